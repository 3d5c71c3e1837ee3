"""A finished row, and the same as nested dicts for people and dashboards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pyscan.accumulate import RowCells

ABSENT_SUM = -1.0  # in place of a sum of squares, as in csrc/step_buffer.h


class Row(NamedTuple):
    """One step: cells as the step buffer gives them (sums of squares; absent is negative) and what is known beside."""

    step: int
    cells: NDArray[np.float64]
    tokens: int | None
    loss: float | None
    lr: float | None
    grad_scale: float | None
    flags: int


def norm(sums: NDArray[np.float64]) -> float | None:
    """The norm of cells of sums of squares together; None if none was observed."""
    observed = sums[~(sums < 0)]
    return float(np.sqrt(observed.sum())) if observed.size else None


def param_stats(buffer: RowCells, cells: NDArray[np.float64]) -> dict[str, dict[str, Any]]:
    """Activation and gradient norm of every site, and of each of its blocks."""
    stats = {}
    for index, site in enumerate(buffer.layout.schema.sites):
        act, grad = (cells[buffer.cells(channel, index)] for channel in ("act", "grad"))
        blocks = [
            {"block_idx": b, "activation_norm": norm(act[b : b + 1]), "grad_norm": norm(grad[b : b + 1])}
            for b in range(site.num_blocks)
        ]
        stats[site.name] = {"activation_norm": norm(act), "grad_norm": norm(grad), "blocks": blocks}
    return stats
