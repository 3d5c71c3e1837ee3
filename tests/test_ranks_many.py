"""A thousand ranks: what `benchmarks/bench_ranks.py` times is merged within bounds of memory, and right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pyscan
from benchmarks.bench_ranks import NUM_FILES, NUM_STEPS, measure_apart
from pyscan.ranks import rank_path


@pytest.mark.slow
def test_a_thousand_ranks_are_merged_in_less_than_a_gibibyte(tmp_path: Path) -> None:
    found = measure_apart(tmp_path, 1024, NUM_STEPS)
    assert found["peak_bytes"] < 2**30
    squares = np.zeros(NUM_STEPS)
    for rank in range(NUM_FILES):  # of each there are 16
        with pyscan.open(rank_path(str(tmp_path / "run1024.mscan"), rank)) as run:
            squares += 16 * run.act("layers.7.proj").astype(np.float64) ** 2
    with pyscan.open(tmp_path / "whole1024.mscan") as whole:
        assert whole.steps["step"].tolist() == list(range(1, NUM_STEPS + 1))
        np.testing.assert_allclose(whole.act("layers.7.proj"), np.sqrt(squares), 0.0014)
        with pyscan.open(rank_path(str(tmp_path / "run1024.mscan"), 5)) as run:
            assert np.array_equal(whole.codes("grad", "layers.7.proj"), run.codes("grad", "layers.7.proj"))
