"""A corpus: JSON lines in one or several files, as numbered records that are valid once they exist.

Receives the names of the files; `survey` counts the records, names every bad line and marks the content, `records`
hands the good ones on one after the other. Numbers run from 1 over all files; blank and bad lines have none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Record:
    """One line: a `text`, or `messages`, or a `prompt` with or without its `response`."""

    number: int
    source: str
    line: int
    body: dict[str, Any]

    @property
    def place(self) -> str:
        return f"{self.source}:{self.line}"


@dataclass(frozen=True)
class BadLine:
    source: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: {self.reason}"


@dataclass(frozen=True)
class Survey:
    """What a corpus holds, before any of it is scanned."""

    num_records: int
    fingerprint: str  # of all bytes, in the order of the files
    bad: tuple[BadLine, ...]


def survey(paths: Sequence[Path], *, generate: bool = False) -> Survey:
    """Read everything once. A corpus with bad lines is better known before hours are spent on the good ones."""
    digest, count, bad = hashlib.sha256(), 0, []
    for path in paths:
        for line, raw in _lines(path):
            digest.update(raw)
            found = _parse(path, line, raw, generate)
            count += isinstance(found, dict)
            bad += [found] if isinstance(found, BadLine) else []
        digest.update(b"\0")  # a line moved to the next file is another corpus
    return Survey(count, digest.hexdigest()[:32], tuple(bad))


def records(paths: Sequence[Path], *, generate: bool = False) -> Iterator[Record]:
    """The good records in order."""
    number = 0
    for path in paths:
        for line, raw in _lines(path):
            body = _parse(path, line, raw, generate)
            if isinstance(body, dict):
                number += 1
                yield Record(number, str(path), line, body)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        yield from enumerate(file, start=1)


def _parse(path: Path, line: int, raw: bytes, generate: bool) -> dict[str, Any] | BadLine | None:
    """The object of a line, or what is wrong with it; None if the line is blank."""
    if not raw.strip():
        return None
    try:
        body = json.loads(raw)
        _check(body, generate)
    except (ValueError, RecursionError) as error:  # also what is not UTF-8 and what is not JSON
        return BadLine(str(path), line, str(error) or type(error).__name__)
    return dict(body)


def _check(body: Any, generate: bool) -> None:
    if not isinstance(body, dict):
        raise ValueError(f"a line must hold a JSON object, got {type(body).__name__}")
    if "messages" in body:
        _check_messages(body["messages"])
    elif "prompt" in body:
        _check_text(body, "prompt")
        if "response" in body:
            _check_text(body, "response")
        elif not generate:
            raise ValueError("a prompt needs its response, or --generate N to make one")
    elif "text" in body:
        _check_text(body, "text")
    else:
        names = ", ".join(map(str, body)) or "nothing"
        raise ValueError(f"a line needs text, or messages, or prompt and response; it has {names}")


def _check_text(body: dict[str, Any], name: str) -> None:
    if not isinstance(body[name], str):
        raise ValueError(f"{name} must be text, got {type(body[name]).__name__}")


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one message")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f"a message needs role and content, both text, got {json.dumps(message)[:80]}")
