"""Read each weight's gradient at the right moment: complete, synchronised, before clipping.

Receives the parameters of the sites, notes when autograd has added to a gradient, and reads it into the step buffer: at
once, while it is hot in the cache, if it is large and nothing changes it afterwards; else at the end of the backward,
all small ones together. With several backwards per step only the last one is read; how many there are is known from
the step before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from pyscan.accumulate import StepBuffer, to_local
from pyscan.engine import DTYPES
from pyscan.sites import Site

_clock = time.perf_counter
_graph_task = torch._C._current_graph_task_id

# A gradient below this is still in a cache at the end of the backward, and costs more to call for than to read.
SMALL_BYTES = 1 << 18


class Weight:
    """A parameter with the sites it fills and what is known of its gradient in this step."""

    __slots__ = ("announced", "expected", "is_small", "members", "num_backwards", "parameter", "read", "stolen")

    def __init__(self, parameter: nn.Parameter, members: list[tuple[int, Site]]) -> None:
        self.parameter = parameter
        self.members = members
        self.num_backwards = 0  # so far in this step
        self.expected = 0  # in the step before; 0: not known
        self.read: tuple[int, int] | None = None  # (address, version) of the gradient in the buffer
        self.stolen = False  # something takes the gradient away inside the backward
        # One site that is the whole parameter: a gradient of this dtype and shape needs nothing but an address.
        is_simple = len(members) == 1 and parameter.ndim == 2 and parameter.dtype in DTYPES
        self.announced = (parameter.dtype, parameter.shape) if is_simple else None
        self.is_small = is_simple and parameter.nbytes < SMALL_BYTES

    def is_as_announced(self, grad: Tensor) -> bool:
        """Whether the address of this gradient is all the engine must be told."""
        is_plain = type(grad) is Tensor and grad.layout is torch.strided and grad.is_cpu and grad.is_contiguous()
        return is_plain and (grad.dtype, grad.shape) == self.announced


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
        self.seconds = 0.0  # spent reading since the last row
        self._buffer = buffer
        self._early = early
        self._on_read = on_read
        self._on_error = on_error
        # Backwards whose end is being waited for, with the weights they have added to. Reentrant checkpointing runs one
        # backward inside another; one that raised never ends, and is forgotten with the step.
        self._dirty: dict[int, list[Weight]] = {}
        self._arrived: list[Weight] = []  # as autograd added to their gradients in this step
        self._unread: dict[Weight, None] = {}  # had a backward in this step, and are to have another
        self._num_ends = 0  # of backwards in this step
        self._expected_ends = 0  # as many as in the step before; 0: not known
        self._handles: list[Any] = []
        self.weights = [Weight(parameter, members) for parameter, members in _by_parameter(sites)]
        for weight in self.weights:
            if weight.announced is not None:
                buffer.expect_grad(weight.members[0][0], weight.parameter)
            hook = self._hook(weight)
            self._handles.append(weight.parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, weight: Weight) -> Callable[[Tensor], None]:
        """What autograd calls when it has added to the weight's gradient. Copies of a parameter leave it behind."""
        read_now = self._early and not weight.is_small

        def accumulated(parameter: Tensor) -> None:
            if not self.active:
                return
            try:
                weight.num_backwards += 1
                weight.read = None  # also if the new gradient has the address and the version of an old one
                (self._dirty.get(_graph_task()) or self._backward_begins()).append(weight)
                self._arrived.append(weight)
                if read_now and weight.num_backwards >= weight.expected and parameter.grad is not None:
                    start = _clock()
                    self._read(weight)
                    self.seconds += _clock() - start
            except Exception as error:
                self._on_error(error)

        return accumulated

    def _backward_begins(self) -> list[Weight]:
        task = _graph_task()
        Variable._execution_engine.queue_callback(lambda: self._backward_ends(task))
        return self._dirty.setdefault(task, [])

    def read_rest(self) -> list[int]:
        """Read what the step has not read yet; returns the sites that were read so late."""
        late = []
        for weight in self.weights:
            if weight.read is None and weight.parameter.grad is not None and weight.num_backwards:
                self._read(weight)
                late += [index for index, _ in weight.members]
        return late

    def order(self) -> list[int]:
        """The sites in the order in which their gradients first came in this step, the loss's neighbours first."""
        return [index for weight in dict.fromkeys(self._arrived) for index, _ in weight.members]

    def next_step(self) -> None:
        """The row is closed: what was counted is what to expect."""
        self._dirty.clear()
        self._arrived.clear()
        self._unread.clear()
        if self._num_ends:
            self._expected_ends, self._num_ends = self._num_ends, 0
        for weight in self.weights:
            if weight.num_backwards:
                weight.expected = weight.num_backwards
            weight.num_backwards = 0
            weight.read = None

    def _backward_ends(self, task: int) -> None:
        if self._early:
            self._settle(task)
        else:
            # Data parallelism finishes its gradients in a callback of its own: one queued from here runs after it.
            Variable._execution_engine.queue_callback(lambda: self._settle(task))

    def _settle(self, task: int) -> None:
        """Read what is due and not read, or changed since it was."""
        start = _clock()
        try:
            self._on_read()
            self._read_many(self._due(self._dirty.pop(task, [])))
        except Exception as error:
            self._on_error(error)
        self.seconds += _clock() - start

    def _due(self, weights: list[Weight]) -> list[Weight]:
        """Of the weights of a backward that ended, those that wait for no other in this step.

        Not every weight takes part in every backward (experts, heads of several tasks): after the last backward none
        waits any longer.
        """
        self._num_ends += 1
        if 0 < self._expected_ends <= self._num_ends:
            waiting, self._unread = self._unread, {}
            return list(dict.fromkeys([*weights, *(w for w in waiting if w.parameter.grad is not None)]))
        due = []
        for weight in weights:
            if weight.num_backwards < weight.expected:
                self._unread[weight] = None
            else:
                due.append(weight)
        return due

    def _read_many(self, weights: list[Weight]) -> None:
        sites: list[int] = []
        addresses: list[int] = []
        for weight in weights:
            grad = weight.parameter.grad
            if grad is None:
                self._steal(weight)
                continue
            if weight.read is not None and weight.read == _state(grad):
                continue
            if weight.is_as_announced(grad):
                address = grad.data_ptr()
                weight.read = address, grad._version
                sites.append(weight.members[0][0])
                addresses.append(address)
            else:
                self._read(weight)
        if sites:
            self._buffer.set_grads(sites, addresses)

    def _read(self, weight: Weight) -> None:
        grad = weight.parameter.grad
        assert grad is not None
        self._on_read()
        weight.read = _state(grad)
        self._store(weight, grad)

    def _store(self, weight: Weight, grad: Tensor) -> None:
        grad = _dense(grad)
        if not grad.is_cpu:
            return  # a model that was moved away, or is only an outline of one: nothing this engine can read
        for index, site in weight.members:
            self._buffer.set_grad(index, site.matrix(grad))

    def _steal(self, weight: Weight) -> None:
        """The optimizer steps inside the backward and leaves no gradient: from now on see it before that."""
        if weight.stolen:
            return
        weight.stolen = True

        def arriving(grad: Tensor) -> None:
            if not self.active or torch.compiler.is_compiling():
                return
            try:
                self._on_read()
                self._store(weight, grad)
            except Exception as error:
                self._on_error(error)

        self._handles.append(weight.parameter.register_hook(arriving))  # type: ignore[no-untyped-call]


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
    if grad.is_sparse:
        return grad._values().data_ptr(), grad._version
    return to_local(grad).data_ptr(), grad._version


def _dense(grad: Tensor) -> Tensor:
    """The values to reduce: of a sparse gradient its rows (each once), of a sharded one what this rank holds."""
    grad = to_local(grad.detach())
    if grad.is_sparse:
        grad = grad.coalesce()._values()
    return grad


def nothing(*args: object) -> None:
    """What a hook becomes in a copy of the model."""


def make_nothing() -> Callable[..., None]:
    return nothing
