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
    from pyscan.integrations.curves import Selection
    from pyscan.run import Run
    from pyscan.schema import SiteInfo


DASHBOARDS = ("tensorboard", "wandb")


class Export(Verb):
    """Write a scan as Parquet, CSV, an older scan, or for a dashboard.

    parquet      a directory that DuckDB, Polars and Spark read as one table
                 with the columns step, site, channel, block, value; of many
                 ranks each by itself, with the columns rank and replica (the
                 lines of replica 0 make up the whole)
    csv          the same lines as text; -o - writes to standard output
    mscan1       the older .mscan file, version 1.1
    tensorboard  a log directory: curves of input and gradient norm of every
                 site, the counts of gradients, heat maps
    wandb        the same as a run of Weights & Biases, with its files under
                 -o; WANDB_PROJECT, WANDB_MODE and the like are heeded

    Cells that were not observed have no line and no point.

    examples:
      pyscan export run.mscan --to parquet -o run_parquet
      duckdb -c "select site, max(value) from 'run_parquet/*/*.parquet'
                 where channel = 'grad' group by site"
      pyscan export run.mscan --to tensorboard -o runs/scan --every 10
    """

    name = "export"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_scan(parser)
        formats = ("parquet", "csv", "mscan1", *DASHBOARDS)
        parser.add_argument("--to", choices=formats, required=True, help="format of the output")
        add_selection(parser)
        parser.add_argument("--every", metavar="N", type=int, help="dashboards: steps that are multiples of N (1)")
        parser.add_argument("--heat-every", metavar="N", type=int, help="dashboards: heat maps every N steps (100)")
        add_output(parser, "the table")

    def run(self, args: argparse.Namespace) -> int:
        if args.to in DASHBOARDS:
            return _to_dashboard(args)
        if args.every is not None or args.heat_every is not None:
            raise UserError(f"--every and --heat-every choose what dashboards show; --to {args.to} holds every step")
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


def _to_dashboard(args: argparse.Namespace) -> int:
    from pyscan.integrations.curves import Selection

    with open_run(args.scan) as run:
        select_sites(run, args.site)  # says so if there is none
        try:
            every = 1 if args.every is None else args.every
            selection = Selection(args.site, _channels(run), every, 100 if args.heat_every is None else args.heat_every)
        except ValueError as error:
            raise UserError(f"--{str(error).replace('_', '-', 1)}") from None
        num_rows = (_to_tensorboard if args.to == "tensorboard" else _to_wandb)(run, selection, args)
    print(f"{args.output}: {num_rows:,} rows", file=sys.stderr)
    return 0


def _channels(run: Run) -> tuple[str, ...]:
    """Those of `act` and `grad` that the scan has; a scan of other channels is shown with all of them."""
    names = [channel.name for channel in run.channels]
    return tuple(name for name in ("act", "grad") if name in names) or tuple(names)


def _to_tensorboard(run: Run, selection: Selection, args: argparse.Namespace) -> int:
    from pyscan.integrations import tensorboard

    output = new_output(args, args.scan)
    if output.exists() and not _holds_only(output, "events.out.tfevents."):
        raise UserError(f"{output} is no log directory of TensorBoard, so --force does not replace it: name another")
    with finished(output) as part:
        return tensorboard.export(run, part, selection)


def _to_wandb(run: Run, selection: Selection, args: argparse.Namespace) -> int:
    from pyscan.integrations import wandb

    args.output.mkdir(parents=True, exist_ok=True)
    return wandb.export(run, selection, dir=str(args.output), name=args.scan.stem)


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
    from pyscan.ranks import RankedRun

    if output.exists() and not _is_data_set(output):
        raise UserError(f"{output} is not a Parquet export, so --force does not replace it: name another output")
    with finished(output) as part, tables.progress("Writing") as tick:
        if isinstance(run, RankedRun):
            return export.write_ranks(run, part, sites, tick)
        return export.write_parquet(run, part, sites, tick)


def _is_data_set(path: Path) -> bool:
    """Whether the path is a directory that holds nothing but what a Parquet export writes."""
    return (_holds_only(path, "channel=") or _holds_only(path, "rank=")) and all(
        entry.is_dir() for entry in path.iterdir()
    )


def _holds_only(path: Path, beginning: str) -> bool:
    """Whether the path is a directory in which every name begins so."""
    return path.is_dir() and all(entry.name.startswith(beginning) for entry in path.iterdir())
