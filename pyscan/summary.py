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
from pyscan.batching import BATCH_CELLS, batches
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
    num_steps, done = len(run.steps), len(sites)
    for batch in batches(sites, lambda site: site.num_blocks * num_steps, BATCH_CELLS):
        channels = {name: _channel(run, name, batch, row, blocks, buckets) for name in norm_channels(run)}
        for i, site in enumerate(batch):
            parts = {name: cells[i] for name, cells in channels.items()}
            records += _records(site.name, scores.get(site.name), parts, blocks)
        done += len(batch)
        tick(done, 2 * len(sites))
    return records


def _records(
    name: str, sps: NDArray[np.float64] | None, channels: dict[str, list[ChannelSummary]], blocks: bool
) -> list[CellSummary]:
    count = len(next(iter(channels.values()), []))
    scores = np.full(count, np.nan) if sps is None else sps if blocks else [float(analysis.mean_over_steps(sps))]
    return [
        CellSummary(name, j if blocks else None, float(scores[j]), {c: cells[j] for c, cells in channels.items()})
        for j in range(count)
    ]


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


def _channel(
    run: Run, channel: str, sites: list[SiteInfo], row: int, blocks: bool, buckets: int
) -> list[list[ChannelSummary]]:
    """For each site a summary of the whole, or one per block; computed for all cells of the sites at once."""
    read = [run.get(channel, site.name, blocks=True) for site in sites]
    sizes = [values.shape[1] for values in read]
    norms = np.concatenate(read if blocks else [combine(values, "sumsq", axis=1)[:, None] for values in read], axis=1)
    dead = analysis.dead(np.concatenate(read, axis=1))
    num_dead = dead.astype(int) if blocks else [part.sum() for part in np.split(dead, np.cumsum(sizes)[:-1])]
    drift, past, gone = analysis.drift(norms).ratio, history(norms, buckets), is_absent(norms[row])
    cells = [
        ChannelSummary(None if gone[j] else float(norms[row, j]), float(drift[j]), past[:, j], int(num_dead[j]))
        for j in range(norms.shape[1])
    ]
    ends = np.cumsum(sizes if blocks else [1] * len(sites)).tolist()
    return [cells[start:end] for start, end in zip([0, *ends], ends, strict=False)]
