"""Mark a piece of Python as counted. Receives a label and a call; valgrind writes what the call executed to a file.

The first calls are not counted: memory is allocated and caches of the interpreter are filled.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable

WARMUP = 3

_requests = ctypes.CDLL(os.environ["PYSCAN_CALLGRIND_REQUESTS"])


def counted(label: str, call: Callable[[], object], *, repeat: int) -> None:
    """Count `repeat` calls."""
    for _ in range(WARMUP):
        call()
    gc.collect()
    gc.disable()
    _requests.begin()
    for _ in range(repeat):
        call()
    _requests.end(f"{label}|{repeat}".encode())
    gc.enable()
