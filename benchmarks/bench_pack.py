"""Packing a row of 10,754 cells beside the numpy formula that gives the same codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pyscan import _C

NUM_CELLS = 10_754


def sums_of_squares() -> np.ndarray:
    return np.exp(np.random.default_rng(0).normal(0, 6, NUM_CELLS))


def pack_with_numpy(cells: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(128 * np.log2(cells)), -32765, 32765).astype(np.int16)


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_pack(benchmark: Any, isa: str) -> None:
    cells = sums_of_squares()
    try:
        codes = benchmark(_C.pack, cells, "log2q8", "root", isa)
    except ValueError as error:
        pytest.skip(str(error))
    assert (codes == pack_with_numpy(cells)).all()


def test_pack_numpy(benchmark: Any) -> None:
    cells = sums_of_squares()
    codes = benchmark(pack_with_numpy, cells)
    assert (codes == _C.pack(cells, "log2q8", "root")).all()
