"""One meeting of a site with rows, and what is added up of it: per row, or per sequence.

Receives, for each call, the input when the forward runs and the gradient of the output when the backward comes; fills
in the call's sums of squares. No input outlives its forward, except per sequence, where autograd holds it until its
gradient comes; under checkpointing, where autograd does not, it is taken from the recompute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pyscan.sites import Site
from pyscan.token_batch import Batch
from pyscan.token_sums import Sums, gradient_sums, lookup_sums, row_sums, segment_sums

_graph_task = torch._C._current_graph_task_id
_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks

TWICE = "a second backward ran through it in one step"
NO_INPUT = "its input was gone when its gradient came, since hooks keep what autograd saves"
NO_SEQUENCES = "its rows cannot be told apart by sequence"

Places = NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Call:
    """Rows that met a site; with `ends`, range e of them met site + e. Sums: [rows, ...] or [sites, sequences, ...]."""

    site: int
    batch: int  # which forward of the step; -1: none that was seen
    shape: tuple[int, ...]  # of the input, without its features
    is_in_order: bool  # its rows are the tokens of the batch, one by one
    act: Sums | None = None
    grad: Sums | None = None
    ends: Places | None = None
    places: Places | None = None  # the token of each row, where a router has chosen them; -1: not known
    ids: Tensor | None = None  # of an embedding
    x: Tensor | None = None  # per sequence only, until the gradient comes
    g: Tensor | None = None  # until the input comes: the last product of a checkpoint has its gradient before
    problem: str = ""

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape)

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The rows of each site."""
        if self.ends is None:
            return [(0, self.num_rows)]
        return list(zip([0, *self.ends[:-1].tolist()], self.ends.tolist(), strict=True))


class Adder(Protocol):
    """Adds up calls; inputs and gradients are matrices of rows."""

    num_threads: int

    def meet(self, call: Call, x: Tensor, batch: Batch | None, whole: Tensor) -> None: ...
    def forget(self) -> None: ...
    def again(self, call: Call, x: Tensor, batch: Batch | None) -> None: ...
    def arrive(self, call: Call, g: Tensor, batch: Batch | None) -> None: ...


class RowAdder:
    """Sums per row; with `block`, per row and block."""

    def __init__(self, block: int | None) -> None:
        self.num_threads = 1
        self._block = block
        self._last: tuple[Tensor, int, Sums] | None = None  # q, k and v meet the same tensor

    def meet(self, call: Call, x: Tensor, batch: Batch | None, whole: Tensor) -> None:
        """`whole` is the tensor itself as the module was given it; while it is kept here no other has its identity."""
        last = self._last
        if last is not None and last[0] is whole and last[1] == whole._version:
            call.act = last[2]
            return
        call.act = row_sums(x, block=self._block, num_threads=self.num_threads)
        self._last = whole, whole._version, call.act

    def forget(self) -> None:
        self._last = None

    def again(self, call: Call, x: Tensor, batch: Batch | None) -> None:
        """A recompute: nothing is missing."""

    def arrive(self, call: Call, g: Tensor, batch: Batch | None) -> None:
        call.grad = row_sums(g, block=self._block, num_threads=self.num_threads)


class SequenceAdder:
    """Sums per sequence and block of the input, of the input itself and of what the sequence adds to the gradient."""

    def __init__(self, sites: Sequence[Site], block: int) -> None:
        self.num_threads = 1
        self._sites = sites
        self._block = block

    def forget(self) -> None:
        """Nothing is kept between calls."""

    def meet(self, call: Call, x: Tensor, batch: Batch | None, whole: Tensor) -> None:
        parts = self._parts(call, batch)
        if parts is None:
            call.problem = NO_SEQUENCES
            return
        rows = row_sums(x, block=self._width(call.site), num_threads=self.num_threads)
        if batch is not None and batch.counted is not None and call.is_in_order:
            rows = np.where(batch.counted[:, None], rows, 0.0)
        call.act = np.stack([segment_sums(rows, part) for part in parts])
        if _graph_task() != -1 or _saved_tensor_hooks(False) is None:
            call.x = x

    def again(self, call: Call, x: Tensor, batch: Batch | None) -> None:
        call.x = x
        if call.g is not None:
            self.arrive(call, call.g, batch)

    def arrive(self, call: Call, g: Tensor, batch: Batch | None) -> None:
        x, call.x, call.g = call.x, None, None
        if x is None:
            call.g = g
            return
        parts, block = self._parts(call, batch) or [], self._width(call.site)
        if call.ids is not None:
            call.grad = np.stack([lookup_sums(call.ids, g, part, block=block) for part in parts])
        else:
            call.grad = np.stack([gradient_sums(x, g, part, block=block) for part in parts])

    def _width(self, site: int) -> int:
        return self._block if self._sites[site].num_blocks > 1 else 0

    def _parts(self, call: Call, batch: Batch | None) -> list[list[Places]] | None:
        """For each site of the call, the rows of each sequence."""
        if batch is None:
            return None
        begins, counts = batch.sequences.T
        if call.is_in_order:
            return [[np.arange(b, b + n) for b, n in zip(begins, counts, strict=True)]]
        if call.places is not None and (call.places >= 0).all():
            owner = np.searchsorted(begins, call.places, side="right") - 1
            return [[a + np.flatnonzero(owner[a:b] == s) for s in range(len(begins))] for a, b in call.ranges]
        if call.ends is None and len(begins) == batch.shape[0] == call.shape[0]:
            return [list(np.arange(call.num_rows).reshape(len(begins), -1))]
        return None
