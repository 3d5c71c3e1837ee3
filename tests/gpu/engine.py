"""The kernels as one more implementation for the suite of tests/test_reduce.py, on tensors inside guard zones.

A guard is a large finite value around a tensor and between its rows: whatever reads it is far off. NaN would not do, as
a tile with NaN is read again on a way with masks of its own.
"""

from collections.abc import Sequence

import numpy as np
import torch

import tests.gpu.interpreter  # noqa: F401 (makes the interpreter quick and strict)
from pyscan import engine
from pyscan.kernels import launch
from pyscan.kernels.launch import Reducer
from pyscan.kernels.plan import View

GUARD = 1000.0
PAD = 4096  # elements, a multiple of every alignment
CPU = torch.device("cpu")

# The interpreter's cost is per operation, not per element: let the general kernel take more rows at once.
launch.GENERAL_ROWS = 32


def guarded(x: torch.Tensor) -> torch.Tensor:
    """A copy of x with the same strides and alignment; all memory around and between its elements is GUARD."""
    if x.numel() == 0:
        return x
    source = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    is_element = np.zeros(len(source), bool)
    window = np.lib.stride_tricks.as_strided(
        is_element[x.storage_offset() :], shape=x.shape, strides=x.stride(), writeable=True
    )
    window[...] = True
    memory = torch.full((len(source) + 2 * PAD,), GUARD, dtype=x.dtype)
    memory[PAD:-PAD][torch.from_numpy(is_element)] = source[torch.from_numpy(is_element)]
    copy = memory.as_strided(x.shape, x.stride(), PAD + x.storage_offset())
    assert copy.data_ptr() % 16 == x.data_ptr() % 16
    return copy


def view_of(x: torch.Tensor, slot: int, *, num_ranges: int = 0, per_row: bool = False) -> View:
    is_aligned = x.data_ptr() % 16 == 0
    rows, cols = x.shape
    return View(slot, engine.DTYPES[x.dtype], rows, cols, *x.stride(), is_aligned, num_ranges, per_row)


def addresses_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)


def num_blocks_of(x: torch.Tensor, block: int, first: int = 0, by_rows: bool = False) -> int:
    length = x.shape[0 if by_rows else 1]
    return (length - 1 + first) // block + 1 if length else 0


def triton_reduce(
    x: torch.Tensor, *, block: int = 64, first: int = 0, by_rows: bool = False, row_sumsq: np.ndarray | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The reduction of a matrix by the kernels, through a plan of its own."""
    x = guarded(x)
    num_blocks = num_blocks_of(x, block, first, by_rows)
    reducer = Reducer([(block, first, by_rows, num_blocks, 0, -1, -1, False)], num_blocks, CPU)
    plan = reducer.plan([view_of(x, 0, per_row=row_sumsq is not None)], replace=False)
    rows = [] if row_sumsq is None else [torch.from_numpy(row_sumsq)]
    reducer.launch(plan, addresses_of([x, *rows]))
    sumsq, absmax, bad = reducer.sums[:num_blocks].T
    return sumsq, absmax, bad
