"""Compare two runs of one model, site by site and step by step: what `pyscan diff` tells.

Receives two open runs; pairs their sites by name and their rows by step, and hands on one small record per site.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyscan.codecs import combine
from pyscan.names import match_names

if TYPE_CHECKING:
    from pyscan.run import Run

Tick = Callable[[int, int], None]


def difference(a: ArrayLike, b: ArrayLike) -> NDArray[np.float64]:
    """log2(b / a), element by element: 0 where both are equal (both 0, too), infinite where only one is 0, NaN where
    either is NaN or absent."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(a == b, 0.0, np.log2(b) - np.log2(a))


@dataclass(frozen=True)
class ChannelDiff:
    """One channel of a site in both runs, over the steps that both have."""

    mean: float  # log2(b / a) of the whole site, mean over steps
    blocks: NDArray[np.float64]  # the same per block; empty where the two runs have other blocks
    largest: float  # largest |log2(b / a)| of any block and step
    first_step: int | None  # first step at which a value differs by more than the tolerance


@dataclass(frozen=True)
class SiteDiff:
    a: str
    b: str
    channels: dict[str, ChannelDiff]

    @property
    def largest_mean(self) -> float:
        """How far the site's norms are apart, whichever channel shows it most; -1 when none says."""
        return max([abs(c.mean) for c in self.channels.values() if not np.isnan(c.mean)], default=-1.0)


@dataclass(frozen=True)
class CommonSteps:
    """The steps that both runs have, and their rows in each."""

    steps: NDArray[Any]
    rows_a: NDArray[np.intp]
    rows_b: NDArray[np.intp]


def common_steps(a: Run, b: Run) -> CommonSteps:
    steps, rows_a, rows_b = np.intersect1d(a.steps["step"], b.steps["step"], return_indices=True)
    return CommonSteps(steps, rows_a, rows_b)


def compare_runs(
    a: Run,
    b: Run,
    *,
    pairs: Sequence[tuple[str, str]] | None = None,
    channels: Sequence[str] = ("act", "grad"),
    tolerance: float = 0.0,
    tick: Tick = lambda done, total: None,
) -> list[SiteDiff]:
    """A record per pair of sites over the steps that both runs have; without `pairs`, of all sites that names pair."""
    if pairs is None:
        pairs = match_names([site.name for site in a.sites], [site.name for site in b.sites]).pairs
    common, found = common_steps(a, b), []
    for done, (name_a, name_b) in enumerate(pairs):
        parts = {}
        for channel in channels:
            values_a = a.get(channel, name_a, blocks=True)[common.rows_a]
            values_b = b.get(channel, name_b, blocks=True)[common.rows_b]
            parts[channel] = _compare_values(values_a, values_b, common.steps, tolerance)
        found.append(SiteDiff(name_a, name_b, parts))
        tick(done + 1, len(pairs))
    return found


def _compare_values(a: NDArray[Any], b: NDArray[Any], steps: NDArray[Any], tolerance: float) -> ChannelDiff:
    whole_a, whole_b = combine(a, "sumsq", axis=1)[:, None], combine(b, "sumsq", axis=1)[:, None]
    same_blocks = a.shape == b.shape
    if not same_blocks:
        a, b = whole_a, whole_b
    apart = difference(a, b)
    one_unknown = np.isnan(a) != np.isnan(b)
    differs = ((np.abs(apart) > tolerance) | one_unknown).any(axis=1)
    known = np.abs(apart[~np.isnan(apart)])
    return ChannelDiff(
        mean=float(_mean(difference(whole_a, whole_b))[0]),
        blocks=_mean(apart) if same_blocks else np.zeros(0),
        largest=float(known.max()) if known.size else float("nan"),
        first_step=int(steps[np.argmax(differs)]) if differs.any() else None,
    )


def _mean(apart: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean over the steps that are not NaN, infinities included: a block that is 0 in one run only must show."""
    known = ~np.isnan(apart)
    count = known.sum(axis=0)
    with np.errstate(invalid="ignore"):  # +inf and -inf in one column: no mean
        total = np.where(known, apart, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
