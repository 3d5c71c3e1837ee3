"""Tables of the kernels: which path a view takes, what is refused, and that nothing here needs Triton."""

import subprocess
import sys

import pytest

from pyscan.kernels.cut import cut
from pyscan.kernels.layout import BFLOAT16, FLOAT32, FLOAT64
from pyscan.kernels.plan import GENERAL, Slots, SlotTuple, View, make_tables

BLOCKS_64: SlotTuple = (64, 0, False, 8, 0, -1, -1, False)
WIDE = View(0, BFLOAT16, 100, 512, 512, 1, True)


def slots(*shapes: tuple[int, int, bool, int]) -> Slots:
    """Slots over the same cells, of shapes (block, first, by_rows, num_blocks)."""
    return Slots([(*shape, 0, -1, -1, False) for shape in shapes], 64)


@pytest.mark.parametrize(
    ("change", "is_fast"),
    [
        ({}, True),
        ({"is_aligned": False}, False),
        ({"dtype": FLOAT64}, False),
        ({"row_stride": 1024}, True),
        ({"row_stride": 516}, False),
        ({"row_stride": 516, "dtype": FLOAT32}, True),
        ({"row_stride": 0}, True),
        ({"row_stride": -512}, False),
        ({"col_stride": 2, "row_stride": 1024}, False),
        ({"rows": 1, "row_stride": 513}, True),
        ({"cols": 509}, False),
        ({"cols": 508}, False),
        ({"cols": 508, "dtype": FLOAT32}, True),
    ],
)
def test_vectors_read_only_what_is_whole_vectors(change: dict[str, int], is_fast: bool) -> None:
    assert cut(WIDE._replace(**change), slots((64, 0, False, 8))).is_fast is is_fast


@pytest.mark.parametrize(
    ("shape", "is_fast"),
    [
        ((64, 0, False, 8), True), ((128, 0, False, 4), True), ((512, 0, False, 1), True), ((32, 0, False, 16), False),
        ((64, 8, False, 9), False), ((64, 0, True, 2), True), ((10, 3, True, 11), True), ((600, 7, False, 1), True),
    ],
)  # fmt: skip
def test_vectors_need_blocks_of_whole_granules(shape: tuple[int, int, bool, int], is_fast: bool) -> None:
    assert cut(WIDE, slots(shape)).is_fast is is_fast


def test_a_transposed_view_is_read_in_memory_order() -> None:
    transposed = WIDE._replace(rows=104, row_stride=1, col_stride=104)
    turned = cut(transposed, slots((64, 0, False, 8)))
    assert turned.is_fast
    assert (turned.view.rows, turned.view.cols, turned.row_block) == (512, 104, (64, 0, 1))
    assert not cut(transposed._replace(per_row=True), slots((64, 0, False, 8))).is_fast


def test_the_address_table_has_what_each_view_needs() -> None:
    views = [WIDE, WIDE._replace(num_ranges=2), WIDE._replace(num_ranges=2, per_row=True), WIDE._replace(per_row=True)]
    assert [view.num_addresses for view in views] == [1, 2, 3, 2]
    tables = make_tables(views, slots(*[(64, 0, False, 8)] * 2), replace=False)
    assert tables.num_addresses == 8
    assert tables.records[:, 0].tolist() == [0, 1, 3, 6]
    assert tables.row_jobs[:, 0].tolist() == [5, 7]
    assert tables.max_ranges == 16
    many = make_tables([WIDE._replace(num_ranges=17)], slots(*[(64, 0, False, 8)] * 17), replace=False)
    assert many.max_ranges == 32


def test_launches_are_one_per_dtype_and_path() -> None:
    views = [WIDE, WIDE._replace(dtype=FLOAT32), WIDE._replace(is_aligned=False), WIDE._replace(dtype=FLOAT64), WIDE]
    tables = make_tables(views, slots((64, 0, False, 8)), replace=False)
    assert [launch.dtype for launch in tables.launches] == [GENERAL, FLOAT32, BFLOAT16]
    assert [launch.tiles.tolist() for launch in tables.launches] == [[2, 3], [1], [0, 4]]
    assert len(tables.jobs) == 1, "one slot, one job, however many views"


def test_no_views_and_empty_views_need_no_tiles() -> None:
    assert make_tables([], slots((64, 0, False, 8)), replace=False).launches == []
    empty = make_tables(
        [WIDE._replace(rows=0), WIDE._replace(rows=0, num_ranges=1)], slots((64, 0, False, 8)), replace=True
    )
    assert empty.launches == []
    assert len(empty.jobs) == 1, "what has no rows is seen all the same"


@pytest.mark.parametrize(
    ("view", "text"),
    [
        (WIDE._replace(slot=3), r"slot must lie in \[0, 3\), got 3"),
        (WIDE._replace(num_ranges=3), "slots 0 and 2 share a read and must have the same blocks"),
        (WIDE._replace(dtype=7), "dtype must be 0 to 3, got 7"),
        (WIDE._replace(rows=1 << 31), r"rows and cols must lie in \[0, 2\*\*31\), got 2147483648 x 512"),
        (WIDE._replace(cols=576), "a view of 9 blocks came for slot 0 of 8"),
        (WIDE._replace(repeats=(2,)), "slots 0 and 2 share a read and must have the same blocks"),
        (WIDE._replace(slot=2, num_ranges=1), "row ranges go with column blocks, got slot 2"),
    ],
)
def test_what_cannot_be_addressed_is_refused(view: View, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_tables([view], slots((64, 0, False, 8), (64, 0, False, 8), (64, 0, True, 2)), replace=False)


@pytest.mark.parametrize(
    ("slot", "text"),
    [
        ((0, 0, False, 8, 0, -1, -1, False), "a slot needs block >= 1 and first in"),
        ((64, 64, False, 8, 0, -1, -1, False), "got block 64, first 64"),
        ((64, 0, False, 8, 3, -1, -1, False), "cells outside the row of 10"),
        ((64, 0, False, 8, 0, 10, -1, False), "cells outside the row of 10"),
    ],
)
def test_slots_outside_the_row_are_refused(slot: SlotTuple, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Slots([slot], 10)


def test_plans_need_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; import pyscan.kernels.plan; import pyscan.kernels.slots"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
