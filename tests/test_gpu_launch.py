"""Launch sites of the kernels on a driver that records instead of launching: how many, with what, and at what cost."""

import os
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are compiled here, not interpreted", allow_module_level=True)

from triton.runtime.jit import JITFunction

from pyscan.kernels.launch import Plan, Reducer
from pyscan.kernels.layout import BFLOAT16, FLOAT32
from pyscan.kernels.plan import View
from tests.gpu.fake_driver import FakeDriver

CPU = torch.device("cpu")
HIDDEN, INNER, NUM_LAYERS, VOCAB, TOKENS = 2048, 6144, 28, 151936, 4096
# (rows, cols) of the weights of a layer, and which of them share an input
WEIGHTS = [
    (2048, HIDDEN), (1024, HIDDEN), (1024, HIDDEN), (HIDDEN, 2048), (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER),
]  # fmt: skip
SHARED = [(0, 1, 2), (3,), (4, 5), (6,)]


class Llama:
    """The slots and views of a training step: activations in flushes of whole layers, gradients at once."""

    def __init__(self) -> None:
        self.weights = WEIGHTS * NUM_LAYERS + [(VOCAB, HIDDEN)]
        slots, cell = [], 0
        for is_gradient in (False, True):
            for _, cols in self.weights:
                slots.append((64, 0, False, cols // 64, cell, cell + cols // 64, cell + cols // 64 + 1, is_gradient))
                cell += cols // 64 + 2
        self.num_cells = cell
        self.reducer = Reducer(slots, cell, CPU)

    def activations(self, layers: range, dtype: int = BFLOAT16) -> list[View]:
        views = []
        for layer in layers:
            for first, *others in SHARED:
                slot, cols = layer * len(WEIGHTS) + first, WEIGHTS[first][1]
                repeats = tuple(layer * len(WEIGHTS) + other for other in others)
                views.append(View(slot, dtype, TOKENS, cols, cols, 1, True, repeats=repeats))
        return views

    def gradients(self, dtype: int = BFLOAT16) -> list[View]:
        first = len(self.weights)
        return [View(first + i, dtype, rows, cols, cols, 1, True) for i, (rows, cols) in enumerate(self.weights)]


def launch(reducer: Reducer, plan: Plan) -> None:
    reducer.launch(plan, torch.zeros(plan.num_addresses, dtype=torch.int64))


@pytest.fixture(scope="module")
def driver() -> Iterator[FakeDriver]:
    with FakeDriver() as driver:
        yield driver


@pytest.fixture
def fake(driver: FakeDriver) -> FakeDriver:
    driver.launches.clear()
    driver.stream, driver.is_recording = 0, True
    return driver


@pytest.fixture(scope="module")
def llama(driver: FakeDriver) -> Llama:
    return Llama()


def test_a_step_of_28_layers_takes_seven_launches(llama: Llama, fake: FakeDriver) -> None:
    half = NUM_LAYERS // 2
    flushes = [llama.activations(range(half)), llama.activations(range(half, NUM_LAYERS))]
    plans = [llama.reducer.plan(views, replace=False) for views in flushes]
    plans.append(llama.reducer.plan(llama.gradients(), replace=True))
    row = torch.empty(llama.num_cells, dtype=torch.float64)
    for _ in range(2):  # a step like every other
        fake.launches.clear()
        for plan in plans:
            launch(llama.reducer, plan)
        llama.reducer.finish(row, 1.0)
    names = [launched.name for launched in fake.launches]
    assert names == ["tile_stats", "merge_tiles"] * 3 + ["finish_row"]
    tiles = fake.launches[0]
    assert tiles.grid == (half * TOKENS // 128 * (3 * HIDDEN + INNER) // 512, 1, 1), "each shared input is read once"
    assert tiles.divisible >= {"records", "tiles", "partials", "row_partials"}
    assert fake.launches[4].grid[0] == sum(-(-rows // 128) * cols // 512 for rows, cols in llama.weights)
    assert fake.launches[-1].grid[0] == 2 * len(llama.weights)


def test_each_dtype_and_path_adds_one_launch(llama: Llama, fake: FakeDriver) -> None:
    views = llama.activations(range(4))
    views[1] = views[1]._replace(dtype=FLOAT32)
    views[2] = views[2]._replace(is_aligned=False)
    views[3] = views[3]._replace(is_aligned=False, dtype=FLOAT32)
    launch(llama.reducer, llama.reducer.plan(views, replace=False))
    names = [launched.name for launched in fake.launches]
    assert names == ["tile_stats_general", "tile_stats", "tile_stats", "merge_tiles"]


def test_launches_go_to_the_current_stream_and_keep_their_own_arguments(llama: Llama, fake: FakeDriver) -> None:
    plans = [llama.reducer.plan(llama.activations(range(1)), replace=replace) for replace in (False, True)]
    for fake.stream, plan in enumerate(plans, 7):
        launch(llama.reducer, plan)
    assert [launched.stream for launched in fake.launches] == [7, 7, 8, 8]
    assert [launched.arguments["REPLACE"] for launched in fake.launches[1::2]] == [False, True]
    partials = [launched.arguments["partials"].data_ptr() for launched in fake.launches]
    assert partials[0] == partials[1] != partials[2] == partials[3]


def test_addresses_and_rows_may_lie_anywhere(llama: Llama, fake: FakeDriver) -> None:
    """What the caller hands over is a part of some buffer: kernels must not take it to be aligned."""
    plan = llama.reducer.plan(llama.activations(range(1)), replace=False)
    for offset in (0, 1):
        llama.reducer.launch(
            plan, torch.zeros(plan.num_addresses + 1, dtype=torch.int64)[offset:][: plan.num_addresses]
        )
        for dtype in (torch.float32, torch.float64):
            row = torch.empty(llama.num_cells + 1, dtype=torch.float64)[offset:][: llama.num_cells]
            llama.reducer.finish(row, torch.ones(3, dtype=dtype)[offset])
    assert [launched.name for launched in fake.launches] == [
        "tile_stats",
        "merge_tiles",
        "finish_row",
        "finish_row",
    ] * 2
    assert not any({"addresses", "row", "inv_scale"} & launched.divisible for launched in fake.launches)


def test_launches_do_not_go_through_the_jit(llama: Llama, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Binding and looking up a kernel costs 20 us a launch: all of that is done when the plan is made."""
    plan = llama.reducer.plan(llama.activations(range(NUM_LAYERS)), replace=False)
    row = torch.empty(llama.num_cells, dtype=torch.float64)
    llama.reducer.finish(row, 1.0)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a launch went through the JIT")

    monkeypatch.setattr(JITFunction, "run", refuse)
    fake.launches.clear()
    launch(llama.reducer, plan)
    llama.reducer.finish(row, 1.0)
    assert [launched.name for launched in fake.launches] == ["tile_stats", "merge_tiles", "finish_row"]
