"""The engine for GPUs: hooks only note tensors, and one launch reduces many of them beside the training.

Receives inputs and gradients with the site they belong to, as the CPU engine of accumulate.py does, and sends them in
groups to flush.py: inputs that autograd keeps to the side stream, what may be overwritten at once to the current one.
Rows come back one step late. A value that changed before it could be read is absent from its row, never wrong.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pyscan import _C
from pyscan.accumulate import RowCells, readable
from pyscan.closing import Closing, Finished
from pyscan.device import Device
from pyscan.device_gradients import DeviceGradientWatch
from pyscan.engine import DTYPES
from pyscan.flush import Flusher, Reducer
from pyscan.groups import Group, GroupSize, Note, note, view
from pyscan.kernels.plan import View
from pyscan.results import Arrival, Results
from pyscan.schema import Schema
from pyscan.sites import Site

_clock = time.perf_counter
_is_grad_enabled = torch.is_grad_enabled
_graph_task = torch._C._current_graph_task_id
_is_tracing = torch._C._get_tracing_state
_ABSENT = -1.0  # as in csrc/step_buffer.h

_CHANGED = (
    "its input was changed in place before it was read: it is absent from this row, and from the next one on it is "
    "read at once"
)
_CAPTURED = (
    "a step ended while a CUDA graph was captured: replays end no step that could be seen; attach without an optimizer "
    "and call scan.step() after each replay"
)

MakeReducer = Callable[[Sequence["_C.SlotTuple"], int, torch.device], Reducer]


class DeviceBuffer(RowCells):
    """The row of one step on a GPU. May be called from several threads: autograd has its own."""

    def __init__(self, sites: Sequence[Site], schema: Schema, device: Device, make_reducer: MakeReducer) -> None:
        super().__init__(sites, schema)
        self.changed: list[int] = []  # sites whose input changed before it was read, since this list was last emptied
        self._device = device
        reducer = make_reducer(self._slots, self.num_cells, device.torch_device)
        self._flusher = Flusher(device, reducer, len(self._slots))
        self._results = Results(device, self._flusher, self.num_cells)
        self._lock = threading.RLock()  # guards all below
        self._inputs: Group | None = None
        self._input_size = GroupSize()
        self._grads: Group | None = None
        self._grad_size = GroupSize()
        self._gathered: list[Note] | None = None
        self._at_once = {i for i, site in enumerate(sites) if not _is_kept(site)}
        self._lost: set[int] = set()  # slots of this row
        self._num_captured_rows = 0

    @property
    def num_launches(self) -> int:
        """Kernels launched since the beginning."""
        return self._flusher.num_launches

    def reads(self, x: Tensor) -> bool:
        """Whether x is where this engine can read it."""
        return x.device == self._device.torch_device

    # Inputs

    def observer(self, state: _C.CaptureState, site: int, careful: Callable[[Any], None]) -> Callable[[Tensor], None]:
        """What notes plain inputs of a site by itself and gives every other to `careful`."""

        def see(x: Any) -> None:
            if not state.active:
                return
            state.meet(site, 1)
            if not _is_grad_enabled():
                return
            start = _clock()
            if not (self._is_plain(state, x) and self._noted(site, x)):
                careful(x)
            else:
                state.direct[site] = 1
            state.seconds += _clock() - start

        return see

    def _is_plain(self, state: _C.CaptureState, x: Any) -> bool:
        is_outside = not state.has_mask and _graph_task() == -1 and _is_tracing() is None
        return is_outside and type(x) is Tensor and x.dtype in DTYPES and x.is_contiguous() and x.numel() > 0

    def _noted(self, site: int, x: Tensor) -> bool:
        """Whether that went well; the careful way knows whom to tell if it did not."""
        try:
            self.add_input(site, x)
        except Exception:
            return False
        return True

    def add_input(self, site: int, x: Tensor, *, at_once: bool = False) -> None:
        """Add the rows of x, whose last dimension is the site's input; at once if x may change without a trace."""
        if self.reads(x):
            self._add(site, readable(x), at_once=at_once)

    def add_ranges(self, site: int, x: Tensor, ends: Tensor) -> None:
        """Add row ranges of x to sites site, site + 1, ...; range e ends before row ends[e]."""
        if self.reads(x):
            self._add(site, readable(x), ends.to(torch.int32))

    def masked(self, x: Tensor, mask: Tensor) -> Tensor:
        """x where the mask is true, and zeros, which add nothing, elsewhere: how many are true is not known here."""
        return torch.where(mask.view(mask.shape + (1,) * (x.ndim - mask.ndim)), x, 0)

    def _add(self, site: int, x: Tensor, ends: Tensor | None = None, *, at_once: bool = False) -> None:
        with self._lock:
            if at_once or site in self._at_once or x.is_inference() or self._device.is_capturing():
                addresses = [x.data_ptr()] if ends is None else [x.data_ptr(), ends.data_ptr()]
                self._flusher.on_current((view(site, x, ends),), addresses, replace=False)
            elif ends is not None or not self._repeats(site, x):
                self._keep(note(site, x, ends))

    def _repeats(self, site: int, x: Tensor) -> bool:
        """Whether x is the tensor noted last, unchanged: then one read serves both sites."""
        group = self._inputs
        if group is None or group.notes[-1].tensors[0] is not x or group.fills((site,)):
            return False
        last = group.notes[-1]
        if last.changed or last.view.num_ranges or self._slots[last.view.slot][:4] != self._slots[site][:4]:
            return False
        group.add_slot(site)
        return True

    def _keep(self, new: Note) -> None:
        stream = self._device.current_stream()
        num_bytes = new.tensors[0].nbytes
        self._input_size.count(num_bytes)
        if self._inputs is not None:
            is_full = self._inputs.num_bytes + num_bytes > self._input_size.num_bytes
            if is_full or self._inputs.stream != stream or self._inputs.fills(new.slots):
                self.flush()
        if self._inputs is None:
            self._inputs = Group(stream)
        self._inputs.add(new)

    def flush(self) -> None:
        """Send the inputs noted so far: the forward is over, or they are many."""
        with self._lock:
            group = self._inputs
            if group is not None and not self._device.is_capturing():
                self._inputs = None
                self._send(group, replace=False)

    def join(self) -> None:
        """The current stream waits until all that was sent is read; what was noted may be written to after that."""
        with self._lock:
            if not self._device.is_capturing():
                self.flush()
                self._lose(self._flusher.join(self._device.current_stream()))

    def _send(self, group: Group, *, replace: bool) -> None:
        self._lose(group.notes)
        notes = [one for one in group.notes if not one.changed]
        if notes:
            self._lose(self._flusher.on_side(notes, group.stream, replace=replace))

    def _lose(self, notes: Sequence[Note]) -> None:
        """What was written to before it was read, or while it was read, is not in this row."""
        for one in notes:
            if one.changed:
                self._lost.update(one.slots)

    # Gradients

    def watch_gradients(
        self,
        weights: Sequence[tuple[nn.Parameter, list[int], int, int, bool]],
        early: bool,
        ended: Callable[[], None] | None,
        begins: Callable[[int], None],
        careful: Callable[[int, Tensor, int, int], tuple[int, int]],
        gone: Callable[[int], None],
        failed: Callable[[Exception], None],
    ) -> DeviceGradientWatch:
        """What reads gradients of (parameter, slots, rows, columns, early) when they are due; whoever `begins` tells of
        a backward settles it."""
        return DeviceGradientWatch(self, weights, begins, careful, gone, failed)

    def watch_grad(self, slots: Sequence[int], grad: Tensor) -> None:
        """Read the gradient beside the backward, in the place of what was there: it is not to change before `join`."""
        with self._lock:
            if self._device.is_capturing():
                self.set_views([view(slot, grad) for slot in slots], [grad.data_ptr()] * len(slots))
                return
            stream = self._device.current_stream()
            self._grad_size.count(grad.nbytes)
            if self._grads is not None:
                is_full = self._grads.num_bytes + grad.nbytes > self._grad_size.num_bytes
                if is_full or self._grads.stream != stream or self._grads.fills(slots):
                    self.flush_grads()
            if self._grads is None:
                self._grads = Group(stream)
            for slot in slots:
                self._grads.add(note(slot, grad))

    def flush_grads(self) -> None:
        """Send the gradients watched so far."""
        with self._lock:
            group, self._grads = self._grads, None
            if group is not None:
                self._send(group, replace=True)

    def set_grad(self, site: int, grad: Tensor) -> None:
        """Read the matrix `grad` now, in the place of what was there; while gathering, when that ends."""
        with self._lock:
            grad = readable(grad)
            notes = [note(slot, grad) for slot in self.grad_slots(site)]
            if self._gathered is None:
                self.set_views([one.view for one in notes], [grad.data_ptr()] * len(notes))
            else:
                self._gathered += notes

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Gradients set inside are read together at the end; nothing may change them meanwhile."""
        with self._lock:
            self._gathered = []
            try:
                yield
            finally:
                notes, self._gathered = self._gathered, None
            if notes:
                self.set_views([one.view for one in notes], [one.tensors[0].data_ptr() for one in notes])

    def set_views(self, views: Sequence[View], addresses: Sequence[int]) -> None:
        """Read gradients now, of which only the addresses are given; they may change after this."""
        with self._lock:
            self.flush_grads()
            self._lost.difference_update(one.slot for one in views)
            self._flusher.on_current(tuple(views), addresses, replace=True)

    # Rows

    def close_row(self, closing: Closing) -> Iterable[Finished]:
        """Finish the row of this step; gives the earlier rows that have arrived meanwhile."""
        if self._device.is_capturing():
            self._num_captured_rows += 1
            return ()
        return map(_finished, self.send_row(closing, closing.tensors, closing.scale))

    def wait_rows(self) -> Iterable[Finished]:
        """All rows that were sent, waiting for them."""
        return map(_finished, self.wait_arrivals())

    def complaints(self) -> Iterator[tuple[str, int | None, str]]:
        """What users must know and was not said yet: kind, site, text."""
        changed, self.changed = self.changed, []
        for site in changed:
            yield "input_changed", site, _CHANGED
        if self._num_captured_rows == 1:
            self._num_captured_rows += 1
            yield "row_in_graph", None, _CAPTURED

    def send_row(self, facts: Any, numbers: Sequence[Tensor], scale: Tensor | float) -> Iterator[Arrival]:
        """Finish the row of this step; gives the earlier rows that have arrived meanwhile, each with its facts.

        `numbers` are single values on the device that come with the row.
        """
        with self._lock:
            self.flush_grads()
            self.join()
            lost, self._lost = self._lost, set()
            inputs = {slot for slot in lost if slot < self._num_sites}
            self._at_once |= inputs
            self.changed += sorted(inputs)
            self._input_size.next_step()
            self._grad_size.next_step()
            arrivals = [*self._results.make_room()]
            self._results.send((facts, lost), numbers, scale)
            arrivals += self._results.arrived()
        return map(self._received, arrivals)

    def wait_arrivals(self) -> Iterator[Arrival]:
        return map(self._received, self._results.all())

    def _received(self, arrival: Arrival) -> Arrival:
        facts, lost = arrival.facts
        for slot in lost:
            _, _, _, num_blocks, sumsq, absmax, bad, _ = self._slots[slot]
            arrival.cells[[*range(sumsq, sumsq + num_blocks), *(cell for cell in (absmax, bad) if cell >= 0)]] = _ABSENT
        return Arrival(facts, self._tie(arrival.cells), arrival.numbers)


def _finished(arrival: Arrival) -> Finished:
    return Finished(arrival.facts, arrival.cells, arrival.numbers.tolist())


def _is_kept(site: Site) -> bool:
    """Whether autograd keeps the input until the backward, so that nothing may write to it before.

    It does for the gradient of a weight. What an embedding has looked up is not its input.
    """
    return site.trainable and site.observe != "lookup"
