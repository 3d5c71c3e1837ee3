"""Where the first bad number came from: one step run again, operation by operation.

Receives a model and the batch that went wrong; hands back the operation, module and pass in which the NaN or infinity
that spoiled the loss or a gradient was made, or None if both are finite. An infinity that somebody put there on purpose
(a mask of -inf) is no culprit as long as nothing makes a NaN of it.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pyscan.parallel import without_sync
from pyscan.preserve import Batch, backward, run_loss, running, untouched
from pyscan.sites import named_modules, parameters_of

_graph_task = torch._C._current_graph_task_id
_PLAIN = (Tensor, nn.Parameter)
_UNFILLED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
_OVERWRITING = {"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_"}  # what was there is not read
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


@dataclass(frozen=True)
class NonFinite:
    """The first bad value. As a string, one sentence."""

    what: str  # "nan" or "inf"
    op: str  # "aten.div.Tensor"; for a value that was there before, "parameter", "batch" or "constant"
    module: str  # name of the innermost module; "" outside of all
    pass_: str  # "forward" or "backward"
    node: str = ""  # of the backward pass, "SqrtBackward0"
    inputs: tuple[tuple[float, float], ...] = ()  # smallest and largest of each tensor the operation read
    where: str = ""  # file, line and text of the code that called it, in the forward
    order: int = 0
    is_deliberate: bool = False  # an infinity that was written down as such

    def __str__(self) -> str:
        if self.op in ("parameter", "batch"):
            return f"{self.op} {self.module!r} holds {self.what} before the step begins"
        place = f"in {self.module!r}" if self.module else "outside of all modules"
        ranges = ", ".join(f"[{low:.4g}, {high:.4g}]" for low, high in self.inputs)
        text = f"first {self.what}: {self.op} {place}, {self.pass_} pass"
        text += f" ({self.node})" if self.node else ""
        text += f", from inputs in {ranges}" if ranges else ""
        return text + (f", at {self.where}" if self.where else "")


def trace_nonfinite(model: nn.Module, batch: Batch) -> NonFinite | None:
    """Run one step on `batch` and name where the first NaN or infinity in its loss or gradients was made.

    batch   what the model is called with (keywords, arguments or one tensor), or a function that returns the loss

    The weights should be those from before the bad step. Every operation is checked: a few times slower than a step.
    State is left as `pyscan.check_grad_flow` leaves it.
    """
    trace = _Trace(model, batch)
    with untouched(model), running(model), without_sync(model), trace.following(model), trace:
        loss = run_loss(model, batch)
        if not _is_finite(loss):
            return trace.origin_of(loss)
        backward(loss)
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        origins = [trace.origin_of(grad) for grad in grads if not _is_finite(grad)]
    return min(origins, key=lambda origin: origin.order, default=None)


class _Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers for every bad tensor where its badness was made."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._origins: dict[int, NonFinite] = {}  # address of a storage -> who spoiled it
        self._modules: list[str] = [""]
        # Nodes are numbered as they are made: from which number on which module made them.
        self._numbers: list[int] = [0]
        self._makers: list[str] = [""]
        self._num_ops = 0
        self._given = {_storage(p): ("parameter", name) for name, p in parameters_of(model) if type(p) in _PLAIN}
        self._given |= {_storage(x): ("batch", name) for name, x in _named_tensors(batch) if type(x) in _PLAIN}

    @contextlib.contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Know which module runs."""
        with contextlib.ExitStack() as stack:
            for module, name in named_modules(model).items():
                stack.callback(module.register_forward_pre_hook(self._enter(name), prepend=True).remove)
                stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        read = list(_tensors((args, kwargs)))[name in _OVERWRITING :]
        before = self._look(read) if func._schema.is_mutable else None
        out = func(*args, **kwargs)
        self._num_ops += 1
        if name not in _UNFILLED:
            for tensor in _tensors(out):
                if not _is_finite(tensor):
                    written = any(map(math.isinf, _floats((args, kwargs))))
                    self._origins[_storage(tensor)] = self._judge(func, before or self._look(read), tensor, written)
        return out

    def _look(self, tensors: list[Tensor]) -> tuple[list[NonFinite], tuple[tuple[float, float], ...]]:
        """Whence the bad ones among the arguments of a call come, and the range of each argument."""
        return [self.origin_of(x) for x in tensors if not _is_finite(x)], tuple(map(_range, tensors))

    def origin_of(self, tensor: Tensor) -> NonFinite:
        """Who spoiled a bad tensor: an operation, or whoever brought it."""
        if (known := self._origins.get(_storage(tensor))) is not None:
            return known
        kind, name = self._given.get(_storage(tensor), ("constant", self._modules[-1]))
        what = _what(tensor)
        is_mask = what == "inf" and kind != "parameter" and not bool((tensor == math.inf).any())
        return NonFinite(what, kind, name, "forward", order=self._num_ops, is_deliberate=is_mask)

    def _judge(
        self, func: Any, read: tuple[list[NonFinite], tuple[tuple[float, float], ...]], out: Tensor, written: bool
    ) -> NonFinite:
        """The origin of a bad result: that of a bad input, or this operation; `written`: it was given an infinity."""
        sources, ranges = read
        if culprits := [source for source in sources if not source.is_deliberate]:
            return min(culprits, key=lambda source: source.order)
        what = _what(out)
        if sources and what == "inf":
            return sources[0]
        return replace(self._here(func, what), inputs=ranges, is_deliberate=written and what == "inf")

    def _here(self, func: Any, what: str) -> NonFinite:
        op = str(func)
        if _graph_task() == -1 or len(self._modules) > 1:  # a checkpoint runs modules inside the backward
            return NonFinite(what, op, self._modules[-1], "forward", where=_where(), order=self._num_ops)
        node = torch._C._current_autograd_node()
        module = self._makers[bisect.bisect_right(self._numbers, node._sequence_nr()) - 1]
        return NonFinite(what, op, module, "backward", node.name(), order=self._num_ops)

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: Any) -> None:
            self._modules.append(name)
            self._note()

        return enter

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._modules.pop()
        self._note()

    def _note(self) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._makers.append(self._modules[-1])


def _is_finite(x: Tensor) -> bool:
    if type(x) not in _PLAIN or x.is_meta or x.is_sparse or not (x.is_floating_point() or x.is_complex()):
        return True
    return x.element_size() == 1 or bool(torch.isfinite(x).all())  # fp8 has no isfinite


def _what(x: Tensor) -> str:
    return "nan" if bool(torch.isnan(x).any()) else "inf"


def _range(x: Tensor) -> tuple[float, float]:
    if type(x) not in _PLAIN or x.is_meta or x.is_complex() or x.is_sparse or x.dtype is torch.bool or not x.numel():
        return (0.0, 0.0)
    low, high = x.detach().aminmax()
    return float(low), float(high)


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _where() -> str:
    """The line of the user's, or of the model's, that runs now."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_LIBRARIES):
            return f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
    return ""


def _floats(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _floats(one)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _tensors(one)


def _named_tensors(batch: Batch) -> Iterable[tuple[str, Tensor]]:
    items = batch.items() if hasattr(batch, "items") else enumerate(batch) if isinstance(batch, list | tuple) else ()
    if isinstance(batch, Tensor):
        items = [("0", batch)]
    return [(str(key), value) for key, value in items if isinstance(value, Tensor)]
