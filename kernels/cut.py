"""How one view is cut into tiles along the blocks of its slot, and which kernel can read it.

Receives a view and the slots; hands on the tiles' geometry and where the terms of each block stand among their triples.
"""

from __future__ import annotations

from typing import NamedTuple

from pyscan.kernels.layout import (
    ELEMENT_BYTES,
    FLOAT64,
    GRANULE,
    NO_LIMIT,
    TILE_GRANULES,
    TILE_ROWS,
    VECTOR_BYTES,
)
from pyscan.kernels.slots import Slots


class View(NamedTuple):
    """What is known of a tensor to reduce, without its address. Strides are in elements.

    Its addresses in the table: the tensor; with `num_ranges` the int32 ends of its row ranges; with `per_row` a
    float64 buffer of one value per row, which is written.
    """

    slot: int  # with num_ranges the first of num_ranges slots
    dtype: int
    rows: int
    cols: int
    row_stride: int
    col_stride: int
    is_aligned: bool  # the address is a multiple of 16 bytes
    num_ranges: int = 0
    per_row: bool = False
    repeats: tuple[int, ...] = ()  # further slots that receive the same sums

    @property
    def num_addresses(self) -> int:
        return 1 + (self.num_ranges > 0) + self.per_row


class Cut(NamedTuple):
    """How a view is cut into tiles, and where the terms of its blocks stand among their triples."""

    view: View  # perhaps transposed
    is_fast: bool
    num_pieces: int  # rows of tiles
    num_strips: int
    row_block: tuple[int, int, int]  # width, first, tiles per block
    col_block: tuple[int, int, int]
    terms: int
    inner: int
    stride: int
    limit: int

    @property
    def num_tiles(self) -> int:
        return self.num_pieces * self.num_strips

    @property
    def row_of_tiles(self) -> int:
        """Triples of one row of tiles."""
        return self.num_strips * TILE_GRANULES


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def _is_fast(view: View, col_block: tuple[int, int, int]) -> bool:
    """Whether 16-byte vectors can read the view: a false yes is a misaligned address on the device."""
    size = ELEMENT_BYTES[view.dtype]
    return (
        view.dtype != FLOAT64
        and view.is_aligned
        and view.col_stride == 1
        and view.row_stride >= 0
        and view.row_stride * size % VECTOR_BYTES == 0
        and view.cols * size % VECTOR_BYTES == 0
        and col_block[0] % GRANULE == 0
        and col_block[1] == 0
    )


def _num_pieces(view: View, num_strips: int) -> int:
    """Rows of tiles. Each range begins a tile, so that there is at most one more per range than whole ones fit."""
    if not num_strips or not view.rows:
        return 0
    return view.rows // TILE_ROWS + view.num_ranges if view.num_ranges else ceil(view.rows, TILE_ROWS)


def _all_columns(view: View) -> tuple[int, int, int]:
    num_granules = max(ceil(view.cols, GRANULE), 1)
    return num_granules * GRANULE, 0, num_granules


def _one_block(view: View) -> Cut:
    col_block, num_strips = _all_columns(view), ceil(view.cols, GRANULE * TILE_GRANULES)
    num_pieces, granules = _num_pieces(view, num_strips), num_strips * TILE_GRANULES
    return Cut(
        view, _is_fast(view, col_block), num_pieces, num_strips, (TILE_ROWS, 0, 1), col_block,
        terms=num_pieces * granules, inner=max(granules, 1), stride=0, limit=NO_LIMIT,
    )  # fmt: skip


def _blocks_of_rows(view: View, block: int, first: int, num_blocks: int) -> Cut:
    col_block, num_strips = _all_columns(view), ceil(view.cols, GRANULE * TILE_GRANULES)
    per_block = ceil(block, TILE_ROWS)
    terms = per_block * num_strips * TILE_GRANULES
    return Cut(
        view, _is_fast(view, col_block), num_blocks * per_block if num_strips else 0, num_strips,
        (block, first, per_block), col_block, terms=terms, inner=max(terms, 1), stride=terms, limit=NO_LIMIT,
    )  # fmt: skip


def _blocks_of_columns(view: View, block: int, first: int, num_blocks: int) -> Cut:
    per_block = ceil(block, GRANULE)
    col_block = (block, first, per_block)
    is_fast = _is_fast(view, col_block)
    num_strips = ceil(ceil(view.cols, GRANULE) if is_fast else num_blocks * per_block, TILE_GRANULES)
    num_pieces = _num_pieces(view, num_strips)
    return Cut(
        view, is_fast, num_pieces, num_strips, (TILE_ROWS, 0, 1), col_block,
        terms=num_pieces * per_block, inner=per_block, stride=per_block, limit=num_strips * TILE_GRANULES,
    )  # fmt: skip


def cut(view: View, slots: Slots) -> Cut:
    """Cut a view along the blocks of its slot."""
    block, first, by_rows, num_blocks = slots.geometry(view.slot)
    if view.rows == 1:
        view = view._replace(row_stride=0)  # whatever it was, it is never used
    if view.row_stride == 1 and view.col_stride > 1 and not view.num_ranges and not view.per_row:
        # Read in memory order, columns are rows.
        view = view._replace(rows=view.cols, cols=view.rows, row_stride=view.col_stride, col_stride=1)
        by_rows = not by_rows
    if num_blocks <= 1:
        return _one_block(view)
    return (_blocks_of_rows if by_rows else _blocks_of_columns)(view, block, first, num_blocks)


def check(view: View, slots: Slots) -> None:
    """Refuse at the door what the kernels could not address."""
    if not 0 <= view.dtype < len(ELEMENT_BYTES):
        raise ValueError(f"dtype must be 0 to 3, got {view.dtype}")
    if not (0 <= view.rows < 1 << 31 and 0 <= view.cols < 1 << 31):
        raise ValueError(f"rows and cols must lie in [0, 2**31), got {view.rows} x {view.cols}")
    for slot in (view.slot, *view.repeats):
        for i in range(max(view.num_ranges, 1)):
            _, _, by_rows, num_blocks = geometry = slots.geometry(slot + i)
            if geometry != slots.geometry(view.slot):
                raise ValueError(f"slots {view.slot} and {slot + i} share a read and must have the same blocks")
        if view.num_ranges and by_rows and num_blocks > 1:
            raise ValueError(f"row ranges go with column blocks, got slot {slot} with blocks of rows")
    expected = slots.num_blocks_of(view.slot, view.rows, view.cols)
    if not (view.num_ranges and by_rows) and expected != num_blocks:
        raise ValueError(f"a view of {expected} blocks came for slot {view.slot} of {num_blocks}")
