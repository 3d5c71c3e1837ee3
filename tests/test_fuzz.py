"""The fuzzer itself: a short run ends without a find, and a fault put into the reader is found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("atheris", reason="atheris is not installed: pip install atheris")
HARNESS = Path(__file__).parent.parent / "fuzz" / "fuzz_reader.py"
RUNS = ("-runs=5000", "-seed=1")


def fuzz(harness: Path, directory: Path) -> subprocess.CompletedProcess[str]:
    """`timeout` forks: a process starts with the peak memory of the one it was forked from, and that of a runner of
    tests may be above libFuzzer's limit."""
    command = ["timeout", "600", sys.executable, str(harness), *RUNS]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True)


def test_five_thousand_mutants_are_read_or_refused(tmp_path: Path) -> None:
    result = fuzz(HARNESS, tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "Done 5000 runs" in result.stderr
    assert not list(tmp_path.glob("crash-*"))


def test_a_length_that_is_believed_too_early_would_be_found(tmp_path: Path) -> None:
    """The same run with a reader that does not ask whether a frame ends inside the file."""
    fault = (
        "fmt.decode_frame.__globals__['len'] = lambda data: 1 << 62 if isinstance(data, memoryview) else data.__len__()"
    )
    code = HARNESS.read_text().replace("if __name__ ==", f"{fault}\nif __name__ ==")
    code = code.replace("Path(__file__).resolve().parent.parent", f"Path({str(HARNESS.parent.parent)!r})")
    broken = tmp_path / "broken.py"
    broken.write_text(code)
    result = fuzz(broken, tmp_path)
    assert result.returncode != 0
    assert "Uncaught Python exception" in result.stdout + result.stderr
