"""A corpus through a model, one row per sequence: read, tokenise, batch, generate, measure, write.

Receives the settings of `pyscan scan`; hands on the path of the scan. Every process of several takes every n-th batch.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pyscan import corpus, corpus_model
from pyscan.corpus_file import CorpusFile
from pyscan.corpus_generate import answer
from pyscan.corpus_norms import Meter
from pyscan.corpus_plan import Batch, windows
from pyscan.corpus_tokens import CorpusError, Encoder, Sequence

Tick = Callable[[int, int], None]  # sequences and tokens that were finished


@dataclass(frozen=True)
class Settings:
    """What is scanned, and how."""

    model: str
    data: tuple[Path, ...]
    output: Path
    loss: str = "response"
    generate: int = 0
    max_length: int | None = None
    batch_tokens: int = 4096
    dtype: str = "auto"
    device: str = "auto"
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    block: int = 64
    resume: bool = False
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        least = {"generate": 0, "batch_tokens": 1, "block": 0, "max_length": 2 + self.generate}
        for name, limit in least.items():
            value = getattr(self, name)
            if value is not None and value < limit:
                raise CorpusError(f"--{name.replace('_', '-')} must be >= {limit}, got {value}")
        for name in ("include", "exclude"):
            for pattern in getattr(self, name):
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise CorpusError(f"--{name} {pattern!r} is not a regular expression: {error}") from None


class CorpusScan:
    """One scan: made from settings and a survey of the data, run once."""

    def __init__(self, settings: Settings, survey: corpus.Survey) -> None:
        self._settings = settings
        loaded = corpus_model.load(settings.model, dtype=settings.dtype, device=settings.device)
        self._model, self._tokenizer = loaded.model, loaded.tokenizer
        self._max_length = settings.max_length or loaded.max_length
        if self._max_length is not None and self._max_length < settings.generate + 2:
            raise CorpusError(f"--generate {settings.generate} leaves no room in {self._max_length} tokens")
        patterns = {"include": settings.include or None, "exclude": settings.exclude or None}
        self._meter = Meter(self._model, block=settings.block, **patterns)
        self._told = self._metadata(survey)

    def _metadata(self, survey: corpus.Survey) -> dict[str, Any]:
        settings = self._settings
        return {
            "files": [str(path) for path in settings.data],
            "sequences": survey.num_records,
            "data": survey.fingerprint,
            "weights": corpus_model.fingerprint(self._model),
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "loss": settings.loss,
            "generate": settings.generate,
            "max_length": self._max_length,
            "batch_tokens": settings.batch_tokens,
            "include": list(settings.include),
            "exclude": list(settings.exclude),
            "block": settings.block,
        }

    def run(self, tick: Tick) -> Path:
        """Scan what is not in the file yet. However it ends, the file is whole."""
        settings = self._settings
        schema = self._meter.schema(rank=settings.rank, world=settings.world, metadata={"corpus": self._told})
        with (
            contextlib.closing(self._meter),
            contextlib.closing(CorpusFile(settings.output, schema, resume=settings.resume)) as file,
        ):
            for window in self._windows():
                own = [batch for batch in window if batch.number % settings.world == settings.rank]
                self._scan_window(own, file, tick)
        return file.path

    def _windows(self) -> Iterator[list[Batch[Sequence]]]:
        settings = self._settings
        encoder = Encoder(self._tokenizer, loss=settings.loss, max_length=self._max_length, generate=settings.generate)
        sequences = map(encoder.encode, corpus.records(settings.data, generate=bool(settings.generate)))
        return windows(sequences, cost=lambda one: len(one.ids) + settings.generate, batch_tokens=settings.batch_tokens)

    def _scan_window(self, batches: list[Batch[Sequence]], file: CorpusFile, tick: Tick) -> None:
        file.expect(sequence for batch in batches for sequence in batch.members)
        for batch in batches:
            members = batch.members
            if any(map(file.lacks, members)):
                members = self._scan_batch(members, file)
            tick(len(members), sum(len(sequence.ids) for sequence in members))

    def _scan_batch(self, members: list[Sequence], file: CorpusFile) -> list[Sequence]:
        settings = self._settings
        try:
            if settings.generate:
                members = answer(
                    self._model, self._tokenizer, members, num_tokens=settings.generate, loss=settings.loss
                )
            measured = self._meter.measure(members)
            for event in self._meter.take_events():
                file.event(**event | {"step": min(sequence.number for sequence in members)})
            file.add(measured)
        except torch.OutOfMemoryError as error:
            raise CorpusError(
                f"out of memory in a batch of {len(members)} sequences: lower --batch-tokens (now "
                f"{settings.batch_tokens}) or --max-length, and go on with --resume"
            ) from error
        return members
