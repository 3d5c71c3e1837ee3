"""What the verbs that write a new scan from an old one share: where it goes, the progress, what is said at the end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from pyscan.commands.base import Verb, add_output, add_scan, finished, new_output, open_run, require_scan


def _since(event: dict[str, Any]) -> str:
    return str(event.get("reason") or f"step {event['step']:,}")


class Rewrite(Protocol):
    """A function of pyscan.rewrite or pyscan.convert."""

    def __call__(self, source: Path, target: Path, *, progress: Callable[[int, int], None] | None = None) -> None: ...


class RewritingVerb(Verb):
    """A verb that reads SCAN and writes another scan."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_scan(parser)
        add_output(parser, "the new scan")

    def rewriter(self) -> Rewrite:
        """The function that does it, imported when it is needed."""
        raise NotImplementedError

    def run(self, args: argparse.Namespace) -> int:
        rewrite_scan(self.rewriter(), args)
        return 0


def rewrite_scan(rewrite: Rewrite, args: argparse.Namespace) -> None:
    """Write the new scan under its name once it is whole, and say what it holds."""
    from pyscan import tables, text
    from pyscan.ranks import PASSING_EVENTS

    require_scan(args.scan)
    output = new_output(args, args.scan, tail=True)
    with finished(output) as part, tables.progress("Writing") as tick:
        rewrite(args.scan, part, progress=tick)
    Path(f"{output}.tail").unlink(missing_ok=True)
    with open_run(output) as run:
        rows = text.plural(len(run.steps), "row")
        told = [event for event in run.events if event["kind"] in PASSING_EVENTS]
    for event in told:
        print(f"{event['kind'].replace('_', ' ')}: rank {event.get('rank')}, {_since(event)}", file=sys.stderr)
    print(f"{output}: {rows}, {text.size(output.stat().st_size)}", file=sys.stderr)
