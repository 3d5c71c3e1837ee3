"""Reading the history of one site: version 2, column-major in frames of 64 rows, beside version 1.1, records of 12
bytes.

`pytest benchmarks/bench_reader.py --benchmark-only -s` times both sides and prints their ratio, as does
`python benchmarks/bench_reader.py [cells]`.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyscan
from pyscan import format as fmt
from pyscan.frame_writer import FrameWriter
from pyscan.schema import Channel, Schema, SiteInfo
from pyscan.version1 import HEADER, RECORD_DTYPE

NUM_STEPS = 10_000
BLOCKS = 16
FULL_CELLS = 10_754


def make_pair(folder: Path, num_cells: int) -> tuple[Path, Path]:
    """The same u16 values as version 1.1 and as version 2."""
    num_sites = num_cells // BLOCKS
    codes = np.random.default_rng(0).integers(0, 65536, (2, num_sites * BLOCKS, NUM_STEPS), dtype=np.uint16)
    one, two = folder / "one.mscan", folder / "two.mscan"
    _write_version1(one, codes, num_sites)
    _write_version2(two, codes, num_sites)
    return one, two


def _write_version1(path: Path, codes: np.ndarray, num_sites: int) -> None:
    header = {
        "model_name": "bench",
        "id_to_param_name_map": {str(i): f"layers.{i}.proj" for i in range(num_sites)},
        "sequences": [{"sequence_id": 0, "num_tokens": NUM_STEPS, "source": ""}],
    }
    text = json.dumps(header).encode()
    records = np.zeros((NUM_STEPS, num_sites, BLOCKS), RECORD_DTYPE)
    records["token_idx"] = np.arange(NUM_STEPS)[:, None, None]
    records["param_id"] = np.arange(num_sites)[:, None]
    records["block_idx"] = np.arange(BLOCKS)
    records["activation"], records["grad_norm"] = (codes[i].T.reshape(records.shape) for i in range(2))
    path.write_bytes(HEADER.pack(b"MSCAN", 1, HEADER.size + len(text), records.size) + text + records.tobytes())


def _write_version2(path: Path, codes: np.ndarray, num_sites: int) -> None:
    channels = tuple(Channel(name, "block", "u16", "plain", "sumsq") for name in ("act", "grad"))
    sites = tuple(SiteInfo(f"layers.{i}.proj", "linear", (8, 64 * BLOCKS), "float32", BLOCKS) for i in range(num_sites))
    rows = np.zeros(NUM_STEPS, fmt.ROW_DTYPE)
    rows["step"] = np.arange(1, NUM_STEPS + 1)
    with path.open("wb") as file:
        writer = FrameWriter(file.write, bytes(16), 0)
        writer.schema(Schema("bench", channels, sites))
        for start in range(0, NUM_STEPS, 64):
            part = slice(start, start + 64)
            writer.steps(rows[part], [np.ascontiguousarray(codes[i][:, part]) for i in range(2)])
        writer.index()


def map_version1(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        start = HEADER.unpack(file.read(HEADER.size))[2]
    return np.memmap(path, RECORD_DTYPE, "r", offset=start)


def history_version1(records: np.ndarray, site: int) -> np.ndarray:
    """How one extracts a history from records: pick those of the site, put them in their places."""
    mine = records[records["param_id"] == site]
    history = np.zeros((NUM_STEPS, BLOCKS), np.float32)
    history[mine["token_idx"], mine["block_idx"]] = mine["activation"]
    return history


def history_version2(run: pyscan.Run, site: int) -> np.ndarray:
    """Check the chunks it touches, decode."""
    return run.act(f"layers.{site}.proj", blocks=True)


def open_and_read(path: Path, site: int) -> np.ndarray:
    with pyscan.open(path) as run:
        return history_version2(run, site)


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """At full size only where it is timed."""
    num_cells = FULL_CELLS if request.config.getoption("benchmark_enable") else 640
    return make_pair(tmp_path_factory.mktemp("bench"), num_cells)


def test_both_versions_give_the_same_history(pair: tuple[Path, Path]) -> None:
    records = map_version1(pair[0])
    for site in (0, 17, 39):
        assert np.array_equal(history_version1(records, site), open_and_read(pair[1], site))


def test_history_version1(benchmark: Callable, pair: tuple[Path, Path]) -> None:
    benchmark(history_version1, map_version1(pair[0]), 17)


def test_history_version2(benchmark: Callable, pair: tuple[Path, Path]) -> None:
    benchmark(open_and_read, pair[1], 17)


def test_history_version2_of_an_open_run(benchmark: Callable, pair: tuple[Path, Path]) -> None:
    with pyscan.open(pair[1]) as run:
        benchmark(history_version2, run, 17)


def test_ratio_of_first_reads(request: pytest.FixtureRequest, benchmark: Any, pair: tuple[Path, Path]) -> None:
    """Sites read for the first time, their checksums included; the promise is a factor of 50 at full size."""
    timed = request.config.getoption("benchmark_enable")
    ratio = benchmark.pedantic(compare, (*pair, 15 if timed else 1), rounds=1)
    assert ratio >= 50 or not timed


def compare(one: Path, two: Path, rounds: int) -> float:
    """Print medians with the 20th and 80th percentile, interleaved; both files are open before. Returns the ratio."""
    records, run = map_version1(one), pyscan.open(two)
    history_version1(records, 0), history_version2(run, 0)  # pages of the first, row table of the second
    calls = {
        "version 1.1 records": lambda site: history_version1(records, site),
        "version 2, open + act": lambda site: open_and_read(two, site),
        "version 2, act": lambda site: history_version2(run, site),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for site in range(1, rounds + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call(site)
            times[name].append(time.perf_counter() - started)
    slow = statistics.median(times["version 1.1 records"])
    print(f"\n{NUM_STEPS} steps x {len(records) // NUM_STEPS} cells, a site of {BLOCKS} blocks")
    for name, found in times.items():
        low, middle, high = np.percentile(found, [20, 50, 80]) * 1e3
        print(f"{name:24s} {middle:9.2f} ms  [{low:.2f}, {high:.2f}]  x{slow / middle * 1e3:.0f}")
    run.close()
    return slow / statistics.median(times["version 2, act"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        compare(*make_pair(Path(folder), int(sys.argv[1]) if len(sys.argv) > 1 else FULL_CELLS), rounds=15)
