"""The files of all ranks of a corpus scan as one Run: their rows are parts of one list, put in the order of sequences.

It receives one FileRun per rank, as ranks.py does; no row is a sum over ranks here, so every cell is handed on as its
rank stored it. A rank without a file leaves its sequences out, and an event says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from pyscan import codecs
from pyscan.codecs import Array, Floats
from pyscan.errors import ScanError
from pyscan.payloads import Event
from pyscan.ranks import RankedRun
from pyscan.schema import Channel, SiteInfo


class ListedRun(RankedRun):
    """A run over many files, each of which has some of the rows."""

    def _arrange(self) -> None:
        """For every row the rank that has it and its place there; of a sequence written twice the last one."""
        found: dict[int, tuple[int, int]] = {}
        for rank, fact in self.ranks.facts.items():
            found |= {step: (rank, place) for place, step in enumerate(fact.steps.tolist())}
        pairs = np.array([found[step] for step in sorted(found)], np.int64).reshape(-1, 2)
        self._row_ranks, places = pairs[:, 0], pairs[:, 1]
        self._places = {rank: places[self._row_ranks == rank] for rank in self.ranks}
        self._worlds = np.full(len(pairs), self.world)
        self._steps = None

    def _joined_steps(self) -> Array:
        steps = np.empty(len(self._row_ranks), self.ranks[self._lead.rank].steps.dtype)
        for rank, places in self._places.items():
            steps[self._row_ranks == rank] = self.ranks[rank].steps[places]
        return steps

    def _cells(self, channel: Channel, site: SiteInfo, start: int, stop: int) -> Floats:
        out = np.full((stop - start, site.num_cells(channel.per)), codecs.ABSENT, np.float32)
        for rows, values in self._parts_of(channel, site, start, stop, codes=False):
            out[rows, : values.shape[1]] = values
        return out

    def _codes(self, channel: Channel, site: SiteInfo, start: int, stop: int) -> Array:
        out = codecs.absent_codes((stop - start, site.num_cells(channel.per)), channel.codec)
        for rows, values in self._parts_of(channel, site, start, stop, codes=True):
            out[rows, : values.shape[1]] = values
        return out

    def _parts_of(
        self, channel: Channel, site: SiteInfo, start: int, stop: int, *, codes: bool
    ) -> Iterator[tuple[Array, Array]]:
        """Per rank the rows of [start, stop) it has, counted from start, and their cells."""
        for rank, places in self._places.items():
            rows = np.flatnonzero(self._row_ranks == rank)
            inside = (rows >= start) & (rows < stop)
            run = self.ranks[rank]
            parts = {part.name: part for part in run.sites}
            if not inside.any() or site.name not in parts or channel.name not in {c.name for c in run.channels}:
                continue
            wanted = places[inside]
            low, high = int(wanted.min()), int(wanted.max()) + 1
            read = run._codes if codes else run._cells
            yield rows[inside] - start, read(run.channel(channel.name), parts[site.name], low, high)[wanted - low]

    def _rank_events(self) -> Iterator[Event]:
        """A rank that has fewer rows is nothing to tell: the last sequences belong to somebody."""
        return (event for event in super()._rank_events() if event["kind"] == "rank_missing")

    def merged(self, start: int = 0) -> Iterator[tuple[int, int, list[Floats]]]:
        for at, stop in self._windows(start):
            yield at, stop, [self._all_cells(channel, at, stop).T for channel in self.channels]

    def _compare(self) -> None:
        """No two ranks have the same row."""

    def tokens(self, step: int) -> dict[str, Any]:
        """The tokens of one sequence, from the rank that has it."""
        for run in self.ranks.values():
            if step in run.token_steps():
                return run.tokens(step)
        raise ScanError(f"no tokens are stored for sequence {step}; `pyscan scan --tokens` writes them")
