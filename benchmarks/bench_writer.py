"""Handing a row of 10,754 cells to the writer, beside a plain copy and beside numpy writing the same row itself.

Between the rows the thread works on other memory, as a training step does; otherwise the row would stay in the cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyscan.schema import Channel, Schema, SiteInfo
from pyscan.writer import Writer
from tests import decode

NUM_CELLS = 10_754
ROUNDS = 1000
SCHEMA = Schema("bench", (Channel("act"),), (SiteInfo("w", "linear", (8, 64 * NUM_CELLS), "float32", NUM_CELLS),))


@pytest.fixture
def row() -> np.ndarray:
    return np.random.default_rng(0).random(NUM_CELLS) + 0.5


@pytest.fixture
def work() -> Any:
    activations = np.random.default_rng(1).random(100_000)
    return lambda: [activations.sum() for _ in range(10)]


def measure(benchmark: Any, hand_over: Any, work: Any) -> None:
    benchmark.pedantic(hand_over, setup=lambda: (work(), None)[1], rounds=ROUNDS, warmup_rounds=50)


def test_hand_over(benchmark: Any, tmp_path: Path, row: np.ndarray, work: Any) -> None:
    steps: list[int] = []
    with Writer(tmp_path / "run.mscan", SCHEMA, fsync="never") as writer:

        def hand_over() -> None:
            steps.append(len(steps))
            writer.write(steps[-1], row, time_ns=0, loss=1.0)

        measure(benchmark, hand_over, work)
        assert writer.rows_dropped == 0
    decoded = decode.decode(tmp_path / "run.mscan")
    assert decoded.steps == steps
    assert np.allclose(decode.values(decoded.rows[0]["cells"][0], "log2q8"), np.sqrt(row), rtol=0.001356)


def test_hand_over_compiled(benchmark: Any, tmp_path: Path, row: np.ndarray, work: Any) -> None:
    """Without the Python method around the compiled one."""
    with Writer(tmp_path / "run.mscan", SCHEMA, fsync="never") as writer:
        compiled = writer.native
        measure(benchmark, lambda: compiled.write(1, 0, row), work)
        assert writer.rows_dropped == 0


def test_copy(benchmark: Any, row: np.ndarray, work: Any) -> None:
    """What the copy alone costs: the floor."""
    slots = [np.empty_like(row) for _ in range(16)]
    places = iter(range(10**9))
    measure(benchmark, lambda: np.copyto(slots[next(places) % 16], row), work)
    assert (slots[0] == row).all()


def test_tofile(benchmark: Any, tmp_path: Path, row: np.ndarray, work: Any) -> None:
    """The rival: every row written by the training thread, as float64 and without a checksum."""
    with open(tmp_path / "rows.bin", "wb", buffering=0) as file:
        measure(benchmark, lambda: row.tofile(file), work)
    assert (np.fromfile(tmp_path / "rows.bin", count=NUM_CELLS) == row).all()
