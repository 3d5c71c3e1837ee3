"""The viewer on a long run: how soon a move of the slider is answered, and what a report of the run takes.

`pytest benchmarks/bench_view.py --benchmark-only -s` looks at 100,000 steps of 300 sites; as a test, at 2,000.
"""

from __future__ import annotations

import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyscan
from benchmarks.make_long import NUM_STEPS, SPIKE_STEP, make_long
from pyscan.viewer.server import Viewer
from pyscan.viewer.session import Session

MOVES = 50
MOVE_SECONDS, REPORT_SECONDS, REPORT_BYTES, REPORT_FILE_BYTES = 0.2, 60.0, 1 << 30, 8_000_000


@pytest.fixture(scope="module")
def long_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """At full size only where it is timed."""
    num_steps = NUM_STEPS if request.config.getoption("benchmark_enable") else 2_000
    return make_long(tmp_path_factory.mktemp("bench") / "long.mscan", num_steps)


@pytest.fixture(scope="module")
def viewer(long_run: Path) -> Iterator[Viewer]:
    session = Session([long_run])
    with Viewer(session) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()
    session.close()


def ask(viewer: Viewer, target: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", viewer.server_address[1])
    connection.request("GET", target)
    body = connection.getresponse().read()
    connection.close()
    return json.loads(body)


def move_slider(viewer: Viewer, measure: str) -> list[float]:
    """Seconds of each of 50 moves to places all over the run, over HTTP, one after the other."""
    places = np.random.default_rng(1).integers(0, len(viewer.session.steps), MOVES)
    times = []
    for at in places.tolist():
        started = time.perf_counter()
        answer = ask(viewer, f"/api/frame?at={at}&measure={measure}&scope=layer")
        times.append(time.perf_counter() - started)
        assert answer["step"] == at + 1
    return times


@pytest.mark.parametrize("measure", ["act", "sps"])
def test_slider(request: pytest.FixtureRequest, benchmark: Any, viewer: Viewer, measure: str) -> None:
    """The promise is a median of 200 ms at full size."""
    times = benchmark.pedantic(move_slider, (viewer, measure), rounds=1)
    low, middle, high = np.percentile(times, [20, 50, 80]) * 1e3
    print(f"\n{len(viewer.session.steps):,} steps: {measure} at a new step {middle:.1f} ms  [{low:.1f}, {high:.1f}]")
    assert statistics.median(times) < MOVE_SECONDS or not request.config.getoption("benchmark_enable")


def test_history_of_a_cell(benchmark: Any, viewer: Viewer) -> None:
    found = benchmark(ask, viewer, "/api/history?site=150&block=0&channel=grad&points=500")
    if len(viewer.session.steps) >= SPIKE_STEP:
        assert max(found["high"]) == 2.0**12  # one step in 100,000
    assert len(found["steps"]) == 500


def report(scan: Path, output: Path) -> tuple[float, int]:
    """Seconds and peak memory of `pyscan report` in a process of its own."""
    code = "import sys; from benchmarks.memory import peak_bytes; from pyscan.cli import main; "
    code += "status = main(sys.argv[1:]); print(peak_bytes()); sys.exit(status)"
    command = [sys.executable, "-c", code, "report", str(scan), "-o", str(output), "--force"]
    started = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    return time.perf_counter() - started, int(done.stdout.split()[-1])


def check_report(scan: Path, output: Path) -> tuple[float, int]:
    seconds, num_bytes = report(scan, output)
    size = output.stat().st_size
    print(f"\nreport: {seconds:.1f} s, {num_bytes / 2**20:.0f} MiB of memory, {size / 1e6:.2f} MB")
    assert num_bytes < REPORT_BYTES
    assert size < REPORT_FILE_BYTES
    return seconds, num_bytes


def test_report(request: pytest.FixtureRequest, benchmark: Any, long_run: Path, tmp_path: Path) -> None:
    seconds, _ = benchmark.pedantic(check_report, (long_run, tmp_path / "report.html"), rounds=1)
    assert seconds < REPORT_SECONDS or not request.config.getoption("benchmark_enable")


@pytest.mark.slow
def test_report_of_a_long_run_stays_in_bounds(tmp_path: Path) -> None:
    """100,000 steps of 300 sites: less than 1 GiB of memory and 8 MB of file."""
    scan = make_long(tmp_path / "long.mscan")
    check_report(scan, tmp_path / "report.html")
    with pyscan.open(scan) as run:
        assert (len(run), len(run.sites)) == (NUM_STEPS, 300)
