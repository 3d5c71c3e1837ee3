"""Gather what `pyscan show` tells about a run: one small record per site or block.

Receives an open run; reads one site at a time and hands on records whose size does not depend on the number of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pyscan import analysis
from pyscan.codecs import combine, is_absent
from pyscan.text import history

if TYPE_CHECKING:
    from pyscan.run import Run
    from pyscan.schema import SiteInfo

Tick = Callable[[int, int], None]


@dataclass(frozen=True)
class ChannelSummary:
    """One channel of a site or block over the run."""

    norm: float | None  # at the row asked for; None: absent
    drift: float  # log2(late / early), NaN where either end has no level
    history: NDArray[np.float64]  # as pyscan.text.history gives it
    num_dead: int  # blocks that are 0 or absent in every step


@dataclass(frozen=True)
class CellSummary:
    """A site (block None: all its blocks together) or one of its blocks."""

    site: str
    block: int | None
    num_blocks: int
    sps: float
    channels: dict[str, ChannelSummary]


def norm_channels(run: Run) -> list[str]:
    """Of `act` and `grad`, those that the run has per block."""
    return [channel.name for channel in run.channels if channel.name in ("act", "grad") and channel.per == "block"]


def summarize(
    run: Run,
    sites: Sequence[SiteInfo],
    *,
    row: int,
    one_step: bool = False,
    blocks: bool = False,
    scope: analysis.Scope = "layer",
    buckets: int = 24,
    tick: Tick = lambda done, total: None,
) -> list[CellSummary]:
    """A record per site, or per block: the norms of the row, and the SPS of the row or, unless one_step, its integral.

    The SPS of a site is the mean over its blocks.
    """
    scores = _scores(run, sites, row if one_step else None, scope, lambda done: tick(done, 2 * len(sites)))
    records: list[CellSummary] = []
    for done, site in enumerate(sites):
        channels = {name: _channel(run, name, site, row, blocks, buckets) for name in norm_channels(run)}
        sps = scores.get(site.name, np.full(site.num_blocks, np.nan))
        for j in range(len(sps) if blocks else 1):
            score = sps[j] if blocks else analysis.mean_over_steps(sps)
            parts = {name: part[j] for name, part in channels.items()}
            records.append(CellSummary(site.name, j if blocks else None, len(sps), float(score), parts))
        tick(len(sites) + done + 1, 2 * len(sites))
    return records


def _scores(
    run: Run, sites: Sequence[SiteInfo], row: int | None, scope: analysis.Scope, tick: Callable[[int], None]
) -> dict[str, NDArray[np.float64]]:
    """SPS [blocks] of each site: of one row, or the integral over all; empty when the run lacks a channel."""
    if len(norm_channels(run)) < 2:
        return {}
    scores = {}
    for name, sps in analysis.iter_sps(run, scope, only=[site.name for site in sites]):
        scores[name] = analysis.mean_over_steps(sps) if row is None else sps[row]
        tick(len(scores))
    return scores


def _channel(run: Run, channel: str, site: SiteInfo, row: int, blocks: bool, buckets: int) -> list[ChannelSummary]:
    values = run.get(channel, site.name, blocks=True)
    dead = analysis.dead(values)
    if not blocks:
        values, dead = combine(values, "sumsq", axis=1)[:, None], np.array([dead.sum()])
    drift = analysis.drift(values).ratio
    gone = is_absent(values[row])
    return [
        ChannelSummary(
            None if gone[j] else float(values[row, j]), float(drift[j]), history(values[:, j], buckets), int(dead[j])
        )
        for j in range(values.shape[1])
    ]
