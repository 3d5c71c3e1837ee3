"""What `pyscan diff` says about two corpus scans: which blocks differ, how much, and how sure that is."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pyscan.commands.base import UserError, print_json

if TYPE_CHECKING:
    from pyscan.compare_corpora import Cell, CorporaDiff
    from pyscan.names import Matches
    from pyscan.run import Run

SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("corpus scans")
    group.add_argument("--fdr", metavar="RATE", type=float, default=0.05, help="false discovery rate (0.05)")
    group.add_argument("--permutations", metavar="N", type=int, default=2000, help="random relabellings (2000)")
    group.add_argument("--seed", metavar="N", type=int, default=0, help="of the relabellings (0)")


def are_corpora(args: argparse.Namespace, a: Run, b: Run) -> bool:
    """Whether rows are compared as samples of two groups rather than step by step."""
    if args.by != "auto":
        return bool(args.by == "sequence")
    if a.row_kind != b.row_kind:
        kinds = {"step": "a training run", "sequence": "a corpus scan"}
        raise UserError(
            f"{args.a} is {kinds[a.row_kind]} and {args.b} is {kinds[b.row_kind]}: say --by step or --by sequence"
        )
    return a.row_kind == "sequence"


def compare(args: argparse.Namespace, a: Run, b: Run, matches: Matches, channels: list[str]) -> int:
    from pyscan import tables
    from pyscan.compare_corpora import compare_corpora

    try:
        with tables.progress("Comparing") as tick:
            found = compare_corpora(
                a,
                b,
                pairs=matches.pairs,
                channels=channels,
                fdr=args.fdr,
                num_permutations=args.permutations,
                seed=args.seed,
                tick=tick,
            )
    except ValueError as error:
        raise UserError(str(error)) from error
    if args.json:
        print_json(_report(args, a, b, matches, found))
    else:
        _print(args, a, b, found)
    return 0


def _report(args: argparse.Namespace, a: Run, b: Run, matches: Matches, found: CorporaDiff) -> dict[str, Any]:
    return {
        "sequences": {"a": len(a), "b": len(b)},
        "median_tokens": {"a": _tokens(a), "b": _tokens(b)},
        "fdr": args.fdr,
        "permutations": args.permutations,
        "seed": args.seed,
        "tested": found.num_tested,
        "untested": len(found.q) - found.num_tested,
        "significant": int(found.significant.sum()),
        "only_a": matches.only_a,
        "only_b": matches.only_b if args.site is None else [],
        "cells": [cell._asdict() for cell in found.strongest(args.top)],
    }


def _print(args: argparse.Namespace, a: Run, b: Run, found: CorporaDiff) -> None:
    from pyscan import tables, text

    cells = found.strongest(args.top or SHOWN)
    if cells:
        titles = ("block", "channel", "log2(B/A)", "effect", "p", "q")
        columns = [tables.Column("site", right=False, is_name=True), *map(tables.Column, titles)]
        rows = [_row(cell) for cell in cells]
        tables.print_table(columns, rows)
    count, tested = int(found.significant.sum()), found.num_tested
    shown = f", the {len(cells)} strongest shown" if len(cells) < count else ""
    tables.print_line(f"{count:,} of {text.plural(tested, 'block')} differ{shown}", "" if count else "yellow")
    groups = (
        f"{text.plural(len(a), 'sequence')} of {_tokens(a):g} tokens against {len(b):,} of {_tokens(b):g} (medians)"
    )
    how = f"false discovery rate {args.fdr:g}, {args.permutations:,} relabellings"
    tables.print_line(f"{groups} · {how}", "dim")
    tables.print_line("act per token, grad of each sequence's mean loss; effect in standard deviations of log2", "dim")
    if tested < len(found.q):
        tables.print_line(
            f"{text.plural(len(found.q) - tested, 'block')} not tested: too few sequences have them", "dim"
        )


def _row(cell: Cell) -> list[str]:
    from pyscan import text

    block = "all" if cell.block is None else str(cell.block)
    sizes = text.signed(cell.difference), text.signed(cell.effect)
    return [cell.site, block, cell.channel, *sizes, f"{cell.p:.1e}", f"{cell.q:.1e}"]


def _tokens(run: Run) -> float:
    import numpy as np

    return float(np.median(run.steps["tokens"]))
