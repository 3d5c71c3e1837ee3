"""One contestant at work: takes training steps when asked and says how long they took.

`Worker` does it in this process. `python -m benchmarks.training.worker` is a server: it loads torch once and forks a
process for every contestant, so that all have the same memory layout; each speaks lines of JSON over a socket.
"""

from __future__ import annotations

import json
import os
import shutil
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


class Worker:
    """A model in training, with a contestant attached."""

    def __init__(self, name: str, model: str, *, accumulate: int = 1, compiled: bool = False) -> None:
        self._training = make(MODELS[model], compiled=compiled)
        self._accumulate = accumulate
        self._directory = Path(tempfile.mkdtemp(prefix="pyscan-bench-"))
        self._attached = CONTESTANTS[name].attach(self._training, self._directory)
        self._children = psutil.Process().children(recursive=True)  # services that a contestant has started
        self._num_steps = 0
        self._billed = 0, self._processor_seconds()

    def turn(self, num_steps: int) -> dict[str, Any]:
        """Seconds per step. A turn of several steps begins with one that is not timed, since the caches hold the data
        of others. Processor time is all that was used since the last turn: what the threads of a contestant did while
        others had their turn is its own."""
        self._attached.begin_turn()
        if num_steps > 1:
            self._step()
        start = time.perf_counter()
        losses = [self._step() for _ in range(num_steps)]
        wall = time.perf_counter() - start
        before, self._billed = self._billed, (self._num_steps, self._processor_seconds())
        processor = (self._billed[1] - before[1]) / (self._billed[0] - before[0])
        claimed = self._attached.overhead() if self._attached.overhead else None
        return {"wall": wall / num_steps, "processor": processor, "loss": losses[-1].item(), "claimed": claimed}

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

    def close(self) -> dict[str, Any]:
        self._attached.close()
        files = [path for path in self._directory.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        shutil.rmtree(self._directory, ignore_errors=True)
        return {"bytes_per_step": size / self._num_steps, "values_per_step": self._attached.values_per_step}


def serve(connection: socket.socket, task: dict[str, Any]) -> NoReturn:
    """In the child: one contestant until it is told to close."""
    with connection.makefile("rw") as stream:
        try:
            torch.set_num_threads(task.pop("threads"))
            worker = Worker(**task)
            answer: dict[str, Any] = {"ready": True}
            while True:
                print(json.dumps(answer), file=stream, flush=True)
                num_steps = int(stream.readline() or 0)
                if num_steps == 0:
                    break
                answer = worker.turn(num_steps)
            print(json.dumps(worker.close()), file=stream, flush=True)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            traceback.print_exc()
            print(json.dumps({"failed": text}), file=stream, flush=True)
    os._exit(0)


def main() -> None:
    """The server: a line of JSON with a task, and the descriptor of a socket, for every contestant."""
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401  loaded before the fork

    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, 65536, 1)
        if not data:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            if os.fork() == 0:
                control.close()
                serve(connection, json.loads(data))


if __name__ == "__main__":
    main()
