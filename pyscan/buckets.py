"""A long history as a few hundred points: lowest, highest and mean value of each stretch of rows.

Receives values in windows of rows, in order; hands on a bucket for each stretch. Nothing that lasts one step only is
lost: it is the highest or lowest of its bucket, and what is not finite is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pyscan.codecs import is_absent

# Cells of one window of rows: 16 MB as float32.
WINDOW_CELLS = 1 << 22


@dataclass(frozen=True)
class Buckets:
    """Arrays [buckets, cells]; low, high and mean are NaN where no value of the bucket is finite."""

    low: NDArray[np.float64]
    high: NDArray[np.float64]
    mean: NDArray[np.float64]
    num_bad: NDArray[np.int64]  # values that are NaN or infinite


def edges(start: int, stop: int, count: int) -> NDArray[np.int64]:
    """Where each of at most `count` stretches of the rows [start, stop) begins, and where the last one ends."""
    rows = max(stop - start, 0)
    count = max(1, min(count, rows))
    return start + np.unique(np.arange(count + 1, dtype=np.int64) * rows // count)


def reduce_rows(values: NDArray[np.float32], starts: NDArray[np.int64]) -> Buckets:
    """Values [rows, cells] to a bucket for each start; starts rise from 0 and none is empty."""
    finite = np.isfinite(values)
    bad = ~finite & ~is_absent(values)
    count = np.add.reduceat(finite, starts, axis=0, dtype=np.int64)
    low = np.minimum.reduceat(np.where(finite, values, np.inf), starts, axis=0)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts, axis=0)
    total = np.add.reduceat(np.where(finite, values, 0.0), starts, axis=0, dtype=np.float64)
    seen = count > 0
    return Buckets(
        low=np.where(seen, low, np.nan).astype(np.float64),
        high=np.where(seen, high, np.nan).astype(np.float64),
        mean=np.where(seen, total / np.maximum(count, 1), np.nan),
        num_bad=np.add.reduceat(bad, starts, axis=0, dtype=np.int64),
    )


def windows(bounds: NDArray[np.int64], num_cells: int) -> Iterator[NDArray[np.int64]]:
    """The bounds in runs of neighbours whose rows fit into memory together; each run ends where the next begins."""
    room = max(WINDOW_CELLS // max(num_cells, 1), 1)
    at = 0
    while at < len(bounds) - 1:
        end = int(np.searchsorted(bounds, bounds[at] + room, side="right")) - 1
        end = min(max(end, at + 1), len(bounds) - 1)
        yield bounds[at : end + 1]
        at = end


def join(parts: list[Buckets]) -> Buckets:
    names = ("low", "high", "mean", "num_bad")
    return Buckets(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
