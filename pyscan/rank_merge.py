"""Cells of many ranks to those of the whole model, rank after rank, in memory that does not grow with their number.

`Merger` receives the facts of the ranks and which row of each is which step; it hands on merged values for some sites
of a channel and some steps. Ranks that are copies of each other are merged one after the other and compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pyscan import codecs
from pyscan.codecs import Array, Floats
from pyscan.rank_files import RankFacts, RankFiles, Stretch
from pyscan.schema import Channel, Layout, Merge, Mesh, SiteInfo
from pyscan.timeline import gather

if TYPE_CHECKING:
    from pyscan.ranks import RankedRun

# Replicas may differ by the rounding of one code, 0.27 %; more is a difference.
_SAME = 0.003
ABSENT_PLACE = -1

Key = tuple[tuple[str, ...], tuple[int, ...]]  # dimensions combined over, and coordinates in the others


class Piece(NamedTuple):
    """Cells of one rank that follow one rule: their places in the rank's channel, and among the cells asked for."""

    rule: Merge | None
    local: Array
    whole: Array


class Plan(NamedTuple):
    """What to read of a rank's channel, [first, stop), and where it goes."""

    first: int
    stop: int
    pieces: list[Piece]


class Read(NamedTuple):
    """Rows of one rank under one schema: which of the rows asked for, and where they stand in the file."""

    rank: int
    stretch: Stretch
    rows: Array
    places: Array


@dataclass
class Difference:
    """Two groups of ranks that should hold the same and do not, first in this cell."""

    row: int
    cell: int
    ranks: tuple[int, int]


class Merger:
    """`places[rank]` is the row of every common step in the rank's file, or ABSENT_PLACE where it had no part in it."""

    def __init__(self, files: RankFiles, places: dict[int, Array], block: int, missing: dict[int, Array]) -> None:
        self._files = files
        self._places = places
        self._block = block
        self._missing = missing  # ranks without a file -> the rows they should have
        self._plans: dict[tuple[int, str, tuple[str, ...]], tuple[Layout, Plan]] = {}

    def merge(
        self, channel: Channel, sites: Sequence[SiteInfo], start: int, stop: int
    ) -> tuple[Floats, list[Difference]]:
        """The cells of these sites in the rows [start, stop), [rows, cells], and where copies differ."""
        starts = np.concatenate([[0], np.cumsum([site.num_cells(channel.per) for site in sites])])
        names = {site.name: int(first) for site, first in zip(sites, starts, strict=False)}
        reads = list(self._reads(start, stop))
        waiting = Counter(key for read in reads for key in self._keys(read, channel, names))
        result = np.full((stop - start, int(starts[-1])), codecs.ABSENT, np.float32)
        groups: dict[Key, _Group] = {}
        taken: dict[tuple[str, ...], int] = {}
        differences: list[Difference] = []
        for read in reads:
            plan = self._plan(read.stretch.layout, channel, names)
            values = self._values(read, channel, plan) if plan.pieces else None
            for piece in plan.pieces:
                key = _key(read.stretch.mesh, piece.rule)
                if key not in groups:
                    groups[key] = _Group(channel.op, result.shape, read.rank, piece.rule)
                assert values is not None
                groups[key].add(values[:, piece.local - plan.first], read.rows, piece.whole)
            for key in self._keys(read, channel, names):
                waiting[key] -= 1
                if not waiting[key]:
                    done = groups.pop(key)
                    differences += self._take(done, key, result, taken, start)
        return result, differences

    def norms(self, channel: Channel, sites: Sequence[SiteInfo], start: int, stop: int) -> Iterator[tuple[int, Floats]]:
        """Per rank its own values [rows, sites], its cells of a site combined; absent where it has none."""
        names = {site.name: place for place, site in enumerate(sites)}
        found: dict[int, Floats] = {}
        for read in self._reads(start, stop):
            out = found.get(read.rank)
            if out is None:
                if found:
                    yield found.popitem()
                out = found[read.rank] = np.full((stop - start, len(sites)), codecs.ABSENT, np.float32)
            layout = read.stretch.layout
            plan = self._plan(layout, channel, names)
            values = self._values(read, channel, plan) if plan.pieces else out
            here = [name for name in names if name in layout.site_index] if plan.pieces else []
            spans = [layout.cells(layout.channel_index[channel.name], layout.site_index[name]) for name in here]
            if all(high - low == 1 for low, high in spans):
                columns = np.array([names[name] for name in here], np.int64)
                out[np.ix_(read.rows, columns)] = values[:, [low - plan.first for low, _ in spans]]
                continue
            for name, (low, high) in zip(here, spans, strict=True):
                cells = values[:, low - plan.first : high - plan.first]
                out[read.rows, names[name]] = codecs.combine(cells, channel.op, axis=1)
        yield from found.items()

    def _reads(self, start: int, stop: int) -> Iterator[Read]:
        for rank, places in self._places.items():
            wanted = places[start:stop]
            for stretch in self._files.facts[rank].stretches:
                rows = np.flatnonzero((wanted >= stretch.start) & (wanted < stretch.stop))
                if len(rows):
                    yield Read(rank, stretch, rows, wanted[rows])

    def _keys(self, read: Read, channel: Channel, names: dict[str, int]) -> set[Key]:
        plan = self._plan(read.stretch.layout, channel, names)
        return {_key(read.stretch.mesh, piece.rule) for piece in plan.pieces}

    def _plan(self, layout: Layout, channel: Channel, names: dict[str, int]) -> Plan:
        known = id(layout), channel.name, tuple(names)
        if known not in self._plans:
            if len(self._plans) > 64:
                self._plans.clear()
            self._plans[known] = layout, self._make_plan(layout, channel, names)  # keeps the layout, and so its id
        return self._plans[known][1]

    def _make_plan(self, layout: Layout, channel: Channel, names: dict[str, int]) -> Plan:
        number = layout.channel_index.get(channel.name)
        if number is None or layout.schema.channels[number].per != channel.per:
            return Plan(0, 0, [])
        found: dict[tuple[str, ...] | None, list[tuple[Merge | None, Array, Array]]] = {}
        for name, first in names.items():
            place = layout.site_index.get(name)
            if place is None:
                continue
            low, high = layout.cells(number, place)
            site = layout.schema.sites[place]
            rule = site.merge.get(channel.name)
            whole = first + first_cell(site, channel.per, self._block) + np.arange(high - low)
            found.setdefault(None if rule is None else rule.over, []).append((rule, np.arange(low, high), whole))
        pieces = [
            Piece(parts[0][0], np.concatenate([p[1] for p in parts]), np.concatenate([p[2] for p in parts]))
            for parts in found.values()
        ]
        cells = np.concatenate([piece.local for piece in pieces]) if pieces else np.zeros(0, np.int64)
        return Plan(int(cells.min()), int(cells.max()) + 1, pieces) if len(cells) else Plan(0, 0, [])

    def _values(self, read: Read, channel: Channel, plan: Plan) -> Floats:
        """What the rank has stored, decoded, [rows, cells]."""
        run = self._files[read.rank]
        low, high = int(read.places.min()), int(read.places.max()) + 1
        number = read.stretch.layout.channel_index[channel.name]
        segments = run.timeline.overlapping(low, high)
        codes, lost = gather(segments, number, (plan.first, plan.stop), low, high)
        values = codecs.decode(codes, read.stretch.layout.schema.channels[number].codec)
        if lost is not None:
            values[lost] = codecs.ABSENT
        picked: Floats = values.T[read.places - low]
        return picked

    def _take(
        self, group: _Group, key: Key, result: Floats, taken: dict[tuple[str, ...], int], start: int
    ) -> Iterator[Difference]:
        """Put a finished group into the result where nothing is yet, and compare it where something is."""
        values = group.values()
        values[self._incomplete(group, key, start, len(values))] = codecs.ABSENT
        cells = group.cells
        before, now = result[:, cells], values[:, cells]
        if key[0] in taken:
            where = _different(before, now)
            if where is not None:
                yield Difference(start + where[0], int(cells[where[1]]), (taken[key[0]], group.rank))
        taken.setdefault(key[0], group.rank)
        result[:, cells] = np.where(codecs.is_absent(before), now, before)

    def _incomplete(self, group: _Group, key: Key, start: int, num_rows: int) -> Array:
        """Rows in which a rank without a file holds, or may hold, a part of what the group combines."""
        rows = np.zeros(num_rows, bool)
        for rank, due in self._missing.items():
            mesh = self._mesh_of(rank)
            if mesh is None or _key(mesh, group.rule) == key:
                rows |= due[start : start + num_rows]
        return rows

    def _mesh_of(self, rank: int) -> Mesh | None:
        """Where a rank without a file stands: by its number, row-major in the mesh of the others."""
        facts: RankFacts = next(iter(self._files.facts.values()))
        mesh = facts.last.mesh
        if mesh is None or rank >= np.prod(mesh.shape, dtype=float):
            return None
        return replace(mesh, coords=tuple(int(c) for c in np.unravel_index(rank, mesh.shape)))


class _Group:
    """Ranks whose cells are combined to one set: what of them was read so far."""

    def __init__(self, op: str, shape: tuple[int, int], rank: int, rule: Merge | None) -> None:
        self.rank, self.rule = rank, rule
        self._op = op
        self._total = np.zeros(shape)
        self._seen = np.zeros(shape, bool)

    def add(self, values: Floats, rows: Array, cells: Array) -> None:
        place = _block_of(rows), _block_of(cells)
        if not any(isinstance(part, slice) for part in place):
            place = np.ix_(rows, cells)  # type: ignore[assignment]
        there = ~codecs.is_absent(values)
        wide = np.where(there, values, 0.0).astype(np.float64)
        combine: Callable[[Array, Array], Array] = np.maximum if self._op == "max" else np.add
        self._total[place] = combine(self._total[place], np.square(wide) if self._op == "sumsq" else wide)
        self._seen[place] |= there

    @property
    def cells(self) -> Array:
        return np.flatnonzero(self._seen.any(axis=0))

    def values(self) -> Floats:
        with np.errstate(over="ignore"):
            total = (np.sqrt(self._total) if self._op == "sumsq" else self._total).astype(np.float32)
        total[~self._seen] = codecs.ABSENT
        return total


def _block_of(places: Array) -> slice | Array:
    """Neighbouring places as a slice, which is a view where an array would be a copy."""
    if len(places) and int(places[-1]) - int(places[0]) == len(places) - 1 and (np.diff(places) == 1).all():
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


def first_cell(site: SiteInfo, per: str, block: int) -> int:
    """The first cell of a rank's part of a site, counted over the whole site."""
    if per == "site" or not block or site.num_cells(per) == 0:
        return 0
    return site.offset[1 if per == "block" else 0] // block


def _key(mesh: Mesh | None, rule: Merge | None) -> Key:
    if rule is None or mesh is None:
        return (), ()
    return rule.over, tuple(c for dim, c in zip(mesh.dims, mesh.coords, strict=True) if dim not in rule.over)


def _different(one: Floats, other: Floats) -> tuple[int, int] | None:
    """The first row and cell in which two copies differ; what one of them has not observed is no difference."""
    with np.errstate(invalid="ignore"):
        near = np.abs(one - other) <= _SAME * np.maximum(np.abs(one), np.abs(other))
    unknown = codecs.is_absent(one) | codecs.is_absent(other)
    same = near | (one == other) | unknown | (np.isnan(one) & np.isnan(other))
    if same.all():
        return None
    row, cell = np.argwhere(~same)[0]
    return int(row), int(cell)


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
        over, rest = _key(mesh, rule)
        numbers = self._numbers.setdefault(over, {})
        if rest not in numbers and rule is not None:
            for fact in self._run.ranks.facts.values():
                numbers.setdefault(_key(fact.last.mesh, rule)[1], len(numbers))
        return first_cell(site, channel.per, self._run.block), numbers.get(rest, 0)
