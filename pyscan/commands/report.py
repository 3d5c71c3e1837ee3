"""`pyscan report`: one HTML file about a run, to open anywhere and to send around."""

from __future__ import annotations

import argparse

from pyscan.commands.base import Verb, add_output, add_scan, finished, new_output, open_run


class Report(Verb):
    """Write a report of a run: one HTML file that opens offline.

    It holds the verdict, the map of the whole model over time, the loss with
    its events, a curve for every site, the sites that moved most, what the
    scanner cost and what it covered. The file stays small enough to mail
    whatever the length of the run.

    example:
      pyscan report run.mscan -o report.html
    """

    name = "report"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_scan(parser)
        add_output(parser, "the report")

    def run(self, args: argparse.Namespace) -> int:
        from pyscan import report, tables, text
        from pyscan.commands.info import describe
        from pyscan.health import judge

        output = new_output(args, args.scan)
        with open_run(args.scan) as run:
            with tables.progress("Judging") as tick:
                health = judge(run, tick=tick)
            with tables.progress("Reading") as tick:
                page = report.build(run, describe(run, args.scan), health, tick)
        with finished(output) as part:
            part.write_text(page, encoding="utf-8")
        print(f"{output}  ({text.size(output.stat().st_size)})")
        return 0
