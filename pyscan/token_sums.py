"""Sums of squares of rows, and of what the rows of one sequence add to a weight's gradient.

Receives inputs and output gradients as matrices of rows and hands on float64 arrays. A row with a value that is not
finite gives NaN, like a block of `act`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyscan import _C
from pyscan.accumulate import matrix_of, readable
from pyscan.engine import reduce
from pyscan.latest import ABSENT_SUM

Sums = NDArray[np.float64]

_GRAM_VALUES = 1 << 22  # products of one sequence held at once


def num_blocks(width: int, block: int) -> int:
    return -(-width // block) if block else 1


def row_sums(x: Tensor, *, block: int | None, num_threads: int) -> Sums:
    """Per row of x the sum of squares, [rows]; with `block`, of each block of its last dimension, [rows, blocks]."""
    sums = _C.row_sums(x, x.shape[-1], block or 0, block is not None, num_threads)
    if sums is None:
        matrix = readable(x.detach())
        sums = _C.row_sums_of(*matrix_of(matrix), block or 0, block is not None, num_threads)
    return sums


def segment_sums(rows: Sums, segments: Sequence[NDArray[np.int64]]) -> Sums:
    """The rows of each segment added up; absent where there are none."""
    absent = np.full(rows.shape[1:], ABSENT_SUM)
    return np.stack([rows[segment].sum(0) if len(segment) else absent for segment in segments])


def gradient_sums(x: Tensor, g: Tensor, segments: Sequence[NDArray[np.int64]], *, block: int) -> Sums:
    """Squared norms of each segment's own g^T x, per block of the columns of x: [segments, blocks]."""
    absent = np.full(num_blocks(x.shape[1], block), ABSENT_SUM)
    places = map(torch.from_numpy, segments)
    return np.stack([_outer_sums(x[rows], g[rows], block) if len(rows) else absent for rows in places])


def lookup_sums(ids: Tensor, g: Tensor, segments: Sequence[NDArray[np.int64]], *, block: int) -> Sums:
    """The same for an embedding: rows of g that went to one row of the weight are added up first."""
    found = []
    for rows in map(torch.from_numpy, segments):
        _, place = torch.unique(ids[rows], return_inverse=True)
        total = torch.zeros(int(place.max()) + 1, g.shape[1], dtype=torch.float64)
        total.index_add_(0, place, g[rows].double())
        found.append(_column_sums(total, block))
    return np.stack(found)


def _outer_sums(x: Tensor, g: Tensor, block: int) -> Sums:
    """A product of Gram matrices where it is cheaper than the outer products themselves.

    In float64: the terms of that sum may cancel, which costs twice the digits that it costs the gradient itself.
    """
    rows, blocks = len(x), num_blocks(x.shape[1], block)
    if 2 * rows * rows >= x.shape[1] * g.shape[1]:
        wide = torch.promote_types(torch.promote_types(x.dtype, g.dtype), torch.float32)
        return _column_sums(g.to(wide).T @ x.to(wide), block)
    g64, x64 = g.double(), x.double()
    gram = g64 @ g64.T
    width = block or x.shape[1]
    padded = torch.nn.functional.pad(x64, (0, blocks * width - x.shape[1])).view(rows, blocks, width).transpose(0, 1)
    each = max(_GRAM_VALUES // max(rows * rows, 1), 1)
    sums = [((part @ part.mT) * gram).sum((1, 2)) for part in torch.split(padded, each)]
    result: Sums = torch.cat(sums).clamp(min=0).numpy()
    return result


def _column_sums(matrix: Tensor, block: int) -> Sums:
    sums, _, bad = reduce(matrix, block=block)
    result: Sums = torch.where(bad > 0, torch.nan, sums).numpy()
    return result
