"""Finished rows on their way to the host: they arrive in pinned memory, one step late.

Receives the order to finish a row, together with single numbers that are still on the device (losses, the loss scale),
and hands on what has arrived, oldest first. A row is waited for only when all places are taken, or at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyscan.device import Device
from pyscan.flush import Flusher

# Rows under way at the same time; the host is rarely more than two steps ahead of the device.
NUM_PLACES = 8


class Arrival(NamedTuple):
    """A row that has arrived, with what was known when it was sent."""

    facts: Any
    cells: NDArray[np.float64]
    numbers: NDArray[np.float64]


class _Place:
    """Memory for one row and its numbers: on the device, and pinned."""

    def __init__(self, device: Device, num_cells: int, num_numbers: int) -> None:
        self.num_cells = num_cells
        self.on_device = device.empty(num_cells + num_numbers, torch.float64)
        self.inv_scale = device.empty(1, torch.float64)
        self.pinned = device.pinned(num_cells + num_numbers, torch.float64)
        self.done = device.new_event()

    @property
    def num_numbers(self) -> int:
        return self.pinned.shape[0] - self.num_cells


class Results:
    """A ring of places; each is used again when its row has been read by the host."""

    def __init__(self, device: Device, flusher: Flusher, num_cells: int) -> None:
        self._device = device
        self._flusher = flusher
        self._num_cells = num_cells
        self._most_numbers = 0
        self._idle: deque[_Place] = deque()
        self._under_way: deque[tuple[_Place, int, Any]] = deque()  # with the number of numbers

    def send(self, facts: Any, numbers: Sequence[Tensor], scale: Tensor | float) -> None:
        """Finish the row, gradients divided by `scale`. The numbers are taken as they are now on the current stream."""
        place = self._place(len(numbers))
        for i, number in enumerate(numbers):
            cell = self._num_cells + i
            self._device.copy(place.on_device[cell : cell + 1], number.detach().reshape(1))
        inv_scale: Tensor | float
        if isinstance(scale, Tensor):
            self._device.copy(place.inv_scale, scale.detach().reshape(1))
            inv_scale = place.inv_scale.reciprocal_()
        else:
            inv_scale = 1.0 / scale
        row = place.on_device[: self._num_cells]
        self._flusher.finish(row, inv_scale, place.on_device, place.pinned, place.done)
        self._under_way.append((place, len(numbers), facts))

    def arrived(self) -> Iterator[Arrival]:
        """Rows of earlier steps that are done; nothing is waited for."""
        while self._under_way and self._under_way[0][0].done.query():
            yield self._read()

    def all(self) -> Iterator[Arrival]:
        """Every row that was sent, waiting for it."""
        while self._under_way:
            self._under_way[0][0].done.synchronize()
            yield self._read()

    def make_room(self) -> Iterator[Arrival]:
        """Call before `send`: waits for the oldest row if there is no place left."""
        while len(self._under_way) >= NUM_PLACES:
            self._under_way[0][0].done.synchronize()
            yield self._read()

    def _read(self) -> Arrival:
        place, num_numbers, facts = self._under_way.popleft()
        values = self._device.read(place.pinned)
        self._idle.append(place)
        return Arrival(facts, values[: self._num_cells], values[self._num_cells : self._num_cells + num_numbers])

    def _place(self, num_numbers: int) -> _Place:
        """A place that is free, in the order of use; made when there is none."""
        self._most_numbers = max(self._most_numbers, num_numbers)
        while self._idle:
            place = self._idle.popleft()
            if place.num_numbers >= num_numbers:
                return place
        return _Place(self._device, self._num_cells, self._most_numbers)
