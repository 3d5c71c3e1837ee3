"""The file of a corpus scan: rows in the order of the corpus, each with its sequence as an event; and its resumption.

Receives measured rows in any order inside a window; writes each as soon as all before it are written, and knows which
sequences an earlier process has finished. What came before a row is on disk before the row is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyscan
from pyscan.corpus_norms import Measured
from pyscan.corpus_tokens import CorpusError, Sequence
from pyscan.errors import ScanError
from pyscan.ranks import find_ranks, rank_path
from pyscan.schema import Schema
from pyscan.writer import Writer

# Rows handed over before they are flushed: fewer than the writer's queue holds, so that none is ever dropped.
_HANDFUL = 8
TROUBLES = ("no_targets", "zero_loss", "nonfinite_loss")


class CorpusFile:
    """Writes one scan, or the part of it that is this process's."""

    def __init__(self, path: Path, schema: Schema, *, resume: bool) -> None:
        self.path = own_path(path, schema.rank, schema.world)
        self.done: set[int] = set()
        self._told: set[int] = set()  # sequences whose event is in the file
        if resume:
            check_world(path, schema)
            self._take_up(schema)
        self._writer = Writer(self.path, schema, resume=resume)
        self._expected: list[int] = []
        self._finished: dict[int, Measured] = {}

    def expect(self, sequences: Iterable[Sequence]) -> None:
        """Begin a window: these are its sequences, of which those that are not done will come."""
        self._expected = sorted({sequence.number for sequence in sequences} - self.done)

    def lacks(self, sequence: Sequence) -> bool:
        """Whether its row is not in the file, or its event is not: a kill may have come between the two."""
        return sequence.number not in self.done or sequence.number not in self._told

    def add(self, measured: Iterable[Measured]) -> None:
        """Take finished rows and write those whose turn it is."""
        for one in measured:
            if one.sequence.number not in self.done:
                self._finished[one.sequence.number] = one
            elif self.lacks(one.sequence):
                self._tell(one)
        ready = []
        while self._expected and self._expected[0] in self._finished:
            ready.append(self._finished.pop(self._expected.pop(0)))
        for start in range(0, len(ready), _HANDFUL):
            self._write(ready[start : start + _HANDFUL])

    def _write(self, rows: list[Measured]) -> None:
        for row in rows:
            self._tell(row)
            for kind, text in troubles(row):
                self._writer.event(kind, row.sequence.number, text=text)
        self._flush()
        for row in rows:
            self._writer.write(row.sequence.number, row.cells, tokens=len(row.sequence.ids), loss=row.loss)
        self._flush()
        self.done |= {row.sequence.number for row in rows}

    def _flush(self) -> None:
        if not self._writer.flush():
            raise CorpusError(f"{self.path} cannot be written: {self._writer.error}; what is in it stays readable")

    def _tell(self, row: Measured) -> None:
        sequence, record = row.sequence, row.sequence.record
        told: dict[str, Any] = {"num_tokens": len(sequence.ids), "num_targets": sequence.num_targets}
        told |= {"source": record.source, "line": record.line, "text": sequence.text}
        told |= {"num_cut": sequence.num_cut} if sequence.num_cut else {}
        self._writer.event("sequence", record.number, sequence_id=record.number, **told)
        if row.tokens is not None:
            self._writer.tokens(record.number, row.tokens)
        self._told.add(record.number)

    def event(self, kind: str, step: int, **fields: Any) -> None:
        self._writer.event(kind, step, **fields)

    def _take_up(self, schema: Schema) -> None:
        """Learn what the file holds; it must be a scan of the same corpus with the same settings."""
        if not self.path.exists():
            return
        with pyscan.open(self.path) as run:
            settings = (run.metadata or {}).get("corpus") if isinstance(run.metadata, dict) else None
            if run.row_kind != "sequence" or settings is None:
                raise CorpusError(f"{self.path} is no corpus scan: name another output")
            _same(self.path, settings, schema.metadata["corpus"])
            self.done = set(run.steps["step"].tolist())
            self._told = {event["step"] for event in run.events if event["kind"] == "sequence"}
            if settings.get("tokens"):
                no_tokens = {event["step"] for event in run.events if event["kind"] == "no_targets"}
                self._told &= no_tokens.union(run.token_steps())

    def close(self) -> None:
        self._writer.close()


def troubles(row: Measured) -> list[tuple[str, str]]:
    """What is wrong with a row, as kind and text."""
    if row.loss is None:
        return [("no_targets", "no token carries loss: nothing to learn from, so no gradient and no loss are recorded")]
    if not math.isfinite(row.loss):
        return [("nonfinite_loss", f"the loss is {row.loss}: its gradients say nothing")]
    return [("zero_loss", "the loss is 0: every gradient is 0")] if row.loss == 0 else []


def own_path(path: Path, rank: int, world: int) -> Path:
    return path if world == 1 else Path(rank_path(str(path), rank))


def check_world(path: Path, schema: Schema) -> None:
    """A scan goes on with as many processes as it began with: each continues the rows it was given."""
    ranks = find_ranks(str(path))
    world = 1 if path.exists() else _world_of(ranks)
    if world and world != schema.world:
        raise CorpusError(
            f"{path} was begun by {world} process{'es' if world > 1 else ''}, got {schema.world}: "
            "resume with as many, or name another output"
        )


def _world_of(ranks: dict[int, str]) -> int:
    for name in ranks.values():
        try:
            with pyscan.open(name) as run:
                return run.world
        except ScanError:
            continue
    return 0


def _same(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    for key in now:
        if before.get(key) != now[key]:
            raise CorpusError(
                f"{path} was scanned with {key} {before.get(key)!r}, got {now[key]!r}: resume with the same, "
                "or name another output"
            )
