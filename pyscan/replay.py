"""One step of a run as its text: a number for every token, of all chosen weights together.

Receives the token rows of a step and hands on sequences of (token, value). Contributions of different weights stand at
right angles, so the norm of a token's contribution to all of them is the root of the sum of squares.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pyscan.analysis import layer_of, mean_over_steps, sps
from pyscan.codecs import Array
from pyscan.errors import ScanError
from pyscan.token_view import SiteTokens

if TYPE_CHECKING:
    from pyscan.run import Run


class Line(NamedTuple):
    """One sequence of a step; tokens that were padding are left out."""

    ids: list[int]
    values: list[float]


def replay(run: Run, step: int, *, by: str = "contribution", sites: Collection[str] | None = None) -> list[Line]:
    """The sequences of a step with a value per token; `sites` are names, all without them."""
    tokens = run.tokens(step)
    ids, mask, sequences = tokens["ids"], tokens["mask"], tokens["sequences"]
    if ids is None:
        raise ScanError(f"step {step} has token rows but no token ids: its forward was given none")
    sequences = np.array([[0, ids.size]]) if sequences is None else sequences
    chosen = {name: rows for name, rows in tokens.items() if isinstance(rows, SiteTokens)}
    chosen = {name: rows for name, rows in chosen.items() if sites is None or name in sites}
    lengths = sequences[:, 1]
    values = _sps(chosen, ids.size, lengths, run) if by == "sps" else _together(chosen, by, ids.size, lengths)
    lines = []
    for first, length in sequences.tolist():
        kept = np.arange(first, min(first + length, ids.size))
        kept = kept if mask is None else kept[mask.ravel()[kept]]
        lines.append(Line(ids.ravel()[kept].tolist(), values[kept].tolist()))
    return lines


def _per_token(rows: SiteTokens, channel: str, num_tokens: int, lengths: Array) -> Array | None:
    """A channel of a site as one value per token, 0 where an expert did not meet it; None if it has others."""
    if channel not in rows and "grad" not in rows:
        return None
    values = rows.flat(channel)
    if rows.mode == "sequences":
        return np.repeat(values, lengths)
    if "positions" in rows:
        spread = np.zeros(num_tokens)
        spread[rows["positions"]] = values
        return spread
    return values if len(values) == num_tokens else None


def _together(chosen: Mapping[str, SiteTokens], by: str, num_tokens: int, lengths: Array) -> Array:
    found = [_per_token(rows, by, num_tokens, lengths) for rows in chosen.values()]
    known = [values for values in found if values is not None]
    if not known:
        raise ScanError(f"none of the chosen sites has {by} for every token of the step")
    return np.asarray(np.sqrt(np.square(np.stack(known)).sum(0)))


def _sps(chosen: Mapping[str, SiteTokens], num_tokens: int, lengths: Array, run: Run) -> Array:
    """Per token the mean, over sites, of z(act) - z(contribution) within the layer."""
    act, grad = (
        {name: _per_token(rows, channel, num_tokens, lengths) for name, rows in chosen.items()}
        for channel in ("act", "contribution")
    )
    names = [name for name in chosen if act[name] is not None and grad[name] is not None]
    if not names:
        raise ScanError("none of the chosen sites has act and grad for every token of the step")
    widths, layers = [run.site(name).shape[1] for name in names], [layer_of(name) for name in names]
    tables = [np.stack([np.asarray(part[name]) for name in names], 1) for part in (act, grad)]
    cells = sps(tables[0], tables[1], widths, layers)
    return np.asarray(mean_over_steps(np.asarray(cells).T))
