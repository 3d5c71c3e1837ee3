"""The norms of each sequence of a batch, and its loss.

Receives sequences; hands on a row of cells per sequence: sums of squares, `act` of all sites, then `grad` of all sites.
The loss of a sequence is its own mean over its target tokens, and the backward is that of their sum, so that no row
depends on which other sequences share its batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

import pyscan
from pyscan.config import Event
from pyscan.corpus_tokens import CorpusError, Sequence
from pyscan.latest import ABSENT_SUM
from pyscan.schema import Schema

IGNORED = -100


class Measured(NamedTuple):
    """One row."""

    sequence: Sequence
    cells: NDArray[np.float64]
    loss: float | None  # None: no target token, so that there is no loss


class Meter:
    """Runs batches through a model that is scanned into memory."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.model = model
        self._events: list[Event] = []
        self._scan = pyscan.attach(model, None, watch=False, on_event=self._hear, mask="attention_mask", **options)
        if not self._scan.schema.sites:
            raise CorpusError("no weight of the model is left to scan: look at --include and --exclude")
        self._num_cells = 2 * sum(site.num_blocks for site in self._scan.schema.sites)

    def schema(self, **more: Any) -> Schema:
        """That of the rows: input and gradient of every site, a row per sequence."""
        schema = self._scan.schema
        channels = tuple(channel for channel in schema.channels if channel.name in ("act", "grad"))
        return replace(schema, channels=channels, row_kind="sequence", **more)

    def measure(self, sequences: list[Sequence]) -> list[Measured]:
        return [self._one(sequence) for sequence in sequences]

    def _one(self, sequence: Sequence) -> Measured:
        if not sequence.num_targets:
            return Measured(sequence, np.full(self._num_cells, ABSENT_SUM), None)
        ids, mask, labels = padded([sequence], self.model.device)
        losses = self._losses(ids, mask, labels)
        torch.autograd.backward(losses.sum())
        self._scan.step(loss=None, tokens=None)
        self.model.zero_grad(set_to_none=True)
        self._stop_if_off()
        row = self._scan.rows.pop()
        return Measured(sequence, row.cells[: self._num_cells], losses[0].item())

    def _stop_if_off(self) -> None:
        """In training a scanner that fails must not be in the way; here there is nothing but the scan."""
        for event in self._events:
            if event["kind"] == "off":
                raise CorpusError(event["text"].removesuffix(" Training goes on."))

    def _losses(self, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss of each sequence."""
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
        wanted = labels[:, 1:]
        each = F.cross_entropy(logits.transpose(1, 2), wanted, ignore_index=IGNORED, reduction="none")
        return each.sum(1) / (wanted != IGNORED).sum(1)

    def _hear(self, event: Event) -> None:
        if event["kind"] != "attached":  # that is about rows of the scanner's own
            self._events.append(event)

    def take_events(self) -> list[Event]:
        """What the scanner had to say since the last time."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        self._scan.close()


def padded(sequences: list[Sequence], device: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, mask and labels [sequences, longest]; what is added stands at the end and is masked."""
    longest = max(len(sequence.ids) for sequence in sequences)
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
    for row, sequence in enumerate(sequences):
        own = torch.tensor(sequence.ids)
        ids[row, : len(own)], mask[row, : len(own)] = own, 1
        labels[row, : len(own)] = torch.where(torch.tensor(sequence.is_target), own, IGNORED)
    return ids.to(device), mask.to(device), labels.to(device)
