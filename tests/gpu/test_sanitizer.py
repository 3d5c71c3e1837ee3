"""The sanitizer finds what it is for: tables that lead astray, races that the interpreter hides, stale scratch."""

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from pyscan.kernels.launch import Plan, Reducer
from pyscan.kernels.layout import Job, Record
from tests.gpu.engine import CPU, view_of
from tests.gpu.sanitizer import FaultError, Sanitizer
from tests.gpu.test_kernels import randn, sanitized


def tables(plan: Plan, index: int, argument: int) -> torch.Tensor:
    return plan._launches[index][0]._arguments[argument]


def corrupted(change: Callable[[Plan], None]) -> None:
    """Two views of one plan under the sanitizer, after its tables have been changed."""
    reducer = Reducer([(64, 0, False, 3, 0, -1, -1, False), (64, 0, False, 3, 3, -1, -1, False)], 6, CPU)
    tensors = [randn(140, 136), randn(21, 136, seed=1)]
    plan = reducer.plan([view_of(x, i) for i, x in enumerate(tensors)], replace=False)
    change(plan)
    sanitized(reducer, plan, tensors, [])


def set_record(view: int, column: Record, value: int) -> Callable[[Plan], None]:
    return lambda plan: tables(plan, 0, 0).__setitem__((view, column), value)


def drop_program(plan: Plan) -> None:
    plan._launches[0][0]._num_programs -= 1


CORRUPTIONS: dict[str, tuple[Callable[[Plan], None], str]] = {
    "one vector of columns too many": (set_record(0, Record.COLS, 18), "load out of bounds"),
    "five rows too many": (set_record(1, Record.ROWS, 26), "load out of bounds"),
    "a stride too large": (set_record(0, Record.ROW_STRIDE, 18), "load out of bounds"),
    "the other view's address": (set_record(0, Record.ADDRESS, 1), "load out of bounds"),
    "an address outside the table": (set_record(0, Record.ADDRESS, 2), "load out of bounds"),
    "triples outside scratch": (set_record(1, Record.PARTIAL, 1000), "store out of bounds"),
    "two views write the same triples": (set_record(1, Record.PARTIAL, 0), "race"),
    "a tile that nobody reads": (drop_program, "load of scratch that no launch wrote"),
    "two slots with the same sums": (lambda plan: tables(plan, 1, 0).__setitem__((1, Job.SUMS), 0), "race"),
    "sums outside": (lambda plan: tables(plan, 1, 0).__setitem__((1, Job.SUMS), 4), "out of bounds"),
}


def test_sound_tables_pass() -> None:
    corrupted(lambda plan: None)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_wrong_table_is_caught(name: str) -> None:
    change, text = CORRUPTIONS[name]
    with pytest.raises(Exception, match=text):
        corrupted(change)


@triton.jit
def racy(x, out, SIZE: tl.constexpr):
    part = tl.sum(tl.load(x + tl.program_id(0) * SIZE + tl.arange(0, SIZE)))
    tl.store(out, tl.load(out) + part)


def test_a_race_is_caught_though_the_interpreter_gets_it_right() -> None:
    x, out = torch.randn(64), torch.zeros(1)
    racy[(4,)](x, out, 16)
    torch.testing.assert_close(out[0], x.sum())
    with pytest.raises(FaultError, match=r"race at 0x[0-9a-f]+ between program"), Sanitizer(reads=[x], writes=[out]):
        racy[(4,)](x, out, 16)
    with Sanitizer(reads=[x], writes=[out]):
        racy[(1,)](x, out, 16)


def test_padding_between_rows_is_out_of_bounds() -> None:
    x, out = torch.randn(4, 16), torch.zeros(1)
    with pytest.raises(Exception, match="load out of bounds"), Sanitizer(reads=[x[:, :15]], writes=[out]):
        racy[(1,)](x, out, 16)
