"""The text of a step, token by token, with the norms of one site.

Receives a session and a query; hands on pieces of text with a value each. Runs of version 1.1 have a row per token, and
their text only as a whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pyscan.payloads import TOKEN_CHANNELS
from pyscan.run import Run
from pyscan.viewer import wire
from pyscan.viewer.query import BadRequestError, Query
from pyscan.viewer.session import Session

_MAX_TOKENS = 8192
_MAX_TEXT = 100_000


def tokens(session: Session, query: Query) -> dict[str, Any]:
    """What is known of the tokens at the step nearest to the one asked for."""
    run = session.run(query.integer("run", low=0, high=1, default=0))
    step = query.integer("step", low=0, high=2**53)
    channel = query.choice("channel", TOKEN_CHANNELS, "contribution")
    site = query.integer("site", low=-1, high=max(len(run.sites) - 1, 0), default=-1)
    steps = token_steps(run)
    if steps:
        nearest = min(steps, key=lambda found: abs(found - step))
        return {"steps": len(steps)} | _of_step(run, nearest, site, channel, session.tokenizer)
    return {"steps": 0} | _of_sequence(run, step, max(site, 0), channel)


def token_steps(run: Run) -> list[int]:
    found = getattr(run, "token_steps", None)
    return found() if found is not None else []


def _of_step(run: Run, step: int, site: int, channel: str, tokenizer: Any) -> dict[str, Any]:
    given = run.tokens(step)
    ids = given.pop("ids")
    names = [name for name in given if channel in given[name]]
    if not names:
        raise BadRequestError(f"the tokens of step {step} have no {channel}")
    wanted = run.sites[site].name if site >= 0 else ""
    name = wanted if wanted in names else names[0]
    values = np.asarray(given[name][channel], np.float32)
    if values.ndim > 1:  # a norm per block
        values = np.sqrt(np.square(values.astype(np.float64)).reshape(values.shape[0], -1).sum(axis=1))
    values = values.reshape(-1)[:_MAX_TOKENS]
    flat = None if ids is None else np.asarray(ids).reshape(-1)[: len(values)].tolist()
    return {
        "step": step,
        "site": name,
        "sites": names,
        "channel": channel,
        "pieces": pieces(flat, len(values), tokenizer),
        "values": wire.pack(values),
        "source": None,
    }


def pieces(ids: list[int] | None, count: int, tokenizer: Any) -> list[str]:
    """The text of each token; its id where no tokenizer is given, its place where there are no ids either."""
    if ids is None:
        return [str(place) for place in range(count)]
    if tokenizer is None:
        return [str(token) for token in ids]
    return [tokenizer.decode([token], skip_special_tokens=False) or f"<{token}>" for token in ids]


def _of_sequence(run: Run, step: int, site: int, channel: str) -> dict[str, Any]:
    """The sequence that the step belongs to, if the run tells its sequences."""
    told = [event for event in run.events if event["kind"] == "sequence" and int(event["step"]) <= step]
    if not told:
        return {"step": None, "pieces": [], "source": None}
    event = told[-1]
    source = event.get("source", event.get("text"))
    answer = {"step": int(event["step"]), "pieces": [], "source": None if source is None else str(source)[:_MAX_TEXT]}
    count = event.get("num_tokens")
    if run.version == 1 and type(count) is int and count and run.sites:
        first = int(event["step"]) - 1
        name = run.sites[site].name
        which = channel if channel in ("act", "grad") else "act"
        values = run.get(which, name, steps=slice(first, first + min(count, _MAX_TOKENS)))
        answer |= {"pieces": pieces(None, len(values), None), "values": wire.pack(values)}
        answer |= {"site": name, "sites": [s.name for s in run.sites], "channel": which}
    return answer
