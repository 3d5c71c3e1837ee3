"""`pyscan demo`: train a small language model here and now, and look at its scan."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from pyscan.commands.base import UserError, Verb, open_run
from pyscan.commands.health import HealthVerb

if TYPE_CHECKING:
    from pyscan.demo import Outcome
    from pyscan.interleave import Cost
    from pyscan.run import Run
    from pyscan.summary import CellSummary

HOME = Path("runs/demo")
SHOWN = 4  # sites at either end of the table


class Demo(Verb):
    """Train a small language model on this machine, scanned, and show what was seen.

    The model has the shape of MiniMind: hidden 512, 8 layers, 26 million
    parameters. It learns the sources of Python's standard library for about two
    minutes; the loop is examples/train.py. Every third step is taken with the
    scanner paused, which measures what the scanner costs.

    What stands after -- goes to the loop: see pyscan demo -- --help.

    examples:
      pyscan demo
      pyscan demo --steps 2000 -o runs/long
      pyscan demo --steps 4000 -o runs/long --resume
    """

    name = "demo"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--steps", metavar="N", type=int, help="optimizer steps in all (two minutes of them)")
        parser.add_argument("-o", "--output", metavar="DIR", type=Path, help=f"directory of the run ({HOME})")
        parser.add_argument("--resume", action="store_true", help="go on at the last checkpoint in the directory")
        parser.add_argument("options", metavar="OPTION", nargs="*", help="for the training loop, after --")

    def run(self, args: argparse.Namespace) -> int:
        from pyscan import demo

        if args.steps is not None and args.steps < 1:
            raise UserError(f"--steps must be >= 1, got {args.steps}")
        output = _home(args.output, args.resume)
        example = demo.load_example()
        options = ["-o", str(output), *(["--resume"] if args.resume else []), *args.options]
        _report(demo.train(example, options, args.steps))
        return 0


def _home(output: Path | None, resume: bool) -> Path:
    """The directory of the run: one that has no scan yet, or, to resume, one that has a checkpoint."""
    wanted = HOME if output is None else output
    if resume:
        if not (wanted / "checkpoint.pt").exists():
            raise UserError(f"{wanted} has no checkpoint.pt to resume from: name the directory of the run with -o")
        return wanted
    if output is not None and (output / "run.mscan").exists():
        raise UserError(f"{output} holds a run already: add --resume, or name another directory")
    number = 1
    while (wanted / "run.mscan").exists():
        number += 1
        wanted = HOME.with_name(f"{HOME.name}-{number}")
    return wanted


def _report(outcome: Outcome) -> None:
    from pyscan import tables

    with open_run(outcome.scan) as run:
        print()
        _print_sites(run)
        _print_loss(run)
    HealthVerb().run(argparse.Namespace(scan=outcome.scan, json=False))
    tables.print_line(_cost_line(outcome.cost))
    scan = f"{outcome.scan}  ({_size(outcome.scan)})"
    written = {"scan": scan, "model": str(outcome.model), "checkpoint": str(outcome.checkpoint)}
    tables.print_facts("written", [(what, where, "") for what, where in written.items()])
    tables.print_facts("try next", [("", command, "") for command in _next(outcome)])


def _size(path: Path) -> str:
    from pyscan import text

    return text.size(path.stat().st_size)


def _next(outcome: Outcome) -> list[str]:
    scan = outcome.scan
    verbs = f"info {scan}", f"show {scan} --top 10", f"check {scan}", f"health {scan}"
    return [f"pyscan {verb}" for verb in (*verbs, f"demo --steps 1000 -o {scan.parent} --resume")]


def _print_sites(run: Run) -> None:
    """The sites with the highest and the lowest input, per feature, in the last row."""
    from pyscan import tables, text
    from pyscan.summary import summarize

    cells = summarize(run, list(run.sites), row=len(run.steps) - 1, buckets=12)
    levels = {cell.site: _level(run, cell) for cell in cells}
    cells = sorted((cell for cell in cells if levels[cell.site]), key=lambda cell: levels[cell.site], reverse=True)
    shown = cells if len(cells) <= 2 * SHOWN else [*cells[:SHOWN], *cells[-SHOWN:]]
    columns = [tables.Column("site", right=False, is_name=True), tables.Column("input per feature")]
    columns += [tables.Column("over time", right=False, style="cyan"), tables.Column("gradient norm")]
    columns += [tables.Column("over time", right=False, style="magenta"), tables.Column("SPS")]
    rows = [
        [
            cell.site,
            text.norm(levels[cell.site]),
            text.sparkline(cell.channels["act"].history, tables.bars()),
            text.norm(cell.channels["grad"].norm),
            text.sparkline(cell.channels["grad"].history, tables.bars()),
            text.signed(cell.sps),
        ]
        for cell in shown
    ]
    tables.print_line("the most and the least active sites, at the last step", "bold")
    tables.print_table(columns, rows, sections=[SHOWN - 1] if len(shown) < len(cells) else [])


def _level(run: Run, cell: CellSummary) -> float:
    """Root mean square of the inputs of a site at the last step; 0 if there were none."""
    norm, tokens = cell.channels["act"].norm, int(run.steps["tokens"][-1])
    width = next(site.shape[1] for site in run.sites if site.name == cell.site)
    return 0.0 if norm is None or not tokens else norm / math.sqrt(tokens * width)


def _print_loss(run: Run) -> None:
    from pyscan import tables, text

    steps = run.steps
    tokens = f"{int(steps['tokens'].sum()):,} tokens in {text.plural(len(steps), 'scanned step')}"
    few = max(len(steps) // 10, 1)
    first, last = (f"{steps['loss'][part].mean():.2f}" for part in (slice(few), slice(-few, None)))
    tables.print_line(f"loss {first} → {last}, first and last {text.plural(few, 'step')} · {tokens}")


def _cost_line(cost: Cost | None) -> str:
    if cost is None:
        return "overhead not measured: too few steps"
    return (
        f"overhead {cost.median:+.1%} of the step time: median over {cost.num_paused} steps with the scanner paused, "
        f"each beside the two around it (p20 {cost.p20:+.1%}, p80 {cost.p80:+.1%})"
    )
