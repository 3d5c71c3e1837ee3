"""What a launch costs the training thread: a plan's own way beside Triton's, and what making the plan costs.

On a driver that records nothing and launches nothing, so that the host's share alone is timed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are compiled here, not interpreted", allow_module_level=True)

from pyscan.kernels.launch import Launch, Reducer, tile_settings
from pyscan.kernels.layout import BFLOAT16
from pyscan.kernels.plan import TileLaunch, View
from tests.gpu.fake_driver import FakeDriver

NUM_VIEWS, ROWS, COLS = 112, 4096, 2048  # the inputs of a model of 28 layers
BLOCKS = COLS // 64
VIEWS = [View(i, BFLOAT16, ROWS, COLS, COLS, 1, True) for i in range(NUM_VIEWS)]


@pytest.fixture(scope="module")
def reducer() -> Iterator[Reducer]:
    slots = [(64, 0, False, BLOCKS, i * BLOCKS, -1, -1, False) for i in range(NUM_VIEWS)]
    with FakeDriver(is_recording=False):
        yield Reducer(slots, NUM_VIEWS * BLOCKS, torch.device("cpu"))


def arguments() -> list[torch.Tensor]:
    """What tile_stats takes; nobody reads it here."""
    dtypes = [torch.int64, torch.int32, torch.int64, torch.float64, torch.float64]
    return [torch.zeros(16, dtype=dtype) for dtype in dtypes]


def settings() -> tuple[Any, dict[str, Any]]:
    return tile_settings(TileLaunch(BFLOAT16, False, np.zeros(0, np.int32)), 0)


def test_launch(benchmark: Any, reducer: Reducer) -> None:
    launch = Launch(settings()[0], 1000, settings()[1], arguments())
    benchmark(launch, {2: torch.zeros(NUM_VIEWS, dtype=torch.int64)})


def test_launch_through_the_jit(benchmark: Any, reducer: Reducer) -> None:
    kernel, constants = settings()
    benchmark(lambda values: kernel[(1000,)](*values, **constants), arguments())


def test_plan(benchmark: Any, reducer: Reducer) -> None:
    plan = benchmark(reducer.plan, VIEWS, replace=False)
    assert plan.num_launches == 2
