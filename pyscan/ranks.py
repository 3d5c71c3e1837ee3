"""The files of all ranks of a run as one Run, merged when they are read.

It receives one FileRun per rank and hands on the steps that all of them have. A cell is merged in float64 from the
decoded values of the ranks that hold a part of it; where such a rank is missing, the cell is absent. Replicas must
agree: where they do not, there is an event.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pyscan import codecs
from pyscan.codecs import Array, Floats
from pyscan.errors import ScanError, ScanFormatError
from pyscan.payloads import Event
from pyscan.run import Run
from pyscan.schema import Channel, Merge, Mesh, Schema, SiteInfo
from pyscan.source import PathSource
from pyscan.version2 import FileRun

# Replicas may differ by the rounding of one code, 0.27 %; more is a difference.
_SAME = 0.003
_RANK = re.compile(r"\.rank(\d{5,})\.mscan$")


def rank_path(path: str, rank: int) -> str:
    return f"{_stem(path)}.rank{rank:05d}.mscan"


def find_ranks(path: str) -> dict[int, str]:
    """The files of the ranks of a run, by rank."""
    found = ((_RANK.search(name), name) for name in glob.glob(f"{glob.escape(_stem(path))}.rank*.mscan"))
    return {int(match[1]): name for match, name in sorted(found, key=lambda pair: pair[1]) if match}


def _stem(path: str) -> str:
    return path.removesuffix(".mscan")


@dataclass(frozen=True)
class Shard:
    """One rank's part of a site in a channel; its first cell is cell `first` of the whole."""

    rank: int
    site: SiteInfo
    first: int


class RankedRun(Run):
    """A run over many files. Step, loss and the like are those of the lowest rank; flags are joined."""

    version = 2

    def __init__(self, path: str, runs: dict[int, FileRun], unreadable: dict[int, str]) -> None:
        self.path = path
        self.ranks = runs
        self._unreadable = unreadable
        self._reference = runs[min(runs)]
        self._describe()

    def _describe(self) -> None:
        lead = self._reference
        self.model, self.block, self.every = lead.model, lead.block, lead.every
        self.metadata, self.versions, self.rank = lead.metadata, lead.versions, 0
        self.world = max(run.world for run in self.ranks.values())
        self.missing_ranks = tuple(rank for rank in range(self.world) if rank not in self.ranks)
        self.channels = list({c.name: c for run in self.ranks.values() for c in run.channels}.values())
        self._parts: dict[str, dict[int, SiteInfo]] = {}
        for rank, run in self.ranks.items():
            for site in run.sites:
                self._parts.setdefault(site.name, {})[rank] = site
        self.sites = [self._whole(parts) for parts in self._parts.values()]
        self._places: dict[int, Array] | None = None
        self._differ: dict[tuple[str, str], Event] = {}
        self._compared = 0

    def _whole(self, parts: dict[int, SiteInfo]) -> SiteInfo:
        """The site as it would stand in the file of a single rank."""
        one = next(iter(parts.values()))
        blocks = max(self._first(part, "block") + part.num_blocks for part in parts.values())
        row_blocks = max(self._first(part, "row_block") + part.num_row_blocks for part in parts.values())
        return replace(one, num_blocks=blocks, num_row_blocks=row_blocks, offset=(0, 0), merge={})

    def _first(self, part: SiteInfo, per: str) -> int:
        if per == "site" or not self.block or part.num_cells(per) == 0:
            return 0
        return part.offset[1 if per == "block" else 0] // self.block

    @property
    def _num_bytes(self) -> int:
        return sum(run._num_bytes for run in self.ranks.values())

    @property
    def schema(self) -> Schema:
        """What a file of a single rank would say."""
        lead = self._reference.schema
        return replace(lead, sites=tuple(self.sites), channels=tuple(self.channels), rank=0, world=1, mesh=None)

    def _common(self) -> dict[int, Array]:
        """Per rank the places of the rows whose step all ranks have; of a step written twice the later row."""
        if self._places is None:
            last = {rank: _last_places(run.steps["step"]) for rank, run in self.ranks.items()}
            common = set.intersection(*(set(places) for places in last.values()))
            order = [step for step in dict.fromkeys(self._reference.steps["step"].tolist()) if step in common]
            self._places = {rank: np.array([places[s] for s in order], np.int64) for rank, places in last.items()}
        return self._places

    @property
    def steps(self) -> Array:
        places = self._common()
        steps = self._reference.steps[places[min(self.ranks)]]
        for rank, run in self.ranks.items():
            steps["flags"] |= run.steps["flags"][places[rank]]
        return steps

    @property
    def events(self) -> list[Event]:
        """Events about the ranks, then those of all ranks by step, with their `rank`. Replicas are compared here."""
        written = [{**event, "rank": rank} for rank, run in self.ranks.items() for event in run.events]
        self._compare_replicas()
        about = [*self._rank_events(), *self._differ.values()]
        return about + sorted(written, key=lambda event: int(event["step"]))

    def _rank_events(self) -> Iterator[Event]:
        for rank in self.missing_ranks:
            reason = self._unreadable.get(rank, "no file")
            yield {"kind": "rank_missing", "step": 0, "site": None, "rank": rank, "reason": reason}
        ends = {rank: int(run.steps["step"][-1]) if len(run.steps) else 0 for rank, run in self.ranks.items()}
        for rank, end in ends.items():
            if end < max(ends.values()):
                yield {"kind": "rank_shorter", "step": end, "site": None, "rank": rank, "longest": max(ends.values())}

    @property
    def damage(self) -> list[tuple[int, str]]:
        found = [(0, f"rank {rank}: {self._unreadable.get(rank, 'no file')}") for rank in self.missing_ranks]
        return found + [
            (offset, f"rank {rank}: {reason}") for rank, run in self.ranks.items() for offset, reason in run.damage
        ]

    def _cells(self, channel: Channel, site: SiteInfo, start: int, stop: int) -> Floats:
        groups = self._groups(channel, site)
        whole = {key: shards for key, shards in groups.items() if not self._missing_from(channel, shards)}
        if not whole:
            return np.full((stop - start, site.num_cells(channel.per)), codecs.ABSENT, np.float32)
        merged = [self._merge(channel, site, shards, start, stop) for shards in whole.values()]
        for other in merged[1:]:
            self._note_difference(channel, site, merged[0], other, start)
        return merged[0]

    def _codes(self, channel: Channel, site: SiteInfo, start: int, stop: int) -> Array:
        return codecs.encode(self._cells(channel, site, start, stop), channel.codec)

    def _groups(self, channel: Channel, site: SiteInfo) -> dict[tuple[int, ...], list[Shard]]:
        """The shards to combine, by their coordinates in the other mesh dimensions: groups are replicas."""
        groups: dict[tuple[int, ...], list[Shard]] = {}
        for rank, part in self._parts[site.name].items():
            key = self._key(rank, self._rule(channel, part))
            groups.setdefault(key, []).append(Shard(rank, part, self._first(part, channel.per)))
        return dict(sorted(groups.items()))

    def _rule(self, channel: Channel, part: SiteInfo) -> Merge | None:
        return part.merge.get(channel.name)

    def _key(self, rank: int, rule: Merge | None) -> tuple[int, ...]:
        mesh = self._mesh(rank)
        if rule is None or mesh is None:
            return ()
        return tuple(c for dim, c in zip(mesh.dims, mesh.coords, strict=True) if dim not in rule.over)

    def _mesh(self, rank: int) -> Mesh | None:
        """Where a rank stands in the mesh; for one without a file, by its number, row-major."""
        if rank in self.ranks:
            return self.ranks[rank].schema.mesh
        mesh = self._reference.schema.mesh
        if mesh is None or rank >= np.prod(mesh.shape, dtype=float):
            return None
        return replace(mesh, coords=tuple(int(c) for c in np.unravel_index(rank, mesh.shape)))

    def _missing_from(self, channel: Channel, shards: list[Shard]) -> bool:
        """Whether a rank without a file holds, or may hold, a part of what these shards are combined to."""
        rule = self._rule(channel, shards[0].site)
        key = self._key(shards[0].rank, rule)
        return any(self._key(rank, rule) == key for rank in self.missing_ranks)

    def _merge(self, channel: Channel, site: SiteInfo, shards: list[Shard], start: int, stop: int) -> Floats:
        places = self._common()
        out = np.full((len(shards), stop - start, site.num_cells(channel.per)), codecs.ABSENT, np.float32)
        for layer, shard in zip(out, shards, strict=True):
            values = self._of_rank(channel, shard, places[shard.rank][start:stop])
            layer[:, shard.first : shard.first + values.shape[1]] = values[:, : layer.shape[1] - shard.first]
        return codecs.combine(out, channel.op, axis=0)

    def _of_rank(self, channel: Channel, shard: Shard, places: Array) -> Floats:
        run = self.ranks[shard.rank]
        if not len(places) or channel.name not in {c.name for c in run.channels}:
            return np.full((len(places), 0), codecs.ABSENT, np.float32)
        low, high = int(places.min()), int(places.max()) + 1
        values: Floats = run._cells(run.channel(channel.name), shard.site, low, high)[places - low]
        return values

    def _note_difference(self, channel: Channel, site: SiteInfo, one: Floats, other: Floats, start: int) -> None:
        with np.errstate(invalid="ignore"):
            near = np.abs(one - other) <= _SAME * np.maximum(np.abs(one), np.abs(other))
        both_nan = np.isnan(one) & np.isnan(other) & (codecs.is_absent(one) == codecs.is_absent(other))
        same = near | (one == other) | both_nan
        if same.all():
            return
        row, cell = (int(i) for i in np.argwhere(~same)[0])
        step = int(self.steps["step"][start + row])
        where = {"site": site.name, "channel": channel.name, "cell": cell}
        event: Event = {"kind": "replicas_differ", "step": step, **where}
        known = self._differ.get((site.name, channel.name))
        if known is None or step < known["step"]:
            self._differ[site.name, channel.name] = event

    def _compare_replicas(self) -> None:
        """Read what is replicated in the rows not compared yet."""
        start, stop = self._compared, len(self.steps)
        for site in self.sites if stop > start else ():
            for channel in self.channels:
                if len(self._groups(channel, site)) > 1:
                    self.get(channel.name, site.name, steps=slice(start, stop))
        self._compared = stop

    def token_steps(self) -> list[int]:
        return self._reference.token_steps()

    def tokens(self, step: int) -> dict[str, Any]:
        """The tokens of the lowest rank; each rank has tokens of its own: `run.ranks[r].tokens(step)`."""
        return self._reference.tokens(step)

    def refresh(self) -> int:
        before = self.steps["step"]
        for rank, name in find_ranks(self.path).items():
            if rank not in self.ranks:
                _try_open(name, rank, self.ranks, self._unreadable)
        for run in self.ranks.values():
            run.refresh()
        compared, differ = self._compared, self._differ
        self._reference = self.ranks[min(self.ranks)]
        self._describe()
        now = self.steps["step"]
        count = min(len(before), len(now))
        same = int(np.argmin(np.append(before[:count] == now[:count], False)))
        self._compared, self._differ = min(compared, same), differ
        return len(now) - same

    def close(self) -> None:
        for run in self.ranks.values():
            run.close()


def open_ranks(path: str) -> RankedRun:
    runs: dict[int, FileRun] = {}
    unreadable: dict[int, str] = {}
    for rank, name in find_ranks(path).items():
        _try_open(name, rank, runs, unreadable)
    if not runs:
        raise ScanFormatError(f"no rank of {path} can be read: {unreadable}")
    return RankedRun(path, runs, unreadable)


def _last_places(steps: Array) -> dict[int, int]:
    return {step: place for place, step in enumerate(steps.tolist())}


def _try_open(name: str, rank: int, runs: dict[int, FileRun], unreadable: dict[int, str]) -> None:
    """Open the file of one rank, or note why it cannot be."""
    try:
        run = FileRun(PathSource(name))
    except (ScanError, OSError) as error:
        unreadable[rank] = str(error)
        return
    if run.rank != rank:
        unreadable[rank] = f"the file says it is of rank {run.rank}"
        run.close()
        return
    runs[rank] = run
    unreadable.pop(rank, None)
