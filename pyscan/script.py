"""Run a Python program as `python` itself would: same `__main__`, arguments, search path, tracebacks and exit status.

Receives the program and its arguments; returns when it has ended, or lets its exception pass with a traceback that
shows no line of pyscan.
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

# Frames of these files are ours, not the program's. They stand before its own, or between them where it called torch.
_HERE = str(Path(__file__).parent)
_OURS = tuple(os.path.join(_HERE, name) for name in ("script.py", "autoattach.py"))


class ProgramError(Exception):
    """The program cannot be started; the message is like python's own."""


@dataclass(frozen=True)
class Program:
    """What is to run: a fresh `__main__`, its sys.argv[0], and its code, compiled when it starts."""

    main: ModuleType
    name: str
    compile: Callable[[], CodeType]


def load_script(path: str) -> Program:
    """What `python path` runs."""
    full = os.path.abspath(path)
    try:
        source = Path(full).read_bytes()
    except OSError as error:
        raise ProgramError(f"can't open file {full!r}: [Errno {error.errno}] {error.strerror}") from None
    main = _new_main()
    main.__file__ = full
    main.__cached__ = None  # type: ignore[attr-defined]
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", full)
    return Program(main, path, lambda: compile(source, full, "exec", dont_inherit=True))


def load_module(name: str) -> Program:
    """What `python -m name` runs."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ImportError as error:
        raise ProgramError(f"no module {name!r}: {error}") from None
    if spec is None or not isinstance(spec.loader, importlib.abc.InspectLoader):
        raise ProgramError(f"no module {name!r} that can be run")
    loader, full_name, main = spec.loader, spec.name, _new_main()
    main.__file__, main.__cached__ = spec.origin, spec.cached  # type: ignore[attr-defined]
    main.__loader__, main.__package__, main.__spec__ = loader, spec.parent, spec
    return Program(main, str(spec.origin), lambda: _code(loader, full_name))


def _code(loader: importlib.abc.InspectLoader, name: str) -> CodeType:
    code = loader.get_code(name)
    if code is None:
        raise ImportError(f"no code in module {name!r}")
    return code


def _new_main() -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    main.__annotations__ = {}
    return main


def set_search_path(script: str | None) -> None:
    """The first entry is the directory of the script, or the current one for a module."""
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if script is None else os.path.dirname(os.path.realpath(script))


def run(program: Program, arguments: Sequence[str]) -> None:
    """Run the program. What it raises passes through, and reaches sys.excepthook without our frames."""
    sys.argv = [program.name, *arguments]
    sys.modules["__main__"] = program.main
    try:
        exec(program.compile(), program.main.__dict__)
    except SystemExit:
        raise
    except BaseException:
        _hide_our_frames()
        raise


def _hide_our_frames() -> None:
    """The program has ended: what it left as sys.excepthook is still called, once, with a traceback of its own."""
    hook = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        hook(kind, error.with_traceback(_without_ours(trace)), error.__traceback__)

    sys.excepthook = excepthook


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """The frames from the program's first on, without those that pyscan put between them."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    starts = [i for i, frame in enumerate(frames) if frame.tb_frame.f_code.co_filename == _OURS[0]]
    kept = [f for f in frames[starts[-1] + 1 :] if f.tb_frame.f_code.co_filename not in _OURS]
    rebuilt: TracebackType | None = None
    for frame in reversed(kept):
        rebuilt = TracebackType(rebuilt, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return rebuilt
