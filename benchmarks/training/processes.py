"""Contestants in processes of their own, of which one runs at a time, for a slice.

A shared machine changes its speed within a tenth of a second, so that whole steps one after the other see different
machines. Here all contestants of a round are at work at once, but all except one are stopped by a signal; each runs for
a slice, again and again, until all are done. What a turn took is the time its process was allowed to run.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
# glibc gives the gradients' memory back to the system when they are freed and asks for it again in the next step:
# 10,000 to 30,000 page faults, another number in every step and process, with every contestant and without one.
STEADY_HEAP = {"MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_MMAP_THRESHOLD_": str(1 << 34)}


class Remote:
    """A worker in a process of its own; stopped, unless it was asked for something."""

    def __init__(self, control: socket.socket, task: dict[str, Any]) -> None:
        self._socket, theirs = socket.socketpair()
        socket.send_fds(control, [json.dumps(task).encode()], [theirs.fileno()])
        theirs.close()
        self._stream = self._socket.makefile("rw")
        self._slices: list[tuple[float, float]] = []
        self._process = int(self._stream.readline())
        self._answer()
        self._signal(signal.SIGSTOP)

    def begin(self, request: dict[str, Any]) -> None:
        """Ask for something; it works on it while `run` lets it."""
        self._slices = []
        print(json.dumps(request), file=self._stream, flush=True)

    def run(self, seconds: float) -> bool:
        """Let it work for so long; whether it has answered."""
        start = time.monotonic()
        self._signal(signal.SIGCONT)
        answered, _, _ = select.select([self._socket], [], [], None if math.isinf(seconds) else seconds)
        self._signal(signal.SIGSTOP)
        self._slices.append((start, time.monotonic()))
        return bool(answered)

    def finish(self) -> dict[str, Any]:
        """The answer; of a turn with the seconds in which it ran, step by step."""
        answer = self._answer()
        if "clock" in answer:
            answer["wall"] = [ran(self._slices, start, end) for start, end in itertools.pairwise(answer.pop("clock"))]
        return answer

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer, without a pause."""
        self.begin(request)
        self.run(math.inf)
        return self.finish()

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        self._stream.close()
        self._socket.close()

    def _answer(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._stream.readline() or '{"failed": "the process ended"}')
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self._process, number)
        except ProcessLookupError:  # it has ended, which its answer tells
            return


def ran(slices: list[tuple[float, float]], start: float, end: float) -> float:
    """The part of the time from `start` to `end` that is in the slices."""
    return sum(max(0.0, min(end, last) - max(start, first)) for first, last in slices)


def share(players: dict[str, Remote], request: dict[str, Any], slice_seconds: float) -> dict[str, dict[str, Any]]:
    """All do the same, one at a time for a slice; returns their answers."""
    for player in players.values():
        player.begin(request)
    waiting, answers = dict(players), {}
    while waiting:
        for name, player in list(waiting.items()):
            if player.run(slice_seconds):
                answers[name] = player.finish()
                del waiting[name]
    return answers


class Server:
    """Starts workers, all forked from one process so that they have the same memory layout; output goes to `log`."""

    def __init__(self, log: Path) -> None:
        self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._started: list[Remote] = []
        with open(log, "w") as file:
            command = [sys.executable, "-m", "benchmarks.training.worker", str(theirs.fileno())]
            files = {"stdout": file, "stderr": file, "stdin": subprocess.DEVNULL, "pass_fds": [theirs.fileno()]}
            self._process = subprocess.Popen(command, cwd=ROOT, env=os.environ | STEADY_HEAP, **files)
        theirs.close()

    def start(self, **task: Any) -> Remote:
        self._started.append(Remote(self._control, task))
        return self._started[-1]

    def end_all(self) -> None:
        while self._started:
            self._started.pop().close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.end_all()
        self._control.close()
        self._process.wait(timeout=60)
