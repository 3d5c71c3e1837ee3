"""Merging the files of many ranks: time and memory against the number of ranks and of steps.

`pytest benchmarks/bench_ranks.py --benchmark-only -s` prints both for 64, 256 and 1,024 ranks of a model with 200
sites, as does `python -m benchmarks.bench_ranks [ranks ...]`. There are 64 files; ranks beyond are hard links to them,
which the reader is told to take for files of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.memory import peak_bytes
from pyscan import format as fmt
from pyscan import ranks
from pyscan.frame_writer import FrameWriter
from pyscan.rank_files import RankFacts, RankFiles, rank_path
from pyscan.rewrite import merge
from pyscan.schema import Channel, Merge, Mesh, Schema, SiteInfo
from pyscan.source import PathSource
from pyscan.version2 import FileRun

ROOT = Path(__file__).parent.parent
NUM_FILES, NUM_SITES, NUM_STEPS = 64, 200, 1000
CHANNELS = (
    Channel("act"),
    Channel("grad"),
    Channel("act_max", "site", "log2q8", "plain", "max"),
    Channel("grad_max", "site", "log2q8", "plain", "max"),
    Channel("act_bad", "site", "log2q8", "plain", "add"),
    Channel("grad_bad", "site", "log2q8", "plain", "add"),
)


class LinkedFiles(RankFiles):
    """Takes a link to the file of another rank for the file of its own."""

    world = NUM_FILES

    def _load(self, rank: int) -> FileRun:
        return FileRun(PathSource(self._names[rank]), self._read_layout)

    def _describe(self, rank: int, run: FileRun, mark: tuple[int, ...]) -> RankFacts:
        facts = super()._describe(rank, run, mark)
        mesh = Mesh(("dp",), (self.world,), (rank,), ("dp",))
        return replace(facts, stretches=tuple(replace(s, world=self.world, mesh=mesh) for s in facts.stretches))


def make_run(folder: Path, num_ranks: int, num_steps: int) -> Path:
    """Files of a data-parallel run without blocks."""
    path = folder / f"run{num_ranks}.mscan"
    over = Merge(("dp",))
    rules = {c.name: over if c.name.startswith("act") else Merge((), ("dp",)) for c in CHANNELS}
    sites = tuple(
        SiteInfo(f"layers.{i}.proj.weight", "linear", (512, 512), "float32", 1, merge=rules) for i in range(NUM_SITES)
    )
    rng = np.random.default_rng(0)
    grads = rng.integers(-2000, 2000, (NUM_SITES, num_steps), dtype=np.int16)
    for rank in range(num_ranks):
        name = rank_path(str(path), rank)
        if rank >= NUM_FILES:
            os.link(rank_path(str(path), rank % NUM_FILES), name)
            continue
        mesh = Mesh(("dp",), (num_ranks,), (rank,), ("dp",))
        schema = Schema("bench", CHANNELS, sites, block=0, rank=rank, world=num_ranks, mesh=mesh)
        acts = rng.integers(-64, 64, (NUM_SITES, num_steps), dtype=np.int16)
        _write(Path(name), schema, acts, grads)
    return path


def _write(path: Path, schema: Schema, acts: np.ndarray, grads: np.ndarray) -> None:
    zeros = np.full_like(acts, -32768)
    with path.open("wb") as file:
        writer = FrameWriter(file.write, os.urandom(16), 0)
        writer.schema(schema)
        for start in range(0, acts.shape[1], fmt.ROWS_PER_FRAME):
            part = slice(start, min(start + fmt.ROWS_PER_FRAME, acts.shape[1]))
            rows = np.zeros(part.stop - part.start, fmt.ROW_DTYPE)
            rows["step"] = np.arange(part.start, part.stop) + 1
            writer.steps(rows, [values[:, part] for values in (acts, grads, acts, grads, zeros, zeros)])
        writer.index()


def measure(path: Path, num_ranks: int) -> dict[str, float]:
    """Open, read one site, and merge to one file; in this process."""
    LinkedFiles.world = num_ranks
    ranks.RankFiles = LinkedFiles  # type: ignore[misc]
    start = time.perf_counter()
    run = ranks.open_ranks(str(path))
    opened = time.perf_counter()
    run.act("layers.7.proj")
    read = time.perf_counter()
    run.close()
    merge(path, path.with_name(f"whole{num_ranks}.mscan"))
    end = time.perf_counter()
    peak = peak_bytes()
    return {"open": opened - start, "site": read - opened, "merge": end - read, "peak_bytes": peak}


def measure_apart(folder: Path, num_ranks: int, num_steps: int) -> dict[str, float]:
    """The same in a process of its own, whose memory is that of this run alone."""
    path = make_run(folder, num_ranks, num_steps)
    command = [sys.executable, "-m", "benchmarks.bench_ranks", "--measure", str(path), str(num_ranks)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def show(num_ranks: int, num_steps: int, found: dict[str, float]) -> None:
    print(
        f"\n{num_ranks:5} ranks x {num_steps:,} steps x {NUM_SITES} sites: open {found['open']:.2f} s, "
        f"one site {found['site']:.2f} s, merge {found['merge']:.1f} s, peak {found['peak_bytes'] / 2**20:.0f} MiB"
    )


@pytest.mark.parametrize("num_ranks", [64, 256, 1024])
def test_merge(benchmark, tmp_path: Path, num_ranks: int) -> None:  # type: ignore[no-untyped-def]
    if not benchmark.enabled:
        num_ranks, num_steps = num_ranks // 16, 64
    else:
        num_steps = NUM_STEPS
    found = benchmark.pedantic(measure_apart, (tmp_path, num_ranks, num_steps), rounds=1)
    assert found["peak_bytes"] < 2**30
    show(num_ranks, num_steps, found)


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(Path(sys.argv[2]), int(sys.argv[3]))))
        return
    for num_ranks in map(int, sys.argv[1:] or ["64", "256", "1024"]):
        with tempfile.TemporaryDirectory() as folder:
            show(num_ranks, NUM_STEPS, measure_apart(Path(folder), num_ranks, NUM_STEPS))


if __name__ == "__main__":
    main()
