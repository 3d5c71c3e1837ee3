"""The kernels that read tensors: one program per tile, three numbers per granule of 64 columns.

A program finds its view in the table, reads at most TILE_ROWS x 512 elements once, and leaves per granule the sum of
squares, the largest magnitude and the count of non-finite values as float64 for `merge_tiles`. Nothing is shared
between programs, so there are no atomics and the result is the same bit for bit every time.

Numerics, as csrc/reduce.h: `tile_stats` adds at most 32 squares in one float32 accumulator, whose error is then at most
31 roundings of a growing sum, 31 / 2 * 2^-24 = 9.3e-7 of it; all else is added in float64. A tile whose squares leave
float32's range, or with non-finite values, is read again in float64.
"""

import triton
import triton.language as tl

from pyscan.kernels.layout import GRANULE as _GRANULE
from pyscan.kernels.layout import Record

WIDTH = tl.constexpr(int(Record.WIDTH))
ADDRESS = tl.constexpr(int(Record.ADDRESS))
ROWS = tl.constexpr(int(Record.ROWS))
COLS = tl.constexpr(int(Record.COLS))
ROW_STRIDE = tl.constexpr(int(Record.ROW_STRIDE))
COL_STRIDE = tl.constexpr(int(Record.COL_STRIDE))
FIRST_TILE = tl.constexpr(int(Record.FIRST_TILE))
NUM_STRIPS = tl.constexpr(int(Record.NUM_STRIPS))
PARTIAL = tl.constexpr(int(Record.PARTIAL))
NUM_RANGES = tl.constexpr(int(Record.NUM_RANGES))
ROW_BLOCK = tl.constexpr(int(Record.ROW_BLOCK))
ROW_FIRST = tl.constexpr(int(Record.ROW_FIRST))
ROW_PIECES = tl.constexpr(int(Record.ROW_PIECES))
COL_BLOCK = tl.constexpr(int(Record.COL_BLOCK))
COL_FIRST = tl.constexpr(int(Record.COL_FIRST))
COL_PIECES = tl.constexpr(int(Record.COL_PIECES))
DTYPE = tl.constexpr(int(Record.DTYPE))
ROW_PARTIAL = tl.constexpr(int(Record.ROW_PARTIAL))
GRANULE = tl.constexpr(_GRANULE)

INF = tl.constexpr(float("inf"))
# Squares that are too large for float32 make the sum infinite. Those that are too small are lost, up to 2^-126 each
# where the device flushes denormals: with a maximum of 2^-42 or more, the 2^13 of a granule lose 2^-29 of its sum.
TOO_SMALL = tl.constexpr(2.0**-42)


@triton.jit
def range_bounds(ends_ptr, num_ranges, rows, RANGES: tl.constexpr, TILE_ROWS: tl.constexpr):
    """First row, end and number of tiles of every range. Whatever the ends hold, the bounds lie inside the matrix."""
    index = tl.arange(0, RANGES)
    mask = index < num_ranges
    ends = tl.minimum(tl.maximum(tl.load(ends_ptr + index, mask=mask, other=0), 0), rows)
    begins = tl.load(ends_ptr + index - 1, mask=mask & (index > 0), other=0)
    begins = tl.minimum(tl.maximum(begins, 0), rows)
    lengths = tl.maximum(ends - begins, 0)
    return begins, begins + lengths, (lengths + TILE_ROWS - 1) // TILE_ROWS


@triton.jit
def _row_bounds(record, addresses, piece, RANGES: tl.constexpr, TILE_ROWS: tl.constexpr):
    """First row and end of a row of tiles."""
    rows = tl.load(record + ROWS)
    block = tl.load(record + ROW_BLOCK)
    first = tl.load(record + ROW_FIRST)
    pieces = tl.load(record + ROW_PIECES).to(tl.int32)
    whole = (piece // pieces).to(tl.int64) * block - first
    begin = tl.maximum(whole, 0) + (piece % pieces) * TILE_ROWS
    end = tl.minimum(tl.minimum(whole + block, rows), begin + TILE_ROWS)
    begin = begin.to(tl.int32)
    end = end.to(tl.int32)
    if RANGES > 0:
        num_ranges = tl.load(record + NUM_RANGES).to(tl.int32)
        if num_ranges > 0:
            ends_ptr = tl.load(addresses + tl.load(record + ADDRESS) + 1).to(tl.pointer_type(tl.int32))
            begins, ends, counts = range_bounds(ends_ptr, num_ranges, rows.to(tl.int32), RANGES, TILE_ROWS)
            after = tl.cumsum(counts, 0)
            mine = (after > piece) & (after - counts <= piece)  # true for one range, or for none
            begin = tl.sum(tl.where(mine, begins + (piece - (after - counts)) * TILE_ROWS, 0))
            end = tl.minimum(tl.sum(tl.where(mine, ends, 0)), begin + TILE_ROWS)
    return begin, end


@triton.jit
def _store_triples(out, sumsq, absmax, bad):
    tl.store(out, sumsq)
    tl.store(out + 1, absmax)
    tl.store(out + 2, bad)


@triton.jit
def _split4(x):
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1], x.shape[2], 2, 2)))
    x0, x1 = tl.split(even)
    x2, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _low(word, DTYPE: tl.constexpr):
    """The value in the low half of a word, or the whole word of a float32."""
    if DTYPE == 0:
        return word.to(tl.float32, bitcast=True)
    elif DTYPE == 1:
        return (word << 16).to(tl.float32, bitcast=True)
    else:
        return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _high(word, DTYPE: tl.constexpr):
    if DTYPE == 1:
        return (word & -65536).to(tl.float32, bitcast=True)
    else:
        return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _add(x, sumsq, absmax):
    return tl.fma(x, x, sumsq), tl.maximum(absmax, tl.abs(x))


@triton.jit
def _add_pair(a, b, sumsq_a, sumsq_b, absmax, DTYPE: tl.constexpr):
    """Two words, spread over two accumulators."""
    sumsq_a, absmax = _add(_low(a, DTYPE), sumsq_a, absmax)
    sumsq_b, absmax = _add(_low(b, DTYPE), sumsq_b, absmax)
    if DTYPE != 0:
        sumsq_a, absmax = _add(_high(a, DTYPE), sumsq_a, absmax)
        sumsq_b, absmax = _add(_high(b, DTYPE), sumsq_b, absmax)
    return sumsq_a, sumsq_b, absmax


@triton.jit
def _add_vector(words, sumsq_a, sumsq_b, absmax, DTYPE: tl.constexpr):
    w0, w1, w2, w3 = _split4(words)
    sumsq_a, sumsq_b, absmax = _add_pair(w0, w1, sumsq_a, sumsq_b, absmax, DTYPE)
    return _add_pair(w2, w3, sumsq_a, sumsq_b, absmax, DTYPE)


@triton.jit
def _add_careful(x, sumsq, absmax, bad):
    """One value per lane in float64; what is not finite is counted and left out."""
    is_finite = tl.abs(x) < INF  # false for NaN too
    x = tl.where(is_finite, x, 0.0).to(tl.float64)
    return sumsq + x * x, tl.maximum(absmax, tl.abs(x)), bad + tl.where(is_finite, 0, 1)


@triton.jit
def _add_careful_words(words, sumsq, absmax, bad, DTYPE: tl.constexpr):
    sumsq, absmax, bad = _add_careful(_low(words, DTYPE), sumsq, absmax, bad)
    if DTYPE != 0:
        sumsq, absmax, bad = _add_careful(_high(words, DTYPE), sumsq, absmax, bad)
    return sumsq, absmax, bad


@triton.jit
def _store_rows(out, row, row_end, num_strips, sumsq):
    """Leave the sums of squares of rows: `sumsq` is [granules, rows, lanes]."""
    tl.store(out + row.to(tl.int64) * num_strips, tl.sum(tl.sum(sumsq, 0), 1).to(tl.float64), mask=row < row_end)


@triton.jit
def _careful_tile(
    x_ptr,
    row_stride,
    row_begin,
    row_end,
    num_rows,
    col,
    cols,
    row_out,
    num_strips,
    DTYPE: tl.constexpr,
    CAREFUL_ROWS: tl.constexpr,
    PER_ROW: tl.constexpr,
):
    """A tile of `tile_stats` in float64, few rows at a time: this rare way must not cost the other one registers."""
    row_index = tl.arange(0, CAREFUL_ROWS)
    x_ptrs = x_ptr + (row_begin.to(tl.int64) + row_index[None, :, None, None]) * row_stride + col
    zeros = tl.zeros((col.shape[0], CAREFUL_ROWS, col.shape[2], 4), tl.float64)
    sumsq = zeros
    absmax = zeros
    bad = zeros.to(tl.int32)
    for i in range(0, num_rows, CAREFUL_ROWS):
        row = row_begin + i + row_index
        words = tl.load(x_ptrs, mask=(col < cols) & (row[None, :, None, None] < row_end), other=0)
        x_ptrs += CAREFUL_ROWS * row_stride
        if PER_ROW:
            row_sumsq, absmax, bad = _add_careful_words(words, zeros, absmax, bad, DTYPE)
            sumsq += row_sumsq
            _store_rows(row_out, row, row_end, num_strips, tl.sum(row_sumsq, 3))
        else:
            sumsq, absmax, bad = _add_careful_words(words, sumsq, absmax, bad, DTYPE)
    return (
        tl.sum(tl.sum(tl.sum(sumsq, 3), 2), 1),
        tl.max(tl.max(tl.max(absmax, 3), 2), 1),
        tl.sum(tl.sum(tl.sum(bad, 3), 2), 1).to(tl.float64),
    )


@triton.jit(do_not_specialize_on_alignment=["addresses"])
def tile_stats(
    records,
    tiles,
    addresses,
    partials,
    row_partials,
    DTYPE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    GRANULES: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
    CAREFUL_ROWS: tl.constexpr,
    RANGES: tl.constexpr,
    PER_ROW: tl.constexpr,
):
    """Tiles of views whose address, row stride and row length are multiples of 16 bytes.

    A tile is read as 32-bit words [granule, row, lane, 4]: the last axis is one 128-bit load, granules lie at offsets
    the compiler knows. For that it must see the address as a multiple of 16 after the cast, and the stride and length
    as multiples of 4 words: the table has them in vectors.
    """
    WORDS: tl.constexpr = GRANULE if DTYPE == 0 else GRANULE // 2  # of a granule
    LANES: tl.constexpr = WORDS // 4
    program = tl.program_id(0)
    record = records + tl.load(tiles + program).to(tl.int64) * WIDTH
    x_ptr = tl.multiple_of(tl.load(addresses + tl.load(record + ADDRESS)).to(tl.pointer_type(tl.int32)), 16)
    cols = tl.load(record + COLS).to(tl.int32) * 4
    row_stride = tl.load(record + ROW_STRIDE) * 4
    num_strips = tl.load(record + NUM_STRIPS).to(tl.int32)
    local = program - tl.load(record + FIRST_TILE).to(tl.int32)
    strip = local % num_strips
    row_begin, row_end = _row_bounds(record, addresses, local // num_strips, RANGES, TILE_ROWS)
    col_begin = strip * (GRANULES * WORDS)
    granule = tl.arange(0, GRANULES)[:, None, None, None]
    row_index = tl.arange(0, ROWS_AT_ONCE)[None, :, None, None]
    lane = tl.arange(0, LANES)[None, None, :, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    col = col_begin + granule * WORDS + lane
    x_ptrs = x_ptr + (row_begin.to(tl.int64) + row_index) * row_stride + col
    row_out = row_partials
    if PER_ROW:
        row_out += tl.load(record + ROW_PARTIAL) + strip
    zeros = tl.zeros((GRANULES, ROWS_AT_ONCE, LANES), tl.float32)
    sumsq_a = zeros
    sumsq_b = zeros
    absmax = zeros
    small = zeros
    num_rows = tl.maximum(row_end - row_begin, 0)
    is_wide = col_begin + GRANULES * WORDS <= cols
    num_unmasked = tl.where(is_wide, num_rows // ROWS_AT_ONCE * ROWS_AT_ONCE, 0)
    for i in range(0, num_unmasked, ROWS_AT_ONCE):
        words = tl.load(x_ptrs)
        x_ptrs += ROWS_AT_ONCE * row_stride
        if PER_ROW:
            row_a, row_b, row_max = _add_vector(words, zeros, zeros, zeros, DTYPE)
            row_a += row_b
            sumsq_a += row_a
            absmax = tl.maximum(absmax, row_max)
            small = tl.where((row_max > 0) & (row_max < TOO_SMALL), 1.0, small)
            _store_rows(row_out, row_begin + i + tl.arange(0, ROWS_AT_ONCE), row_end, num_strips, row_a)
        else:
            sumsq_a, sumsq_b, absmax = _add_vector(words, sumsq_a, sumsq_b, absmax, DTYPE)
    for i in range(num_unmasked, num_rows, ROWS_AT_ONCE):
        words = tl.load(x_ptrs, mask=(col < cols) & (row_begin + i + row_index < row_end), other=0)
        x_ptrs += ROWS_AT_ONCE * row_stride
        if PER_ROW:
            row_a, row_b, row_max = _add_vector(words, zeros, zeros, zeros, DTYPE)
            row_a += row_b
            sumsq_a += row_a
            absmax = tl.maximum(absmax, row_max)
            small = tl.where((row_max > 0) & (row_max < TOO_SMALL), 1.0, small)
            _store_rows(row_out, row_begin + i + tl.arange(0, ROWS_AT_ONCE), row_end, num_strips, row_a)
        else:
            sumsq_a, sumsq_b, absmax = _add_vector(words, sumsq_a, sumsq_b, absmax, DTYPE)
    block_sumsq = tl.sum(tl.sum(sumsq_a.to(tl.float64) + sumsq_b.to(tl.float64), 2), 1)
    block_max = tl.max(tl.max(absmax, 2), 1)
    is_trusted = (block_sumsq < INF) & ((block_max >= TOO_SMALL) | (block_max == 0))
    num_doubts = tl.sum(tl.where(is_trusted, 0, 1))
    if PER_ROW:
        num_doubts += tl.max(tl.max(tl.max(small, 2), 1), 0).to(tl.int32)
    block_bad = tl.zeros((GRANULES,), tl.float64)
    block_max = block_max.to(tl.float64)
    if num_doubts > 0:
        block_sumsq, block_max, block_bad = _careful_tile(
            x_ptr, row_stride, row_begin, row_end, num_rows, col, cols, row_out, num_strips,
            DTYPE, CAREFUL_ROWS, PER_ROW,
        )  # fmt: skip
    first = tl.load(record + PARTIAL) + local.to(tl.int64) * GRANULES
    _store_triples(partials + (first + tl.arange(0, GRANULES)) * 3, block_sumsq, block_max, block_bad)


@triton.jit
def _load_any(address, offsets, mask, dtype):
    """Elements of any dtype as float64."""
    if dtype == 0:
        x = tl.load(address.to(tl.pointer_type(tl.float32)) + offsets, mask=mask, other=0.0).to(tl.float64)
    elif dtype == 1:
        x = tl.load(address.to(tl.pointer_type(tl.bfloat16)) + offsets, mask=mask, other=0.0).to(tl.float64)
    elif dtype == 2:
        x = tl.load(address.to(tl.pointer_type(tl.float16)) + offsets, mask=mask, other=0.0).to(tl.float64)
    else:
        x = tl.load(address.to(tl.pointer_type(tl.float64)) + offsets, mask=mask, other=0.0)
    return x


@triton.jit(do_not_specialize_on_alignment=["addresses"])
def tile_stats_general(
    records,
    tiles,
    addresses,
    partials,
    row_partials,
    TILE_ROWS: tl.constexpr,
    GRANULES: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
    RANGES: tl.constexpr,
    PER_ROW: tl.constexpr,
):
    """Tiles of any view: every dtype, stride, address and block width, one element per load, all in float64."""
    program = tl.program_id(0)
    record = records + tl.load(tiles + program).to(tl.int64) * WIDTH
    address = tl.load(addresses + tl.load(record + ADDRESS))
    dtype = tl.load(record + DTYPE).to(tl.int32)
    row_stride = tl.load(record + ROW_STRIDE)
    num_strips = tl.load(record + NUM_STRIPS).to(tl.int32)
    local = program - tl.load(record + FIRST_TILE).to(tl.int32)
    strip = local % num_strips
    row_begin, row_end = _row_bounds(record, addresses, local // num_strips, RANGES, TILE_ROWS)
    block = tl.load(record + COL_BLOCK)
    col_pieces = tl.load(record + COL_PIECES)
    granule = strip * GRANULES + tl.arange(0, GRANULES)
    whole = granule // col_pieces * block - tl.load(record + COL_FIRST)
    col_begin = tl.maximum(whole, 0) + granule % col_pieces * GRANULE
    col_end = tl.minimum(whole + block, tl.load(record + COLS))[:, None, None]
    col = col_begin[:, None, None] + tl.arange(0, GRANULE)[None, None, :]
    row_index = tl.arange(0, ROWS_AT_ONCE)[None, :, None]
    offsets = (row_begin.to(tl.int64) + row_index) * row_stride + col * tl.load(record + COL_STRIDE)
    row_out = row_partials
    if PER_ROW:
        row_out += tl.load(record + ROW_PARTIAL) + strip
    zeros = tl.zeros((GRANULES, ROWS_AT_ONCE, GRANULE), tl.float64)
    sumsq = zeros
    absmax = zeros
    bad = tl.zeros((GRANULES, ROWS_AT_ONCE, GRANULE), tl.int32)
    for i in range(0, row_end - row_begin, ROWS_AT_ONCE):
        x = _load_any(address, offsets, (col < col_end) & (row_begin + i + row_index < row_end), dtype)
        offsets += ROWS_AT_ONCE * row_stride
        if PER_ROW:
            row_sumsq, absmax, bad = _add_careful(x, zeros, absmax, bad)
            sumsq += row_sumsq
            rows = row_begin + i + tl.arange(0, ROWS_AT_ONCE)
            _store_rows(row_out, rows, row_end, num_strips, row_sumsq)
        else:
            sumsq, absmax, bad = _add_careful(x, sumsq, absmax, bad)
    first = tl.load(record + PARTIAL) + local.to(tl.int64) * GRANULES
    _store_triples(
        partials + (first + tl.arange(0, GRANULES)) * 3,
        tl.sum(tl.sum(sumsq, 2), 1),
        tl.max(tl.max(absmax, 2), 1),
        tl.sum(tl.sum(bad, 2), 1).to(tl.float64),
    )
