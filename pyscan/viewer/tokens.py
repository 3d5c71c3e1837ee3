"""The text of a step, token by token, with the norms of one site.

Receives a session and a query; hands on pieces of text with a value each. Runs of version 1.1 have a row per token, and
their text only as a whole.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pyscan.codecs import Floats, combine
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
    ids = given["ids"]
    sites = {name: given[name] for name in (site.name for site in run.sites) if name in given}
    names = [name for name, channels in sites.items() if "grad" in channels or channel in channels]
    if not names:
        raise BadRequestError(f"the tokens of step {step} have no {channel}")
    wanted = run.sites[site].name if site >= 0 else ""
    name = wanted if wanted in names else names[0]
    values = _per_token(np.asarray(sites[name][channel], np.float32), ids)[:_MAX_TOKENS]
    is_each = ids is not None and np.size(ids) >= len(values)
    flat = np.asarray(ids).reshape(-1)[: len(values)].tolist() if is_each else None
    return {
        "step": step,
        "site": name,
        "sites": names,
        "channel": channel,
        "pieces": pieces(flat, len(values), tokenizer),
        "values": wire.pack(values),
        "source": None,
    }


def _per_token(values: Floats, ids: Any) -> Floats:
    """One norm per token, or per sequence: dimensions beyond those of the ids are blocks."""
    shape = np.shape(ids) if ids is not None else values.shape[:1]
    lead = len(shape) if values.shape[: len(shape)] == shape else 1
    flat = values.reshape(int(np.prod(values.shape[:lead])), -1)
    return flat[:, 0] if flat.shape[1] == 1 else combine(flat, "sumsq", axis=1)


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
    source = event.get("text", event.get("source"))
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
