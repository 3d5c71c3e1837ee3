"""The merged cells of some sites in one channel: parts of ranks go in, values of the whole model come out.

Ranks whose cells add up to one set form a group. A group is put into the result when its last rank was added; groups
that are copies of each other are compared, and the first place where they differ is kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from pyscan import codecs
from pyscan.codecs import Array, Floats
from pyscan.schema import Channel, Merge, Mesh, SiteInfo

# Replicas may differ by the rounding of one code, 0.27 %; more is a difference.
_SAME = 0.003

Places = slice | Array
Key = tuple[tuple[str, ...], tuple[int, ...]]  # dimensions combined over, and coordinates in the others


class Difference(NamedTuple):
    """Two groups of ranks that should hold the same and do not, first in this row and cell."""

    row: int
    cell: int
    ranks: tuple[int, int]


class Table:
    """`result` is [cells, rows], absent where nothing was added."""

    def __init__(self, channel: Channel, sites: Sequence[SiteInfo], num_rows: int) -> None:
        ends = np.cumsum([0, *(site.num_cells(channel.per) for site in sites)]).tolist()
        self.channel = channel
        self.names = tuple(site.name for site in sites)
        self.starts = dict(zip(self.names, ends, strict=False))
        self.result = np.full((ends[-1], num_rows), codecs.ABSENT, np.float32)
        self.differences: list[Difference] = []
        self._waiting: Counter[Key] = Counter()
        self._groups: dict[Key, _Group] = {}
        self._taken: dict[tuple[str, ...], int] = {}

    def expect(self, keys: Iterable[Key]) -> None:
        """The group of every part that is going to be added."""
        self._waiting.update(keys)

    def add(self, key: Key, rank: int, place: tuple[Places, Places], values: Floats, incomplete: Array) -> None:
        """A rank's part of a group, and in which rows a part of the group is missing."""
        rows = place[1]
        self._waiting[key] -= 1
        group = self._groups.get(key)
        if group is None and not self._waiting[key]:
            self._take(key[0], rank, place, _without(values, incomplete[rows]))
            return
        if group is None:
            group = self._groups[key] = _Group(self.channel.op, self.result.shape, rank)
        group.add(place, values)
        if not self._waiting[key]:
            cells = as_slice(group.cells)
            whole = _without(group.values()[cells], incomplete)
            self._take(key[0], group.rank, (cells, slice(0, len(incomplete))), whole)
            del self._groups[key]

    def _take(self, over: tuple[str, ...], rank: int, place: tuple[Places, Places], now: Floats) -> None:
        """Put a group into the result where nothing is yet, and compare it where something is."""
        before = self.result[index_of(*place)]
        if over in self._taken and not np.array_equal(before.view(np.uint32), now.view(np.uint32)):
            where = _different(before, now)
            if where is not None:
                cell, row = (nth(places, at) for places, at in zip(place, where, strict=True))
                self.differences.append(Difference(row, cell, (self._taken[over], rank)))
        self.result[index_of(*place)] = np.where(codecs.is_absent(before), now, before)
        self._taken.setdefault(over, rank)


class _Group:
    """Ranks whose cells are combined to one set: what of them was added so far."""

    def __init__(self, op: str, shape: tuple[int, int], rank: int) -> None:
        self.rank = rank
        self._op = op
        self._total = np.zeros(shape)
        self._seen = np.zeros(shape, bool)

    def add(self, place: tuple[Places, Places], values: Floats) -> None:
        index = index_of(*place)
        there = ~codecs.is_absent(values)
        wide = values.astype(np.float64)
        if not there.all():
            wide[~there] = 0.0
        if self._op == "sumsq":
            np.square(wide, out=wide)
        if self._op == "max":
            self._total[index] = np.maximum(self._total[index], wide)
        else:
            self._total[index] += wide
        self._seen[index] |= there

    @property
    def cells(self) -> Array:
        return np.flatnonzero(self._seen.any(axis=1))

    def values(self) -> Floats:
        with np.errstate(over="ignore"):
            total = (np.sqrt(self._total) if self._op == "sumsq" else self._total).astype(np.float32)
        total[~self._seen] = codecs.ABSENT
        return total


def group_key(mesh: Mesh | None, rule: Merge | None) -> Key:
    """Ranks with the same key hold parts of the same cells."""
    if rule is None or mesh is None:
        return (), ()
    return rule.over, tuple(c for dim, c in zip(mesh.dims, mesh.coords, strict=True) if dim not in rule.over)


def as_slice(places: Array) -> Places:
    """Neighbouring places as a slice, which is a view where an array would be a copy."""
    if len(places) and int(places[-1]) - int(places[0]) == len(places) - 1 and (np.diff(places) == 1).all():
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


def index_of(first: Places, second: Places) -> tuple[Places, ...]:
    """What picks the places of both axes from an array of two."""
    if isinstance(first, slice) or isinstance(second, slice):
        return first, second
    return np.ix_(first, second)


def nth(places: Places, at: int) -> int:
    return int(places.start) + at if isinstance(places, slice) else int(places[at])


def _without(values: Floats, rows: Array) -> Floats:
    return np.where(rows, codecs.ABSENT, values) if rows.any() else values


def _different(one: Floats, other: Floats) -> tuple[int, int] | None:
    """Cell and row of the first row in which two copies differ; what one of them has not observed is no difference."""
    with np.errstate(invalid="ignore"):
        near = np.abs(one - other) <= _SAME * np.maximum(np.abs(one), np.abs(other))
    unknown = codecs.is_absent(one) | codecs.is_absent(other)
    same = near | (one == other) | unknown | (np.isnan(one) & np.isnan(other))
    if same.all():
        return None
    row, cell = np.argwhere(~same.T)[0]
    return int(cell), int(row)
