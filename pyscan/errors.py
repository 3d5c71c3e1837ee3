"""The errors that reading and rewriting scans raise; every one of them is a ScanError."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ScanError(Exception):
    """Something about a scan cannot be done; the message says the rule, the value and the remedy."""


class ScanFormatError(ScanError, ValueError):
    """The bytes are not a readable `.mscan` file."""


class ScanNameError(ScanError, KeyError):
    """A site or channel that the run does not have."""

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        names = list(known)
        close = difflib.get_close_matches(name, names, n=3, cutoff=0.5) if len(names) <= 20_000 else []
        hint = f"did you mean {', '.join(map(repr, close))}?" if close else f"there are {len(names)}: {names[:3]} ..."
        self.message = f"no {what} is named {name!r}; {hint}"
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message
