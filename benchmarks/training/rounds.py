"""Contestants in turns: one turn each per round, in an order that is drawn anew, until the noise is small enough.

Receives names and hands on, for each, the ratio of its time to that of the two bare contestants of the same round. The
two bare ones tell the noise: the run goes on until the median of their ratio is known to within the bound. Where its
memory comes to lie makes a process faster or slower for all its life, so all contestants are started anew some times.
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from benchmarks.training.models import MODELS

ROOT = Path(__file__).parent.parent.parent
BARE = ("bare", "bare again")
NOISE = 0.005
WARMUP_ROUNDS = 3
FEWEST_ROUNDS = 20
LAUNCHES = 4
# glibc gives the gradients' memory back to the system when they are freed and asks for it again in the next step:
# 10,000 to 30,000 page faults, another number in every step and process, with every contestant and without one.
STEADY_HEAP = {"MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_MMAP_THRESHOLD_": str(1 << 34)}
# A turn of those that leave steps out must hold scanned and other steps in their proportion.
SPARSE, STEPS_OF_SPARSE = {"pyscan every 10th", "pyscan budget"}, 20


class Runner(Protocol):
    """A contestant that takes turns."""

    def turn(self, num_steps: int) -> dict[str, Any]: ...
    def close(self) -> dict[str, Any]: ...


class Remote:
    """A contestant in a process of its own."""

    def __init__(self, control: socket.socket, task: dict[str, Any]) -> None:
        mine, theirs = socket.socketpair()
        socket.send_fds(control, [json.dumps(task).encode()], [theirs.fileno()])
        theirs.close()
        self._stream = mine.makefile("rw")
        mine.close()
        self._answer()

    def _answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._stream.readline() or '{"failed": "the process ended"}')
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer

    def turn(self, num_steps: int) -> dict[str, Any]:
        print(num_steps, file=self._stream, flush=True)
        return self._answer()

    def close(self) -> dict[str, Any]:
        return self.turn(0)


class Server:
    """Starts contestants; what they print goes to `log`."""

    def __init__(self, log: Path) -> None:
        self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with open(log, "w") as file:
            command = [sys.executable, "-m", "benchmarks.training.worker", str(theirs.fileno())]
            files = {"stdout": file, "stderr": file, "stdin": subprocess.DEVNULL, "pass_fds": [theirs.fileno()]}
            self._process = subprocess.Popen(command, cwd=ROOT, env=os.environ | STEADY_HEAP, **files)
        theirs.close()

    def start(self, **task: Any) -> Remote:
        return Remote(self._control, task)

    def close(self) -> None:
        self._control.close()
        self._process.wait(timeout=60)


@dataclass
class Taken:
    """What the turns of one contestant took, one value per round."""

    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    claimed: list[float] = field(default_factory=list)  # overhead that a scanner measured itself

    def add(self, other: Taken) -> None:
        for name, values in vars(self).items():
            values += getattr(other, name)


@dataclass(frozen=True)
class Ratio:
    """To bare, over the rounds; `error`: half the width of the 95 % interval of the median."""

    median: float
    p20: float
    p80: float
    error: float


def ratio_of(mine: list[float], others: list[list[float]]) -> Ratio:
    """Of a contestant's times to the mean of the others' in the same round."""
    ratios = sorted(m / statistics.fmean(rest) for m, *rest in zip(mine, *others, strict=True))
    low, high = (ratios[round(q * (len(ratios) - 1))] for q in (0.2, 0.8))
    # 20 % and 80 % of a normal distribution are 1.683 deviations apart; a median has 1.253 times the error of a mean.
    deviation = (high - low) / 1.683
    return Ratio(statistics.median(ratios), low, high, 1.96 * 1.253 * deviation / math.sqrt(len(ratios)))


def is_settled(taken: dict[str, Taken], noise: float = NOISE) -> bool:
    """Whether bare against bare is 1 to within the noise, and known that well, in wall and processor time."""
    one, two = (taken[name] for name in BARE)
    if len(one.wall) < FEWEST_ROUNDS:
        return False
    ratios = [ratio_of(one.wall, [two.wall]), ratio_of(one.processor, [two.processor])]
    return all(max(abs(ratio.median - 1), ratio.error) <= noise for ratio in ratios)


def take_turns(
    runners: dict[str, Runner], num_steps: int, *, rounds: int | None = None, seconds: float = math.inf
) -> dict[str, Taken]:
    """So many rounds, or as many as it takes until the noise is small enough or the time is over."""
    taken = {name: Taken() for name in runners}
    order, draw, start = list(runners), random.Random(0), time.monotonic()
    for _ in range(WARMUP_ROUNDS if rounds is None else min(rounds - 1, WARMUP_ROUNDS)):
        for name in order:
            taken[name].losses.append(runners[name].turn(num_steps)["loss"])
    while (len(taken["bare"].wall) < rounds) if rounds else not is_settled(taken):
        draw.shuffle(order)
        for name in order:
            figures, mine = runners[name].turn(num_steps), taken[name]
            mine.wall.append(figures["wall"])
            mine.processor.append(figures["processor"])
            mine.losses.append(figures["loss"])
            mine.claimed += [] if figures["claimed"] is None else [figures["claimed"]]
        if rounds is None and time.monotonic() - start > seconds:
            break
    return taken


def compare(
    names: list[str], model: str, *, rounds: int | None, seconds: float, log: Path, threads: int = 2, **options: Any
) -> dict[str, Any]:
    """A table's worth of contestants, each in its process, as `report.py` takes it."""
    num_steps = STEPS_OF_SPARSE if SPARSE.intersection(names) else MODELS[model].steps_per_turn
    launches = LAUNCHES if rounds is None else 1
    unavailable: dict[str, str] = {}
    taken: dict[str, Taken] = {}
    closed: dict[str, dict[str, Any]] = {}
    server = Server(log)
    try:
        for _ in range(launches):
            present = [name for name in [*BARE, *names] if name not in unavailable]
            runners, failed = _start(server, present, model=model, threads=threads, **options)
            unavailable |= failed
            part = take_turns(runners, num_steps, rounds=rounds, seconds=seconds / launches)
            for name, mine in part.items():
                taken.setdefault(name, Taken()).add(mine)
            closed = {name: runner.close() for name, runner in runners.items()}
    finally:
        server.close()
    bare = [taken[name] for name in BARE]
    return {
        "model": model,
        "threads": threads,
        **options,
        "rounds": len(taken["bare"].wall),
        "launches": launches,
        "steps_per_turn": num_steps,
        "settled": is_settled(taken),
        "bare_ms": statistics.median(taken["bare"].wall) * 1e3,
        "unavailable": unavailable,
        "contestants": {name: _figures(mine, bare) | closed[name] for name, mine in taken.items()},
    }


def _start(server: Server, names: list[str], **task: Any) -> tuple[dict[str, Runner], dict[str, str]]:
    """The contestants that can run, and why the others cannot."""
    runners: dict[str, Runner] = {}
    unavailable: dict[str, str] = {}
    for name in names:
        try:
            runners[name] = server.start(name=name, **task)
            runners[name].turn(1)
        except RuntimeError as error:
            runners.pop(name, None)
            unavailable[name] = str(error)
    return runners, unavailable


def _figures(mine: Taken, bare: list[Taken]) -> dict[str, Any]:
    others = [bare[1]] if mine is bare[0] else [bare[0]] if mine is bare[1] else bare
    return {
        "wall": vars(ratio_of(mine.wall, [b.wall for b in others])),
        "processor": vars(ratio_of(mine.processor, [b.processor for b in others])),
        "same_losses": mine.losses == bare[0].losses,
        "claimed": statistics.median(mine.claimed) if mine.claimed else None,
    }
