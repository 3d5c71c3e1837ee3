"""Tensors that are to be reduced together: noted one by one, sent as one group.

Receives tensors with the slot they fill and hands on notes: what flush.py needs to launch, and what tells whether a
tensor was written to meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from pyscan.accumulate import matrix_of
from pyscan.device import Stream
from pyscan.kernels.plan import View

# A group is sent when it has this many bytes. It keeps its tensors alive until the group after it is sent, which
# matters where autograd does not (gradient checkpointing); so there is a limit even where it means more launches.
MIN_GROUP_BYTES = 1 << 28
MAX_GROUP_BYTES = 3 << 29
NUM_GROUPS = 8  # per step, where the limits allow it: enough to read one while the next is made


class Note(NamedTuple):
    """Tensors to reduce as `view` says: one, and with ranges a second that says where they end."""

    view: View
    tensors: tuple[Tensor, ...]
    version: int  # of the first tensor, when it was noted

    @property
    def slots(self) -> list[int]:
        return slots_of(self.view)

    @property
    def changed(self) -> bool:
        """Whether something has written to the tensor since."""
        return self.tensors[0]._version != self.version


class Group:
    """Notes of tensors made on one stream; no slot twice."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.notes: list[Note] = []
        self.num_bytes = 0
        self._slots: set[int] = set()

    def add(self, note: Note) -> None:
        self.notes.append(note)
        self._slots.update(note.slots)
        self.num_bytes += note.tensors[0].nbytes

    def add_slot(self, slot: int) -> None:
        """The last tensor fills one more slot."""
        last = self.notes[-1]
        self.notes[-1] = last._replace(view=last.view._replace(repeats=(*last.view.repeats, slot)))
        self._slots.add(slot)

    def fills(self, slots: Iterable[int]) -> bool:
        return not self._slots.isdisjoint(slots)


class GroupSize:
    """How many bytes make a group, known from the step before."""

    def __init__(self) -> None:
        self.num_bytes = group_bytes(0)
        self._total = 0

    def count(self, num_bytes: int) -> None:
        self._total += num_bytes

    def next_step(self) -> None:
        self.num_bytes = group_bytes(self._total)
        self._total = 0


def group_bytes(total: int) -> int:
    """The size of a group in a step of `total` bytes."""
    return min(max(total // NUM_GROUPS, MIN_GROUP_BYTES), MAX_GROUP_BYTES)


def slots_of(view: View) -> list[int]:
    """All slots that a view fills."""
    return [first + i for first in (view.slot, *view.repeats) for i in range(max(view.num_ranges, 1))]


def note(slot: int, x: Tensor, ends: Tensor | None = None) -> Note:
    return Note(view(slot, x, ends), (x,) if ends is None else (x, ends), x._version)


def view(slot: int, x: Tensor, ends: Tensor | None = None) -> View:
    address, dtype, rows, cols, row_stride, col_stride = matrix_of(x)
    num_ranges = 0 if ends is None else ends.numel()
    return View(slot, dtype, rows, cols, row_stride, col_stride, address % 16 == 0, num_ranges)
