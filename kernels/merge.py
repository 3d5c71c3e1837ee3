"""The kernels that add up what the tiles left, and that make a row of cells of it.

`merge_tiles` adds the triples of tiles, in the order of the table, to the accumulators of each slot; `merge_rows` adds
the sums of rows; `finish_row` writes a step's row and makes every slot absent again. A slot is one program's alone, so
nothing is shared between programs. An accumulator is three float64: sum of squares (-1: absent), maximum and count.
"""

import triton
import triton.language as tl

from pyscan.kernels.layout import Job, RowJob, Segment
from pyscan.kernels.slots import Finish
from pyscan.kernels.tiles import range_bounds

ABSENT = tl.constexpr(-1.0)  # csrc/step_buffer.h

JOB_WIDTH = tl.constexpr(int(Job.WIDTH))
FIRST_SEGMENT = tl.constexpr(int(Job.FIRST_SEGMENT))
NUM_SEGMENTS = tl.constexpr(int(Job.NUM_SEGMENTS))
JOB_SUMS = tl.constexpr(int(Job.SUMS))
JOB_NUM_BLOCKS = tl.constexpr(int(Job.NUM_BLOCKS))
JOB_FIRST_PROGRAM = tl.constexpr(int(Job.FIRST_PROGRAM))

SEGMENT_WIDTH = tl.constexpr(int(Segment.WIDTH))
PARTIAL = tl.constexpr(int(Segment.PARTIAL))
TERMS = tl.constexpr(int(Segment.TERMS))
INNER = tl.constexpr(int(Segment.INNER))
OUTER = tl.constexpr(int(Segment.OUTER))
STRIDE = tl.constexpr(int(Segment.STRIDE))
LIMIT = tl.constexpr(int(Segment.LIMIT))
RANGE = tl.constexpr(int(Segment.RANGE))
NUM_RANGES = tl.constexpr(int(Segment.NUM_RANGES))
ENDS = tl.constexpr(int(Segment.ENDS))
ROWS = tl.constexpr(int(Segment.ROWS))

ROW_JOB_WIDTH = tl.constexpr(int(RowJob.WIDTH))
ROW_BUFFER = tl.constexpr(int(RowJob.BUFFER))
ROW_PARTIAL = tl.constexpr(int(RowJob.ROW_PARTIAL))
ROW_ROWS = tl.constexpr(int(RowJob.ROWS))
ROW_STRIPS = tl.constexpr(int(RowJob.NUM_STRIPS))
ROW_ENDS = tl.constexpr(int(RowJob.ENDS))
ROW_NUM_RANGES = tl.constexpr(int(RowJob.NUM_RANGES))
ROW_FIRST_PROGRAM = tl.constexpr(int(RowJob.FIRST_PROGRAM))

FINISH_WIDTH = tl.constexpr(int(Finish.WIDTH))
SUMS = tl.constexpr(int(Finish.SUMS))
NUM_SUMS = tl.constexpr(int(Finish.NUM_SUMS))
NUM_BLOCKS = tl.constexpr(int(Finish.NUM_BLOCKS))
SUMSQ_CELL = tl.constexpr(int(Finish.SUMSQ_CELL))
ABSMAX_CELL = tl.constexpr(int(Finish.ABSMAX_CELL))
BAD_CELL = tl.constexpr(int(Finish.BAD_CELL))
IS_GRADIENT = tl.constexpr(int(Finish.IS_GRADIENT))


@triton.jit
def _terms(segment, addresses, RANGES: tl.constexpr, TILE_ROWS: tl.constexpr):
    """First triple and number of terms of a segment; a range without rows has none and is not seen."""
    partial = tl.load(segment + PARTIAL)
    terms = tl.load(segment + TERMS).to(tl.int32)
    is_seen = 1
    if RANGES > 0:
        index = tl.load(segment + RANGE).to(tl.int32)
        if index >= 0:
            ends_ptr = tl.load(addresses + tl.load(segment + ENDS)).to(tl.pointer_type(tl.int32))
            num_ranges = tl.load(segment + NUM_RANGES).to(tl.int32)
            rows = tl.load(segment + ROWS).to(tl.int32)
            _begins, _ends, counts = range_bounds(ends_ptr, num_ranges, rows, RANGES, TILE_ROWS)
            ranges = tl.arange(0, RANGES)
            num_tiles = tl.sum(tl.where(ranges == index, counts, 0))
            partial += tl.sum(tl.where(ranges < index, counts, 0)).to(tl.int64) * tl.load(segment + OUTER)
            terms = num_tiles * tl.load(segment + INNER).to(tl.int32)
            is_seen = tl.minimum(num_tiles, 1)
    return partial, terms, is_seen


@triton.jit(do_not_specialize_on_alignment=["addresses"])
def merge_tiles(
    jobs,
    programs,
    segments,
    addresses,
    partials,
    sums,
    RANGES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TERMS_AT_ONCE: tl.constexpr,
    REPLACE: tl.constexpr,
):
    """Add the terms of BLOCKS blocks of one slot, or put them in the place of what is there."""
    program = tl.program_id(0)
    job = jobs + tl.load(programs + program).to(tl.int64) * JOB_WIDTH
    block = (program - tl.load(job + JOB_FIRST_PROGRAM).to(tl.int32)) * BLOCKS + tl.arange(0, BLOCKS)
    in_slot = block < tl.load(job + JOB_NUM_BLOCKS).to(tl.int32)
    sumsq = tl.zeros((TERMS_AT_ONCE, BLOCKS), tl.float64)
    absmax = sumsq
    bad = sumsq
    num_seen = tl.zeros((BLOCKS,), tl.int32)
    segment = segments + tl.load(job + FIRST_SEGMENT) * SEGMENT_WIDTH
    for _ in range(0, tl.load(job + NUM_SEGMENTS).to(tl.int32)):
        partial, terms, is_seen = _terms(segment, addresses, RANGES, TILE_ROWS)
        inner = tl.load(segment + INNER).to(tl.int32)
        outer = tl.load(segment + OUTER)
        stride = tl.load(segment + STRIDE)
        limit = tl.load(segment + LIMIT)
        for i in range(0, terms, TERMS_AT_ONCE):
            term = i + tl.arange(0, TERMS_AT_ONCE)[:, None]
            position = block[None, :] * stride + term % inner
            mask = (term < terms) & in_slot[None, :] & (position < limit)
            triple = partials + (partial + (term // inner) * outer + position) * 3
            sumsq += tl.load(triple, mask=mask, other=0.0)
            absmax = tl.maximum(absmax, tl.load(triple + 1, mask=mask, other=0.0))
            bad += tl.load(triple + 2, mask=mask, other=0.0)
        num_seen += is_seen
        segment += SEGMENT_WIDTH
    out = sums + (tl.load(job + JOB_SUMS) + block) * 3
    in_slot = in_slot & (num_seen > 0)
    new_sumsq = tl.sum(sumsq, 0)
    new_max = tl.max(absmax, 0)
    new_bad = tl.sum(bad, 0)
    if not REPLACE:
        old = tl.load(out, mask=in_slot, other=ABSENT)
        is_first = old < 0
        new_sumsq += tl.where(is_first, 0.0, old)
        new_max = tl.maximum(new_max, tl.where(is_first, 0.0, tl.load(out + 1, mask=in_slot, other=0.0)))
        new_bad += tl.where(is_first, 0.0, tl.load(out + 2, mask=in_slot, other=0.0))
    tl.store(out, new_sumsq, mask=in_slot)
    tl.store(out + 1, new_max, mask=in_slot)
    tl.store(out + 2, new_bad, mask=in_slot)


@triton.jit(do_not_specialize_on_alignment=["addresses"])
def merge_rows(
    row_jobs,
    programs,
    addresses,
    row_partials,
    RANGES: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
):
    """Write the sums of squares of ROWS_AT_ONCE rows of one view; rows of no range are 0."""
    program = tl.program_id(0)
    job = row_jobs + tl.load(programs + program).to(tl.int64) * ROW_JOB_WIDTH
    num_rows = tl.load(job + ROW_ROWS).to(tl.int32)
    num_strips = tl.load(job + ROW_STRIPS).to(tl.int32)
    row = (program - tl.load(job + ROW_FIRST_PROGRAM).to(tl.int32)) * ROWS_AT_ONCE + tl.arange(0, ROWS_AT_ONCE)
    in_view = row < num_rows
    has_sum = in_view
    if RANGES > 0:
        num_ranges = tl.load(job + ROW_NUM_RANGES).to(tl.int32)
        if num_ranges > 0:
            ends_ptr = tl.load(addresses + tl.load(job + ROW_ENDS)).to(tl.pointer_type(tl.int32))
            has_sum = in_view & (row < tl.load(ends_ptr + num_ranges - 1))
    source = row_partials + tl.load(job + ROW_PARTIAL) + row.to(tl.int64) * num_strips
    total = tl.zeros((ROWS_AT_ONCE,), tl.float64)
    for strip in range(0, num_strips):
        total += tl.load(source + strip, mask=has_sum, other=0.0)
    out = tl.load(addresses + tl.load(job + ROW_BUFFER)).to(tl.pointer_type(tl.float64))
    tl.store(out + row, total, mask=in_view)


@triton.jit(do_not_specialize_on_alignment=["row", "inv_scale"])
def finish_row(slots, sums, row, inv_scale, BLOCKS: tl.constexpr):
    """Write the cells of one slot and make it absent: NaN where values were not finite, gradients unscaled."""
    slot = slots + tl.program_id(0).to(tl.int64) * FINISH_WIDTH
    first = tl.load(slot + SUMS)
    num_sums = tl.load(slot + NUM_SUMS).to(tl.int32)
    num_blocks = tl.load(slot + NUM_BLOCKS).to(tl.int32)
    sumsq_cell = tl.load(slot + SUMSQ_CELL)
    scale = tl.load(inv_scale).to(tl.float64)
    scale = tl.where(tl.load(slot + IS_GRADIENT) != 0, scale, 1.0)
    is_seen = tl.load(sums + first * 3) >= 0
    absmax = tl.zeros((BLOCKS,), tl.float64)
    bad = absmax
    for i in range(0, num_sums, BLOCKS):
        block = i + tl.arange(0, BLOCKS)
        mask = block < num_sums
        source = sums + (first + block) * 3
        sumsq = tl.load(source, mask=mask, other=0.0) * (scale * scale)
        num_bad = tl.load(source + 2, mask=mask, other=0.0)
        sumsq = tl.where(num_bad > 0, float("nan"), sumsq)
        tl.store(row + sumsq_cell + block, tl.where(is_seen, sumsq, ABSENT), mask=block < num_blocks)
        absmax = tl.maximum(absmax, tl.load(source + 1, mask=mask, other=0.0))
        bad += num_bad
        tl.store(source, tl.full((BLOCKS,), ABSENT, tl.float64), mask=mask)
    absmax_cell = tl.load(slot + ABSMAX_CELL)
    bad_cell = tl.load(slot + BAD_CELL)
    tl.store(row + absmax_cell, tl.where(is_seen, tl.max(absmax) * scale, ABSENT), mask=absmax_cell >= 0)
    tl.store(row + bad_cell, tl.where(is_seen, tl.sum(bad), ABSENT), mask=bad_cell >= 0)
