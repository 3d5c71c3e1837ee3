"""Where the bytes of a version 2 file come from: a file on disk with its tail beside it, or memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Protocol

from pyscan.frames import Buffer, map_file


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
        try:
            with open(f"{self.path}.tail", "rb") as tail:
                rows = tail.read()
        except FileNotFoundError:
            rows = b""
        return rows, map_file(self._fileno)


class BufferSource:
    """The same for bytes in memory."""

    def __init__(self, main: bytes, tail: bytes = b"") -> None:
        self.path, self.main, self.tail = "<memory>", main, tail

    def load(self) -> tuple[bytes, Buffer]:
        return self.tail, self.main

    def close(self) -> None: ...
