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

import numpy as np
import torch

from benchmarks.training import models
from benchmarks.training.billing import watch
from benchmarks.training.contestants import CONTESTANTS
from benchmarks.training.models import MODELS, Training
from benchmarks.training.ratios import CLOCKS, Floats

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

    def step(self, accumulate: int, mark: Callable[[], None]) -> torch.Tensor:
        self.num_steps += 1
        return models.step(self.training, accumulate=accumulate, after_step=self.attached.after_step, mark=mark)


class Marks:
    """When steps came to their marks, by the clocks of `CLOCKS`: what lies between two marks is a stretch."""

    def __init__(self) -> None:
        self._moments: list[tuple[float, float]] = []

    def mark(self) -> None:
        self._moments.append((time.perf_counter(), time.process_time()))

    def take(self, num_steps: int) -> Floats:
        """[clocks, stretches]: seconds of the stretches of a step, the mean of so many steps."""
        moments, self._moments = np.array(self._moments), []
        stretches: Floats = np.diff(moments.reshape(num_steps, -1, len(CLOCKS)), axis=1).mean(axis=0).T
        return stretches


class Worker:
    """Twins of one training, a contestant attached to each."""

    def __init__(self, model: str, *, accumulate: int = 1, compiled: bool = False) -> None:
        self._common = models.make(MODELS[model])
        models.step(self._common)
        self._accumulate = accumulate
        self._compiled = compiled
        self._marks = Marks()
        self._players: dict[str, Player] = {}
        self._home = tempfile.TemporaryDirectory(prefix="pyscan-bench-")

    def join(self, name: str) -> None:
        """Attach a contestant to a twin of its own."""
        training = models.twin(self._common, compiled=self._compiled)
        if not self._compiled:  # a hook in the middle would break its graph
            models.mark_layers(training.network, self._marks.mark)
        self._players[name] = Player(name, training, Path(self._home.name) / name)

    def leave(self, name: str) -> dict[str, float]:
        """Detach a contestant; returns what it has written."""
        player = self._players.pop(name)
        player.attached.close()
        size = sum(path.stat().st_size for path in player.directory.rglob("*") if path.is_file())
        values = player.attached.values_per_step
        return {"bytes_per_step": size / max(player.num_steps, 1), "values_per_step": values}

    def turn(self, name: str, num_steps: int) -> dict[str, Any]:
        """Seconds of a step, by stretches. `background` is what threads and processes of this contestant have used
        since its last turn, which `processor` does not hold."""
        player = self._players[name]
        player.attached.begin_turn()
        threads = self._threads_seconds()
        losses = [player.step(self._accumulate, self._marks.mark) for _ in range(num_steps)]
        threads = (self._threads_seconds() - threads) / num_steps
        wall, processor = self._marks.take(num_steps)
        return {
            "wall": wall,
            "processor": processor * (1 - threads / processor.sum()),
            "background": player.background.bill() / num_steps,
            "losses": [loss.item() for loss in losses],
            "claimed": player.attached.overhead() if player.attached.overhead else None,
        }

    def _threads_seconds(self) -> float:
        """What the threads of all contestants have used, which is part of this process' time."""
        return sum(player.background.threads_seconds() for player in self._players.values())


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
