"""The token rows of one step: the calls of its sites, put in the order of the tokens.

Receives what tokens mode has captured and hands on, per site, arrays of sums of squares: for `scan.tokens()` as norms,
for the file as they are. Micro-batches stand one after another, in the order of their forwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyscan.codecs import ABSENT
from pyscan.latest import ABSENT_SUM
from pyscan.payloads import TokenArray, Tokens, tokens_start
from pyscan.schema import SiteInfo
from pyscan.token_batch import Batch
from pyscan.token_calls import Call
from pyscan.token_sums import Sums
from pyscan.token_view import SiteTokens

Ints = NDArray[np.int64]

SEVERAL = "it is met several times in one forward, and norms of parts do not add up to that of a sequence"


@dataclass(eq=False)
class SiteRows:
    """What a site met in a step: sums of squares [rows(, blocks)], or per sequence [sequences, blocks]."""

    act: Sums
    grad: Sums | None
    places: Ints | None = None  # of an expert: the token of each row


@dataclass(eq=False)
class TokenStep:
    """A step token by token. `ids` is [sequences, length] where all micro-batches are equally long, else flat."""

    step: int
    mode: str  # "rows", "blocks" or "sequences"
    ids: Ints | None
    mask: NDArray[np.bool_] | None
    sequences: Ints
    sites: dict[int, SiteRows] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return int(self.sequences[:, 1].sum())

    def payload(self) -> tuple[bytes, list[Sums]]:
        """For the file: a tokens frame up to its cells, and the sums of squares that are to be its cells."""
        arrays, sums = [], []
        for index, rows in sorted(self.sites.items()):
            places = None if rows.places is None else rows.places.astype("<i4")
            for channel, values in (("act", rows.act), ("grad", rows.grad)):
                if values is not None:
                    arrays.append(TokenArray(index, channel, "log2q8", values, places))
                    sums.append(values)
        mask = None if self.mask is None else self.mask.astype("u1")
        sequences = self.sequences.astype("<i4")
        ids = None if self.ids is None else _narrow(self.ids)
        tokens = Tokens(self.step, ids, arrays, self.mode, mask, sequences)
        return tokens_start(tokens, self.num_tokens), sums

    def view(self, infos: Sequence[SiteInfo]) -> dict[str, Any]:
        """As `scan.tokens()` and `run.tokens(step)` give it."""
        result: dict[str, Any] = {"ids": self.ids, "mask": self.mask, "sequences": self.sequences}
        for index, rows in sorted(self.sites.items()):
            channels: dict[str, Any] = {"act": norms(rows.act)}
            if rows.grad is not None:
                channels["grad"] = norms(rows.grad)
            if rows.places is not None:
                channels["positions"] = rows.places
            result[infos[index].name] = SiteTokens(channels, mode=self.mode, is_lookup=infos[index].kind == "embedding")
        return result


def _narrow(ids: Ints) -> NDArray[Any]:
    """In 4 bytes each, where they fit."""
    is_small = ids.size == 0 or (ids.min() >= -(2**31) and ids.max() < 2**31)
    return ids.astype("<i4" if is_small else "<i8")


def norms(sums: Sums) -> Sums:
    """Sums of squares to norms; absent stays absent."""
    return np.where(sums < 0, np.float64(ABSENT), np.sqrt(np.maximum(sums, 0)))


def make_step(step: int, mode: bool | str, calls: Iterable[Call], batches: Sequence[Batch], scale: float) -> TokenStep:
    """Put the calls of a step together; output gradients are divided by the loss scale."""
    shapes = {batch.shape[1:] for batch in batches}
    shape = (-1, *shapes.pop()) if len(shapes) == 1 else (-1,)
    starts = np.cumsum([0, *(batch.num_tokens for batch in batches)])
    made = TokenStep(
        step=step,
        mode=mode if isinstance(mode, str) else "rows",
        ids=_joined([batch.ids for batch in batches], shape),
        mask=_joined([batch.mask for batch in batches], shape),
        sequences=_sequences(batches, starts),
    )
    by_site: dict[int, list[tuple[Call, int]]] = {}
    for call in sorted(calls, key=lambda call: call.batch):
        for part in range(len(call.ranges)):
            by_site.setdefault(call.site + part, []).append((call, part))
    for site, parts in by_site.items():
        whole = _per_sequence(parts, batches) if mode == "sequences" else _per_row(parts, starts, shape)
        if problem := next((call.problem for call, _ in parts if call.problem), ""):
            made.problems[site] = problem
        if whole is not None:
            made.sites[site] = whole
            if whole.grad is not None and scale != 1.0:
                whole.grad = np.where(whole.grad < 0, whole.grad, whole.grad / (scale * scale))
    return made


def _joined(arrays: Sequence[Any], shape: tuple[int, ...]) -> Any:
    if not arrays or any(array is None for array in arrays):
        return None
    return np.concatenate([array.ravel() for array in arrays]).reshape(shape if arrays[0].size else (0,))


def _sequences(batches: Sequence[Batch], starts: Ints) -> Ints:
    moved = [batch.sequences + np.array([start, 0]) for batch, start in zip(batches, starts, strict=False)]
    return np.concatenate(moved) if moved else np.zeros((0, 2), np.int64)


def _per_row(parts: list[tuple[Call, int]], starts: Ints, shape: tuple[int, ...]) -> SiteRows | None:
    """The rows of all calls; in the shape of the ids if they are the tokens, one by one."""
    calls = [call for call, _ in parts]
    pieces = [(call, *call.ranges[part]) for call, part in parts]
    if all(a == b for _, a, b in pieces):
        return None  # an expert without tokens
    act = _end_to_end([call.act[a:b] for call, a, b in pieces if call.act is not None])
    grads = [_grad_rows(call, a, b) for call, a, b in pieces]
    grad = _end_to_end([g for g, _ in grads]) if any(seen for _, seen in grads) else None
    if all(call.is_in_order for call in calls) and len(act) == starts[-1] and len(calls) == len(starts) - 1:
        blocks = act.shape[1:]
        return SiteRows(act.reshape(*shape, *blocks), None if grad is None else grad.reshape(*shape, *grad.shape[1:]))
    places = [call.places[a:b] + starts[call.batch] for call, a, b in pieces if call.places is not None]
    is_known = len(places) == len(calls) and all((call.places[a:b] >= 0).all() for call, a, b in pieces)  # type: ignore[index]
    return SiteRows(act, grad, np.concatenate(places) if is_known else None)


def _end_to_end(arrays: list[Sums]) -> Sums:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _grad_rows(call: Call, first: int, last: int) -> tuple[Sums, bool]:
    """The gradient rows of a part of a call, and whether they came; absent if not."""
    if call.grad is not None and not call.problem:
        return call.grad[first:last], True
    assert call.act is not None
    return np.full((last - first, *call.act.shape[1:]), ABSENT_SUM), False


def _per_sequence(parts: list[tuple[Call, int]], batches: Sequence[Batch]) -> SiteRows | None:
    """Sums of all sequences; one that a site did not meet is absent."""
    known = [(call, part) for call, part in parts if call.act is not None]
    if not known:
        return None
    firsts = np.cumsum([0, *(len(batch.sequences) for batch in batches)])
    num_calls = Counter(call.batch for call, _ in parts)
    blocks = known[0][0].act.shape[-1]  # type: ignore[union-attr]
    act, grad = (np.full((firsts[-1], blocks), ABSENT_SUM) for _ in range(2))
    for call, part in known:
        rows = slice(firsts[call.batch], firsts[call.batch + 1])
        act[rows] = _added(act[rows], call.act, part)
        if num_calls[call.batch] > 1:
            call.problem = call.problem or SEVERAL
        if not call.problem:
            grad[rows] = _added(grad[rows], call.grad, part)
    return None if (act < 0).all() else SiteRows(act, None if (grad < 0).all() else grad)


def _added(total: Sums, sums: Sums | None, part: int) -> Sums:
    if sums is None:
        return total
    return np.where(sums[part] < 0, total, np.maximum(total, 0) + sums[part])
