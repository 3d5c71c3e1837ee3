"""Which gradients are due on a GPU, and when each is read: beside the backward, or at its end.

Receives the weights and autograd's word that it has added to one; hands gradients to the device buffer. A large one
that nothing has changed between its arrival and the end of the backward in the step before is read on the side stream
meanwhile; if it has changed after all, and every other one, is read at the end of the backward. The CPU engine's
counterpart is bindings_gradients.cpp, which says the same of memory that is read at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from pyscan.engine import DTYPES
from pyscan.kernels.plan import View

if TYPE_CHECKING:
    from pyscan.device_buffer import DeviceBuffer

_clock = time.perf_counter
_graph_task = torch._C._current_graph_task_id

State = tuple[int, int]  # address and version of a gradient
UNREAD: State = (0, -1)


class Described(NamedTuple):
    """A weight, the slots of a plain gradient (none: it never is), its shape, and whether it may be read early."""

    parameter: nn.Parameter
    slots: list[int]
    rows: int
    cols: int
    early: bool


class _Weight:
    """What is known of a gradient in this step."""

    __slots__ = ("arrived", "described", "expected", "is_calm", "num_backwards", "read")

    def __init__(self, described: Described) -> None:
        self.described = described
        self.num_backwards = 0  # so far in this step
        self.expected = 0  # in the step before; 0: not known
        self.arrived = UNREAD  # as autograd left it
        self.read = UNREAD  # as it is in the buffer
        self.is_calm = False  # nothing changed it between its arrival and the end of the backward

    def plain(self) -> Tensor | None:
        """The gradient, if its address is all that must be known of it."""
        described, grad = self.described, self.described.parameter.grad
        if not described.slots or type(grad) is not Tensor or grad.layout is not torch.strided:
            return None
        is_same = grad.dtype == described.parameter.dtype and grad.shape == (described.rows, described.cols)
        return grad if is_same and grad.is_contiguous() and grad.dtype in DTYPES else None

    def views(self, address: int) -> list[View]:
        _, slots, rows, cols, _ = self.described
        dtype = DTYPES[self.described.parameter.dtype]
        return [View(slot, dtype, rows, cols, cols, 1, address % 16 == 0) for slot in slots]


class DeviceGradientWatch:
    """Follows the gradients of all weights. No exception reaches autograd: `failed` is told.

    `begins(task)` is called at the first gradient of a backward; `careful(weight, gradient, address, version)` gives
    one that is not plain to the buffer unless it has this address and version, and returns those it has; `gone(weight)`
    is told that no gradient was left at the end of a backward.
    """

    def __init__(
        self,
        buffer: DeviceBuffer,
        weights: Sequence[tuple[nn.Parameter, list[int], int, int, bool]],
        begins: Callable[[int], None],
        careful: Callable[[int, Tensor, int, int], State],
        gone: Callable[[int], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.active = True
        self.num_threads = 0  # the CPU engine's
        self.seconds = 0.0  # spent in this step
        self.order: list[int] = []  # of weights, as their gradients first came in this step
        self._buffer = buffer
        self._weights = [_Weight(Described(*weight)) for weight in weights]
        self._begins, self._careful, self._gone, self._failed = begins, careful, gone, failed
        self._dirty: dict[int, list[int]] = {}  # backwards whose end is waited for, with what they have added to
        self._waiting: dict[int, None] = {}  # had a backward in this step, and are to have another
        self._num_ends = 0  # of backwards in this step
        self._expected_ends = 0  # as many as in the step before; 0: not known

    def close(self) -> None:
        """Let go of everything: the hooks are about to be taken away."""
        self.active = False
        self._weights.clear()
        self._dirty.clear()
        self._waiting.clear()

    def hook(self, index: int) -> Callable[[Tensor], None]:
        """What autograd calls when it has added to the weight's gradient."""

        def accumulated(parameter: Tensor) -> None:
            if self.active:
                self._timed(lambda: self._accumulated(index))

        return accumulated

    def settle(self, task: int) -> None:
        """A backward is over, and so is whatever else changes its gradients: read what is not read as it is now."""
        self._timed(lambda: self._read(self._due(self._dirty.pop(task, []))))

    def read_rest(self) -> list[int]:
        """Read what the step has not read yet; returns the weights that were read so late."""
        late = [
            index
            for index, weight in enumerate(self._weights)
            if weight.read == UNREAD and weight.num_backwards and weight.described.parameter.grad is not None
        ]
        self._read(late)
        return late

    def read_all(self) -> None:
        """Read every gradient there is, in the place of what was read: something has changed them all."""
        there = [i for i, weight in enumerate(self._weights) if weight.described.parameter.grad is not None]
        for index in there:
            weight = self._weights[index]
            weight.num_backwards += 1
            if weight.num_backwards == 1:
                self.order.append(index)
            weight.read = UNREAD
        self._timed(lambda: self._read(there))

    def next_step(self) -> float:
        """The row is closed: what was counted is what to expect. Returns the seconds spent in the step that ended."""
        self.order = []
        self._dirty.clear()
        self._waiting.clear()
        if self._num_ends:
            self._expected_ends, self._num_ends = self._num_ends, 0
        for weight in self._weights:
            weight.expected = weight.num_backwards or weight.expected
            weight.num_backwards = 0
            weight.arrived = weight.read = UNREAD
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def _timed(self, work: Callable[[], None]) -> None:
        start = _clock()
        try:
            work()
        except Exception as error:
            self._failed(error)
        self.seconds += _clock() - start

    def _accumulated(self, index: int) -> None:
        weight = self._weights[index]
        weight.num_backwards += 1
        if weight.num_backwards == 1:
            self.order.append(index)
        weight.read = UNREAD  # also if the new gradient has the address and the version of an old one
        task = _graph_task()
        if task not in self._dirty:
            self._dirty[task] = []
            self._begins(task)
            self._buffer.join()  # from now on the memory of activations is written to
        self._dirty[task].append(index)
        grad = weight.plain()
        if not weight.described.early or grad is None:
            return
        weight.arrived = grad.data_ptr(), grad._version
        if weight.is_calm and weight.num_backwards >= weight.expected:
            self._buffer.watch_grad(weight.described.slots, grad)
            weight.read = weight.arrived

    def _due(self, ended: list[int]) -> list[int]:
        """Of the weights of a backward that ended, those that wait for no other in this step.

        Not every weight takes part in every backward (experts, heads of several tasks): after the last backward none
        waits any longer.
        """
        self._num_ends += 1
        if 0 < self._expected_ends <= self._num_ends:
            waiting, self._waiting = self._waiting, {}
            left = [index for index in waiting if self._weights[index].described.parameter.grad is not None]
            return list(dict.fromkeys([*ended, *left]))
        is_due = [self._weights[index].num_backwards >= self._weights[index].expected for index in ended]
        self._waiting.update((index, None) for index, due in zip(ended, is_due, strict=True) if not due)
        return [index for index, due in zip(ended, is_due, strict=True) if due]

    def _read(self, indices: list[int]) -> None:
        """Read these weights' gradients now, all in one launch."""
        self._buffer.flush_grads()
        self._buffer.join()
        views: list[View] = []
        addresses: list[int] = []
        with self._buffer.gathering():
            for index in indices:
                weight = self._weights[index]
                grad = weight.described.parameter.grad
                if grad is None:
                    weight.is_calm = False
                    self._gone(index)
                elif (plain := weight.plain()) is None:
                    weight.read = self._careful(index, grad, *weight.read)
                else:
                    state = plain.data_ptr(), plain._version
                    weight.is_calm = weight.arrived == state
                    if weight.read != state:
                        weight.read = state
                        new = weight.views(state[0])
                        views += new
                        addresses += [state[0]] * len(new)
            if views:
                self._buffer.set_views(views, addresses)
