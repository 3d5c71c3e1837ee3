"""`pyscan merge`: the files of all ranks as one."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time

from pyscan.commands.base import UserError, new_output
from pyscan.commands.rewriting import Rewrite, RewritingVerb


class Merge(RewritingVerb):
    """Write the files of all ranks as one scan.

    SCAN is the name the ranks were given: run.mscan stands for
    run.rank00000.mscan, run.rank00001.mscan and so on. With --follow
    the new scan grows while the ranks still write, until Ctrl-C.

    examples:
      pyscan merge run.mscan -o whole.mscan
      pyscan merge run.mscan -o now.mscan --follow 10
    """

    name = "merge"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--follow", type=_seconds, metavar="SECONDS", help="append what all ranks have finished, this often"
        )

    def rewriter(self) -> Rewrite:
        from pyscan.rewrite import merge

        return merge

    def run(self, args: argparse.Namespace) -> int:
        if args.follow is None:
            return super().run(args)
        from pyscan.live_merge import LiveMerge

        if args.scan.is_file():
            raise UserError(f"{args.scan} is one file already; merge takes the name that rank files share")
        merge, total = LiveMerge(args.scan, new_output(args, args.scan)), 0
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                total += merge.update()
                print(f"\r{total:,} rows", end="", file=sys.stderr, flush=True)
                time.sleep(args.follow)
        print(file=sys.stderr)
        merge.close()
        return 0


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text}")
    return value
