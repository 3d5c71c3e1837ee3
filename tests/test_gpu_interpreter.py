"""The kernels on Triton's interpreter, which a process chooses when it imports them: it runs in one of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run_interpreted(*arguments: str) -> str:
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    return run.stdout


def test_kernels_and_sanitizer() -> None:
    assert " passed" in run_interpreted("tests/gpu")


@pytest.mark.slow
def test_the_suite_of_the_reduction_holds_for_the_kernels() -> None:
    output = run_interpreted("tests/test_reduce.py", "-k", "triton")
    assert "skipped" not in output.splitlines()[-1]
