"""Tables that tell the kernels what to read and where its sums go, made from shapes alone.

Receives the slots of a step buffer and the views to be reduced together, cuts every view into tiles and hands on one
record per view, the tile map of each launch, and the jobs that add the tiles up. Addresses are no part of it: a plan
serves every step that sees the same shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyscan.kernels.layout import (
    ELEMENT_BYTES,
    FLOAT64,
    GRANULE,
    MERGE_BLOCKS,
    MERGE_ROWS,
    NO_LIMIT,
    TILE_GRANULES,
    TILE_ROWS,
    VECTOR_BYTES,
    Job,
    Record,
    RowJob,
    Segment,
)
from pyscan.kernels.slots import Slots, SlotTuple

__all__ = ["GENERAL", "SlotTuple", "Slots", "Tables", "TileLaunch", "View", "make_tables"]


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


class TileLaunch(NamedTuple):
    """One launch of a tile kernel: GENERAL, or the dtype whose aligned vectors it reads."""

    dtype: int
    per_row: bool
    tiles: NDArray[np.int32]  # record of each program


GENERAL = -1


class Tables(NamedTuple):
    """Everything a plan uploads, and how much scratch it needs."""

    records: NDArray[np.int64]
    launches: list[TileLaunch]
    segments: NDArray[np.int64]
    jobs: NDArray[np.int64]
    job_programs: NDArray[np.int32]
    row_jobs: NDArray[np.int64]
    row_programs: NDArray[np.int32]
    num_partials: int
    num_row_partials: int
    num_addresses: int
    max_ranges: int  # a power of two; 0: no view has ranges


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


def _ceil(a: int, b: int) -> int:
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


def cut(view: View, slots: Slots) -> Cut:
    """Cut a view along the blocks of its slot."""
    block, first, by_rows, num_blocks = slots.geometry(view.slot)
    if view.rows == 1:
        view = view._replace(row_stride=0)  # whatever it was, it is never used
    if view.row_stride == 1 and view.col_stride > 1 and not view.num_ranges and not view.per_row:
        # Read in memory order, columns are rows.
        view = view._replace(rows=view.cols, cols=view.rows, row_stride=view.col_stride, col_stride=1)
        by_rows = not by_rows
    whole_cols = GRANULE * _ceil(max(view.cols, 1), GRANULE)
    is_whole = num_blocks <= 1
    col_block = (whole_cols, 0, whole_cols // GRANULE)
    if not by_rows and not is_whole:
        col_block = (block, first, _ceil(block, GRANULE))
    is_fast = _is_fast(view, col_block)
    num_granules = _ceil(view.cols, GRANULE) if is_fast or by_rows or is_whole else num_blocks * col_block[2]
    num_strips = _ceil(num_granules, TILE_GRANULES)
    granules = num_strips * TILE_GRANULES
    row_block = (TILE_ROWS, 0, 1)
    num_pieces = _ceil(view.rows, TILE_ROWS) if num_strips else 0
    if view.num_ranges:
        # Each range begins a tile: at most one more tile than whole ones fit.
        num_pieces = view.rows // TILE_ROWS + view.num_ranges if view.rows and num_strips else 0
    if is_whole:
        terms, inner, stride, limit = num_pieces * granules, granules, 0, NO_LIMIT
    elif by_rows:
        row_block = (block, first, _ceil(block, TILE_ROWS))
        num_pieces = num_blocks * row_block[2] if num_strips else 0
        terms = inner = stride = row_block[2] * granules
        limit = NO_LIMIT
    else:
        inner = stride = col_block[2]
        terms, limit = num_pieces * inner, granules
    return Cut(view, is_fast, num_pieces, num_strips, row_block, col_block, terms, max(inner, 1), stride, limit)


def _check(view: View, slots: Slots) -> None:
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


def _record(c: Cut, *, address: int, first_tile: int, partial: int, row_partial: int) -> list[int]:
    view = c.view
    unit = VECTOR_BYTES // ELEMENT_BYTES[view.dtype] if c.is_fast else 1
    return [
        address, view.rows, view.cols // unit, view.row_stride // unit, view.col_stride, first_tile, c.num_strips,
        partial, view.num_ranges, *c.row_block, *c.col_block, view.dtype, row_partial,
    ]  # fmt: skip


def _segments(c: Cut, *, address: int, partial: int) -> Iterable[tuple[int, list[int]]]:
    """What each slot of a view adds up: (slot, segment)."""
    view = c.view
    for slot in (view.slot, *view.repeats):
        for i in range(max(view.num_ranges, 1)):
            terms = [partial, c.terms, c.inner, c.row_of_tiles, c.stride, c.limit]
            yield slot + i, [*terms, i if view.num_ranges else -1, view.num_ranges, address + 1, view.rows]


def _programs(counts: Sequence[int]) -> NDArray[np.int32]:
    """The map from program to table row, where row i has counts[i] programs."""
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)


def _firsts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)][:-1]


def _table(rows: list[list[int]], width: int) -> NDArray[np.int64]:
    return np.array(rows, np.int64).reshape(len(rows), width)


def make_tables(views: Sequence[View], slots: Slots, *, replace: bool) -> Tables:
    """The tables that reduce `views` together; with `replace` the last view of a slot counts."""
    for view in views:
        _check(view, slots)
    cuts = [cut(view, slots) for view in views]
    addresses = _firsts([view.num_addresses for view in views])
    partials = _firsts([c.num_tiles * TILE_GRANULES for c in cuts])
    row_counts = [c.view.rows * c.num_strips if c.view.per_row else 0 for c in cuts]
    row_partials = _firsts(row_counts)
    records: list[list[int]] = [[]] * len(cuts)
    launches = []
    groups = sorted({(c.view.dtype if c.is_fast else GENERAL, c.view.per_row) for c in cuts if c.num_tiles})
    for dtype, per_row in groups:
        members = [
            i for i, c in enumerate(cuts)
            if c.num_tiles and (c.view.dtype if c.is_fast else GENERAL, c.view.per_row) == (dtype, per_row)
        ]  # fmt: skip
        counts = [cuts[i].num_tiles for i in members]
        for i, first_tile in zip(members, _firsts(counts), strict=True):
            records[i] = _record(
                cuts[i], address=addresses[i], first_tile=first_tile, partial=partials[i], row_partial=row_partials[i]
            )
        launches.append(TileLaunch(dtype, per_row, np.array(members, np.int32)[_programs(counts)]))
    by_slot: dict[int, list[list[int]]] = {}
    for c, address, partial in zip(cuts, addresses, partials, strict=True):
        for slot, segment in _segments(c, address=address, partial=partial):
            known = by_slot.setdefault(slot, [])
            if replace:
                known.clear()
            known.append(segment)
    return _finish_tables(by_slot, records, launches, cuts, addresses, row_partials, slots)


def _finish_tables(
    by_slot: dict[int, list[list[int]]],
    records: list[list[int]],
    launches: list[TileLaunch],
    cuts: list[Cut],
    addresses: list[int],
    row_partials: list[int],
    slots: Slots,
) -> Tables:
    segment_firsts = _firsts([len(segments) for segments in by_slot.values()])
    job_counts = [_ceil(slots.num_sums(slot), MERGE_BLOCKS) for slot in by_slot]
    jobs = [
        [first, len(segments), slots.first_sum(slot), slots.num_sums(slot), first_program]
        for (slot, segments), first, first_program in zip(
            by_slot.items(), segment_firsts, _firsts(job_counts), strict=True
        )
    ]
    row_views = [i for i, c in enumerate(cuts) if c.view.per_row]
    row_counts = [_ceil(cuts[i].view.rows, MERGE_ROWS) for i in row_views]
    row_jobs = [
        [
            addresses[i] + cuts[i].view.num_addresses - 1, row_partials[i], cuts[i].view.rows, cuts[i].num_strips,
            addresses[i] + 1 if cuts[i].view.num_ranges else -1, cuts[i].view.num_ranges, first_program,
        ]
        for i, first_program in zip(row_views, _firsts(row_counts), strict=True)
    ]  # fmt: skip
    max_ranges = max((c.view.num_ranges for c in cuts), default=0)
    return Tables(
        records=_table([record or [0] * Record.WIDTH for record in records], Record.WIDTH),
        launches=launches,
        segments=_table([segment for segments in by_slot.values() for segment in segments], Segment.WIDTH),
        jobs=_table(jobs, Job.WIDTH),
        job_programs=_programs(job_counts),
        row_jobs=_table(row_jobs, RowJob.WIDTH),
        row_programs=_programs(row_counts),
        num_partials=sum(c.num_tiles for c in cuts) * TILE_GRANULES,
        num_row_partials=sum(c.view.rows * c.num_strips for c in cuts if c.view.per_row),
        num_addresses=sum(c.view.num_addresses for c in cuts),
        max_ranges=1 << (max_ranges - 1).bit_length() if max_ranges else 0,
    )
