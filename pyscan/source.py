"""Where the bytes of a version 2 file come from: a file on disk with its tail beside it, or memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Protocol

from pyscan.frames import Buffer, map_file

# A writer empties its tail once in 64 rows; a reader that is as slow as that takes what it gets.
_TAIL_READS = 16


class Source(Protocol):
    """Where the bytes come from."""

    path: str

    def load(self) -> tuple[bytes, Buffer]:
        """The tail and the main file as they are now, looked at in this order."""

    @property
    def close(self) -> Callable[[], object]: ...


class PathSource:
    """A file on disk and its tail. The tail is looked at first, so that a row moving between them is never missed."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fileno = os.open(path, os.O_RDONLY)
        self.close = weakref.finalize(self, os.close, self._fileno)  # at the latest when nobody holds the run any more

    def load(self) -> tuple[bytes, Buffer]:
        return self._settled_tail(), map_file(self._fileno)

    def _settled_tail(self) -> bytes:
        """The tail as it was at one moment. One that was emptied and filled anew while it was read is half old and half
        new, which shows when it is read again: a tail that only grew begins with what was read before."""
        rows = self._read_tail()
        for _ in range(_TAIL_READS):
            again = self._read_tail()
            if again.startswith(rows):
                break
            rows = again
        return rows

    def _read_tail(self) -> bytes:
        try:
            with open(f"{self.path}.tail", "rb") as tail:
                return tail.read()
        except FileNotFoundError:
            return b""


class BufferSource:
    """The same for bytes in memory."""

    def __init__(self, main: bytes, tail: bytes = b"") -> None:
        self.path, self.main, self.tail = "<memory>", main, tail

    def load(self) -> tuple[bytes, Buffer]:
        return self.tail, self.main

    def close(self) -> None: ...
