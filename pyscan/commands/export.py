"""`pyscan export`: a scan as tables for other programs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pyscan.commands.base import (
    UserError,
    Verb,
    add_output,
    add_scan,
    add_selection,
    finished,
    new_output,
    open_run,
    select_sites,
)
from pyscan.commands.rewriting import rewrite_scan

if TYPE_CHECKING:
    from pyscan.run import Run
    from pyscan.schema import SiteInfo


class Export(Verb):
    """Write a scan as Parquet, CSV or as a version 1.1 scan.

    parquet  a directory that DuckDB, Polars and Spark read as one table with
             the columns step, site, channel, block, value
    csv      the same lines as text; -o - writes to standard output
    mscan1   the older .mscan file, version 1.1

    Cells that were not observed have no line.

    examples:
      pyscan export run.mscan --to parquet -o run_parquet
      duckdb -c "select site, max(value) from 'run_parquet/*/*.parquet'
                 where channel = 'grad' group by site"
    """

    name = "export"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_scan(parser)
        parser.add_argument("--to", choices=("parquet", "csv", "mscan1"), required=True, help="format of the output")
        add_selection(parser)
        add_output(parser, "the table")

    def run(self, args: argparse.Namespace) -> int:
        if args.to == "mscan1":
            return _to_mscan1(args)
        with open_run(args.scan) as run:
            sites = select_sites(run, args.site)
            if args.to == "csv" and str(args.output) == "-":
                return _to_stdout(run, sites)
            output = new_output(args, args.scan)
            lines = (_to_parquet if args.to == "parquet" else _to_csv)(run, sites, output)
        print(f"{output}: {lines:,} lines", file=sys.stderr)
        return 0


def _to_mscan1(args: argparse.Namespace) -> int:
    from pyscan.convert import export_version1

    if args.site is not None:
        raise UserError("--site selects lines of a table; a version 1.1 scan holds all sites")
    rewrite_scan(export_version1, args)
    return 0


def _to_stdout(run: Run, sites: list[SiteInfo]) -> int:
    from pyscan import export

    export.write_csv(run, sys.stdout, sites)
    return 0


def _to_csv(run: Run, sites: list[SiteInfo], output: Path) -> int:
    from pyscan import export, tables

    if output.is_dir():
        raise UserError(f"{output} is a directory: name a file")
    with (
        finished(output) as part,
        tables.progress("Writing") as tick,
        part.open("w", encoding="utf-8", newline="") as file,
    ):
        return export.write_csv(run, file, sites, tick)


def _to_parquet(run: Run, sites: list[SiteInfo], output: Path) -> int:
    from pyscan import export, tables

    if output.exists() and not _is_data_set(output):
        raise UserError(f"{output} is not a Parquet export, so --force does not replace it: name another output")
    with finished(output) as part, tables.progress("Writing") as tick:
        return export.write_parquet(run, part, sites, tick)


def _is_data_set(path: Path) -> bool:
    """Whether the path is a directory that holds nothing but what a Parquet export writes."""
    if not path.is_dir():
        return False
    return all(entry.is_dir() and entry.name.startswith("channel=") for entry in path.iterdir())
