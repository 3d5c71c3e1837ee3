"""Cells of many ranks to those of the whole model, rank after rank, in memory that does not grow with their number.

`Merger` receives the facts of the ranks and which row of each is which step; it hands on merged values for some sites
of some channels and some steps. Each rank's file is read once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from pyscan import codecs
from pyscan.codecs import Array, Floats
from pyscan.rank_files import RankFacts, RankFiles, Stretch
from pyscan.rank_table import Key, Places, Table, as_slice, group_key
from pyscan.schema import Channel, Layout, Merge, Mesh, SiteInfo
from pyscan.timeline import gather

if TYPE_CHECKING:
    from pyscan.ranks import RankedRun

ABSENT_PLACE = -1
_NUM_PLANS = 8192  # kept at a time; ranks with the same part of the model share theirs


class Piece(NamedTuple):
    """Cells of one rank that follow one rule: their places in what is read of it, and among the cells asked for."""

    rule: Merge | None
    local: Places
    whole: Places


class Plan(NamedTuple):
    """What to read of a rank's channel, [first, stop), and where it goes."""

    first: int
    stop: int
    pieces: list[Piece]
    sites: Places  # those of the sites asked for that the rank has a part of
    spans: Array  # the cells of each in what is read, [first, stop)


class Read(NamedTuple):
    """Rows of one rank under one schema: which of the rows asked for, and where they stand in the file."""

    rank: int
    stretch: Stretch
    rows: Places
    places: Array


class Witness(Protocol):
    """Someone who looks at what each rank has before it is merged."""

    def wants(self, channel: Channel) -> bool: ...

    def see(self, channel: Channel, rank: int, rows: Places, sites: Places, values: Floats) -> None:
        """A rank's own values of some of the sites in some of the rows, [sites, rows], its cells of a site combined."""


class Merger:
    """`places[rank]` is the row of every common step in the rank's file, or ABSENT_PLACE where it had no part in it."""

    def __init__(self, files: RankFiles, places: dict[int, Array], block: int, missing: dict[int, Array]) -> None:
        self._files = files
        self._places = places
        self._block = block
        self._missing = missing  # ranks without a file -> the rows they should have
        self._plans: dict[tuple[int, str, tuple[str, ...]], tuple[Layout, Plan]] = {}

    def merge(
        self,
        channels: Sequence[Channel],
        sites: Sequence[SiteInfo],
        start: int,
        stop: int,
        witness: Witness | None = None,
    ) -> list[Table]:
        """Per channel the cells of these sites in the rows [start, stop)."""
        reads = list(self._reads(start, stop))
        tables = [Table(channel, sites, stop - start) for channel in channels]
        for table in tables:
            plans = ((read, self._plan(read, table)) for read in reads)
            table.expect(group_key(read.stretch.mesh, piece.rule) for read, plan in plans for piece in plan.pieces)
        for read in reads:
            for table in tables:
                plan = self._plan(read, table)
                if not plan.pieces:
                    continue
                values = self._values(read, table.channel, plan)
                if witness is not None and witness.wants(table.channel):
                    own = _combined(values, plan.spans, table.channel.op)
                    witness.see(table.channel, read.rank, read.rows, plan.sites, own)
                for piece in plan.pieces:
                    key = group_key(read.stretch.mesh, piece.rule)
                    incomplete = self._incomplete(piece.rule, key, start, stop)
                    table.add(key, read.rank, (piece.whole, read.rows), values[piece.local], incomplete)
        return tables

    def _reads(self, start: int, stop: int) -> Iterator[Read]:
        for rank, places in self._places.items():
            wanted = places[start:stop]
            for stretch in self._files.facts[rank].stretches:
                rows = np.flatnonzero((wanted >= stretch.start) & (wanted < stretch.stop))
                if len(rows):
                    yield Read(rank, stretch, as_slice(rows), wanted[rows])

    def _plan(self, read: Read, table: Table) -> Plan:
        layout, channel = read.stretch.layout, table.channel
        known = id(layout), channel.name, table.names
        if known not in self._plans:
            if len(self._plans) > _NUM_PLANS:
                self._plans.clear()
            self._plans[known] = layout, self._make_plan(layout, table)  # keeps the layout, and so its id
        return self._plans[known][1]

    def _make_plan(self, layout: Layout, table: Table) -> Plan:
        channel = table.channel
        number = layout.channel_index.get(channel.name)
        if number is None or layout.schema.channels[number].per != channel.per:
            return Plan(0, 0, [], slice(0), np.zeros((0, 2), np.int64))
        here = [name for name in table.names if name in layout.site_index]
        spans = [layout.cells(number, layout.site_index[name]) for name in here]
        first, stop = min((low for low, _ in spans), default=0), max((high for _, high in spans), default=0)
        found: dict[tuple[str, ...] | None, list[tuple[Merge | None, Array, Array]]] = {}
        for name, (low, high) in zip(here, spans, strict=True):
            site = layout.schema.sites[layout.site_index[name]]
            rule = site.merge.get(channel.name)
            whole = table.starts[name] + first_cell(site, channel.per, self._block) + np.arange(high - low)
            local = np.arange(low - first, high - first)
            found.setdefault(None if rule is None else rule.over, []).append((rule, local, whole))
        pieces = [
            Piece(parts[0][0], *(as_slice(np.concatenate([part[i] for part in parts])) for i in (1, 2)))
            for parts in found.values()
            if any(len(part[1]) for part in parts)
        ]
        places = {name: place for place, name in enumerate(table.names)}
        order = as_slice(np.array([places[name] for name in here], np.int64))
        return Plan(first, stop, pieces, order, np.array(spans, np.int64).reshape(-1, 2) - first)

    def _values(self, read: Read, channel: Channel, plan: Plan) -> Floats:
        """What the rank has stored, decoded, [cells, rows]."""
        run = self._files[read.rank]
        low, high = int(read.places.min()), int(read.places.max()) + 1
        number = read.stretch.layout.channel_index[channel.name]
        codes, lost = gather(run.timeline.overlapping(low, high), number, (plan.first, plan.stop), low, high)
        values = codecs.decode(codes, read.stretch.layout.schema.channels[number].codec)
        if lost is not None:
            values[lost] = codecs.ABSENT
        places = as_slice(read.places - low)
        return values if isinstance(places, slice) else values[:, places]

    def _incomplete(self, rule: Merge | None, key: Key, start: int, stop: int) -> Array:
        """Rows in which a rank without a file holds, or may hold, a part of what a group combines."""
        rows = np.zeros(stop - start, bool)
        for rank, due in self._missing.items():
            mesh = self._mesh_of(rank)
            if mesh is None or group_key(mesh, rule) == key:
                rows |= due[start:stop]
        return rows

    def _mesh_of(self, rank: int) -> Mesh | None:
        """Where a rank without a file stands: by its number, row-major in the mesh of the others."""
        facts: RankFacts = next(iter(self._files.facts.values()))
        mesh = facts.last.mesh
        if mesh is None or rank >= np.prod(mesh.shape, dtype=float):
            return None
        return replace(mesh, coords=tuple(int(c) for c in np.unravel_index(rank, mesh.shape)))


def _combined(values: Floats, spans: Array, op: str) -> Floats:
    """One value per site of its cells, [sites, rows]."""
    if (spans[:, 1] - spans[:, 0] == 1).all():
        return values[as_slice(spans[:, 0])]
    return np.stack([codecs.combine(values[low:high], op, axis=0) for low, high in spans])


def first_cell(site: SiteInfo, per: str, block: int) -> int:
    """The first cell of a rank's part of a site, counted over the whole site."""
    if per == "site" or not block or site.num_cells(per) == 0:
        return 0
    return site.offset[1 if per == "block" else 0] // block


class Replicas:
    """Which copy of a cell each rank holds a part of: the groups of a rule, numbered by their lowest rank."""

    def __init__(self, run: RankedRun) -> None:
        self._run = run
        self._numbers: dict[tuple[str, ...], dict[tuple[int, ...], int]] = {}

    def of(self, rank: int, channel: Channel, names: list[str]) -> list[tuple[int, int]]:
        """Per site the first block of the rank's part, and the number of the copy it belongs to."""
        stretch = self._run.ranks.facts[rank].last
        sites = {site.name: site for site in stretch.layout.schema.sites}
        return [self._one(stretch.mesh, channel, sites[name]) for name in names]

    def _one(self, mesh: Mesh | None, channel: Channel, site: SiteInfo) -> tuple[int, int]:
        rule = site.merge.get(channel.name)
        over, rest = group_key(mesh, rule)
        numbers = self._numbers.setdefault(over, {})
        if rest not in numbers and rule is not None:
            for fact in self._run.ranks.facts.values():
                numbers.setdefault(group_key(fact.last.mesh, rule)[1], len(numbers))
        return first_cell(site, channel.per, self._run.block), numbers.get(rest, 0)
