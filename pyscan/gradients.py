"""Read each weight's gradient at the right moment: complete, synchronised, before clipping.

Receives the parameters of the sites, notes when autograd has added to a gradient, and reads it into the step buffer: at
once, while it is hot in the cache, where nothing changes it afterwards; else at the end of the backward. With several
backwards per step only the last one is read; how many there are is known from the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from pyscan.accumulate import StepBuffer, to_local
from pyscan.sites import Site

_graph_task = torch._C._current_graph_task_id


class Weight:
    """A parameter with the sites it fills and what is known of its gradient in this step."""

    __slots__ = ("expected", "members", "num_backwards", "parameter", "read", "stolen")

    def __init__(self, parameter: nn.Parameter, members: list[tuple[int, Site]]) -> None:
        self.parameter = parameter
        self.members = members
        self.num_backwards = 0  # so far in this step
        self.expected = 0  # in the step before; 0: not known
        self.read: tuple[int, int] | None = None  # (address, version) of the gradient in the buffer
        self.stolen = False  # something takes the gradient away inside the backward


class GradientReader:
    """Post-accumulate hooks on every trainable weight, and the callback at the end of a backward."""

    def __init__(
        self,
        sites: Sequence[Site],
        buffer: StepBuffer,
        *,
        early: bool,
        on_read: Callable[[], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self.active = True
        self._buffer = buffer
        self._early = early
        self._on_read = on_read
        self._on_error = on_error
        self._task = -1  # the backward whose end is being waited for
        self._dirty: list[Weight] = []
        self._handles: list[Any] = []
        self.weights = [Weight(parameter, members) for parameter, members in _by_parameter(sites)]
        for weight in self.weights:
            hook = _Accumulated(self, weight)
            self._handles.append(weight.parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def accumulated(self, weight: Weight) -> None:
        """Autograd has added to the weight's gradient."""
        if not self.active:
            return
        task = _graph_task()
        if task != self._task:
            # A backward that raised never came to its end: what it left is not waited for.
            self._task = task
            self._dirty.clear()
            Variable._execution_engine.queue_callback(self._backward_ends)
        weight.num_backwards += 1
        self._dirty.append(weight)
        if weight.parameter.grad is None:
            self._steal(weight)
        elif self._early and weight.num_backwards >= weight.expected:
            self._read(weight)

    def read_rest(self) -> list[int]:
        """Read what the step has not read yet; returns the sites that were read so late."""
        late = []
        for weight in self.weights:
            if weight.read is None and weight.parameter.grad is not None and weight.num_backwards:
                self._read(weight)
                late += [index for index, _ in weight.members]
        return late

    def next_step(self) -> None:
        """The row is closed: what was counted is what to expect."""
        for weight in self.weights:
            if weight.num_backwards:
                weight.expected = weight.num_backwards
            weight.num_backwards = 0
            weight.read = None

    def _backward_ends(self) -> None:
        if self._early:
            self._settle()
        else:
            # Data parallelism finishes its gradients in a callback of its own: one queued from here runs after it.
            Variable._execution_engine.queue_callback(self._settle)

    def _settle(self) -> None:
        """Read what is due and not read, or changed since it was."""
        try:
            self._task = -1
            dirty, self._dirty = self._dirty, []
            for weight in dirty:
                grad = weight.parameter.grad
                if grad is None or weight.num_backwards < weight.expected:
                    continue
                if weight.read is None or weight.read != _state(grad):
                    self._read(weight)
        except Exception as error:
            self._on_error(error)

    def _read(self, weight: Weight) -> None:
        grad = weight.parameter.grad
        assert grad is not None
        self._on_read()
        weight.read = _state(grad)
        self._store(weight, grad)

    def _store(self, weight: Weight, grad: Tensor) -> None:
        grad = _dense(grad)
        for index, site in weight.members:
            self._buffer.set_grad(index, site.matrix(grad))

    def _steal(self, weight: Weight) -> None:
        """The optimizer steps inside the backward and leaves no gradient: from now on see it before that."""
        if not weight.stolen:
            weight.stolen = True
            hook = _Arriving(self, weight)
            self._handles.append(weight.parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    def arriving(self, weight: Weight, grad: Tensor) -> None:
        if self.active and not torch.compiler.is_compiling():
            self._on_read()
            self._store(weight, grad)


def _by_parameter(sites: Sequence[Site]) -> list[tuple[nn.Parameter, list[tuple[int, Site]]]]:
    """The trainable parameters in the order of the model, each with its sites; a tied weight belongs to its first."""
    found: dict[int, tuple[nn.Parameter, list[tuple[int, Site]]]] = {}
    for index, site in enumerate(sites):
        parameter = site.parameter
        if parameter is not None and parameter.requires_grad and site.tied_to is None:
            found.setdefault(id(parameter), (parameter, []))[1].append((index, site))
    return list(found.values())


def _state(grad: Tensor) -> tuple[int, int]:
    """Changes when the gradient is another tensor or was written to."""
    address = grad._values().data_ptr() if grad.is_sparse else grad.data_ptr()
    return address, grad._version


def _dense(grad: Tensor) -> Tensor:
    """The values to reduce: of a sparse gradient its rows (each once), of a sharded one what this rank holds."""
    grad = to_local(grad.detach())
    if grad.is_sparse:
        grad = grad.coalesce()._values()
    return grad


class _Hook:
    """A hook that belongs to one model: copies of the model get one that does nothing."""

    __slots__ = ("_reader", "_weight")

    def __init__(self, reader: GradientReader, weight: Weight) -> None:
        self._reader = reader
        self._weight = weight

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return make_nothing, ()


class _Accumulated(_Hook):
    __slots__ = ()

    def __call__(self, parameter: Tensor) -> None:
        try:
            self._reader.accumulated(self._weight)
        except Exception as error:
            self._reader._on_error(error)


class _Arriving(_Hook):
    __slots__ = ()

    def __call__(self, grad: Tensor) -> None:
        try:
            self._reader.arriving(self._weight, grad)
        except Exception as error:
            self._reader._on_error(error)


def nothing(*args: object) -> None:
    """What a hook becomes in a copy of the model."""


def make_nothing() -> Callable[..., None]:
    return nothing
