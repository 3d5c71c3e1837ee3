"""The numbers of a gradient that decide about its parameter: smallest and largest element, and norm.

Receives the parameters of a model after a backward; hands on a GradStats for each that has a gradient. Where a sum in
float32 is not good enough (many elements, squares out of range) the engine computes it in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pyscan.engine import reduce
from pyscan.shards import to_local

# Above, a sum in float32 is off by more than 1e-5; below, one call for all is worth more than a better sum.
_MANY = 1 << 20


class GradStats(NamedTuple):
    """The smallest and the largest element of a gradient, and its norm."""

    min: float
    max: float
    norm: float

    @property
    def status(self) -> str:
        if math.isnan(self.min) or math.isnan(self.max):
            return "nan"
        if math.isinf(self.min) or math.isinf(self.max):
            return "inf"
        return "zero" if self.min == self.max == 0 else "ok"


_EMPTY = GradStats(0.0, 0.0, 0.0)


def gradient_stats(parameters: Mapping[str, Tensor]) -> dict[str, GradStats | None]:
    """Per name the numbers of its gradient; None where there is none."""
    grads = {name: _values(p.grad) for name, p in parameters.items() if p.grad is not None}
    filled = {name: values for name, values in grads.items() if values.numel()}
    norms = dict(zip(filled, _norms(list(filled.values())), strict=True))
    ends = {name: values.aminmax() for name, values in filled.items()}
    stats = {name: GradStats(float(end.min), float(end.max), norms[name]) for name, end in ends.items()}
    return {name: stats.get(name, _EMPTY if name in grads else None) for name in parameters}


def _values(grad: Tensor) -> Tensor:
    """What this rank holds of a gradient; a sparse one by its rows, a complex one by its parts."""
    values = to_local(grad.detach())
    if values.is_sparse:
        values = values.coalesce()._values()
    return torch.view_as_real(values) if values.is_complex() else values


def _norms(tensors: list[Tensor]) -> list[float]:
    """NaN or infinite only where an element is, zero only where all are."""
    wide = [x.to(torch.promote_types(x.dtype, torch.float32)) for x in tensors]
    small = [x for x in wide if x.numel() <= _MANY]
    norms = torch._foreach_norm(small) if small else ()
    quick = {id(x): float(norm) for x, norm in zip(small, norms, strict=True)}
    return [norm if 0 < (norm := quick.get(id(x), 0.0)) < math.inf else _norm(x) for x in wide]


def _norm(x: Tensor) -> float:
    """In float64, from one read where there is an engine."""
    if not x.is_cpu:
        return float(torch.linalg.vector_norm(x, dtype=torch.float64))
    squares, _, bad = reduce(x, block=0)
    if not bad.any():
        return math.sqrt(float(squares.sum()))
    return math.nan if bool(x.isnan().any()) else math.inf
