"""What the verbs share: their shape, the common options, and the way a mistake of the user is reported."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyscan
from pyscan.errors import ScanFormatError

if TYPE_CHECKING:
    from pyscan.run import Run
    from pyscan.schema import SiteInfo


class UserError(Exception):
    """A mistake of the user: shown on one line, exit status 2."""


class Verb:
    """One word of the command line. The docstring of a subclass is its help, the first line its summary."""

    name: ClassVar[str]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments of this verb."""

    def run(self, args: argparse.Namespace) -> int | Callable[[], int]:
        """Do it and give back the exit status; or what does it, if its errors are not the program's to report."""
        raise NotImplementedError


def add_scan(parser: argparse.ArgumentParser, name: str = "scan") -> None:
    parser.add_argument(
        name, metavar=name.upper(), type=Path, help="a .mscan file, or the common name of its ranks' files"
    )


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_output(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("-o", "--output", metavar="PATH", type=Path, required=True, help=f"where {what} goes")
    parser.add_argument("--force", action="store_true", help="replace the output if it exists")


def add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--site", metavar="REGEX", help="only sites whose name the regular expression finds")


def open_run(path: Path) -> Run:
    """The run behind a path; what is no scan is reported with its name."""
    if path.is_dir():
        raise UserError(f"{path} is a directory: name the .mscan file in it")
    try:
        return pyscan.open(path)
    except ScanFormatError as error:
        raise UserError(f"{path}: {error}") from error


def require_scan(path: Path) -> None:
    """Pass if the path is a scan, whole or damaged, or stands for the files of ranks."""
    from pyscan.format import MAGIC

    if not path.is_file():
        open_run(path).close()
        return
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise UserError(f"{path} is not a scan: it does not begin with {MAGIC.decode()}")


def new_output(args: argparse.Namespace, source: Path, tail: bool = False) -> Path:
    """The output path, free to be written: not the input, and not there unless --force allows replacing it.

    A new scan must not find the tail file of another one beside it (`tail`): a reader would take its rows for its own.
    """
    output: Path = args.output
    if output.exists() and source.exists() and output.samefile(source):
        raise UserError(f"{output} is the input itself: name another output")
    for path in (output, *([Path(f"{output}.tail")] if tail else [])):
        if path.exists() and not args.force:
            raise UserError(f"{path} exists: name another output or add --force")
    if tail and output.is_dir():
        raise UserError(f"{output} is a directory: name a file")
    if not output.parent.is_dir():
        raise UserError(f"{output.parent} is not a directory: make it first")
    return output


@contextmanager
def finished(output: Path) -> Iterator[Path]:
    """A path beside the output that takes its place once it is whole; nothing stays of it when writing fails."""
    part = output.with_name(f"{output.name}.part{os.getpid()}")
    try:
        yield part
        if output.is_dir():
            shutil.rmtree(output)
        part.replace(output)
    finally:
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink(missing_ok=True)


def select_sites(run: Run, pattern: str | None) -> list[SiteInfo]:
    """The sites whose name the pattern finds, all of them without one; none found is a UserError."""
    if pattern is None:
        return list(run.sites)
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise UserError(f"--site {pattern!r} is not a regular expression: {error}") from None
    found = [site for site in run.sites if regex.search(site.name)]
    if not found:
        raise UserError(f"--site {pattern!r} finds none of the {len(run.sites)} sites, such as {_example(run)}")
    return found


def _example(run: Run) -> str:
    return run.sites[len(run.sites) // 2].name if run.sites else "(the scan has no sites)"


def print_json(value: Any) -> None:
    """Print strict JSON: what JSON has no number for (NaN, infinity) is null."""
    print(json.dumps(jsonable(value), indent=2, allow_nan=False))


def jsonable(value: Any) -> Any:
    """Plain lists, objects, numbers and text out of whatever a verb found, numpy's included."""
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int | bool) else str(value)
