"""How many weights have a gradient, step by step, under the names dashboards know.

Receives a row of a scan, or a run; hands on the number of sites in each state: ok, zero, none (no gradient: frozen,
unused, not connected) and nan (not finite). A tied weight counts once, where it is defined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyscan.codecs import is_absent
from pyscan.levels import Sites

if TYPE_CHECKING:
    from pyscan.run import Run
    from pyscan.schema import SiteInfo

NAMES = {state: f"grad_check/{state}_params" for state in ("ok", "zero", "none", "nan")}

Counts = dict[str, NDArray[np.int64]]


def count_states(norms: ArrayLike, is_absent: ArrayLike, num_bad: ArrayLike) -> Counts:
    """Sites in each state, counted over the last axis. A norm and its square serve alike; `num_bad` <= 0 is finite."""
    norms, none = np.asarray(norms, np.float64), np.asarray(is_absent, bool)
    bad = ~none & ((np.asarray(num_bad) > 0) | ~np.isfinite(norms))
    zero = ~none & ~bad & (norms == 0)
    masks = {"ok": ~none & ~bad & ~zero, "zero": zero, "none": none, "nan": bad}
    return {name: np.asarray(masks[state].sum(axis=-1), np.int64) for state, name in NAMES.items()}


def row_counts(sites: Sequence[SiteInfo], cells: NDArray[np.float64]) -> dict[str, int]:
    """The counts of one row of the scanner."""
    columns = Sites(sites)
    mine = np.array([site.tied_to is None for site in sites], bool)[columns.kept]
    sums = columns.sums(cells)[len(columns) :][mine]
    num_bad = cells[-columns.num_all :][columns.kept][mine]
    return {name: int(count) for name, count in count_states(sums, sums < 0, num_bad).items()}


def run_counts(run: Run) -> Counts:
    """The counts of every row of a run, as arrays [steps]."""
    sites = [site for site in run.sites if site.tied_to is None and site.num_blocks]
    total: Counts = {name: np.zeros(len(run.steps), np.int64) for name in NAMES.values()}
    has_counts = any(channel.name == "grad_bad" for channel in run.channels)
    for site in sites:
        norms = run.grad(site.name)
        bad: Any = run.get("grad_bad", site.name) if has_counts else 0.0
        found = count_states(norms[:, None], is_absent(norms)[:, None], np.reshape(bad, (-1, 1)))
        total = {name: total[name] + found[name] for name in total}
    return total
