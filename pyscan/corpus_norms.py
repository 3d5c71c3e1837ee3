"""The norms of each sequence of a batch, and its loss.

Receives sequences; hands on a row of cells per sequence: sums of squares, `act` of all sites, then `grad` of all sites.
The loss of a sequence is its own mean over its target tokens, and the backward is that of their sum, so that no row
depends on which other sequences share its batch. Where the parts of a batch cannot be told apart (on a GPU, or where a
weight is used several times), sequences go through the model one by one, with the same rows.
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
from pyscan.corpus_tied import TiedProduct, are_plain, tied_uses
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
    """Runs batches through a model that is scanned into memory; `options` are those of `attach`."""

    def __init__(self, model: Any, **options: Any) -> None:
        self.model = model
        self._options = options
        self._events: list[Event] = []
        self._tied: TiedProduct | None = None
        uses = tied_uses(model)
        self._together = model.device.type == "cpu" and (uses is None or are_plain(uses))
        try:
            self._attach()
        except ValueError as error:
            raise CorpusError(str(error)) from error

    def _attach(self) -> None:
        tokens = "sequences" if self._together else False
        fixed: dict[str, Any] = {"watch": False, "on_event": self._hear, "mask": "attention_mask"}
        self._scan = pyscan.attach(self.model, None, tokens=tokens, **fixed, **self._options)
        self._sites = self._scan.schema.sites
        self._num_cells = 2 * sum(site.num_blocks for site in self._sites)
        uses = tied_uses(self.model)
        if self._together and uses is not None and any(site.tied_to for site in self._sites):
            self._tied = TiedProduct(*uses, block=self._scan.schema.block)

    def schema(self, **more: Any) -> Schema:
        """That of the rows: input and gradient of every site, a row per sequence."""
        schema = self._scan.schema
        channels = tuple(channel for channel in schema.channels if channel.name in ("act", "grad"))
        return replace(schema, channels=channels, row_kind="sequence", **more)

    def measure(self, sequences: list[Sequence]) -> list[Measured]:
        """A row for each, in their order. Without a target token there is no loss, and nothing to run."""
        able = [sequence for sequence in sequences if sequence.num_targets]
        found = self._measure(able) if able else []
        if self._together and any(event["kind"] == "tokens_missing" for event in self._events):
            self._separate()
            found = self._measure(able)
        rows = {row.sequence.number: row for row in found}
        absent = np.full(self._num_cells, ABSENT_SUM)
        return [rows.get(sequence.number, Measured(sequence, absent, None)) for sequence in sequences]

    def _measure(self, sequences: list[Sequence]) -> list[Measured]:
        if not self._together:
            return [row for sequence in sequences for row in self._run([sequence])]
        return self._run(sequences)

    def _run(self, sequences: list[Sequence]) -> list[Measured]:
        losses = self._losses(*padded(sequences, self.model.device))
        torch.autograd.backward(losses.sum())
        self._scan.step()
        self._scan.flush()
        self.model.zero_grad(set_to_none=True)
        self._stop_if_off()
        total = self._scan.rows.pop().cells[: self._num_cells]
        cells = self._cells(len(sequences)) if self._together else total[None]
        return [Measured(*row) for row in zip(sequences, cells, losses.tolist(), strict=True)]

    def _losses(self, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss of each sequence."""
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
        wanted = labels[:, 1:]
        each = F.cross_entropy(logits.transpose(1, 2), wanted, ignore_index=IGNORED, reduction="none")
        return each.sum(1) / (wanted != IGNORED).sum(1)

    def _cells(self, num_sequences: int) -> NDArray[np.float64]:
        """The rows of a batch that went through the model together."""
        tokens = self._scan.tokens()
        absent = {site.name: np.full((num_sequences, site.num_blocks), ABSENT_SUM) for site in self._sites}
        parts = {
            channel: {
                name: _sums(tokens[name][channel]) if channel in tokens.get(name, {}) else nothing
                for name, nothing in absent.items()
            }
            for channel in ("act", "grad")
        }
        self._add_tied(parts["grad"])
        return np.concatenate([part for channel in parts.values() for part in channel.values()], axis=1)

    def _add_tied(self, grads: dict[str, NDArray[np.float64]]) -> None:
        """A tied weight has one gradient, the sum over its uses."""
        for site in self._sites:
            if site.tied_to is not None and self._tied is not None:
                both = grads[site.name] + grads[site.tied_to] + 2 * self._tied.take()
                grads[site.name] = grads[site.tied_to] = np.maximum(both, 0.0)

    def _separate(self) -> None:
        """From here on one sequence at a time; the first batch is enough to know."""
        self.close()
        self._together, self._tied = False, None
        self._events = [event for event in self._events if event["kind"] != "tokens_missing"]
        self._attach()

    def _stop_if_off(self) -> None:
        """In training a scanner that fails must not be in the way; here there is nothing but the scan."""
        for event in self._events:
            if event["kind"] == "off":
                raise CorpusError(event["text"].removesuffix(" Training goes on."))

    def _hear(self, event: Event) -> None:
        if event["kind"] not in ("attached", "execution_order"):  # they are about rows of the scanner's own
            self._events.append(event)

    def take_events(self) -> list[Event]:
        """What the scanner had to say since the last time."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        self._scan.close()
        if self._tied is not None:
            self._tied.remove()


def _sums(norms: NDArray[np.float64]) -> NDArray[np.float64]:
    """Norms to sums of squares, absent to what stands for it in a row."""
    return np.where(pyscan.is_absent(norms), ABSENT_SUM, np.square(norms))


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
