"""Types of the compiled core."""

import numpy as np
from numpy.typing import NDArray

version: str
compiler: str
isa: str
best_isa: str

def reduce_into(
    address: int,
    dtype: int,
    rows: int,
    cols: int,
    row_stride: int,
    col_stride: int,
    sumsq: NDArray[np.float64],
    absmax: NDArray[np.float64],
    bad: NDArray[np.float64],
    *,
    block: int,
    first: int = 0,
    by_rows: bool = False,
    row_sumsq: NDArray[np.float64] | None = None,
    num_threads: int = 1,
    isa: str | None = None,
) -> None: ...

# (block, first, by_rows, num_blocks, sumsq_cell, absmax_cell, bad_cell, is_gradient)
SlotTuple = tuple[int, int, bool, int, int, int, int, bool]

class StepBuffer:
    def __init__(self, num_cells: int, slots: list[SlotTuple]) -> None: ...
    @property
    def num_cells(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    def add(
        self,
        slot: int,
        address: int,
        dtype: int,
        rows: int,
        cols: int,
        row_stride: int,
        col_stride: int,
        num_threads: int,
        /,
    ) -> None: ...
    def repeat(self, slot: int, /) -> None: ...
    def set(
        self,
        slot: int,
        address: int,
        dtype: int,
        rows: int,
        cols: int,
        row_stride: int,
        col_stride: int,
        num_threads: int,
        /,
    ) -> None: ...
    def add_ranges(
        self,
        first_slot: int,
        address: int,
        dtype: int,
        rows: int,
        cols: int,
        row_stride: int,
        col_stride: int,
        ends: NDArray[np.int32],
        num_threads: int,
        /,
    ) -> None: ...
    def seen(self, slot: int, /) -> bool: ...
    def forget(self, slot: int, /) -> None: ...
    def take(self, grad_scale: float, row: NDArray[np.float64]) -> None: ...
