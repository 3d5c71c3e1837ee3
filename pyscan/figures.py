"""A finished row in a handful of numbers, under the names loggers show them by.

Receives the sites and the cells of one row, as the scanner keeps it; hands on plain floats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pyscan.levels import Sites
from pyscan.schema import SiteInfo


def row_figures(sites: Sequence[SiteInfo], cells: NDArray[np.float64]) -> dict[str, float]:
    """Norm of all gradients together (NaN if one is not finite), largest values, number of values not finite.

    A tied weight counts once. What no site has recorded is left out.
    """
    columns, num_sites = Sites(sites), len(sites)
    mine = np.array([site.tied_to is None for site in sites], bool)
    sums = columns.sums(cells)[len(columns) :][mine[columns.kept]]
    act_max, grad_max, act_bad, grad_bad = cells[len(cells) - 4 * num_sites :].reshape(4, num_sites)
    grad_bad = grad_bad[mine]
    found = {
        "pyscan/grad_norm": math.sqrt(sums[~(sums < 0)].sum()) if (~(sums < 0)).any() else None,
        "pyscan/act_max": _largest(act_max),
        "pyscan/grad_max": _largest(grad_max),
        "pyscan/bad_values": float(act_bad[act_bad > 0].sum() + grad_bad[grad_bad > 0].sum()),
    }
    return {name: value for name, value in found.items() if value is not None}


def _largest(values: NDArray[np.float64]) -> float | None:
    observed = values[values >= 0]
    return float(observed.max()) if observed.size else None
