"""`open()`: look at the first bytes of a path and hand on the Run that reads such a file."""

from __future__ import annotations

import builtins
import os
import struct

from pyscan import format as fmt
from pyscan.errors import ScanFormatError
from pyscan.ranks import find_ranks, open_ranks
from pyscan.run import Run
from pyscan.source import BufferSource, PathSource
from pyscan.version1 import Version1Run
from pyscan.version2 import FileRun

__all__ = ["Run", "open", "open_buffer"]

_START = struct.Struct("<5sH")


def open(path: str | os.PathLike[str]) -> Run:
    """Open a scan for reading: a `.mscan` file of version 2 or 1.1, or all ranks' files by their common name."""
    name = os.fspath(path)
    if not os.path.exists(name):
        if find_ranks(name):
            return open_ranks(name)
        raise FileNotFoundError(f"there is no file {name!r} and no {os.path.splitext(name)[0]}.rank00000.mscan")
    with builtins.open(name, "rb") as file:
        version = _version(file.read(_START.size))
    if version == 1:
        return Version1Run(name)
    return FileRun(PathSource(name))


def open_buffer(main: bytes, tail: bytes = b"") -> Run:
    """The same for the bytes of a file."""
    if _version(main[: _START.size]) == 1:
        return Version1Run("<memory>", main)
    return FileRun(BufferSource(main, tail))


def _version(start: bytes) -> int:
    if len(start) < _START.size or start[:5] != fmt.MAGIC:
        raise ScanFormatError(f"not a .mscan file: it begins with {start[:5]!r} instead of {fmt.MAGIC!r}")
    return int(_START.unpack(start)[1])
