"""Cut the sites of a run into neighbours that are read and computed together.

Receives sites and the cells each of them brings; hands on lists of sites near a bounded number of cells, so that a
million small sites do not cost a million small computations and one large site needs no more memory than it must.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

# 4 MB as float32, some 30 MB with what is computed from them.
BATCH_CELLS = 1 << 20

T = TypeVar("T")


def batches(items: Sequence[T], num_cells: Callable[[T], int], limit: int) -> Iterator[list[T]]:
    """Runs of neighbours whose cells add up to at most `limit`; an item with more is alone."""
    batch: list[T] = []
    total = 0
    for item in items:
        cells = num_cells(item)
        if batch and total + cells > limit:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += cells
    if batch:
        yield batch
