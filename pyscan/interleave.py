"""What the scanner costs, measured in the run itself: every third step is taken with the scanner paused.

Receives a scanner and its optimizer and times the steps between them; hands on how much longer a scanned step took than
the paused one beside it, so that whatever slows the machine for a while slows both.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from pyscan.scanner import Scanner

# Steps at the start that are not compared: memory and threads are still settling.
WARMUP = 3


@dataclass(frozen=True)
class Cost:
    """Ratios of step times, scanned to paused, minus 1."""

    median: float
    p20: float
    p80: float
    num_paused: int  # paused steps, each compared with the scanned one before and with the one after


class Interleaved:
    """Pauses a scanner at every third step of its optimizer, from the second of each three on."""

    def __init__(self, scan: Scanner, optimizer: Optimizer) -> None:
        self._scan = scan
        self._pause = ExitStack()
        self._num_steps = 0
        self._seconds: list[float] = []
        # Registered after the scanner's own hook, so a step's time ends when its row is handed over.
        self._handle = optimizer.register_step_post_hook(self._step_ended)
        self._last: float | None = None

    def stop(self) -> None:
        self._handle.remove()
        self._pause.close()

    def _step_ended(self, *args: Any) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._num_steps += 1
        self._pause.close()
        if self._is_paused(self._num_steps):
            self._pause.enter_context(self._scan.paused())
        self._last = time.perf_counter()

    @staticmethod
    def _is_paused(step: int) -> bool:
        """Of the step after `step` others."""
        return step >= WARMUP and step % 3 == 1

    def cost(self) -> Cost | None:
        """None as long as no paused step stands between two scanned ones."""
        seconds = self._seconds  # [i] is the time of the step after i + 1 others
        places = [i for i in range(1, len(seconds) - 1) if self._is_paused(i + 1)]
        # One step against one: the mean of two would meet a slow moment of the machine twice as often.
        ratios = sorted(seconds[i + side] / seconds[i] - 1 for i in places for side in (-1, 1))
        if not ratios:
            return None
        low, high = ratios[len(ratios) // 5], ratios[-1 - len(ratios) // 5]
        return Cost(statistics.median(ratios), low, high, len(places))
