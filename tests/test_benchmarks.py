"""How benchmarks are run."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_benchmark_only_times_them_and_prints_a_table_for_their_file() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    chosen = ["benchmarks/bench_pack.py", "-k", "numpy", "--benchmark-only"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # no worker of xdist
    done = subprocess.run([*command, *chosen], cwd=ROOT, env=alone, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "benchmark 'bench_pack': 1 tests" in done.stdout
    assert "test_pack_numpy" in done.stdout
