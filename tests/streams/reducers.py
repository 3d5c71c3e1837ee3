"""Reducers for the fake device: one computes with the CPU engine, one tells the device what a launch touches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyscan import _C
from pyscan.groups import slots_of
from pyscan.kernels.plan import View
from tests.streams.fake_device import FakeDevice


class StandInPlan:
    num_launches = 2

    def __init__(self, views: Sequence[View], replace: bool) -> None:
        self.views = list(views)
        self.replace = replace
        self.num_addresses = sum(2 if view.num_ranges else 1 for view in views)


class StandInReducer:
    """The contract of the kernels, met with the CPU engine: what it gives is what that engine gives, bit by bit."""

    def __init__(self, slots: Sequence[_C.SlotTuple], num_cells: int, device: torch.device) -> None:
        self._native = _C.StepBuffer(num_cells, list(slots))

    def plan(self, views: Sequence[View], *, replace: bool) -> StandInPlan:
        return StandInPlan(views, replace)

    def launch(self, plan: StandInPlan, addresses: Tensor) -> None:
        assert addresses.shape == (plan.num_addresses,)
        values = iter(addresses.numpy().tolist())
        for view in plan.views:
            matrix = (next(values), view.dtype, view.rows, view.cols, view.row_stride, view.col_stride)
            assert (matrix[0] % 16 == 0) == view.is_aligned
            if view.num_ranges:
                ends = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_int32 * view.num_ranges).from_address(next(values)))
                self._native.add_ranges(view.slot, *matrix, ends.copy(), 1)
            for slot in () if view.num_ranges else (view.slot, *view.repeats):
                (self._native.set if plan.replace else self._native.add)(slot, *matrix, 1)

    def finish(self, row: Tensor, inv_scale: float | Tensor) -> None:
        values = np.empty(row.shape[0])
        scale = float(inv_scale.numpy()[0]) if isinstance(inv_scale, Tensor) else inv_scale
        self._native.take(1 / scale, values)
        row.numpy()[:] = values


class RecordedPlan:
    def __init__(self, inner: Any, views: Sequence[View]) -> None:
        self.inner, self.views = inner, tuple(views)
        self.num_launches, self.num_addresses = inner.num_launches, inner.num_addresses


class RecordingReducer:
    """Passes everything on, and declares to the device what a launch reads and writes on the current stream."""

    def __init__(self, device: FakeDevice, reducer: Any, num_slots: int) -> None:
        self._device, self._reducer, self._num_slots = device, reducer, num_slots
        self.num_launches = 0
        device.launch("reset sums", [], self._sums(range(num_slots)))

    def _sums(self, slots: Any) -> list[Any]:
        return [self._device.sums(("sums of slot", slot)) for slot in slots]

    def plan(self, views: Sequence[View], *, replace: bool) -> RecordedPlan:
        return RecordedPlan(self._reducer.plan(views, replace=replace), views)

    def launch(self, plan: RecordedPlan, addresses: Tensor) -> None:
        slots = [slot for view in plan.views for slot in slots_of(view)]
        assert len(slots) == len(set(slots)), "a slot is there twice in one launch"
        reads = [self._device.at(addresses.data_ptr())]
        reads += [self._device.at(address) for address in addresses.numpy().tolist() if address]
        scratch = self._device.sums(("scratch of plan", id(plan)))
        self._device.launch("reduce", reads, [*self._sums(slots), scratch])
        self.num_launches += plan.num_launches
        self._reducer.launch(plan.inner, addresses)

    def finish(self, row: Tensor, inv_scale: float | Tensor) -> None:
        reads = [self._device.at(inv_scale.data_ptr())] if isinstance(inv_scale, Tensor) else []
        self._device.launch("finish", reads, [self._device.at(row.data_ptr()), *self._sums(range(self._num_slots))])
        self.num_launches += 1
        self._reducer.finish(row, inv_scale)


def recording(device: FakeDevice, inner: Any = StandInReducer) -> Any:
    """What makes a reducer for a DeviceBuffer."""

    def make(slots: Sequence[_C.SlotTuple], num_cells: int, torch_device: torch.device) -> RecordingReducer:
        return RecordingReducer(device, inner(slots, num_cells, torch_device), len(slots))

    return make
