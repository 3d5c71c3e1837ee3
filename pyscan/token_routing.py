"""Which token each row of an expert belongs to.

Receives the arguments of a module that holds experts and, at each use of one, its rows; hands on the places of those
rows among the tokens. It is never guessed: an order is taken only if the rows are, value for value, the hidden states
of the tokens that the router chose for the expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Places = NDArray[np.int64]


class Routing:
    """One forward of a module that holds experts."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        tensors = [value.detach() for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        hidden = next((t for t in tensors if t.is_floating_point() and t.ndim >= 2), None)
        self._hidden = None if hidden is None else hidden.reshape(-1, hidden.shape[-1])
        self._chosen = next((t for t in tensors if self._is_choice(t)), None)
        self._known: dict[int, Places] = {}  # by expert, from its first use
        self._sorted: tuple[Tensor, Tensor] | None = None

    @property
    def num_tokens(self) -> int:
        return 0 if self._hidden is None else len(self._hidden)

    def _is_choice(self, t: Tensor) -> bool:
        is_int = not t.is_floating_point() and t.dtype != torch.bool
        return self._hidden is not None and is_int and t.ndim >= 2 and t.numel() % max(len(self._hidden), 1) == 0

    def all_places(self, order: Tensor, rows_each: int) -> Places | None:
        """The tokens of rows that were gathered choice by choice and then brought into this order."""
        if self._chosen is None or self._chosen.numel() != len(order) or rows_each != 1:
            return None
        found: Places = (order // (len(order) // max(self.num_tokens, 1))).numpy()
        return found

    def places(self, expert: int, rows: Tensor, *, is_grouped: bool) -> Places | None:
        """The tokens of the rows that met an expert, alone or grouped with all others; None if that is not known."""
        if expert not in self._known:
            found = self._find(expert, rows.detach(), is_grouped)
            if found is None:
                return None
            self._known[expert] = found
        known = self._known[expert]
        return known if len(known) == len(rows) else None

    def _find(self, expert: int, rows: Tensor, is_grouped: bool) -> Places | None:
        if self._hidden is None or rows.shape[1] != self._hidden.shape[1]:
            return None
        hidden = self._hidden.to(rows.dtype)
        for places in self._candidates(expert, is_grouped):
            if len(places) == len(rows) and torch.equal(hidden[places], rows):
                found: Places = places.numpy()
                return found
        return None

    def _candidates(self, expert: int, is_grouped: bool) -> Iterator[Tensor]:
        """Orders in which implementations take the tokens of an expert, the usual one first."""
        if self._chosen is None:
            yield torch.arange(self.num_tokens)
            return
        chosen = self._chosen.reshape(self.num_tokens, -1)
        hit = chosen == expert
        if is_grouped:  # sorted by torch, which need not be stable
            experts, order = self._sorted if self._sorted is not None else torch.sort(chosen.flatten())
            self._sorted = experts, order
            yield order[experts == expert] // chosen.shape[1]
        yield hit.T.nonzero()[:, 1]  # by rank of the choice, then by token
        yield hit.nonzero()[:, 0]
        yield torch.arange(self.num_tokens)
