"""Contestants as twins of one training: each takes steps when asked, and says what they took.

`Worker` does it in this process, `Host` in one of its own, where `serve` answers.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.training import models
from benchmarks.training.billing import watch
from benchmarks.training.contestants import CONTESTANTS
from benchmarks.training.models import MODELS, Training

# glibc gives the gradients' memory back to the system when they are freed and asks for it again in the next step:
# 10,000 to 30,000 page faults, another number in every step and process, with every contestant and without one.
STEADY_HEAP = {"MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_MMAP_THRESHOLD_": str(1 << 34)}
END_SECONDS = 60


class Player:
    """A contestant on a twin, with a directory to write to."""

    def __init__(self, name: str, training: Training, directory: Path) -> None:
        directory.mkdir()
        self.training = training
        self.directory = directory
        self.attached, self.background = watch(lambda: CONTESTANTS[name].attach(training, directory))
        self.num_steps = 0

    def steps(self, num_steps: int, accumulate: int) -> list[torch.Tensor]:
        self.num_steps += num_steps
        after_step = self.attached.after_step
        return [models.step(self.training, accumulate=accumulate, after_step=after_step) for _ in range(num_steps)]


class Worker:
    """Twins of one training, a contestant attached to each."""

    def __init__(self, model: str, *, accumulate: int = 1, compiled: bool = False) -> None:
        self._common = models.make(MODELS[model])
        models.step(self._common)
        self._accumulate = accumulate
        self._compiled = compiled
        self._players: dict[str, Player] = {}
        self._home = tempfile.TemporaryDirectory(prefix="pyscan-bench-")

    def join(self, name: str) -> None:
        """Attach a contestant to a twin of its own."""
        training = models.twin(self._common, compiled=self._compiled)
        self._players[name] = Player(name, training, Path(self._home.name) / name)

    def leave(self, name: str) -> dict[str, float]:
        """Detach a contestant; returns what it has written."""
        player = self._players.pop(name)
        player.attached.close()
        size = sum(path.stat().st_size for path in player.directory.rglob("*") if path.is_file())
        values = player.attached.values_per_step
        return {"bytes_per_step": size / max(player.num_steps, 1), "values_per_step": values}

    def turn(self, name: str, num_steps: int) -> dict[str, Any]:
        """Seconds of a step. `background` is what threads and processes of this contestant have used since its last
        turn, which `processor` does not hold."""
        player = self._players[name]
        player.attached.begin_turn()
        processor, wall = self._foreground_seconds(), time.perf_counter()
        losses = player.steps(num_steps, self._accumulate)
        wall, processor = time.perf_counter() - wall, self._foreground_seconds() - processor
        return {
            "wall": wall / num_steps,
            "processor": processor / num_steps,
            "background": player.background.bill() / num_steps,
            "losses": [loss.item() for loss in losses],
            "claimed": player.attached.overhead() if player.attached.overhead else None,
        }

    def _foreground_seconds(self) -> float:
        """Of this process, without the threads of any contestant."""
        return time.process_time() - sum(player.background.threads_seconds() for player in self._players.values())


class Host:
    """A worker in a process of its own, which ends with this one; its output goes to `log`."""

    def __init__(self, log: Path, **task: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, log, task), daemon=True)
        with mock.patch.dict(os.environ, STEADY_HEAP):  # glibc reads it when a process starts
            self._process.start()
        theirs.close()

    def ask(self, what: str, *arguments: Any) -> Any:
        """The answer of that method of the worker."""
        try:
            self._pipe.send((what, arguments))
            answer, failed = self._pipe.recv()
        except (EOFError, OSError):
            raise RuntimeError("the process ended; the log says why") from None
        if failed is not None:
            raise RuntimeError(failed)
        return answer

    def close(self) -> None:
        self._pipe.close()
        self._process.join(END_SECONDS)
        self._process.kill()


def serve(pipe: Connection, log: Path, task: dict[str, Any]) -> None:
    """In the process of a host: a worker, until nobody asks any more."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    torch.set_num_threads(task.pop("threads"))
    worker = Worker(**task)
    while True:
        try:
            what, arguments = pipe.recv()
        except EOFError:
            return
        pipe.send(_answer(getattr(worker, what), arguments))


def _answer(method: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, str | None]:
    """What it returned, and why it failed."""
    try:
        return method(*arguments), None
    except Exception as error:
        traceback.print_exc()
        return None, f"{type(error).__name__}: {error}".splitlines()[0]
