"""What a hook costs before any of our code runs: the part of the overhead that the scanner cannot time from inside.

Hands on the seconds by which the call of a module becomes longer through one hook that does nothing, measured once per
process in a few milliseconds, on a module of our own.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from torch import nn

# Where a global hook of somebody else would see our module, nothing is measured: an ordinary figure for a CPU core.
UNMEASURED = 2e-6
_CALLS, _ROUNDS = 100, 9


class _Nothing(nn.Module):
    def forward(self, x: None) -> None:
        return None


def _hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    return None


@functools.cache
def seconds_per_call() -> float:
    """Best of several rounds, with and without a hook in turns: what disturbs a round only makes it longer."""
    if getattr(torch.nn.modules.module, "_has_any_global_hook", lambda: True)():
        return UNMEASURED
    bare, hooked = _Nothing(), _Nothing()
    hooked.register_forward_pre_hook(_hook, with_kwargs=True)
    pairs = [(_seconds(bare), _seconds(hooked)) for _ in range(_ROUNDS)]
    return max(min(h for _, h in pairs) - min(b for b, _ in pairs), 0.0)


def _seconds(module: nn.Module) -> float:
    start = time.perf_counter()
    for _ in range(_CALLS):
        module(None)
    return (time.perf_counter() - start) / _CALLS
