"""The kernels on the interpreter: steps against the CPU engine, ranges, repeats, rows, and what they must not touch."""

import math

import numpy as np
import pytest
import torch

from pyscan import _C, engine
from pyscan.kernels.launch import Plan, Reducer
from tests.gpu.engine import CPU, GUARD, addresses_of, guarded, triton_reduce, view_of
from tests.gpu.interpreter import FalsePromiseError
from tests.gpu.sanitizer import Sanitizer

TOLERANCE = 1e-6
BF16 = torch.bfloat16


def randn(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return guarded(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


def sanitized(reducer: Reducer, plan: Plan, tensors: list[torch.Tensor], writes: list[torch.Tensor]) -> Sanitizer:
    """A sanitizer that knows everything a plan may touch."""
    addresses = addresses_of(tensors)
    tables = [a for launch, _ in plan._launches for a in launch._arguments if a.dtype in (torch.int32, torch.int64)]
    known = [*tables, addresses, *[t for t in tensors if all(t is not w for w in writes)]]
    with Sanitizer(reads=known, writes=[reducer.sums, *writes], scratch=plan.scratch) as sanitizer:
        reducer.launch(plan, addresses)
    return sanitizer


def run(
    reducer: Reducer, views: list, tensors: list[torch.Tensor], *, replace: bool = False, writes: tuple = ()
) -> None:
    """Reduce under the sanitizer; scratch is poisoned before."""
    plan = reducer.plan(views, replace=replace)
    for scratch in plan.scratch:
        scratch.fill_(1e30)
    sanitizer = sanitized(reducer, plan, tensors, list(writes))
    assert sanitizer.num_launches == plan.num_launches


class Step:
    """A set of slots in the kernels' reducer and in the CPU engine's step buffer, given the same tensors."""

    def __init__(self, shapes: list[tuple[int, int, bool, int]], *, gap: int = 2) -> None:
        cell, slots = gap, []
        for i, (block, first, by_rows, num_blocks) in enumerate(shapes):
            slots.append(
                (block, first, by_rows, num_blocks, cell, cell + num_blocks, cell + num_blocks + 1, i % 2 == 1)
            )
            cell += num_blocks + 2 + gap  # cells that no slot has
        self.num_cells = cell
        self.reducer = Reducer(slots, cell, CPU)
        self.buffer = _C.StepBuffer(cell, slots)

    def launch(self, items: list[tuple[int, torch.Tensor]], *, replace: bool = False) -> None:
        run(self.reducer, [view_of(x, slot) for slot, x in items], [x for _, x in items], replace=replace)
        native = self.buffer.set if replace else self.buffer.add
        for slot, x in items:
            view = view_of(x, slot)
            native(slot, x.data_ptr(), view.dtype, view.rows, view.cols, view.row_stride, view.col_stride, 1)

    def check(self, inv_scale: float | torch.Tensor = 1.0) -> torch.Tensor:
        row = torch.full((self.num_cells,), GUARD, dtype=torch.float64)
        self.reducer.finish(row, inv_scale)
        want = np.empty(self.num_cells)
        self.buffer.take(1 / float(inv_scale), want)
        np.testing.assert_allclose(row, want, rtol=TOLERANCE, atol=0)
        return row


def test_a_step_gives_the_row_of_the_cpu_engine() -> None:
    step = Step(
        [
            (64, 0, False, 9), (64, 0, True, 4), (520, 0, False, 1), (64, 17, False, 4), (128, 0, False, 5),
            (64, 5, True, 3), (64, 0, False, 0), (64, 0, False, 2), (64, 0, False, 20), (64, 0, True, 2),
        ]
    )  # fmt: skip
    bad = randn(40, 128, dtype=torch.float32, seed=6)
    bad[39, 127] = -math.inf
    first = [(0, randn(130, 520)), (2, randn(200, 520, seed=1)), (4, randn(20, 577, dtype=torch.float16, seed=2))]
    step.launch([*first, (6, guarded(torch.empty(5, 0))), (7, bad), (8, randn(3, 1280, seed=5))])
    step.launch([(0, randn(129, 520, dtype=torch.float32, seed=3)), (2, randn(3, 520, dtype=torch.float64, seed=4))])
    gradients = [(1, randn(250, 136, seed=7)), (3, randn(70, 200, seed=8)), (5, randn(150, 24, seed=9))]
    gradients += [(9, guarded(torch.randn(70, 128)).T[:, 3:70])]
    step.launch(gradients, replace=True)
    step.launch([(1, randn(250, 136, seed=10))], replace=True)
    row = step.check(1 / 1024)
    assert math.isnan(row[step.reducer.slots.finish_table[7, 3] + 1])
    assert (step.check() == -1).all(), "a finished row forgets every slot"
    step.launch([(7, randn(8, 128, seed=11))])
    assert not torch.isnan(step.check()).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_scale_may_be_a_number_on_the_device(dtype: torch.dtype) -> None:
    step = Step([(64, 0, False, 2), (64, 0, False, 2)])
    for scale in (torch.tensor([2.0**-16], dtype=dtype), torch.tensor(0.5, dtype=dtype), 2.0**-16, 1.0):
        step.launch([(0, randn(5, 128)), (1, randn(5, 128, seed=1))])
        step.check(scale)


# Ends of four ranges of 300 rows.
RANGES = {
    "some empty": [0, 100, 100, 300],
    "one has all": [0, 0, 300, 300],
    "edges at tiles": [128, 256, 256, 257],
    "short of the end": [3, 131, 259, 260],
    "none": [0, 0, 0, 0],
    "every row of its own tile": [1, 2, 3, 4],
}


@pytest.mark.parametrize("ends", RANGES.values(), ids=RANGES)
@pytest.mark.parametrize(("cols", "block"), [(200, 200), (201, 64)])
def test_row_ranges_are_read_on_the_device(ends: list[int], cols: int, block: int) -> None:
    x, limits = randn(300, cols), torch.tensor(ends, dtype=torch.int32)
    shape = (block, 0, False, -(-cols // block))
    step = Step([(64, 0, False, 1), *[shape] * 4, (64, 0, False, 1)], gap=0)
    view, other = view_of(x, 1, num_ranges=4), randn(9, 64, seed=1)
    for _ in range(2):
        run(step.reducer, [view_of(other, 0), view], [other, x, limits])
        step.buffer.add(0, other.data_ptr(), 1, 9, 64, 64, 1, 1)
        step.buffer.add_ranges(1, x.data_ptr(), 1, 300, cols, cols, 1, limits.numpy(), 1)
    step.check()


@pytest.mark.parametrize("ends", [[300, 5, 400, 2], [-7, 2**31 - 1, -(2**31), 128], [500] * 4, [0, -1, -2, -3]])
def test_ends_that_are_nonsense_lead_nowhere_else(ends: list[int]) -> None:
    x, limits = randn(300, 72), torch.tensor(ends, dtype=torch.int32)
    reducer = Reducer([(72, 0, False, 1, i, -1, -1, False) for i in range(4)], 4, CPU)
    run(reducer, [view_of(x, 0, num_ranges=4)], [x, limits])
    assert not (reducer.sums[:, 1] > 100).any()


def test_many_ranges_in_one_plan_have_their_own_ends() -> None:
    sizes = (5, 1, 3)
    slots = [(72, 0, False, 1, i, -1, -1, False) for i in range(sum(sizes))]
    reducer, buffer = Reducer(slots, 9, CPU), _C.StepBuffer(9, slots)
    views, tensors, slot = [], [], 0
    for size in sizes:
        x = randn(50 * size, 72, seed=size)
        ends = torch.arange(1, size + 1, dtype=torch.int32) * 50 - 3
        views.append(view_of(x, slot, num_ranges=size))
        tensors += [x, ends]
        buffer.add_ranges(slot, x.data_ptr(), 1, len(x), 72, 72, 1, ends.numpy(), 1)
        slot += size
    run(reducer, views, tensors)
    row, want = torch.empty(9, dtype=torch.float64), np.empty(9)
    reducer.finish(row, 1.0)
    buffer.take(1.0, want)
    np.testing.assert_allclose(row, want, rtol=TOLERANCE)


def test_one_read_serves_several_slots() -> None:
    step = Step([(64, 0, False, 3)] * 4)
    x = randn(20, 192)
    run(step.reducer, [view_of(x, 0)._replace(repeats=(2, 3))], [x])
    for slot in (0, 2, 3):
        step.buffer.add(slot, x.data_ptr(), 1, 20, 192, 192, 1, 1)
    step.check()


def test_a_slot_that_comes_twice_in_a_plan_is_added_or_the_last_counts() -> None:
    step = Step([(64, 0, False, 2), (64, 0, False, 2)])
    items = [(0, randn(20, 128)), (1, randn(130, 128, seed=1)), (0, randn(7, 128, dtype=torch.float32, seed=2))]
    for replace in (False, True):
        step.launch(items, replace=replace)
        step.check()


@pytest.mark.parametrize("cols", [512, 1032, 77])
def test_rows_are_summed_from_the_same_read(cols: int) -> None:
    x = randn(300, cols)
    x[:, ::3] = 0
    x[5] = 1e-30  # beside rows of ones: its squares are nothing to float32
    x[6] = 0
    x[150, 3] = math.nan
    x[151] = 3e38
    x[152] = math.inf
    rows = np.full(300, GUARD)
    triton_reduce(x, row_sumsq=rows)
    clean = torch.where(torch.isfinite(x), x, 0).double()
    np.testing.assert_allclose(rows, clean.square().sum(1), rtol=TOLERANCE, atol=0)


def test_rows_of_ranges_are_summed_and_the_others_are_zero() -> None:
    x, ends = randn(300, 520), torch.tensor([7, 7, 200], dtype=torch.int32)
    rows = torch.full((300,), GUARD, dtype=torch.float64)
    reducer = Reducer([(520, 0, False, 1, i, -1, -1, False) for i in range(3)], 3, CPU)
    run(reducer, [view_of(x, 0, num_ranges=3, per_row=True)], [x, ends, rows], writes=(rows,))
    want = x.double().square().sum(1)
    want[200:] = 0
    torch.testing.assert_close(rows, want, rtol=TOLERANCE, atol=0)


def test_the_same_bits_every_time() -> None:
    x, y = randn(300, 520), randn(300, 130, dtype=torch.float32, seed=1)
    results = []
    for poison in (0.0, math.nan):
        reducer = Reducer([(64, 0, False, 9, 0, -1, -1, False), (64, 0, True, 5, 9, -1, -1, False)], 14, CPU)
        plan = reducer.plan([view_of(x, 0), view_of(y, 1)], replace=False)
        for scratch in plan.scratch:
            scratch.fill_(poison)
        reducer.launch(plan, addresses_of([x, y]))
        reducer.launch(plan, addresses_of([x, y]))
        results.append(reducer.sums)
    assert torch.equal(*results)


@pytest.mark.parametrize("cols", [64, 63])
def test_offsets_beyond_two_to_the_31(cols: int) -> None:
    """11 GB of memory of which only the pages of 17 rows are ever touched; the 16 rows of one load span 2^31 words."""
    x = torch.empty(17 * 5 << 26, dtype=BF16).as_strided((17, cols), (5 << 26, 1))
    x.copy_(torch.randn(17, cols, generator=torch.Generator().manual_seed(0)))
    reducer = Reducer([(64, 0, False, 1, 0, -1, -1, False)], 1, CPU)
    run(reducer, [view_of(x, 0)], [x])
    torch.testing.assert_close(reducer.sums[0, 0], x.double().square().sum(), rtol=TOLERANCE, atol=0)


def test_a_false_promise_of_alignment_is_seen() -> None:
    x = torch.randn(9, 64)[1:].flatten()[1:257].view(4, 64)
    assert x.data_ptr() % 16
    reducer = Reducer([(64, 0, False, 1, 0, -1, -1, False)], 1, CPU)
    plan = reducer.plan([view_of(x, 0)._replace(is_aligned=True)], replace=False)
    with pytest.raises(Exception, match=FalsePromiseError.__name__):
        reducer.launch(plan, addresses_of([x]))


def test_every_path_agrees_on_the_same_values() -> None:
    x = torch.randn(150, 128, generator=torch.Generator().manual_seed(0)).to(BF16)
    truth = engine.definition(x)
    shifted = torch.empty(150 * 128 + 1, dtype=BF16)[1:].view(150, 128).copy_(x)
    for same in (x, shifted, x.T.contiguous().T, x.double(), torch.stack([x, x], 2)[:, :, 0]):
        sumsq, absmax, bad = triton_reduce(same)
        torch.testing.assert_close(sumsq, truth[0], rtol=TOLERANCE, atol=0)
        assert torch.equal(absmax, truth[1])
        assert torch.equal(bad, truth[2].double())


def test_arguments_are_checked_at_the_door() -> None:
    reducer = Reducer([(64, 0, False, 2, 0, -1, -1, False)], 2, CPU)
    plan = reducer.plan([view_of(randn(5, 128), 0)], replace=False)
    with pytest.raises(ValueError, match=r"addresses must be int64 \[1\], got torch.int64 \[2\]"):
        reducer.launch(plan, torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"row must be contiguous float64 \[2\], got torch.float32 \[2\]"):
        reducer.finish(torch.zeros(2), 1.0)
