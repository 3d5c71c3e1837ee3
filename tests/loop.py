"""The loop of examples/train.py at a size for tests, driven from inside the process or as a program of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import pyscan
from pyscan.demo import load_example

ROOT = Path(__file__).parent.parent
SIZES = "--hidden 32 --layers 2 --heads 4 --kv-heads 2 --vocabulary 280 --corpus-bytes 30000 --context 16 --batch 2"
OPTIONS = f"{SIZES} --accumulate 2 --warmup 2 --log-every 1000000 --device cpu".split()


def make_job(output: Path, *options: str) -> Any:
    """The example's module and a job of it."""
    example = load_example()
    output.mkdir(parents=True, exist_ok=True)
    return example, example.Job(example.parse_arguments([*OPTIONS, "-o", str(output), *options]))


def train_scanned(output: Path, *options: str) -> pyscan.Run:
    """What examples/train.py does, and its scan."""
    example, job = make_job(output, *options)
    path = output / "run.mscan"
    with pyscan.attach(job.model, path, optimizer=job.optimizer, resume=job.args.resume) as scan:
        job.parts["scan"] = scan
        if job.args.resume:
            job.resume()
        example.train(job)
    return pyscan.open(path)


def run_python(*arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


def assert_same_cells(one: pyscan.Run, other: pyscan.Run) -> None:
    """Every code of every channel and site, and what is known of each step beside the time."""
    assert [site.name for site in one.sites] == [site.name for site in other.sites]
    assert [channel.name for channel in one.channels] == [channel.name for channel in other.channels]
    for field in ("step", "tokens", "loss", "lr"):
        assert np.array_equal(one.steps[field], other.steps[field], equal_nan=True), field
    for channel in one.channels:
        for site in one.sites:
            first, second = one.codes(channel.name, site.name), other.codes(channel.name, site.name)
            assert (first == second).all(), f"{channel.name} of {site.name}"
