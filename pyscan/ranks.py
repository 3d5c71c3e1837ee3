"""The files of all ranks of a run as one Run, merged when they are read.

It receives the name the files share and hands on the steps that all ranks have. A cell is merged in float64 from the
decoded values of the ranks that hold a part of it; where such a rank is missing, the cell is absent. Copies must agree:
where they do not, and where one rank goes another way than the others, there is an event.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from pyscan import codecs
from pyscan.between import Between
from pyscan.codecs import Array, Floats
from pyscan.errors import ScanFormatError
from pyscan.format import ROW_HAS_LOSS, ROW_HAS_TOKENS, ROWS_PER_FRAME
from pyscan.payloads import Event
from pyscan.rank_files import OPEN_FILES, RankFacts, RankFiles, find_ranks, rank_path
from pyscan.rank_merge import ABSENT_PLACE, Merger, first_cell
from pyscan.run import Run
from pyscan.schema import Channel, Schema, SiteInfo

__all__ = ["RankedRun", "find_ranks", "open_ranks", "rank_path"]

# Events that are true of the moment while ranks still write, and of the run when they have ended.
PASSING_EVENTS = ("rank_missing", "rank_shorter", "rank_late")
# Cells that are merged at once when sites are read one after the other, or there are more ranks than open files.
_AHEAD_CELLS = 1 << 22
# Norms of all ranks that are held at once to be compared, per channel; 4 bytes each.
_COMPARED_CELLS = 1 << 25


class RankedRun(Run):
    """A run over many files. Steps are those of the lowest rank; flags are joined, losses averaged, tokens added."""

    version = 2

    def __init__(self, path: str, ranks: RankFiles) -> None:
        self.path = path
        self.ranks = ranks
        self._differ: dict[tuple[str, str], Event] = {}
        self._between = Between()
        self._compared = 0
        self._describe()

    def _describe(self) -> None:
        """What follows from the facts of all ranks."""
        self._lead: RankFacts = next(iter(self.ranks.facts.values()))
        lead = self.ranks[self._lead.rank]
        self._lead_schema = lead.schema
        self.model, self.block, self.every = lead.model, lead.block, lead.every
        self.metadata, self.versions, self.rank, self.row_kind = lead.metadata, lead.versions, 0, lead.row_kind
        facts = self.ranks.facts.values()
        self.world = max(fact.last.world for fact in facts if fact.rank < self._lead.last.world)
        worlds = {stretch.world for stretch in self._lead.stretches} | {self.world}
        self.missing_ranks = tuple(rank for rank in range(max(worlds)) if rank not in self.ranks.facts)
        layouts = list({id(s.layout): s.layout for fact in facts for s in fact.stretches}.values())
        self.channels = list({c.name: c for layout in layouts for c in layout.schema.channels}.values())
        self.sites = self._whole_sites([site for layout in layouts for site in layout.schema.sites])
        self._ahead: tuple[Any, Floats] | None = None
        self._last_read: Any = None
        self._arrange()

    def _whole_sites(self, parts: list[SiteInfo]) -> list[SiteInfo]:
        """The sites as they would stand in the file of a single rank."""
        found: dict[str, SiteInfo] = {}
        for part in parts:
            known = found.get(part.name, part)
            blocks, rows = (
                max(known.num_cells(per), first_cell(part, per, self.block) + part.num_cells(per))
                for per in ("block", "row_block")
            )
            found[part.name] = replace(known, num_blocks=blocks, num_row_blocks=rows, offset=(0, 0), merge={})
        return list(found.values())

    def _arrange(self) -> None:
        """Find the steps that all ranks of their world have, and the place of each in every file."""
        lead = _last_places(self._lead.steps)
        worlds = _worlds(self._lead)
        world_of = {step: int(worlds[place]) for step, place in lead.items()}
        known: dict[Any, dict[int, int]] = {}
        places: dict[int, dict[int, int]] = {}
        for rank, fact in self.ranks.facts.items():
            same = id(fact.steps), tuple((s.start, s.stop, s.world) for s in fact.stretches)
            if same not in known:
                own = _worlds(fact)
                in_files = _last_places(fact.steps).items()
                known[same] = {step: place for step, place in in_files if own[place] == world_of.get(step)}
            places[rank] = known[same]
        # Ranks with the same rows are looked at once; the lowest of them is in the most worlds.
        first = {id(steps): rank for rank, steps in reversed(places.items())}.values()
        common = [step for step in lead if all(step in places[rank] for rank in first if rank < world_of[step])]
        self._places = _aligned(places, common, world_of)
        worlds_now = np.array([world_of[step] for step in common], np.int64)
        missing = {rank: worlds_now > rank for rank in self.missing_ranks}
        self._merger = Merger(self.ranks, self._places, self.block, missing)
        self._worlds = worlds_now
        self._steps: Array | None = None

    @property
    def _num_bytes(self) -> int:
        return sum(fact.num_bytes for fact in self.ranks.facts.values())

    @property
    def schema(self) -> Schema:
        """What a file of a single rank would say."""
        lead = self._lead_schema
        return replace(lead, sites=tuple(self.sites), channels=tuple(self.channels), rank=0, world=1, mesh=None)

    @property
    def steps(self) -> Array:
        if self._steps is None:
            self._steps = self._joined_steps()
        return self._steps

    def _joined_steps(self) -> Array:
        """The rows of the lowest rank with the flags of all, the mean of their losses and the sum of their tokens."""
        steps = self.ranks[self._lead.rank].steps[self._places[self._lead.rank]]
        losses, tokens, count = np.zeros(len(steps)), np.zeros(len(steps), np.uint64), np.zeros(len(steps))
        done: dict[tuple[int, ...], tuple[Array, Array]] = {}  # rows of each part of the batch whose figures are known
        for rank, places in self._places.items():
            fact = self.ranks.facts[rank]
            here = places != ABSENT_PLACE
            if not here.any():
                continue
            figures = fact.figures[places]
            steps["flags"][here] |= figures["flags"][here]
            has_loss, has_tokens = done.setdefault(
                _batch_part(fact), (np.zeros(len(here), bool), np.zeros(len(here), bool))
            )
            new_loss = here & ~has_loss & (figures["flags"] & ROW_HAS_LOSS != 0)
            new_tokens = here & ~has_tokens & (figures["flags"] & ROW_HAS_TOKENS != 0)
            losses[new_loss] += figures["loss"][new_loss]
            count[new_loss] += 1
            tokens[new_tokens] += figures["tokens"][new_tokens]
            has_loss |= new_loss
            has_tokens |= new_tokens
        with np.errstate(invalid="ignore"):
            steps["loss"] = losses / count
        steps["tokens"] = tokens
        return steps

    @property
    def events(self) -> list[Event]:
        """Events about the ranks, then those of all ranks by step, with their `rank`. Ranks are compared here."""
        self._compare()
        return [*self._rank_events(), *self._differ.values(), *self._between.events, *self._written()]

    @property
    def recorded_events(self) -> list[Event]:
        """The events that need no values: which ranks are missing, and what was written."""
        return [*self._rank_events(), *self._written()]

    def _written(self) -> list[Event]:
        written = [{**event, "rank": rank} for rank, run in self.ranks.items() for event in run.events]
        return sorted(written, key=lambda event: int(event["step"]))

    def _rank_events(self) -> Iterator[Event]:
        for rank in self.missing_ranks:
            reason = self.ranks.unreadable.get(rank, "no file")
            text = f"rank {rank} of {self.world} is missing ({reason}): cells it has a part in are absent"
            yield {"kind": "rank_missing", "step": 0, "site": None, "rank": rank, "reason": reason, "text": text}
        facts = [fact for rank, fact in self.ranks.facts.items() if rank < self._lead.last.world]
        ends = {fact.rank: int(fact.steps[-1]) if len(fact.steps) else 0 for fact in facts}
        for rank, end in ends.items():
            if end < max(ends.values()):
                yield {"kind": "rank_shorter", "step": end, "site": None, "rank": rank, "longest": max(ends.values())}
        begins = {fact.rank: int(fact.steps[0]) for fact in facts if len(fact.steps) and len(fact.stretches) == 1}
        for rank, begin in begins.items():
            if begin > min(begins.values()) and len(self._lead.stretches) == 1:
                yield {"kind": "rank_late", "step": begin, "site": None, "rank": rank, "first": min(begins.values())}
        yield from self._world_events()

    def _world_events(self) -> Iterator[Event]:
        for place in np.flatnonzero(np.diff(self._worlds)):
            before, now = (int(world) for world in self._worlds[place : place + 2])
            step = int(self.steps["step"][place + 1])
            text = f"the run goes on with {now} ranks, before there were {before}"
            yield {"kind": "world_changed", "step": step, "site": None, "world": now, "before": before, "text": text}

    @property
    def damage(self) -> list[tuple[int, str]]:
        found = [(0, f"rank {rank}: {self.ranks.unreadable.get(rank, 'no file')}") for rank in self.missing_ranks]
        return found + [
            (offset, f"rank {rank}: {reason}") for rank, run in self.ranks.items() for offset, reason in run.damage
        ]

    def _cells(self, channel: Channel, site: SiteInfo, start: int, stop: int) -> Floats:
        place = self._site_place(site)
        last, self._last_read = self._last_read, (channel.name, start, stop, place)
        if self._ahead is not None and self._ahead[0][:3] == (channel.name, start, stop):
            firsts: dict[int, slice] = self._ahead[0][3]
            if place in firsts:
                return self._ahead[1][:, firsts[place]]
        in_order = last == (channel.name, start, stop, place - 1)
        count = self._num_ahead(channel, place, stop - start) if in_order or len(self.ranks) > OPEN_FILES else 1
        sites = self.sites[place : place + count]
        values = self._merge([channel], sites, start, stop)[0].T
        if count == 1:
            return values
        ends = np.cumsum([s.num_cells(channel.per) for s in sites]).tolist()
        spans = {
            place + i: slice(end - s.num_cells(channel.per), end)
            for i, (s, end) in enumerate(zip(sites, ends, strict=True))
        }
        self._ahead = (channel.name, start, stop, spans), values
        return values[:, spans[place]]

    def _num_ahead(self, channel: Channel, place: int, rows: int) -> int:
        """How many sites from `place` on fit what is read at once."""
        cells = np.cumsum([site.num_cells(channel.per) * rows for site in self.sites[place:]])
        return max(int(np.searchsorted(cells, _AHEAD_CELLS, side="right")), 1)

    def _site_place(self, site: SiteInfo) -> int:
        if self._site_places is None or self._site_places[0] is not self.sites:
            self._site_places = self.sites, {s.name: place for place, s in enumerate(self.sites)}
        return self._site_places[1][site.name]

    _site_places: tuple[list[SiteInfo], dict[str, int]] | None = None

    def _merge(
        self, channels: list[Channel], sites: list[SiteInfo], start: int, stop: int, between: Between | None = None
    ) -> list[Floats]:
        """Merged cells, [cells, rows] per channel; where copies differ is noted."""
        tables = self._merger.merge(channels, sites, start, stop, between)
        for table in tables:
            ends = np.cumsum([site.num_cells(table.channel.per) for site in sites])
            for found in table.differences:
                at = int(np.searchsorted(ends, found.cell, side="right"))
                cell = found.cell - int(ends[at]) + sites[at].num_cells(table.channel.per)
                self._note_difference(table.channel, sites[at], start + found.row, cell, found.ranks)
        return [table.result for table in tables]

    def _note_difference(self, channel: Channel, site: SiteInfo, row: int, cell: int, ranks: tuple[int, int]) -> None:
        step = int(self.steps["step"][row])
        known = self._differ.get((site.name, channel.name))
        if known is not None and known["step"] <= step:
            return
        where = {"site": site.name, "channel": channel.name, "cell": cell, "ranks": list(ranks)}
        text = f"ranks {ranks[0]} and {ranks[1]} should hold the same {channel.name} of {site.name} and do not"
        self._differ[site.name, channel.name] = {"kind": "replicas_differ", "step": step, **where, "text": text}

    def _codes(self, channel: Channel, site: SiteInfo, start: int, stop: int) -> Array:
        return codecs.encode(self._cells(channel, site, start, stop), channel.codec)

    def merged(self, start: int = 0) -> Iterator[tuple[int, int, list[Floats]]]:
        """From row `start` on, in windows [from, to) that fit memory, all cells of each channel, [cells, rows].

        Every file is read once per window, and the ranks are compared on the way.
        """
        for at, stop in self._windows(start):
            for channel in self.channels:
                self._refuse_monster(stop - at, sum(site.num_cells(channel.per) for site in self.sites))
            between = self._between if at == self._compared else None
            if between is not None:
                between.begin(self.sites, list(self.ranks), stop - at)
            values = self._merge(self.channels, self.sites, at, stop, between)
            if between is not None:
                between.judge(self.steps["step"][at:stop])
                self._compared = stop
            yield at, stop, values

    def _windows(self, start: int) -> Iterator[tuple[int, int]]:
        """Rows from `start` on in whole frames, or parts of one where there are very many ranks."""
        cells = sum(site.num_cells(channel.per) for site in self.sites for channel in self.channels)
        fits = min(_AHEAD_CELLS // max(cells, 1), _COMPARED_CELLS // max(len(self.sites) * len(self.ranks), 1))
        size = fits // ROWS_PER_FRAME * ROWS_PER_FRAME or 1 << max(fits, 1).bit_length() - 1
        total = len(self.steps)
        return ((at, min(at + size, total)) for at in range(start, total, size))

    def _compare(self) -> None:
        """Compare the ranks in the rows not compared yet."""
        for _ in self.merged(self._compared):
            pass

    def token_steps(self) -> list[int]:
        return self.ranks[self._lead.rank].token_steps()

    def tokens(self, step: int) -> dict[str, Any]:
        """The tokens of the lowest rank; each rank has tokens of its own: `run.ranks[r].tokens(step)`."""
        return self.ranks[self._lead.rank].tokens(step)

    def refresh(self) -> int:
        before = self.steps[["step", "time_ns"]]
        if not self.ranks.refresh():
            return 0
        self._describe()
        now = self.steps[["step", "time_ns"]]
        count = min(len(before), len(now))
        same = int(np.argmin(np.append(before[:count] == now[:count], False)))
        if same < self._compared:  # rows were voided: what was said of them is void as well
            self._compared, self._differ, self._between = 0, {}, Between()
        return len(now) - same

    def close(self) -> None:
        self.ranks.close()


def open_ranks(path: str) -> RankedRun:
    files = RankFiles(path)
    if not files:
        raise ScanFormatError(f"no rank of {path} can be read: {files.unreadable}")
    if files[next(iter(files))].row_kind == "sequence":
        from pyscan.rank_lists import ListedRun

        return ListedRun(path, files)
    return RankedRun(path, files)


def _last_places(steps: Array) -> dict[int, int]:
    """The place of every step; of a step written twice the later one."""
    return {step: place for place, step in enumerate(steps.tolist())}


def _worlds(fact: RankFacts) -> Array:
    """The number of ranks at every row."""
    worlds = np.zeros(len(fact.steps), np.int64)
    for stretch in fact.stretches:
        worlds[stretch.start : stretch.stop] = stretch.world
    return worlds


def _aligned(places: dict[int, dict[int, int]], common: list[int], world_of: dict[int, int]) -> dict[int, Array]:
    """Per rank the place of every common step; ranks with the same rows share one array."""
    worlds = np.array([world_of[step] for step in common], np.int64)
    known: dict[int, Array] = {}
    aligned = {}
    for rank, found in places.items():
        if id(found) not in known:
            known[id(found)] = np.array([found.get(step, ABSENT_PLACE) for step in common], np.int64)
        rows = known[id(found)]
        aligned[rank] = rows if (worlds > rank).all() else np.where(worlds > rank, rows, ABSENT_PLACE)
    return aligned


def _batch_part(fact: RankFacts) -> tuple[int, ...]:
    """Which part of the batch a rank sees; ranks whose mesh does not say it see the same."""
    mesh = fact.last.mesh
    return () if mesh is None else tuple(c for dim, c in zip(mesh.dims, mesh.coords, strict=True) if dim in mesh.data)
