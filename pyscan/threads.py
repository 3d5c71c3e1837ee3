"""Find the OpenMP runtime that torch computes with, and let the engine reduce on its threads.

They spin for some milliseconds after every operator of the training step: threads of our own would share a core with
one that does nothing, and theirs are awake.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

from pyscan import _C


def borrow() -> bool:
    """Reduce on torch's own threads from now on. False, and threads of our own, where its runtime is not found."""
    if not torch.backends.openmp.is_available():  # type: ignore[no-untyped-call]
        return False
    for library in _loaded_runtimes():
        parallel, number = (_address(library, name) for name in ("GOMP_parallel", "omp_get_thread_num"))
        if parallel and number:
            _C.borrow_threads(parallel, number)
            return True
    return False


def _address(library: str, name: str) -> int:
    """Of a function in a library; 0 if it has none of that name."""
    function = getattr(ctypes.CDLL(library), name, None)
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


def _loaded_runtimes() -> list[str]:
    """OpenMP libraries in this process, those beside torch first: another package may have brought one of its own."""
    if not sys.platform.startswith("linux"):
        return []
    torch_home = str(Path(torch.__file__).parent)
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count("/") and "omp" in line}
    found = [path for path in paths if Path(path).name.startswith(("libgomp", "libiomp5", "libomp"))]
    return sorted(found, key=lambda path: (not path.startswith(torch_home), path))
