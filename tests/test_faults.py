"""Faults planted in a copy of the source, one at a time: each must make the named test fail.

The files `tests/faults*.toml` are the catalogue. A test that still passes with its fault in place checks nothing.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
CATALOGUES = sorted((ROOT / "tests").glob("faults*.toml"))
FAULTS = [fault for path in CATALOGUES for fault in tomllib.loads(path.read_text())["fault"]]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "dist", "*.egg-info", "__pycache__", ".*_cache", "build", "*.so")


class Tree:
    """A copy of the repository that can be broken, built and tested."""

    def __init__(self, path: Path) -> None:
        self.path = path
        shutil.copytree(ROOT, path, ignore=LEFT_OUT, symlinks=True)
        self.build()

    def build(self) -> None:
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(command, cwd=self.path, check=True, capture_output=True)

    def run(self, test: str, settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *test.split()]
        environment = os.environ | {"PYTHONPATH": str(self.path)} | settings
        return subprocess.run(command, cwd=self.path, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return Tree(tmp_path_factory.mktemp("faults") / "pyscan")


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=[fault["name"] for fault in FAULTS])
def test_planted_fault_is_caught(tree: Tree, fault: dict[str, Any]) -> None:
    file = tree.path / fault["file"]
    source = file.read_text()
    assert source.count(fault["before"]) == 1, "the place to break must be there exactly once"
    try:
        file.write_text(source.replace(fault["before"], fault["after"]))
        if file.suffix in {".cpp", ".h"}:
            tree.build()
        outcome = tree.run(fault["test"], fault.get("environment", {}))
    finally:
        file.write_text(source)
        if file.suffix in {".cpp", ".h"}:
            os.utime(file)
    assert outcome.returncode == 1, f"not caught by {fault['test']}:\n{outcome.stdout[-2000:]}{outcome.stderr[-2000:]}"


def test_every_planted_fault_fits_the_source() -> None:
    for fault in FAULTS:
        count = (ROOT / fault["file"]).read_text().count(fault["before"])
        assert count == 1, f"{fault['name']}: its place in {fault['file']} occurs {count} times"
