"""Contestants in rounds, each round one turn of each in an order drawn anew, until the noise is small enough.

Receives names and hands on, for each, the ratio of its time to that of two bare contestants, which also tell the noise.
Contestants are twins in one process; one that changes more than its model, and every one of a compiled model, has a
process of its own. Processes are started anew some times: each has its own luck with its memory.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.training.contestants import CONTESTANTS
from benchmarks.training.models import MODELS
from benchmarks.training.ratios import BARE, Taken, is_settled, ratios
from benchmarks.training.worker import Host

LAUNCHES = 4
LAUNCH_SECONDS = 90.0  # at least: starting takes some of it


class Comparison:
    """A table's worth of contestants on one model."""

    def __init__(self, names: list[str], model: str, **task: Any) -> None:
        self.taken = {name: Taken() for name in [*BARE, *names]}
        self.written: dict[str, dict[str, float]] = {}
        self.unavailable: dict[str, str] = {}
        self.num_launches = 0
        # The same for all: what a mean hides of the machine's noise depends on the number of steps.
        self.num_steps = max(MODELS[model].steps_per_turn, *(CONTESTANTS[name].steps_per_turn for name in self.taken))
        self._task = {"model": model, **task}
        self._draw = random.Random(0)

    def launch(self, is_enough: Callable[[int], bool]) -> None:
        """New processes, and rounds until so many are enough."""
        self.num_launches += 1
        hosts: dict[str, Host] = {}
        try:
            self._start(hosts)
            num_rounds = 0
            while not is_enough(num_rounds):
                num_rounds += 1
                for name in self._drawn():
                    self.taken[name].add(hosts[name].ask("turn", name, self.num_steps))
            self.written |= {name: hosts[name].ask("leave", name) for name in self.taken}
        finally:
            for host in set(hosts.values()):
                host.close()

    def _start(self, hosts: dict[str, Host]) -> None:
        """Contestants in their processes, attached and warm; those that cannot are taken off the list."""
        order = self._drawn()
        for name in order:
            hosts[name] = self._host(name, hosts)
        for name in order:
            try:
                hosts[name].ask("join", name)
                hosts[name].ask("turn", name, CONTESTANTS[name].warmup_steps)
            except RuntimeError as error:
                if name in BARE:
                    raise
                del self.taken[name]
                self.unavailable[name] = str(error)

    def _drawn(self) -> list[str]:
        return self._draw.sample(list(self.taken), len(self.taken))

    def _host(self, name: str, hosts: dict[str, Host]) -> Host:
        shared = [host for other, host in hosts.items() if not self._is_alone(other)]
        return shared[0] if shared and not self._is_alone(name) else Host(**self._task)

    def _is_alone(self, name: str) -> bool:
        return CONTESTANTS[name].is_alone or bool(self._task.get("compiled"))


def compare(
    names: list[str], model: str, *, rounds: int | None, seconds: float, threads: int = 2, log: Path, **options: Any
) -> dict[str, Any]:
    """One launch of as many rounds as asked for; or launches, until one leaves the noise small enough or the time is
    over. The result is what `report.py` takes."""
    log.write_text("")
    comparison = Comparison(names, model, threads=threads, log=log, **options)
    if rounds is not None:
        comparison.launch(lambda num_rounds: num_rounds >= rounds)
    else:
        _launches(comparison, seconds)
    found = ratios(comparison.taken)
    return {
        "model": model,
        "threads": threads,
        **options,
        "rounds": len(comparison.taken["bare"].wall),
        "launches": comparison.num_launches,
        "steps_per_turn": comparison.num_steps,
        "settled": is_settled(found),
        "bare_ms": float(np.median(comparison.taken["bare"].seconds("wall").sum(axis=1))) * 1e3,
        "unavailable": comparison.unavailable,
        "contestants": {
            name: {
                **{clock: vars(ratio) for clock, ratio in found[name].items()},
                "same_losses": len(one.losses | comparison.taken["bare"].losses) == 1,
                "claimed": statistics.median(one.claimed) if one.claimed else None,
                **comparison.written[name],
            }
            for name, one in comparison.taken.items()
        },
    }


def _launches(comparison: Comparison, seconds: float) -> None:
    start, num_launches = time.monotonic(), max(1, min(LAUNCHES, int(seconds / LAUNCH_SECONDS)))
    for number in range(1, num_launches + 1):
        comparison.launch(_until(start + seconds * number / num_launches))
        if is_settled(ratios(comparison.taken)):
            return


def _until(end: float) -> Callable[[int], bool]:
    return lambda num_rounds: num_rounds > 0 and time.monotonic() > end
