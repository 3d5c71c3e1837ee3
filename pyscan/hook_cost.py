"""What a hook costs before any of our code runs: the part of the overhead that the scanner cannot time from inside.

Hands on the seconds by which the call of a module becomes longer through one hook that does nothing, measured once per
process in 10 to 20 milliseconds, on a module of our own. A hook is called between operators of the host, which leave
the caches full of other things: so here something else is read before each call.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

# Where a global hook of somebody else would see our module, nothing is measured: an ordinary figure for a CPU core.
UNMEASURED = 2e-6
_CALLS = 200
_OTHER_BYTES = 1 << 21


class _Nothing(nn.Module):
    def forward(self, x: None) -> None:
        return None


def _hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    return None


@functools.cache
def seconds_per_call() -> float:
    """Median of calls with and without a hook, in turns."""
    if getattr(torch.nn.modules.module, "_has_any_global_hook", lambda: True)():
        return UNMEASURED
    bare, hooked = _Nothing(), _Nothing()
    hooked.register_forward_pre_hook(_hook, with_kwargs=True)
    other = np.zeros(_OTHER_BYTES, np.uint8)
    pairs = [(_seconds(bare, other), _seconds(hooked, other)) for _ in range(_CALLS)]
    return max(statistics.median(h for _, h in pairs) - statistics.median(b for b, _ in pairs), 0.0)


def _seconds(module: nn.Module, other: NDArray[np.uint8]) -> float:
    other.max()
    start = time.perf_counter()
    module(None)
    return time.perf_counter() - start
