"""Do two groups of samples differ, cell by cell? A permutation test in bounded memory, and the false discovery rate.

Receives levels [samples, cells] of both groups, in pieces of as many cells as fit; hands on per cell the difference of
means, the effect size and a p-value. NaN is a missing value. Pure arrays: what a cell is, the caller knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

FEWEST = 8  # samples a group needs: 8 against 8 can be relabelled in 12,870 ways
# Exceedances from which on a cell's own count is precise enough (its relative error is 1 / sqrt(10)).
_ENOUGH = 10
# |t| is counted in bins of this width; rounding down to one makes a p-value larger, by 2.5 % at |t| = 5.
_BIN = 0.005
_NUM_BINS = 8_000
_CHUNK_VALUES = 1 << 20  # statistics held at once


class Comparison(NamedTuple):
    """Of each cell; NaN where a group has fewer than `FEWEST` values."""

    difference: Floats  # mean of b minus mean of a
    effect: Floats  # the same in pooled standard deviations (Cohen's d)
    p: Floats  # two-sided


class PermutationTest:
    """Compares groups of `num_a` and `num_b` samples under random relabellings, the same for all cells.

    The statistic is |t| with pooled variance. A p-value is the share of relabellings that reach it, with the true
    labels among them. So many relabellings resolve no p below 1 / (n + 1), and among thousands of cells a false
    discovery rate needs far less: 0.05 / 10,000 for a single cell. More of them would cost a hundred times as much.
    Instead a cell that its own relabellings hardly reach is measured against those of all cells together: under
    exchangeable labels |t| has nearly one distribution in all of them (that is what dividing by the standard deviation
    is for), and n relabellings of m cells resolve 1 / (n m + 1). Dependence between cells does no harm: labels that
    give one cell a large |t| by chance give it to its relatives too, in the relabellings just as in the truth.
    """

    def __init__(self, num_a: int, num_b: int, *, num_permutations: int = 2000, seed: int = 0) -> None:
        for name, count in (("a", num_a), ("b", num_b)):
            if count < FEWEST:
                raise ValueError(
                    f"a permutation test needs at least {FEWEST} samples in each group, {name} has {count}"
                )
        if num_permutations < 100:
            raise ValueError(f"num_permutations must be >= 100, got {num_permutations}")
        self._num_a, self._num_b = num_a, num_b
        self._num_permutations = num_permutations
        self._seed = seed
        self._bins = np.zeros(_NUM_BINS + 1, np.int64)
        self._pieces: list[tuple[Floats, Floats, Floats, NDArray[np.int64]]] = []

    def add(self, a: ArrayLike, b: ArrayLike) -> None:
        """Take in some cells: [num_a, cells] and [num_b, cells]."""
        samples = np.concatenate([np.asarray(a, np.float64), np.asarray(b, np.float64)])
        labels = np.repeat([0.0, 1.0], [self._num_a, self._num_b])[None]
        values = _Values(samples)
        truth = values.compare(labels)
        counts = [np.isfinite(samples[part]).sum(axis=0) for part in np.split(np.arange(len(samples)), [self._num_a])]
        usable = np.minimum(*counts) >= FEWEST
        t, difference, effect = (np.where(usable, found[0], np.nan) for found in truth)
        reached = np.zeros(samples.shape[1], np.int64)
        for chunk in self._relabellings(samples.shape[1]):
            random_t = values.compare(chunk)[0][:, usable]
            reached[usable] += (random_t >= t[usable] * (1 - 1e-9)).sum(axis=0)
            self._bins += np.bincount(_bin(random_t).ravel(), minlength=_NUM_BINS + 1)
        self._pieces.append((t, difference, effect, reached))

    def finish(self) -> Comparison:
        """The verdict on all cells, in the order they came."""
        empty = np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0, np.int64)
        columns = zip(*(self._pieces or [empty]), strict=True)
        t, difference, effect, reached = (np.concatenate(column) for column in columns)
        own = (reached + 1) / (self._num_permutations + 1)
        above = np.cumsum(self._bins[::-1])[::-1]  # how many of all cells and relabellings are in this bin or higher
        known = ~np.isnan(t)
        together = np.ones(len(t))
        together[known] = (above[_bin(t[known])] + 1) / (self._bins.sum() + 1)
        p = np.where(reached >= _ENOUGH, own, together)
        return Comparison(difference, effect, np.where(known, p, np.nan))

    def _relabellings(self, num_cells: int) -> Iterator[Floats]:
        """Rows of labels, 1 for a member of b, the same for every piece of cells."""
        chance = np.random.default_rng(self._seed)
        plain = np.repeat([0.0, 1.0], [self._num_a, self._num_b])
        size = max(_CHUNK_VALUES // max(num_cells, len(plain)), 1)
        for start in range(0, self._num_permutations, size):
            rows = min(size, self._num_permutations - start)
            yield chance.permuted(np.broadcast_to(plain, (rows, len(plain))), axis=1)


class _Values:
    """Samples [n, cells], ready to be compared under any labels with two matrix products."""

    def __init__(self, samples: Floats) -> None:
        finite = np.isfinite(samples)
        count = finite.sum(axis=0)
        zeroed = np.where(finite, samples, 0.0)
        self._x = np.where(finite, zeroed - zeroed.sum(axis=0) / np.maximum(count, 1), 0.0)  # means cancel less
        self._there = None if finite.all() else finite.astype(np.float64)
        self._count = count.astype(np.float64)
        self._sum = self._x.sum(axis=0)
        self._squares = np.square(self._x).sum(axis=0)

    def compare(self, labels: Floats) -> tuple[Floats, Floats, Floats]:
        """|t|, difference of means and effect, each [labels, cells]; 0 where a group has no value or all are equal."""
        in_b = labels.sum(axis=1)[:, None] if self._there is None else labels @ self._there
        in_a = self._count - in_b
        sum_b = labels @ self._x
        sum_a = self._sum - sum_b
        both = (in_a >= 1) & (in_b >= 1)
        in_a, in_b = np.maximum(in_a, 1), np.maximum(in_b, 1)
        difference = np.where(both, sum_b / in_b - sum_a / in_a, 0.0)
        within = self._squares - sum_a**2 / in_a - sum_b**2 / in_b
        within = np.maximum(within, 1e-12 * self._squares)  # rounding, where the groups do not overlap at all
        deviation = np.sqrt(within / np.maximum(self._count - 2, 1))
        flat = deviation == 0
        effect = np.where(flat, 0.0, difference / np.where(flat, 1.0, deviation))
        return np.abs(effect) / np.sqrt(1 / in_a + 1 / in_b), difference, effect


def _bin(t: Floats) -> NDArray[np.int64]:
    return np.minimum(t / _BIN, _NUM_BINS).astype(np.int64)


def adjusted(p: ArrayLike) -> Floats:
    """The lowest false discovery rate at which each cell counts as different (Benjamini and Hochberg); NaN stays NaN.

    Holds for independent cells and for positively dependent ones, such as the blocks of one model.
    """
    p = np.asarray(p, np.float64)
    known = np.flatnonzero(~np.isnan(p))
    order = known[np.argsort(-p[known], kind="stable")]
    ranks = np.arange(len(order), 0, -1)
    q = np.full(p.shape, np.nan)
    q[order] = np.minimum(np.minimum.accumulate(p[order] * len(order) / ranks), 1.0) if len(order) else []
    return q
