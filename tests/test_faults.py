"""Faults planted in a copy of the source, one at a time: each must make the named test fail.

The files `tests/faults*.toml` are the catalogue. A test that still passes with its fault in place checks nothing.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
CATALOGUES = sorted((ROOT / "tests").glob("faults*.toml"))
FAULTS = [fault for path in CATALOGUES for fault in tomllib.loads(path.read_text())["fault"]]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "dist", "*.egg-info", "__pycache__", ".*_cache", "build", "*.so")


# Compiled and linked sooner; what a fault changes does not depend on the optimizer.
QUICK_BUILD = {"PYSCAN_BUILD_TYPE": "Debug", "CMAKE_ARGS": "-DCMAKE_CXX_FLAGS_DEBUG=-O1"}
TIMEOUT_SECONDS = 600


class Tree:
    """A copy of the repository that can be broken, built and tested."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._built = path.with_name("built")
        shutil.copytree(ROOT, path, ignore=LEFT_OUT, symlinks=True)
        self.build()
        shutil.copytree(path / "build", self._built)
        self._core = {file: file.read_bytes() for file in (path / "pyscan").glob("_C*.so")}
        self._forker = self._start([str(path / "tests" / "forked_pytest.py")])

    def build(self) -> None:
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(command, cwd=self.path, env=os.environ | QUICK_BUILD, check=True, capture_output=True)

    def run(self, test: str, settings: dict[str, str]) -> tuple[int, str]:
        """The exit code of pytest and what it said. What settings change may be read when a library is loaded."""
        arguments = ["-q", "-x", "-p", "no:cacheprovider", *test.split()]
        output = self.path.with_name("output")
        if settings:
            with open(output, "w") as file:
                process = self._start(["-m", "pytest", *arguments], settings, stdout=file, stderr=file)
                return process.wait(timeout=TIMEOUT_SECONDS), output.read_text()
        task = {"arguments": arguments, "seconds": TIMEOUT_SECONDS, "output": str(output)}
        assert self._forker.stdin is not None
        assert self._forker.stdout is not None
        print(json.dumps(task), file=self._forker.stdin, flush=True)
        return int(self._forker.stdout.readline()), output.read_text()

    def _start(self, command: list[str], settings: dict[str, str] | None = None, **files: Any) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": str(self.path), "OPENBLAS_NUM_THREADS": "1"} | (settings or {})
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL} | files
        return subprocess.Popen([sys.executable, *command], cwd=self.path, env=environment, text=True, **pipes)

    @contextlib.contextmanager
    def broken(self, fault: dict[str, Any]) -> Iterator[None]:
        """Inside, the fault is in the source and what is compiled from it; afterwards all is as it was, unbuilt."""
        file = self.path / fault["file"]
        source, times = file.read_text(), file.stat()
        assert source.count(fault["before"]) == 1, "the place to break must be there exactly once"
        is_compiled = file.suffix in {".cpp", ".h"}
        try:
            file.write_text(source.replace(fault["before"], fault["after"]))
            if is_compiled:
                self.build()
            yield
        finally:
            file.write_text(source)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
            if is_compiled:
                self._restore_build()

    def _restore_build(self) -> None:
        shutil.rmtree(self.path / "build")
        shutil.copytree(self._built, self.path / "build")
        for file, content in self._core.items():
            file.unlink()  # not overwritten: somebody may have it loaded
            file.write_bytes(content)

    def close(self) -> None:
        assert self._forker.stdin is not None
        self._forker.stdin.close()
        self._forker.wait(timeout=60)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tree]:
    made = Tree(tmp_path_factory.mktemp("faults") / "pyscan")
    yield made
    made.close()


@pytest.mark.slow
def test_a_tree_without_a_fault_passes(tree: Tree) -> None:
    code, output = tree.run("tests/test_reduce.py tests/test_scanner.py", {})
    assert code == 0, output[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=[fault["name"] for fault in FAULTS])
def test_planted_fault_is_caught(tree: Tree, fault: dict[str, Any]) -> None:
    with tree.broken(fault):
        code, output = tree.run(fault["test"], fault.get("environment", {}))
    assert code == 1, f"not caught by {fault['test']}:\n{output[-4000:]}"


def test_every_planted_fault_fits_the_source() -> None:
    for fault in FAULTS:
        count = (ROOT / fault["file"]).read_text().count(fault["before"])
        assert count == 1, f"{fault['name']}: its place in {fault['file']} occurs {count} times"
