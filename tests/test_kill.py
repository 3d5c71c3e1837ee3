"""`kill -9` at any moment: the file opens, no flushed row is lost, and no row older than `flush_seconds`."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

import pyscan
from pyscan.writer import Writer
from tests import decode as dec
from tests.kill_writer import FLUSH_SECONDS, SCHEMA, cells_of

ROOT = Path(__file__).parent.parent
# What the writer thread may need beyond its timer to be scheduled and to write, on a machine that does other things.
SLACK_SECONDS = 0.5
PAUSES = (0.0, 0.0005, 0.005, 0.05)

Decoder = Callable[[Path], list[tuple[int, np.ndarray]]]  # path -> step and values of each row, in order


def rows_by_format(path: Path) -> list[tuple[int, np.ndarray]]:
    rows = dec.decode(path, strict=False).rows
    return [(rows[n]["step"], dec.values(rows[n]["cells"][0], "log2q8")) for n in sorted(rows)]


def rows_by_reader(path: Path) -> list[tuple[int, np.ndarray]]:
    with pyscan.open(path) as run:
        return list(zip(run.steps["step"].tolist(), run.act("w", blocks=True), strict=True))


DECODERS = (rows_by_format, rows_by_reader)


@dataclass
class Report:
    """What the process had said by the time it was killed."""

    accepted: dict[int, float] = field(default_factory=dict)  # step -> when
    flushed: int = 0
    killed_at: float = 0.0


def run_and_kill(path: Path, pause: float, life_seconds: float) -> Report:
    report = Report()
    command = [sys.executable, "-m", "tests.kill_writer", str(path), str(pause)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": "."}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        with ThreadPoolExecutor(1) as pool:
            lines = pool.submit(process.stdout.readlines)
            time.sleep(life_seconds)
            report.killed_at = time.monotonic()
            process.kill()
    for line in lines.result():
        word, *numbers = line.split()
        if word == b"accepted" and len(numbers) == 2 and line.endswith(b"\n"):
            report.accepted[int(numbers[0])] = float(numbers[1])
        elif word == b"flushed" and line.endswith(b"\n"):
            report.flushed = int(numbers[0])
    return report


def check_killed(path: Path, report: Report, decoder: Decoder) -> None:
    rows = decoder(path)
    accepted = sorted(report.accepted)
    stored = [step for step, _ in rows]
    # The last row may have been accepted without the word of it coming through.
    assert stored[: len(accepted)] == accepted[: len(stored)]
    assert len(stored) <= len(accepted) + 1
    assert len(stored) >= report.flushed
    old = [step for step in accepted if report.accepted[step] < report.killed_at - FLUSH_SECONDS - SLACK_SECONDS]
    assert len(stored) >= len(old)
    for step, values in rows:
        assert (values == np.sqrt(cells_of(step))).all(), step


def check_resumed(path: Path) -> None:
    before = [step for step, _ in rows_by_format(path)]
    with Writer(path, SCHEMA, resume=True, fsync="never") as writer:
        writer.write(1_000_000, cells_of(1_000_000))
    for decoder in DECODERS:
        assert [step for step, _ in decoder(path)] == [*before, 1_000_000]
    assert not path.with_name(path.name + ".tail").exists()


def kill_one(folder: Path, number: int) -> int:
    """Returns how many flushed rows were at stake."""
    rng = random.Random(number)
    path = folder / f"run{number}.mscan"
    report = run_and_kill(path, rng.choice(PAUSES), rng.uniform(0, 1.2))
    for decoder in DECODERS:
        check_killed(path, report, decoder)
    check_resumed(path)
    path.unlink()
    return report.flushed


def kill_many(folder: Path, count: int, in_flight: int) -> None:
    with ThreadPoolExecutor(in_flight) as pool:
        flushed = list(pool.map(lambda number: kill_one(folder, number), range(count)))
    assert sum(rows > 0 for rows in flushed) > count // 3  # the kills came when there was something to lose


def test_20_kills_lose_no_flushed_row(tmp_path: Path) -> None:
    kill_many(tmp_path, 20, in_flight=3)


@pytest.mark.slow
def test_300_kills_lose_no_flushed_row(tmp_path: Path) -> None:
    kill_many(tmp_path, 300, in_flight=4)
