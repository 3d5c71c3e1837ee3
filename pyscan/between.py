"""Ranks against each other: one that goes another way than the others, and the first that met a bad value.

Receives the ranks' own norms window by window, hands on events. A rank stands out when the change of its norm from one
row to the next is not that of the others: what is different about a rank all the time (its part of a weight, its share
of the data) cancels out, a broken card or a corrupted weight does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pyscan.codecs import Array, Floats, is_absent
from pyscan.payloads import Event

if TYPE_CHECKING:
    from pyscan.rank_merge import Merger
    from pyscan.schema import Channel, SiteInfo

# A rank stands out if it leaves the others by this many of their usual deviations, and by a factor of 2^0.5.
_DEVIATIONS = 10.0
_LEAST = 0.5
_FLOOR = 0.02  # deviations below this, 1.4 %, are rounding
_EVENTS_PER_RANK = 8
_MAD = 1.4826  # from the median of deviations to a standard deviation
_NOT_COMPARED = {"expert"}  # which tokens an expert gets is not the same on any two ranks


class Between:
    """What was found so far. Windows come in order."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._last: dict[str, dict[int, Floats]] = {}  # channel -> rank -> its deviation in the row before, per site
        self._own: dict[str, dict[int, Floats]] = {}  # the same of its norm
        self._usual: dict[str, list[float]] = {}  # channel -> the usual deviation of each row so far
        self._num_told: Counter[int] = Counter()
        self._is_bad = False

    def see(self, merger: Merger, channels: Sequence[Channel], sites: list[SiteInfo], steps: Array, start: int) -> None:
        """Look at the rows from `start` on, one per step."""
        names = {channel.name: channel for channel in channels}
        for name in ("act", "grad"):
            if name in names and len(steps):
                self._compare(names[name], sites, steps, _gather(merger, names[name], sites, start, len(steps)))
        if not self._is_bad and len(steps):
            self._find_bad([names[n] for n in ("act_bad", "grad_bad") if n in names], merger, sites, steps, start)

    # One rank that goes another way

    def _compare(self, channel: Channel, sites: list[SiteInfo], steps: Array, norms: dict[int, Floats]) -> None:
        ranks = sorted(norms)
        if len(ranks) < 2:
            return
        compared = np.array([site.kind not in _NOT_COMPARED for site in sites])
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log2(np.stack([norms[rank] for rank in ranks]))  # [ranks, rows, sites]
        logs[:, :, ~compared] = np.nan
        logs[~np.isfinite(logs)] = np.nan
        away = logs - _median(logs)
        jumps, own = (
            self._changes(self._last, channel.name, ranks, away),
            self._changes(self._own, channel.name, ranks, logs),
        )
        for row, step in enumerate(steps.tolist()):
            self._judge(channel, sites, int(step), ranks, jumps[:, row], own[:, row])

    def _changes(self, kept: dict[str, dict[int, Floats]], channel: str, ranks: list[int], values: Array) -> Array:
        """The change of every value from the row before; before the first row a rank is taken to be like the others."""
        before = kept.get(channel, {})
        nothing = np.zeros(values.shape[2])
        first = np.stack([before.get(rank, nothing) for rank in ranks])[:, None]
        filled = np.concatenate([first, values], axis=1)
        kept[channel] = {rank: _known(filled[i]) for i, rank in enumerate(ranks)}
        changes: Array = np.diff(filled, axis=1)
        return changes

    def _judge(
        self, channel: Channel, sites: list[SiteInfo], step: int, ranks: list[int], jumps: Array, own: Array
    ) -> None:
        sizes = np.abs(jumps)  # [ranks, sites]
        known = sizes[~np.isnan(sizes)]
        if not len(known):
            return
        usual = self._usual.setdefault(channel.name, [])
        pooled = float(np.median(usual)) if usual else _MAD * float(np.median(known))
        scale = np.maximum(_MAD * _median(sizes[:, None])[0, 0] if len(ranks) > 3 else pooled, max(pooled, _FLOOR))
        with np.errstate(invalid="ignore"):
            out = (sizes > _DEVIATIONS * scale) & (sizes > _LEAST)
        if not out.any():
            usual.append(_MAD * float(np.median(known)))
            del usual[:-64]
            return
        # Of two ranks neither is the majority: the one that moved is it.
        strength = np.where(out, (np.abs(np.nan_to_num(own)) if len(ranks) == 2 else sizes) / scale, 0.0)
        place = int(np.argmax(strength.max(axis=1)))
        site = int(np.flatnonzero(out[place])[0])
        self._tell(channel, sites[site], step, ranks, place, float(jumps[place, site]))

    def _tell(self, channel: Channel, site: SiteInfo, step: int, ranks: list[int], place: int, jump: float) -> None:
        rank = ranks[place]
        self._num_told[rank] += 1
        if self._num_told[rank] > _EVENTS_PER_RANK:
            return
        ratio = float(np.exp2(np.clip(jump, -500, 500)))
        change = f"its {channel.name} changed {ratio:.3g} times as much as theirs"
        text = f"rank {rank} left the other {len(ranks) - 1} at {site.name}: {change}"
        where: dict[str, Any] = {"site": site.name, "rank": rank, "channel": channel.name}
        self.events.append({"kind": "rank_differs", "step": step, **where, "ratio": ratio, "text": text})

    # The first bad value

    def _find_bad(
        self, channels: list[Channel], merger: Merger, sites: list[SiteInfo], steps: Array, start: int
    ) -> None:
        """An input goes before a gradient of the same step: the mean of all ranks spreads a bad gradient to all."""
        found: list[tuple[int, int, int, int]] = []  # row, pass, site, rank
        for number, channel in enumerate(channels):
            for rank, counts in _gather(merger, channel, sites, start, len(steps)).items():
                bad = np.argwhere(np.nan_to_num(counts, nan=0.0) > 0)
                if len(bad):
                    found.append((int(bad[0][0]), number, int(bad[0][1]), rank))
        if not found:
            return
        self._is_bad = True
        row, number, site, rank = min(found)
        others = sorted({r for at, _, _, r in found if at == row and r != rank})
        step, name = int(steps[row]), sites[site].name
        text = f"the first value that is not finite came on rank {rank}, in the {channels[number].name[:-4]} of {name}"
        where: dict[str, Any] = {"site": name, "rank": rank, "channel": channels[number].name, "also": others}
        self.events.append({"kind": "rank_nonfinite", "step": step, **where, "text": text})


def _gather(merger: Merger, channel: Channel, sites: list[SiteInfo], start: int, rows: int) -> dict[int, Floats]:
    """Per rank its own values [rows, sites], NaN where absent."""
    found = {}
    for rank, values in merger.norms(channel, sites, start, start + rows):
        values[is_absent(values)] = np.nan
        found[rank] = values
    return found


def _known(rows: Array) -> Floats:
    """The last value of each site that is one; 0 where there is none."""
    seen = ~np.isnan(rows)
    place = len(rows) - 1 - np.argmax(seen[::-1], axis=0)
    last: Floats = np.where(seen.any(axis=0), rows[place, np.arange(rows.shape[1])], 0.0)
    return last


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
