"""Where the sums of each slot stand on the device, and which cells of a row they become.

Receives the slots of a step buffer as the compiled one takes them; hands on places and the table of `finish_row`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

# (block, first, by_rows, num_blocks, sumsq_cell, absmax_cell, bad_cell, is_gradient)
SlotTuple = tuple[int, int, bool, int, int, int, int, bool]


class Finish(IntEnum):
    """Columns of the table of `finish_row`, one row per slot."""

    SUMS = 0  # first accumulator
    NUM_SUMS = 1
    NUM_BLOCKS = 2  # cells of sums of squares; NUM_SUMS, or 0 for a slot without blocks
    SUMSQ_CELL = 3
    ABSMAX_CELL = 4  # negative: not kept
    BAD_CELL = 5
    IS_GRADIENT = 6
    WIDTH = 7


class Slots:
    """The slots of a row. A slot without blocks has one accumulator all the same: it can be seen."""

    def __init__(self, slots: Sequence[SlotTuple], num_cells: int) -> None:
        for slot in slots:
            _check(slot, num_cells)
        self._slots = list(slots)
        self.num_cells = num_cells
        # Cells of no slot belong to slots that are never seen, so that every cell of a row is written.
        filled = [*self._slots, *_unclaimed(self._slots, num_cells)]
        self._firsts = [0, *accumulate(max(slot[3], 1) for slot in filled)]
        self.num_sums_in_all = self._firsts[-1]
        self.finish_table: NDArray[np.int64] = np.array(
            [
                [first, max(num_blocks, 1), num_blocks, *cells, is_gradient]
                for first, (_, _, _, num_blocks, *cells, is_gradient) in zip(self._firsts, filled, strict=False)
            ],
            np.int64,
        ).reshape(len(filled), Finish.WIDTH)

    def __len__(self) -> int:
        return len(self._slots)

    def geometry(self, slot: int) -> tuple[int, int, bool, int]:
        """(block, first, by_rows, num_blocks) of a slot."""
        if not 0 <= slot < len(self._slots):
            raise ValueError(f"slot must lie in [0, {len(self._slots)}), got {slot}")
        block, first, by_rows, num_blocks = self._slots[slot][:4]
        return block, first, by_rows, num_blocks

    def first_sum(self, slot: int) -> int:
        return self._firsts[slot]

    def num_sums(self, slot: int) -> int:
        return max(self._slots[slot][3], 1)

    def num_blocks_of(self, slot: int, rows: int, cols: int) -> int:
        """How many blocks a matrix has for a slot."""
        block, first, by_rows, _ = self.geometry(slot)
        length = rows if by_rows else cols
        return (length - 1 + first) // block + 1 if length else 0


def _check(slot: SlotTuple, num_cells: int) -> None:
    block, first, _, num_blocks, sumsq, absmax, bad, _ = slot
    if block < 1 or not 0 <= first < block:
        raise ValueError(f"a slot needs block >= 1 and first in [0, block), got block {block}, first {first}")
    if num_blocks < 0 or sumsq < 0 or sumsq + num_blocks > num_cells or max(absmax, bad) >= num_cells:
        raise ValueError(f"a slot has cells outside the row of {num_cells}: {slot}")


def _unclaimed(slots: Sequence[SlotTuple], num_cells: int) -> list[SlotTuple]:
    """Slots over the runs of cells that none of `slots` has."""
    free = np.ones(num_cells + 2, bool)
    free[[0, -1]] = False
    for _, _, _, num_blocks, sumsq, absmax, bad, _ in slots:
        free[1 + sumsq : 1 + sumsq + num_blocks] = False
        free[[1 + cell for cell in (absmax, bad) if cell >= 0]] = False
    edges = np.flatnonzero(np.diff(free.astype(np.int8)))
    return [(1, 0, False, int(b - a), int(a), -1, -1, False) for a, b in edges.reshape(-1, 2)]
