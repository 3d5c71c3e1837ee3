"""The parameters of a request, each checked before anything is done with it.

Receives the text after the question mark; hands on whole numbers inside their limits and words from given lists.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from urllib.parse import parse_qsl

# No honest question is longer.
MAX_CHARACTERS = 1000
_NUMBER = re.compile(r"-?\d{1,15}", re.ASCII)


class BadRequestError(ValueError):
    """The question is not one the viewer answers: the rule and the value."""


class Query:
    def __init__(self, text: str) -> None:
        if len(text) > MAX_CHARACTERS:
            raise BadRequestError(f"a query has at most {MAX_CHARACTERS} characters, got {len(text)}")
        try:
            pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text), max_num_fields=16)
        except ValueError as error:
            raise BadRequestError(f"the query cannot be read: {error}") from None
        self._given = dict(pairs)
        if len(self._given) != len(pairs):
            raise BadRequestError("a query names each parameter once")

    def integer(self, name: str, *, low: int, high: int, default: int | None = None) -> int:
        text = self._given.get(name)
        if text is None and default is not None:
            return default
        if text is None or not _NUMBER.fullmatch(text) or not low <= int(text) <= high:
            raise BadRequestError(f"{name} must be a whole number from {low} to {high}, got {_short(text)}")
        return int(text)

    def choice(self, name: str, allowed: Collection[str], default: str | None = None) -> str:
        text = self._given.get(name, default)
        if text is None or text not in allowed:
            raise BadRequestError(f"{name} must be one of {', '.join(allowed)}, got {_short(text)}")
        return text


def _short(text: str | None) -> str:
    return "nothing" if text is None else repr(text[:40])
