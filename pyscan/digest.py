"""A whole run reduced to what fits on a page: snapshots of the map, a curve per site, and how far each site has moved.

Receives an open run and how large the result may be; reads all rows once, in windows, and hands on arrays whose size
does not depend on the number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pyscan import analysis, buckets
from pyscan.buckets import Buckets
from pyscan.codecs import ABSENT, is_absent
from pyscan.summary import norm_channels

if TYPE_CHECKING:
    from pyscan.run import Run

Floats = NDArray[np.float64]
Norms = NDArray[np.float32]
Tick = Callable[[int, int], None]

# Share of the rows at each end that drift compares, as in analysis.drift.
_END_SHARE = 0.1


@dataclass(frozen=True)
class Curves:
    """A channel of every site over time: buckets [points, sites], the first row of each, and drift [sites]."""

    first_rows: NDArray[np.int64]
    buckets: Buckets
    drift: Floats  # log2(late / early)


@dataclass(frozen=True)
class Snapshot:
    """Norms of one row, of every block or of every site as a whole, and their SPS in both scopes."""

    row: int
    norms: dict[str, Norms]
    sps: dict[str, Floats]


def site_norms(cells: Norms, counts: Sequence[int]) -> Norms:
    """Norms [rows, cells] of blocks as norms [rows, sites], combined as `Run.get` does it."""
    out = np.full((len(cells), len(counts)), ABSENT, np.float32)
    sizes = np.asarray(counts, np.int64)
    some = np.flatnonzero(sizes)
    if not len(some):
        return out
    starts = (np.cumsum(sizes) - sizes)[some]
    absent = is_absent(cells)
    sums = np.add.reduceat(np.square(np.where(absent, 0.0, cells), dtype=np.float64), starts, axis=1)
    seen = np.logical_or.reduceat(~absent, starts, axis=1)
    with np.errstate(over="ignore"):
        out[:, some] = np.where(seen, np.sqrt(sums).astype(np.float32), ABSENT)
    return out


def curves(run: Run, points: int, tick: Tick = lambda done, total: None) -> dict[str, Curves]:
    """act and grad of every site, in at most so many points."""
    channels, num_rows = norm_channels(run), len(run.steps)
    bounds = buckets.edges(0, num_rows, points)
    return {
        name: _curves(run, name, bounds, lambda done, n=n: tick(n * num_rows + done, len(channels) * num_rows))  # type: ignore[misc]
        for n, name in enumerate(channels)
    }


def _curves(run: Run, channel: str, bounds: NDArray[np.int64], tick: Callable[[int], None]) -> Curves:
    what = run.channel(channel)
    counts = [run._num_cells(what, site) for site in run.sites]
    parts, ends = [], _Ends(len(run.steps), len(run.sites))
    for part in buckets.windows(bounds, sum(counts)):
        start, stop = int(part[0]), int(part[-1])
        norms = site_norms(run.cells(channel, steps=slice(start, stop)), counts)
        parts.append(buckets.reduce_rows(norms, part[:-1] - start))
        ends.add(start, norms)
        tick(stop)
    joined = buckets.join(parts) if parts else buckets.reduce_rows(np.zeros((0, len(counts)), np.float32), bounds[:0])
    return Curves(bounds[:-1], joined, ends.drift())


class _Ends:
    """Mean levels of the first and of the last tenth of the rows, gathered window by window."""

    def __init__(self, num_rows: int, num_sites: int) -> None:
        self._rows = max(1, int(_END_SHARE * num_rows))
        self._num_rows = num_rows
        self._sums, self._counts = np.zeros((2, num_sites)), np.zeros((2, num_sites))

    def add(self, start: int, norms: Norms) -> None:
        for end, (low, high) in enumerate(((0, self._rows), (self._num_rows - self._rows, self._num_rows))):
            level = analysis.levels(norms[max(low - start, 0) : max(high - start, 0)])
            self._sums[end] += np.nansum(level, axis=0)
            self._counts[end] += np.isfinite(level).sum(axis=0)

    def drift(self) -> Floats:
        means = self._sums / np.where(self._counts > 0, self._counts, np.nan)
        return means[1] - means[0] if self._num_rows > 1 else np.full(means.shape[1], np.nan)


def snapshot_rows(run: Run, count: int, steps: Sequence[int] = ()) -> list[int]:
    """At most `count` rows: those of the given steps as far as there is room, and others at equal distances."""
    num_rows = len(run.steps)
    if not num_rows:
        return []
    known = run.steps["step"]
    wanted = [int(np.flatnonzero(known == step)[0]) for step in steps if (known == step).any()][: count // 4]
    even = np.linspace(0, num_rows - 1, min(max(count - len(wanted), 2), num_rows)).astype(int).tolist()
    return sorted({*even, *wanted})


def snapshot(run: Run, row: int, *, merged: bool = False) -> Snapshot:
    """One row of the whole model; `merged` has a cell per site instead of one per block."""
    channels = norm_channels(run)
    norms, widths, layers = {}, np.zeros(0), [""]
    for name in channels:
        what = run.channel(name)
        counts = [run._num_cells(what, site) for site in run.sites]
        cells = run.cells(name, steps=slice(row, row + 1))
        norms[name] = site_norms(cells, counts)[0] if merged else cells[0]
        widths = cell_widths(run, counts, merged=merged)
        shown = [1] * len(counts) if merged else counts
        layers = [analysis.layer_of(site.name) for site, n in zip(run.sites, shown, strict=True) for _ in range(n)]
    scores: dict[str, Floats] = {}
    if len(channels) == 2:
        scopes: tuple[analysis.Scope, ...] = ("layer", "global")
        for scope in scopes:
            scores[scope] = analysis.sps(norms["act"], norms["grad"], widths, layers, scope)
    return Snapshot(row, norms, scores)


def cell_widths(run: Run, counts: Sequence[int], *, merged: bool = False) -> Floats:
    """Input features of each cell."""
    if merged:
        return np.array([max(analysis.features_of(site), 1) for site in run.sites], np.float64)
    pairs = zip(run.sites, counts, strict=True)
    parts = [analysis.block_widths(analysis.features_of(site), n, run.block) for site, n in pairs]
    return np.concatenate(parts or [np.zeros(0)])
