"""The main job: the loop of examples/train.py with the scanner on, and what it costs measured on the way.

Receives the options of the example; trains, and hands on where everything lies and the measured cost.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pyscan
from pyscan.extras import need
from pyscan.interleave import Cost, Interleaved

# A run that nobody gave a number of steps takes about so long, on whatever machine it is.
SECONDS = 120.0
MOST_STEPS, FEWEST_STEPS = 120, 12

_LIBRARIES = ("torch", "transformers", "tokenizers", "rich")


@dataclass(frozen=True)
class Outcome:
    """What a demo leaves behind."""

    scan: Path
    model: Path
    checkpoint: Path
    cost: Cost | None


def load_example() -> ModuleType:
    """examples/train.py: inside the package where it is installed, beside it in a checkout."""
    for library in _LIBRARIES:
        need(library, "demo")
    need("transformers", "demo").utils.logging.disable_progress_bar()
    here = Path(__file__).parent
    path = next(p for p in (here / "examples" / "train.py", here.parent / "examples" / "train.py") if p.exists())
    spec = importlib.util.spec_from_file_location("pyscan_demo_train", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(example: Any, options: list[str], steps: int | None = None) -> Outcome:
    """Train as the example does, every third step without the scanner; without `steps`, as many as time allows."""
    args = example.parse_arguments(options)
    args.output.mkdir(parents=True, exist_ok=True)
    job = example.Job(args)
    path = args.output / "run.mscan"
    with pyscan.attach(job.model, path, optimizer=job.optimizer, resume=args.resume) as scan:
        job.parts["scan"] = scan
        if args.resume:
            job.resume()
        with scan.paused():
            args.steps = job.step + affordable_steps(job) if steps is None else steps
        measured = Interleaved(scan, job.optimizer)
        example.train(job)
        measured.stop()
    job.save_model()
    assert scan.path is not None
    return Outcome(
        scan=scan.path,
        model=args.output / "model",
        checkpoint=args.output / "checkpoint.pt",
        cost=measured.cost(),
    )


def affordable_steps(job: Any) -> int:
    """How many steps SECONDS allow, from the time of some passes that change nothing."""
    ids, seconds = job.batch(0, 0), []
    for _ in range(4):
        start = time.perf_counter()
        job.model(input_ids=ids, labels=ids).loss.backward()
        seconds.append(time.perf_counter() - start)
    job.optimizer.zero_grad(set_to_none=True)
    step = statistics.median(seconds[1:]) * job.args.accumulate
    return max(FEWEST_STEPS, min(MOST_STEPS, int(SECONDS / step)))
