"""How high the norms of a row stand, site by site, and how high they may.

Receives rows and windows of rows; hands on levels (log2 of sums of squares, `act` of every site and then `grad` of
every site) and the bounds above which a level has exploded or makes a spike. Pure arithmetic on arrays: what becomes of
a level above its bound is decided in watch.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pyscan.schema import SiteInfo

if TYPE_CHECKING:
    from pyscan import _C

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

# What is 0 or was not observed has the lowest level; no real sum comes near it.
_NOTHING = 2.0**-1000
_LOWEST = -999.0
# A moving average takes in each window with this weight. A run is never taken to be quieter than this (in levels).
_WEIGHT = 0.5
_QUIET = 0.5
# A level this far below the median (root mean square, in levels: a factor of 64) is too small to make a spike.
_FAR_BELOW = 12.0


class Sites:
    """The sites of a run as columns. Sites without a block have no level and are left out: `kept` are the others."""

    def __init__(self, sites: Sequence[SiteInfo]) -> None:
        self.num_all = len(sites)
        self.all_names = [site.name for site in sites]
        self.kept = [i for i, site in enumerate(sites) if site.num_blocks]
        found = [sites[i] for i in self.kept]
        self.names = [site.name for site in found]
        blocks = np.array([site.num_blocks for site in found] * 2, np.int64)
        self.num_blocks = int(blocks.sum())
        self.of_block = np.repeat(np.arange(len(blocks)), blocks)
        self.starts = np.cumsum(blocks) - blocks
        widths = [math.prod(site.shape[1:]) or 1 for site in found]
        self.sizes = np.log2(widths + [math.prod(site.shape) or 1 for site in found])
        # A tied weight has the gradient of another site. An expert without tokens may be 0 and is not dead.
        self.own = np.array([True] * len(found) + [site.tied_to is None for site in found], bool)
        self.may_die = self.own & np.array([not site.name.endswith("]") for site in found] * 2, bool)

    def __len__(self) -> int:
        return len(self.names)

    def sums(self, cells: Floats) -> Floats:
        """Sums of squares per site; negative: not observed."""
        return np.asarray(np.add.reduceat(cells[: self.num_blocks], self.starts))

    def norms(self, cells: Floats, site: int) -> dict[str, float | None]:
        """Norm and largest value of input and gradient of a site, given by its place in the schema, in one row."""
        found: dict[str, float | None] = {"act": None, "grad": None}
        if site in self.kept:
            column, sums = self.kept.index(site), self.sums(cells)
            found = {"act": _root(sums[column]), "grad": _root(sums[column + len(self)])}
        maxima = cells[len(cells) - 4 * self.num_all :]
        return found | {"act_max": _number(maxima[site]), "grad_max": _number(maxima[site + self.num_all])}


def _number(value: float) -> float | None:
    """A plain float of four digits; None for what was not observed and for what JSON has no number for."""
    return float(f"{value:.4g}") if 0 <= value < math.inf else None


def _root(value: float) -> float | None:
    return _number(math.sqrt(value)) if value >= 0 else None


# The largest sum of squares of a site, that of the gradients alone, whether there are values that are not finite, and
# whether a sum is above its limit.
Seen = tuple[float, float, bool, bool]


class Glance:
    """The first look at each row: its sums per site go into the window, the largest value of each block into `tops`.

    Receives where each site's blocks start, how many blocks and how many counts of bad values a row has, and how many
    rows are a window. The definition; the scanner uses one compiled from csrc/glance.cpp, to which it also matters
    after how many rows (`first_rows`) levels have their first reference.
    """

    def __init__(
        self, starts: NDArray[np.int64], num_blocks: int, num_bad: int, num_rows: int, first_rows: int, /
    ) -> None:
        self._starts, self._num_blocks, self._num_bad = starts, num_blocks, num_bad
        self.window = np.zeros((num_rows, len(starts)))  # sums of squares
        self.tops = np.zeros(num_blocks)  # of the window
        self.limits = np.full(len(starts), np.inf)
        self.num_rows = 0  # so far
        self.window_step = 0  # of the window's first row

    def look(self, cells: Floats, step: int, /) -> Seen:
        """Look at the next row."""
        place = self.num_rows % len(self.window)
        if place == 0:
            self.window_step = step
        self.num_rows += 1
        blocks, sums = cells[: self._num_blocks], self.window[place]
        sums[:] = np.add.reduceat(blocks, self._starts)
        self.tops[:] = blocks if place == 0 else np.maximum(self.tops, blocks)
        has_bad = bool((cells[len(cells) - self._num_bad :] > 0).any())
        gradient = float(sums[len(sums) // 2 :].max())
        return float(sums.max()), gradient, has_bad, bool((sums > self.limits).any())


def levels_of(sums: Floats) -> Floats:
    return np.asarray(np.log2(np.maximum(sums, _NOTHING)))


def is_level(levels: Floats) -> Mask:
    """Not so for what is NaN, 0 or was not observed."""
    return np.asarray(levels > _LOWEST)


def highest(window: Floats) -> Floats:
    """The highest level of each site in a window; NaN only where there is nothing else."""
    return np.asarray(np.fmax.reduce(window, axis=0))


class Bounds:
    """What levels are measured by: those of the first rows, and moving average and deviation of the last ones."""

    def __init__(self, sites: Sites, *, explode: float, spike: float, deviations: float) -> None:
        self._sites = sites
        self._explode_by, self._spike_by = 2 * math.log2(explode), 2 * math.log2(spike)
        self._deviations = deviations
        shape = len(sites.sizes)
        self.reference = np.full(shape, np.nan)
        self.mean = np.full(shape, np.nan)
        self.variance = np.full(shape, _QUIET**2)
        self.explode = np.full(shape, np.inf)
        self.spike = np.full(shape, np.inf)
        self.largest_sum = np.full(shape, np.inf)  # of squares that is below both bounds

    def begin(self, window: Floats) -> None:
        """Let sites that have no reference yet explode from their highest level in these rows."""
        top = highest(window)
        unknown = np.isnan(self.reference) & is_level(top)
        if unknown.any():
            self.reference = np.where(unknown, top, self.reference)
            # What begins near 0 (LoRA, a gate at 0) may grow to what the others are before it explodes.
            usual = np.fmax(self.reference, self._usual(self.reference))
            self.explode = self._of_known(usual + self._explode_by)
        with np.errstate(over="ignore"):
            self.largest_sum = np.exp2(np.minimum(self.explode, self.spike))

    def follow(self, window: Floats) -> None:
        """Take in a window. Levels count up to their bound, so that a spike does not hide the next one."""
        known = is_level(window)
        num_rows = np.maximum(known.sum(axis=0), 1)
        seen = known.any(axis=0)
        held = np.where(known, np.minimum(window, np.minimum(self.explode, self.spike)), 0.0)
        mean = held.sum(axis=0) / num_rows
        spread = np.square(np.where(known, held - mean, 0.0)).sum(axis=0) / num_rows
        is_new = np.isnan(self.mean)
        moved = np.where(is_new, 0.0, mean - self.mean)
        self.mean = np.where(seen, np.where(is_new, mean, self.mean + _WEIGHT * moved), self.mean)
        self.variance = np.where(
            seen,
            np.where(is_new, spread, (1 - _WEIGHT) * self.variance + _WEIGHT * (spread + moved**2)),
            self.variance,
        )
        far = np.maximum(self._deviations * np.sqrt(np.maximum(self.variance, _QUIET**2)), self._spike_by)
        self.spike = self._of_known(np.fmax(self.mean + far, self._usual(self.mean) - _FAR_BELOW))
        self.begin(window)

    def follow_plain(self, glance: _C.Glance, fade_by: float) -> bool:
        """The same for the window of a compiled glance, whose limits are set, if there is nothing to find in it. False,
        and nothing has changed, if a level is not known or has no average yet, a block is 0, or a gradient is below the
        highest one by more than `fade_by`, which is negative."""
        sites = self._sites
        bounds = self.reference, self.explode, self.mean, self.variance, self.spike
        return glance.follow(*bounds, sites.sizes, sites.own, self._deviations, self._spike_by, fade_by)

    def calm(self, window: Floats) -> tuple[Mask, Mask]:
        """Sites that stayed halfway below their bound in every row: (exploding, spike)."""
        top = highest(window)
        return ~(top > self.explode - self._explode_by / 2), ~(top > self.spike - self._spike_by / 2)

    def _usual(self, levels: Floats) -> Floats:
        """The median root mean square of all inputs, and of all gradients, as a level of each site."""
        relative = levels - self._sites.sizes
        half = len(levels) // 2
        medians = [_median(relative[:half])] * half + [_median(relative[half:])] * half
        return np.asarray(medians + self._sites.sizes)

    def _of_known(self, bound: Floats) -> Floats:
        return np.where(np.isnan(bound) | ~self._sites.own, np.inf, bound)


def _median(levels: Floats) -> float:
    """The middle one of those that are no NaN; numpy's own takes ten times as long on a few values."""
    ordered = np.sort(levels)  # NaN comes last
    num_known = len(levels) - int(np.isnan(levels).sum())
    return float(ordered[(num_known - 1) // 2]) if num_known else math.nan
