"""Runs pytest again and again without loading torch again: a process that has it forks for every run.

Started as a script, with the directory of the tests as the current one. Receives a line of JSON per run on its standard
input: arguments for pytest, seconds allowed and the file for its output. Answers each with the exit code, negative if a
signal ended the run. Nothing of pyscan or its tests is loaded before the fork, and no thread is started.
"""

import importlib
import json
import os
import signal
import sys
import threading
import traceback
from typing import Any, NoReturn

HEAVY = (
    "numpy",
    "pytest",
    "hypothesis",
    "torch",
    "transformers",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)


def run(arguments: list[str], seconds: int, output: str) -> NoReturn:
    """In the child: becomes a fresh pytest, apart from what is loaded."""
    signal.alarm(seconds)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    code = 3
    try:
        import pytest

        code = int(pytest.main(arguments))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    sys.path[0] = os.getcwd()
    for name in HEAVY:
        importlib.import_module(name)
    assert "pyscan" not in sys.modules, "the version under test is loaded after the fork"
    assert threading.active_count() == 1
    for line in sys.stdin:
        task: dict[str, Any] = json.loads(line)
        child = os.fork()
        if child == 0:
            run(**task)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
