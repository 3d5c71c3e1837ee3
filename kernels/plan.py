"""Tables that tell the kernels what to read and where its sums go, made from shapes alone.

Receives the slots of a step buffer and the views to be reduced together, has every view cut into tiles, and hands on
one record per view, the tile map of each launch, and the jobs that add the tiles up. Addresses are no part of it: a
plan serves every step that sees the same shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyscan.kernels.cut import Cut, View, ceil, check, cut
from pyscan.kernels.layout import (
    ELEMENT_BYTES,
    MERGE_BLOCKS,
    MERGE_ROWS,
    TILE_GRANULES,
    VECTOR_BYTES,
    Job,
    Record,
    RowJob,
    Segment,
)
from pyscan.kernels.slots import Slots, SlotTuple

__all__ = ["GENERAL", "SlotTuple", "Slots", "Tables", "TileLaunch", "View", "make_tables"]

GENERAL = -1  # in the place of a dtype: the kernel that reads any
MIN_RANGES = 16  # kernels are compiled for a power of two of ranges: not for every small one


class TileLaunch(NamedTuple):
    """One launch of a tile kernel: GENERAL, or the dtype whose aligned vectors it reads."""

    dtype: int
    per_row: bool
    tiles: NDArray[np.int32]  # record of each program


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


class Places(NamedTuple):
    """Where each view's addresses, triples and row sums begin."""

    addresses: list[int]
    partials: list[int]
    row_partials: list[int]


def make_tables(views: Sequence[View], slots: Slots, *, replace: bool) -> Tables:
    """The tables that reduce `views` together; with `replace` the last view of a slot counts."""
    for view in views:
        check(view, slots)
    cuts = [cut(view, slots) for view in views]
    triples = [c.num_tiles * TILE_GRANULES for c in cuts]
    row_sums = [c.view.rows * c.num_strips if c.view.per_row else 0 for c in cuts]
    places = Places(_firsts([view.num_addresses for view in views]), _firsts(triples), _firsts(row_sums))
    records, launches = _tile_tables(cuts, places)
    segments, jobs, job_programs = _job_tables(cuts, places, slots, replace=replace)
    row_jobs, row_programs = _row_tables(cuts, places)
    max_ranges = max((view.num_ranges for view in views), default=0)
    return Tables(
        records, launches, segments, jobs, job_programs, row_jobs, row_programs,
        num_partials=sum(triples),
        num_row_partials=sum(row_sums),
        num_addresses=sum(view.num_addresses for view in views),
        max_ranges=max(1 << (max_ranges - 1).bit_length(), MIN_RANGES) if max_ranges else 0,
    )  # fmt: skip


def _tile_tables(cuts: list[Cut], places: Places) -> tuple[NDArray[np.int64], list[TileLaunch]]:
    """One launch per dtype and path of views that have tiles."""
    groups: dict[tuple[int, bool], list[int]] = {}
    for i, c in enumerate(cuts):
        if c.num_tiles:
            groups.setdefault((c.view.dtype if c.is_fast else GENERAL, c.view.per_row), []).append(i)
    records = np.zeros((len(cuts), Record.WIDTH), np.int64)
    launches = []
    for (dtype, per_row), members in sorted(groups.items()):
        counts = [cuts[i].num_tiles for i in members]
        for i, first_tile in zip(members, _firsts(counts), strict=True):
            records[i] = _record(cuts[i], first_tile, *(place[i] for place in places))
        launches.append(TileLaunch(dtype, per_row, np.array(members, np.int32)[_programs(counts)]))
    return records, launches


def _record(c: Cut, first_tile: int, address: int, partial: int, row_partial: int) -> list[int]:
    view = c.view
    unit = VECTOR_BYTES // ELEMENT_BYTES[view.dtype] if c.is_fast else 1
    return [
        address, view.rows, view.cols // unit, view.row_stride // unit, view.col_stride, first_tile, c.num_strips,
        partial, view.num_ranges, *c.row_block, *c.col_block, view.dtype, row_partial,
    ]  # fmt: skip


def _job_tables(
    cuts: list[Cut], places: Places, slots: Slots, *, replace: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """Segments, jobs and programs of merge_tiles. A slot has one job, however many views it has: no two write it."""
    by_slot: dict[int, list[list[int]]] = {}
    for c, address, partial in zip(cuts, places.addresses, places.partials, strict=True):
        for slot, segment in _segments(c, address=address, partial=partial):
            known = by_slot.setdefault(slot, [])
            if replace:
                known.clear()
            known.append(segment)
    counts = [ceil(slots.num_sums(slot), MERGE_BLOCKS) for slot in by_slot]
    firsts = _firsts([len(segments) for segments in by_slot.values()])
    jobs = [
        [first, len(by_slot[slot]), slots.first_sum(slot), slots.num_sums(slot), first_program]
        for slot, first, first_program in zip(by_slot, firsts, _firsts(counts), strict=True)
    ]
    segments = [segment for segments in by_slot.values() for segment in segments]
    return _table(segments, Segment.WIDTH), _table(jobs, Job.WIDTH), _programs(counts)


def _segments(c: Cut, *, address: int, partial: int) -> Iterator[tuple[int, list[int]]]:
    """What each slot of a view adds up: (slot, segment)."""
    view = c.view
    for slot in (view.slot, *view.repeats):
        for i in range(max(view.num_ranges, 1)):
            terms = [partial, c.terms, c.inner, c.row_of_tiles, c.stride, c.limit]
            yield slot + i, [*terms, i if view.num_ranges else -1, view.num_ranges, address + 1, view.rows]


def _row_tables(cuts: list[Cut], places: Places) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Jobs and programs of merge_rows."""
    members = [i for i, c in enumerate(cuts) if c.view.per_row]
    counts = [ceil(cuts[i].view.rows, MERGE_ROWS) for i in members]
    jobs = []
    for i, first_program in zip(members, _firsts(counts), strict=True):
        view, address = cuts[i].view, places.addresses[i]
        ends = address + 1 if view.num_ranges else -1
        buffer = address + view.num_addresses - 1
        jobs.append(
            [buffer, places.row_partials[i], view.rows, cuts[i].num_strips, ends, view.num_ranges, first_program]
        )
    return _table(jobs, RowJob.WIDTH), _programs(counts)


def _programs(counts: Sequence[int]) -> NDArray[np.int32]:
    """The map from program to table row, where row i has counts[i] programs."""
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)


def _firsts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)][:-1]


def _table(rows: list[list[int]], width: int) -> NDArray[np.int64]:
    return np.array(rows, np.int64).reshape(len(rows), width)
