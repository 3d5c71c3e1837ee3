"""The reduction on tensors: its definition in plain torch, and the choice of an engine by device.

Receives a tensor, reads it once, and hands on per block the sum of squares, the largest magnitude and the number of
non-finite values. `definition` says what is meant; every engine must agree with it.
"""

from __future__ import annotations

import numpy as np
import torch

from pyscan import _C

# torch dtype -> the code of csrc/reduce.h
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}

Stats = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def definition(x: torch.Tensor, *, block: int = 64, dim: int = -1) -> Stats:
    """The reduction in plain torch: slow, in float64, on any device. Same arguments and results as `reduce`."""
    _check(x, block, dim)
    columns = _columns(x.detach(), dim)
    length = columns.shape[1]
    num_blocks, width = _cut(length, block)
    padding = (0, num_blocks * width - length)
    blocks = torch.nn.functional.pad(columns.double(), padding).view(columns.shape[0], num_blocks, width)
    finite = torch.isfinite(blocks)
    values = torch.where(finite, blocks, 0.0)
    absmax = values.abs().amax((0, 2)) if values.numel() else values.new_zeros(num_blocks)
    return values.square().sum((0, 2)), absmax, (~finite).sum((0, 2))


def reduce(x: torch.Tensor, *, block: int = 64, dim: int = -1) -> Stats:
    """Sum of squares (float64), largest magnitude (float64) and non-finite count (int64) of each block of `x`.

    Blocks are `block` neighbouring positions along dimension `dim`; the last one may be shorter, and `block=0` makes
    one block of all. All other dimensions are summed over. Non-finite values are counted and left out of sum and
    maximum. Results live on x's device; no gradient flows through them.
    """
    _check(x, block, dim)
    if x.device.type != "cpu":
        raise ValueError(
            f"there is no engine for device {x.device.type!r}: move the tensor with x.cpu(), "
            "or call pyscan.engine.definition, which is plain torch"
        )
    # Strips of rows are read in memory order; as columns they would be walked across.
    by_rows = x.ndim > 1 and dim % x.ndim == 0
    matrix = x.detach().reshape(x.shape[0], -1 if x.shape[0] else 0) if by_rows else _columns(x, dim)
    rows, cols = matrix.shape
    row_stride, col_stride = matrix.stride()
    num_blocks, width = _cut(rows if by_rows else cols, block)
    stats = np.zeros((3, num_blocks))
    _C.reduce_into(
        matrix.data_ptr(), DTYPES[x.dtype], rows, cols, row_stride, col_stride, stats[0], stats[1], stats[2],
        block=width, by_rows=by_rows, num_threads=torch.get_num_threads(),
    )  # fmt: skip
    return torch.from_numpy(stats[0]), torch.from_numpy(stats[1]), torch.from_numpy(stats[2].astype(np.int64))


def _cut(length: int, block: int) -> tuple[int, int]:
    """Number of blocks along a dimension, and their width."""
    width = max(min(block or length, length), 1)
    return -(-length // width), width


def _columns(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x as a matrix whose columns are the positions along `dim`; a view where there is one, else a copy."""
    if x.ndim == 2 and dim in (-1, 1):
        return x
    if x.ndim == 0:
        return x.reshape(1, 1)
    length = x.shape[dim]
    return x.movedim(dim, -1).reshape(x.numel() // length if length else 0, length)


def _check(x: torch.Tensor, block: int, dim: int) -> None:
    """Refuse what no engine can read."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if not isinstance(block, int) or isinstance(block, bool):
        raise TypeError(f"block must be an int, got {type(block).__name__}")
    if block < 0:
        raise ValueError(f"block must be >= 0 (0: one block of all), got {block}")
    if x.is_quantized:
        raise TypeError(f"x is quantised ({x.dtype}): reduce x.dequantize()")
    if x.layout is not torch.strided:
        raise TypeError(f"x has layout {x.layout}: reduce x.to_dense(), or the values of x.coalesce()")
    if x.is_meta:
        raise ValueError("x is on the meta device and has no values to read")
    if x.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"x must be one of {names}, got {str(x.dtype).removeprefix('torch.')}: reduce x.float()")
    if not -max(x.ndim, 1) <= dim < max(x.ndim, 1):
        raise IndexError(f"dim must lie in [{-x.ndim}, {x.ndim}), got {dim}")
