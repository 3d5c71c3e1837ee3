"""The `pyscan` program: parse the command line, run one verb, turn its errors into one line and an exit status.

Exit status 0 is success, 1 "the file is damaged" (check) or "something was wrong in the run" (health), 2 a mistake of
the user, 130 Ctrl-C, 141 a reader of our output that went away (`| head`). Anything else that goes wrong is a bug
and shows its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import pyscan
from pyscan.commands import VERBS, UserError, Verb
from pyscan.errors import ScanError
from pyscan.extras import MissingExtraError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program and give back its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] != ["run"]:  # whose streams are the script's
        _never_fail_to_encode()
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
        return 141
    except KeyboardInterrupt:
        return 130
    except (UserError, ScanError, MissingExtraError, OSError) as error:
        print(f"pyscan: {_one_line(error)}", file=sys.stderr)
        return 2
    return status() if callable(status) else status


def _run(arguments: list[str]) -> int | Callable[[], int]:
    _check_verb(arguments)
    parser = build_parser()
    try:
        args = parser.parse_args(arguments)
    except SystemExit as done:  # --help and --version
        return int(done.code or 0)
    if args.verb is None:
        parser.print_help(sys.stderr)
        return 2
    verb: Verb = args.verb
    return verb.run(args)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    """One subparser per verb; the docstring of its class is its help."""
    parser = _Parser(prog="pyscan", description="Look at, check and convert the scans of training runs.")
    parser.add_argument("--version", action="version", version=f"pyscan {pyscan.__version__}")
    parser.set_defaults(verb=None)
    verbs = parser.add_subparsers(metavar="VERB", title="verbs")
    for verb_class in VERBS:
        text = inspect.cleandoc(verb_class.__doc__ or "")
        sub = verbs.add_parser(
            verb_class.name,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        verb = verb_class()
        verb.add_arguments(sub)
        sub.set_defaults(verb=verb)
    return parser


def _check_verb(arguments: list[str]) -> None:
    """Answer a mistyped verb with the nearest one; argparse would list all of them."""
    known = [verb.name for verb in VERBS]
    if arguments and not arguments[0].startswith("-") and arguments[0] not in known:
        near = difflib.get_close_matches(arguments[0], known, 1)
        hint = f"did you mean {near[0]}?" if near else "see pyscan --help"
        raise UserError(f"no verb {arguments[0]!r}: {hint}")


def _one_line(error: BaseException) -> str:
    """The message on one line, without control characters; an OSError as `file: reason`."""
    from pyscan.text import printable

    text = str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    return printable(" ".join(text.split()))


def _never_fail_to_encode() -> None:
    """A terminal that cannot show a character shows `?`; names of sites may hold any."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def _silence_stdout() -> None:
    """Point stdout at nothing, so that the flush at interpreter exit does not meet the broken pipe again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
