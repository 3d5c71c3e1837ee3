"""Ranks against each other: one that goes another way than the others, and the first that met a bad value.

Receives the ranks' own norms while they are merged, window by window, and hands on events. A rank stands out when the
change of its norm from one row to the next is not that of the others: what is different about a rank all the time (its
part of a weight, its share of the data) cancels out, a broken card or a corrupted weight does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from pyscan.codecs import Array, Floats
from pyscan.payloads import Event
from pyscan.rank_table import Places, index_of, nth
from pyscan.schema import Channel, SiteInfo

# A rank stands out if it leaves the others by this many of their usual deviations, and by a factor of 2^0.5.
_DEVIATIONS = 10.0
_LEAST = 0.5
_FLOOR = 0.02  # deviations below this, 1.4 %, are rounding
_EVENTS_PER_RANK = 8
_MAD = 1.4826  # from the median of deviations to a standard deviation
_NOT_COMPARED = {"expert"}  # which tokens an expert gets is not the same on any two ranks
_COMPARED = ("act", "grad")
_BAD = ("act_bad", "grad_bad")


class Between:
    """What was found so far. Windows come in order: `begin`, then `see` for every rank and channel, then `judge`."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._paths: dict[str, _Path] = {}
        self._names: list[str] = []  # of the sites
        self._num_told: Counter[int] = Counter()
        self._bad: list[tuple[int, int, int, int]] = []  # row, pass, site, rank
        self._is_bad = False

    def begin(self, sites: Sequence[SiteInfo], ranks: Sequence[int], num_rows: int) -> None:
        names = [site.name for site in sites]
        if names != self._names:  # the model has changed: what was known belongs to other sites
            self._paths, self._names = {name: _Path() for name in _COMPARED}, names
        self._sites = sites
        self._ranks = {rank: place for place, rank in enumerate(ranks)}
        self._shape = num_rows, len(ranks), len(sites)
        self._logs: dict[str, Floats] = {}  # channel -> [rows, ranks, sites], NaN where there is no norm to compare

    def wants(self, channel: Channel) -> bool:
        return channel.name in _COMPARED or (channel.name in _BAD and not self._is_bad)

    def see(self, channel: Channel, rank: int, rows: Places, sites: Places, values: Floats) -> None:
        if channel.name in _BAD:
            self._note_bad(_BAD.index(channel.name), rank, rows, sites, values)
            return
        if channel.name not in self._logs:
            self._logs[channel.name] = np.full(self._shape, np.nan, np.float32)
        table = self._logs[channel.name][:, self._ranks[rank]]
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log2(values)
        if not np.isfinite(logs).all():
            logs[~np.isfinite(logs)] = np.nan
        table[index_of(rows, sites)] = logs.T

    def judge(self, steps: Array) -> None:
        """Look at the rows of the window, one per step."""
        ranks = list(self._ranks)
        compared = np.array([site.kind not in _NOT_COMPARED for site in self._sites], bool)
        for name, logs in self._logs.items():
            if len(ranks) < 2:
                break
            for row, step in enumerate(steps.tolist()):
                logs[row][:, ~compared] = np.nan
                found = self._paths[name].follow(ranks, logs[row])
                if found is not None:
                    place, site, jump = found
                    self._tell(name, self._sites[site], int(step), ranks, place, jump)
        self._logs = {}
        self._tell_bad(steps)

    def _tell(self, channel: str, site: SiteInfo, step: int, ranks: list[int], place: int, jump: float) -> None:
        rank = ranks[place]
        self._num_told[rank] += 1
        if self._num_told[rank] > _EVENTS_PER_RANK:
            return
        ratio = float(np.exp2(np.clip(jump, -500, 500)))
        change = f"its {channel} changed {ratio:.3g} times as much as theirs"
        text = f"rank {rank} left the other {len(ranks) - 1} at {site.name}: {change}"
        where: dict[str, Any] = {"site": site.name, "rank": rank, "channel": channel}
        self.events.append({"kind": "rank_differs", "step": step, **where, "ratio": ratio, "text": text})

    def _note_bad(self, number: int, rank: int, rows: Places, sites: Places, counts: Floats) -> None:
        """Where a rank first counted values that are not finite; absent is no count."""
        with np.errstate(invalid="ignore"):
            places = np.argwhere(counts.T > 0)
        if len(places):
            row, site = (nth(part, at) for part, at in zip((rows, sites), places[0], strict=True))
            self._bad.append((row, number, site, rank))

    def _tell_bad(self, steps: Array) -> None:
        """An input goes before a gradient of the same step: the mean of all ranks spreads a bad gradient to all."""
        if not self._bad:
            return
        self._is_bad = True
        row, number, site, rank = min(self._bad)
        others = sorted({r for at, _, _, r in self._bad if at == row and r != rank})
        step, name = int(steps[row]), self._sites[site].name
        text = f"the first value that is not finite came on rank {rank}, in the {_BAD[number][:-4]} of {name}"
        where: dict[str, Any] = {"site": name, "rank": rank, "channel": _BAD[number], "also": others}
        self.events.append({"kind": "rank_nonfinite", "step": step, **where, "text": text})
        self._bad = []


class _Path:
    """The way the ranks went in one channel: where they were last, and how far apart they usually go."""

    def __init__(self) -> None:
        self._ranks: list[int] = []
        self._last = np.zeros((2, 0, 0), np.float32)  # deviation from the others and norm, [2, ranks, sites]
        self._usual: list[float] = []  # of the rows so far

    def follow(self, ranks: list[int], logs: Floats) -> tuple[int, int, float] | None:
        """The rank, by its place, that left the others most in this row, at which site, and by how much (log2)."""
        self._align(ranks, logs)
        now = np.stack([logs - _median(logs), logs])
        jumps, own = now - self._last  # NaN where a rank is seen for the first time
        self._last = np.where(np.isnan(now), self._last, now)
        return self._judge(jumps, own)

    def _align(self, ranks: list[int], logs: Floats) -> None:
        if self._ranks == ranks:
            return
        before = dict(zip(self._ranks, self._last.swapaxes(0, 1), strict=True))
        nothing = np.full((2, logs.shape[1]), np.nan, np.float32)
        self._last = np.stack([before.get(rank, nothing) for rank in ranks], axis=1)
        self._ranks = ranks

    def _judge(self, jumps: Floats, own: Floats) -> tuple[int, int, float] | None:
        sizes = np.abs(jumps)  # [ranks, sites]
        known = sizes[~np.isnan(sizes)]
        if not len(known):
            return None
        pooled = float(np.median(self._usual)) if self._usual else _MAD * float(np.median(known))
        scale = np.maximum(_MAD * _median(sizes)[0] if len(sizes) > 3 else pooled, max(pooled, _FLOOR))
        with np.errstate(invalid="ignore"):
            out = (sizes > _DEVIATIONS * scale) & (sizes > _LEAST)
        if not out.any():
            self._usual = [*self._usual[-63:], _MAD * float(np.median(known))]
            return None
        # Of two ranks neither is the majority: the one that moved is it.
        strength = np.where(out, (np.abs(np.nan_to_num(own)) if len(sizes) == 2 else sizes) / scale, 0.0)
        place = int(np.argmax(strength.max(axis=1)))
        site = int(np.flatnonzero(out[place])[0])
        return place, site, float(jumps[place, site])


def _median(values: Array) -> Array:
    """Over the first axis, which stays with length 1; NaN counts nowhere, and where it is all there is, it stays."""
    if not np.isnan(values).any():
        return np.median(values, axis=0, keepdims=True)
    ordered = np.sort(values, axis=0)  # NaN goes last
    count = (~np.isnan(values)).sum(axis=0, keepdims=True)
    low, high = np.maximum(count - 1, 0) // 2, np.maximum(count // 2, 0)
    middle: Array = (
        np.take_along_axis(ordered, low, 0) + np.take_along_axis(ordered, np.minimum(high, len(values) - 1), 0)
    ) / 2
    return middle
