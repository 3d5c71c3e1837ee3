"""`pyscan diff`: where two runs of one model are apart."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from pyscan.commands import diff_corpora
from pyscan.commands.base import UserError, Verb, add_json, add_scan, add_selection, open_run, print_json, select_sites

if TYPE_CHECKING:
    from pyscan.compare import CommonSteps, SiteDiff
    from pyscan.names import Matches
    from pyscan.run import Run


class Diff(Verb):
    """Show where two runs, or the scans of two corpora, are apart, as log2(B / A).

    +1 is twice as large in B, -1 half as large, 0 equal.

    Sites are paired by name, also when one run's names lack `.weight` or carry
    another prefix (`module.`, `base_model.model.`). Steps that both runs have
    are compared: "mean" is that of the whole site over the steps, "largest"
    that of any block at any step, "first" the first step at which any block
    differs by more than --tolerance.

    Of two corpus scans (pyscan scan) the sequences are compared as groups:
    which blocks differ between the topics, by how many standard deviations, and
    a permutation test with control of the false discovery rate (--fdr).

    examples:
      pyscan diff before.mscan after.mscan --top 20
      pyscan diff code.mscan prose.mscan --fdr 0.01
    """

    name = "diff"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_scan(parser, "a")
        add_scan(parser, "b")
        add_selection(parser)
        parser.add_argument("--top", metavar="N", type=int, help="only the N sites, or blocks, that are farthest apart")
        parser.add_argument(
            "--tolerance", metavar="LOG2", type=float, default=0.0, help="log2 ratio taken as equal (0)"
        )
        parser.add_argument(
            "--by",
            choices=("auto", "step", "sequence"),
            default="auto",
            help="what rows are: steps that both runs have, or samples",
        )
        add_json(parser)
        diff_corpora.add_arguments(parser)

    def run(self, args: argparse.Namespace) -> int:
        from pyscan import compare, names, tables
        from pyscan.summary import norm_channels

        if args.top is not None and args.top < 1:
            raise UserError(f"--top must be >= 1, got {args.top}")
        with open_run(args.a) as a, open_run(args.b) as b:
            matches = names.match_names([s.name for s in select_sites(a, args.site)], [s.name for s in b.sites])
            common = compare.common_steps(a, b)
            by_sequence = diff_corpora.are_corpora(args, a, b)
            _check(a, b, matches, None if by_sequence else common)
            channels = [name for name in norm_channels(a) if name in norm_channels(b)]
            if not channels:
                raise UserError("the runs have neither act nor grad per block in common: nothing to compare")
            if by_sequence:
                return diff_corpora.compare(args, a, b, matches, channels)
            with tables.progress("Comparing") as tick:
                found = compare.compare_runs(
                    a, b, pairs=matches.pairs, channels=channels, tolerance=args.tolerance, tick=tick
                )
        only_b = matches.only_b if args.site is None else []
        if args.top is not None:
            found = sorted(found, key=lambda diff: -diff.largest_mean)[: args.top]
        if args.json:
            print_json(_report(found, matches.only_a, only_b, common))
        else:
            _print(args, found, matches, only_b, common)
        return 0


def _check(a: Run, b: Run, matches: Matches, common: CommonSteps | None) -> None:
    if not matches.pairs:
        raise UserError(f"no site is in both runs: A has {_some(matches.only_a)}, B has {_some(matches.only_b)}")
    if common is not None and not len(common.steps):
        raise UserError(f"no step is in both runs: A has {_range(a)}, B has {_range(b)}")


def _some(names: list[str]) -> str:
    return f"{len(names)} such as {names[0]}" if names else "none"


def _range(run: Run) -> str:
    steps = run.steps["step"]
    return f"{steps[0]} to {steps[-1]}" if len(steps) else "none"


def _report(found: list[SiteDiff], only_a: list[str], only_b: list[str], common: CommonSteps) -> dict[str, Any]:
    return {
        "steps": {"count": len(common.steps), "first": common.steps[0], "last": common.steps[-1]},
        "only_a": only_a,
        "only_b": only_b,
        "sites": [{"a": d.a, "b": d.b} | {name: vars(part) for name, part in d.channels.items()} for d in found],
    }


def _print(
    args: argparse.Namespace, found: list[SiteDiff], matches: Matches, only_b: list[str], common: CommonSteps
) -> None:
    from pyscan import tables, text

    columns, rows = _table(found)
    tables.print_table(columns, rows)
    steps = f"{text.plural(len(common.steps), 'common step')}, {common.steps[0]:,} to {common.steps[-1]:,}"
    tables.print_line(f"{text.plural(len(matches.pairs), 'site')} in both · {steps} · log2(B / A)", "dim")
    renamed = [(a, b) for a, b in matches.pairs if a != b]
    if renamed:
        tables.print_line(f"{len(renamed)} have another name in B: {renamed[-1][0]} is {renamed[-1][1]}", "dim")
    for path, names in ((args.a, matches.only_a), (args.b, only_b)):
        if names:
            more = ", ..." if len(names) > 3 else ""
            tables.print_line(f"only in {path}: {len(names)} ({', '.join(names[:3])}{more})", "yellow")


def _table(found: list[SiteDiff]) -> tuple[list[Any], list[list[str]]]:
    from pyscan import tables, text

    columns = [tables.Column("site", right=False, is_name=True)]
    with_largest = tables.width() >= 90
    for name in found[0].channels if found else ():
        columns.append(tables.Column(f"{name} mean"))
        columns += [tables.Column("largest")] if with_largest else []
        columns.append(tables.Column("first"))
    rows = []
    for diff in found:
        row = [diff.a]
        for part in diff.channels.values():
            first = "-" if part.first_step is None else f"{part.first_step:,}"
            largest = [text.signed(part.largest).lstrip("+")] if with_largest else []
            row += [text.signed(part.mean), *largest, first]
        rows.append(row)
    return columns, rows
