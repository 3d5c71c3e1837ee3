"""What host and device agree on: the size of a tile, and the columns of every table.

`plan.py` fills these tables, the kernels read them; neither knows a number that does not stand here.
"""

from __future__ import annotations

from enum import IntEnum

FLOAT32, BFLOAT16, FLOAT16, FLOAT64 = range(4)  # codes of csrc/reduce.h
ELEMENT_BYTES = (4, 2, 2, 8)
VECTOR_BYTES = 16  # what one thread loads at once on the aligned path

# A tile is up to TILE_ROWS x (TILE_GRANULES * GRANULE) elements: one program reads it and leaves three numbers per
# granule. 128 rows keep every float32 accumulator at 32 squares or fewer (see tiles.py).
GRANULE = 64
TILE_GRANULES = 8
TILE_ROWS = 128
MERGE_BLOCKS = 16  # blocks of a slot that one program of merge_tiles adds up
MERGE_ROWS = 256  # rows whose sums one program of merge_rows adds up
NO_LIMIT = 1 << 62


class Record(IntEnum):
    """Columns of the table of views. The aligned path counts COLS and ROW_STRIDE in vectors of 16 bytes."""

    ADDRESS = 0  # index of the tensor's address
    ROWS = 1
    COLS = 2
    ROW_STRIDE = 3
    COL_STRIDE = 4
    FIRST_TILE = 5  # of the launch
    NUM_STRIPS = 6  # tiles side by side
    PARTIAL = 7  # first triple this view writes
    NUM_RANGES = 8
    ROW_BLOCK = 9  # rows are cut at multiples of ROW_BLOCK, ROW_FIRST of which lie before row 0,
    ROW_FIRST = 10
    ROW_PIECES = 11  # and each block of rows into ROW_PIECES tiles
    COL_BLOCK = 12  # likewise columns, in granules
    COL_FIRST = 13
    COL_PIECES = 14
    DTYPE = 15
    ROW_PARTIAL = 16  # first row sum this view writes
    WIDTH = 17


class Segment(IntEnum):
    """Columns of the table of terms. Term k of block b is triple PARTIAL + k // INNER * OUTER + b * STRIDE + k % INNER,
    if b * STRIDE + k % INNER < LIMIT. With RANGE >= 0, OUTER triples are a row of tiles and the terms are those of the
    rows of that range."""

    PARTIAL = 0
    TERMS = 1
    INNER = 2
    OUTER = 3
    STRIDE = 4
    LIMIT = 5
    RANGE = 6
    NUM_RANGES = 7
    ENDS = 8  # index of the address of the ranges' ends
    ROWS = 9
    WIDTH = 10


class Job(IntEnum):
    """Columns of the table of slots to fill: segments to add, and the first of the slot's accumulators."""

    FIRST_SEGMENT = 0
    NUM_SEGMENTS = 1
    SUMS = 2
    NUM_BLOCKS = 3
    FIRST_PROGRAM = 4
    WIDTH = 5


class RowJob(IntEnum):
    """Columns of the table of row buffers to write."""

    BUFFER = 0  # index of its address
    ROW_PARTIAL = 1
    ROWS = 2
    NUM_STRIPS = 3
    ENDS = 4  # index of the address of the ranges' ends, or -1
    NUM_RANGES = 5
    FIRST_PROGRAM = 6
    WIDTH = 7
