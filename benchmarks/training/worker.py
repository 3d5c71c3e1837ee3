"""A model in training to which contestants attach, one after the other: takes steps when asked and says what they took.

`Worker` does it in this process. `python -m benchmarks.training.worker` is a server: it loads torch once and forks a
process for every worker; each speaks lines of JSON over a socket.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch

from benchmarks.training.contestants import CONTESTANTS
from benchmarks.training.models import MODELS, make

PR_SET_PDEATHSIG = 1


class Worker:
    """A model in training, with a contestant attached."""

    def __init__(self, model: str, *, accumulate: int = 1, compiled: bool = False) -> None:
        self._training = make(MODELS[model], compiled=compiled)
        self._accumulate = accumulate

    def become(self, name: str) -> dict[str, Any]:
        """Attach a contestant."""
        self._directory = Path(tempfile.mkdtemp(prefix="pyscan-bench-"))
        self._attached = CONTESTANTS[name].attach(self._training, self._directory)
        self._children = psutil.Process().children(recursive=True)  # services that a contestant has started
        self._num_steps = 0
        self._billed = self._processor_seconds()
        return {}

    def leave(self, _: None = None) -> dict[str, Any]:
        """Detach the contestant; returns what it has written."""
        self._attached.close()
        files = [path for path in self._directory.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        shutil.rmtree(self._directory, ignore_errors=True)
        values = self._attached.values_per_step
        return {"bytes_per_step": size / max(self._num_steps, 1), "values_per_step": values}

    def turn(self, num_steps: int) -> dict[str, Any]:
        """What the clocks say between steps. The processor time of a step is all that was used since the last one: what
        the threads of a contestant did while others had their turn is its own."""
        self._attached.begin_turn()
        losses, wall, processor = [], [time.monotonic()], [self._billed]
        for _ in range(num_steps):
            losses.append(self._step())
            wall.append(time.monotonic())
            processor.append(self._processor_seconds())
        self._billed = processor[-1]
        return {
            "clock": wall, "processor": [after - before for before, after in itertools.pairwise(processor)],
            "losses": [loss.item() for loss in losses],
            "claimed": self._attached.overhead() if self._attached.overhead else None,
        }  # fmt: skip

    def _processor_seconds(self) -> float:
        """Of this process and all its threads, and of those it has started; the latter in units of 10 ms."""
        return time.process_time() + sum(sum(child.cpu_times()[:2]) for child in self._children)

    def _step(self) -> torch.Tensor:
        training = self._training
        for _ in range(self._accumulate):
            loss: torch.Tensor = training.model(input_ids=training.ids, labels=training.ids).loss
            loss.backward()
        training.optimizer.step()
        self._attached.after_step()
        training.optimizer.zero_grad(set_to_none=True)
        self._num_steps += 1
        return loss.detach()


def serve(connection: socket.socket, task: dict[str, Any]) -> NoReturn:
    """In the child: one worker, until nobody asks any more."""
    os.setpgid(0, 0)  # it is stopped together with what it has started
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # also while it is stopped
    with connection.makefile("rw") as stream:
        print(os.getpid(), file=stream, flush=True)
        try:
            torch.set_num_threads(task.pop("threads"))
            worker = Worker(**task)
            answer: dict[str, Any] = {"ready": True}
            while True:
                print(json.dumps(answer), file=stream, flush=True)
                request = json.loads(stream.readline() or "{}")
                if not request:
                    break
                name, argument = request.popitem()
                answer = {"become": worker.become, "turn": worker.turn, "leave": worker.leave}[name](argument)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            traceback.print_exc()
            print(json.dumps({"failed": text}), file=stream, flush=True)
    os._exit(0)


def main() -> None:
    """The server: a line of JSON with a task, and the descriptor of a socket, for every worker."""
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401  loaded before the fork

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for workers
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 65536, 1)
        if not data:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                control.close()
                serve(connection, json.loads(data))


if __name__ == "__main__":
    main()
