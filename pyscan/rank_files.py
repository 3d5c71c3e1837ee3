"""The files of all ranks of a run, few of them open at a time.

Receives the name they share; hands on, per rank, what must be known to merge it (`RankFacts`: its rows, and in which
schema each stands) and the file itself when it is asked for. What ranks have in common is kept once, so that a thousand
ranks take little more memory than one.
"""

from __future__ import annotations

import glob
import os
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from pyscan.codecs import Array
from pyscan.errors import ScanError, ScanFormatError
from pyscan.schema import Layout, Mesh
from pyscan.source import PathSource
from pyscan.version2 import FileRun, read_layout

# Maps and descriptors at a time, far below the 1,024 that a process usually may have.
OPEN_FILES = 64
_RANK = re.compile(r"\.rank(\d{5,})\.mscan$")


def rank_path(path: str, rank: int) -> str:
    return f"{_stem(path)}.rank{rank:05d}.mscan"


def find_ranks(path: str) -> dict[int, str]:
    """The files of the ranks of a run, by rank."""
    found = ((_RANK.search(name), name) for name in glob.glob(f"{glob.escape(_stem(path))}.rank*.mscan"))
    return dict(sorted((int(match[1]), name) for match, name in found if match))


def _stem(path: str) -> str:
    return path.removesuffix(".mscan")


@dataclass(frozen=True)
class Stretch:
    """Rows [start, stop) of a file that stand under schemas with the same cells, world and mesh; the last one holds."""

    start: int
    stop: int
    layout: Layout
    world: int
    mesh: Mesh | None


@dataclass(frozen=True)
class RankFacts:
    """What merging needs to know of a rank while its file is closed."""

    rank: int
    steps: Array  # number of every row in force
    figures: Array  # flags, loss and tokens of them
    stretches: tuple[Stretch, ...]
    num_bytes: int
    mark: tuple[int, ...]  # changes when the file does

    @property
    def last(self) -> Stretch:
        return self.stretches[-1]


class RankFiles(Mapping[int, FileRun]):
    """The files that can be read, by rank; `facts` of each, and why the others cannot."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.facts: dict[int, RankFacts] = {}
        self.unreadable: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._open: OrderedDict[int, FileRun] = OrderedDict()
        self._layouts: dict[bytes, Layout] = {}  # by the digest of the schema, so that none is parsed twice
        self._recent: list[Layout] = []  # files with the same cells share one
        self._columns: dict[bytes, Array] = {}
        self.refresh()

    def __getitem__(self, rank: int) -> FileRun:
        if rank not in self.facts:
            raise KeyError(rank)
        if rank not in self._open:
            self._keep(rank, self._load(rank))
        self._open.move_to_end(rank)
        return self._open[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self.facts)

    def __len__(self) -> int:
        return len(self.facts)

    def refresh(self) -> bool:
        """Look for new files, rows and ranks; whether anything has changed."""
        changed = False
        for rank, name in find_ranks(self.path).items():
            self._names[rank] = name
            known = self.facts.get(rank)
            if known is None or known.mark != _mark(name):
                changed |= self._look(rank)
        self.facts = dict(sorted(self.facts.items()))
        return changed

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def _look(self, rank: int) -> bool:
        mark = _mark(self._names[rank])
        try:
            run = self._load(rank)
        except (ScanError, OSError) as error:
            self.unreadable[rank] = str(error)
            return False
        before = self.facts.get(rank)
        if before is not None and len(run.file.view) < before.num_bytes:
            raise ScanFormatError(f"{run.path} shrank from {before.num_bytes} to {len(run.file.view)} bytes; open anew")
        self.unreadable.pop(rank, None)
        self.facts[rank] = self._describe(rank, run, mark)
        self._keep(rank, run)
        return True

    def _load(self, rank: int) -> FileRun:
        run = FileRun(PathSource(self._names[rank]), self._read_layout)
        if run.rank != rank:
            run.close()
            raise ScanFormatError(f"the file says it is of rank {run.rank}")
        return run

    def _keep(self, rank: int, run: FileRun) -> None:
        self._open[rank] = run
        while len(self._open) > OPEN_FILES:
            self._open.popitem(last=False)  # not closed: someone may hold it, and else it is gone at once

    def _describe(self, rank: int, run: FileRun, mark: tuple[int, ...]) -> RankFacts:
        rows = run.steps
        figures = np.empty(len(rows), [("flags", "<u4"), ("loss", "<f4"), ("tokens", "<u8")])
        for name in figures.dtype.names or ():
            figures[name] = rows[name]
        return RankFacts(
            rank, self._shared(rows["step"]), figures, tuple(self._stretches(run)), len(run.file.view), mark
        )

    def _stretches(self, run: FileRun) -> Iterator[Stretch]:
        parts = [(part.start, part.stop, part.part.layout) for part in run.timeline.segments]
        merged: list[tuple[int, int, Layout]] = []
        for start, stop, layout in parts or [(0, 0, run.layouts[-1])]:
            if merged and _goes_on(merged[-1][2], layout):
                start = merged.pop()[0]
            merged.append((start, stop, layout))
        # The newest schema may stand behind the last row: what it learned of the same cells holds for them.
        if _goes_on(merged[-1][2], run.layouts[-1]):
            merged[-1] = (*merged[-1][:2], run.layouts[-1])
        for start, stop, layout in merged:
            yield Stretch(start, stop, self._interned(layout), layout.schema.world, layout.schema.mesh)

    def _read_layout(self, payload: bytes) -> Layout:
        digest = blake2b(payload, digest_size=16).digest()
        if digest not in self._layouts:
            layout = read_layout(payload)
            self._layouts[digest] = self._interned(layout).with_schema(layout.schema)
        return self._layouts[digest]

    def _interned(self, layout: Layout) -> Layout:
        for known in self._recent:
            if known.schema.sites == layout.schema.sites and known.schema.channels == layout.schema.channels:
                return known
        self._recent = [layout, *self._recent[:3]]
        return layout

    def _shared(self, column: Array) -> Array:
        values = np.ascontiguousarray(column)
        return self._columns.setdefault(values.tobytes(), values)


def _goes_on(before: Layout, after: Layout) -> bool:
    """Whether rows of two schemas can be read as one: same cells, same ranks."""
    if before is after:
        return True
    a, b = before.schema, after.schema
    same_ranks = a.world == b.world and _shape(a.mesh) == _shape(b.mesh)
    return same_ranks and a.channels == b.channels and _cells(a.sites) == _cells(b.sites)


def _shape(mesh: Mesh | None) -> Any:
    return None if mesh is None else (mesh.dims, mesh.shape, mesh.coords)


def _cells(sites: Any) -> list[Any]:
    return [(site.name, site.num_blocks, site.num_row_blocks, site.offset) for site in sites]


def _mark(name: str) -> tuple[int, ...]:
    """Size and time of the file and of its tail."""
    found: list[int] = []
    for path in (name, f"{name}.tail"):
        try:
            stat = os.stat(path)
            found += [stat.st_size, stat.st_mtime_ns]
        except FileNotFoundError:
            found += [-1, -1]
    return tuple(found)
