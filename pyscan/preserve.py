"""Run one more forward or backward of a model that is being trained, and leave no trace of it.

Receives a model, and a loss whose graph is about to be used; hands back, inside `untouched`, a model whose gradients
are empty and whose attached scanner is paused, and puts everything back afterwards: the gradients (the same objects),
buffers, random generators, hooks. `run` calls a model with a batch and finds the loss in what it returns.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pyscan.attached import scanners_of

Batch = Tensor | Mapping[str, Any] | list[Any] | tuple[Any, ...] | Callable[[], Tensor]


@contextlib.contextmanager
def untouched(model: nn.Module, leaves: Iterable[Tensor] = ()) -> Iterator[None]:
    """Inside, gradients of the model and of `leaves` are None and nobody hears of them; afterwards all is as before."""
    everything = {id(tensor): tensor for tensor in [*model.parameters(), *leaves]}
    with contextlib.ExitStack() as stack:
        for scanner in scanners_of(model):
            stack.enter_context(scanner.paused())
        stack.enter_context(_random_state(model))
        stack.enter_context(_buffers(model))
        stack.enter_context(_silent(everything.values()))
        stack.enter_context(_gradients(everything.values()))
        yield


@contextlib.contextmanager
def running(model: nn.Module) -> Iterator[None]:
    """For a forward as in training, whatever surrounds the call: gradients enabled, nothing compiled."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def run(model: nn.Module, batch: Batch) -> Any:
    """What the model returns for a batch: keywords, arguments, one argument; or what a function returns."""
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, list | tuple):
        return model(*batch)
    if callable(batch):
        return batch()
    raise TypeError(f"batch must be a dict, a tuple, a tensor or a function that returns the loss, got {type(batch)}")


def find_loss(output: Any) -> Tensor | None:
    """The loss in what a model returned: the output itself, `.loss`, `["loss"]` or the first of a tuple."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif not isinstance(output, Tensor) and hasattr(output, "loss"):
        output = output.loss
    elif isinstance(output, list | tuple) and output:
        output = output[0]
    return output if isinstance(output, Tensor) and output.numel() == 1 else None


def run_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The loss of one forward; an error that says what to pass if the model returns none."""
    output = run(model, batch)
    if (loss := find_loss(output)) is not None:
        return loss
    shape = f" of shape {tuple(output.shape)}" if isinstance(output, Tensor) else ""
    raise ValueError(
        f"{type(model).__name__} returned no loss for this batch but {type(output).__name__}{shape}: add the labels, "
        "or pass batch=lambda: criterion(model(x), y)"
    )


def backward(loss: Tensor, scale: float = 1.0) -> None:
    """Accumulate the gradients of scale * loss and keep the graph; nothing if there is none."""
    if not loss.requires_grad:
        return
    try:
        loss.backward(torch.full_like(loss, scale), retain_graph=True)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "donated buffers" in str(error):
            error.add_note("a compiled graph can be used once: pass batch=, or call this after loss.backward()")
        elif "second time" in str(error):
            error.add_note("the graph of this loss is gone: call this before loss.backward(), or without loss after it")
        raise


@contextlib.contextmanager
def _random_state(model: nn.Module) -> Iterator[None]:
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device.index or 0 for device in devices]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextlib.contextmanager
def _buffers(model: nn.Module) -> Iterator[None]:
    """Buffers are put back by value where they changed, without a new version: a graph may hold them."""
    saved = [
        (module, key, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for key, buffer in module._buffers.items()
    ]
    try:
        yield
    finally:
        for module, key, buffer, value in saved:
            module._buffers[key] = buffer
            if buffer is not None and value is not None and not torch.equal(buffer, value):
                buffer.data.copy_(value)


@contextlib.contextmanager
def _silent(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Hooks that run when a gradient is there (an optimizer inside the backward, a scanner) do not hear of this one."""
    emptied = []
    for tensor in tensors:
        if hooks := getattr(tensor, "_post_accumulate_grad_hooks", None):
            emptied.append((hooks, dict(hooks)))
            hooks.clear()
    try:
        yield
    finally:
        for hooks, entries in emptied:
            hooks.update(entries)


@contextlib.contextmanager
def _gradients(tensors: Iterable[Tensor]) -> Iterator[None]:
    saved = [(tensor, tensor.grad) for tensor in tensors]
    for tensor, _ in saved:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, grad in saved:
            tensor.grad = grad
