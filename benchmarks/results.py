"""Results that are kept: one directory per commit under benchmarks/results, with the machine and the versions.

Receives what a benchmark measured and hands on the newest kept result of the same name, to compare with.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def commit() -> str:
    """Short name of the commit, with a + if the tree differs from it in anything but results."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run([*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True).stdout.strip()
    changes = [*git, "status", "--porcelain", "--", "csrc", "kernels", "pyscan", "benchmarks", ":!benchmarks/results"]
    changed = subprocess.run(changes, capture_output=True, text=True).stdout.strip()
    return (name or "unknown") + ("+" if changed else "")


def circumstances() -> dict[str, Any]:
    """Where and with what a result was measured."""
    import torch

    import pyscan
    from pyscan import _C

    return {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {
            "pyscan": pyscan.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "compiler": _C.compiler,
            "isa": _C.isa,
        },
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def directory(at: dict[str, Any]) -> Path:
    found = RESULTS / at["commit"]
    found.mkdir(parents=True, exist_ok=True)
    return found


def keep(name: str, result: dict[str, Any], at: dict[str, Any]) -> Path:
    path = directory(at) / f"{name}.json"
    path.write_text(json.dumps({"name": name, **at, "result": result}, indent=1) + "\n")
    return path


def last_kept(name: str) -> dict[str, Any] | None:
    """The newest result of this name."""
    found = [json.loads(path.read_text()) for path in RESULTS.glob(f"*/{name}.json")]
    return max(found, key=lambda kept: kept["date"], default=None)


def of_commit(name: str, prefix: str) -> list[dict[str, Any]]:
    """All that is kept of a commit, of one kind of benchmark."""
    return [json.loads(path.read_text()) for path in sorted((RESULTS / name).glob(f"{prefix}*.json"))]
