"""`pyscan health`: the verdict of a whole run on one screen."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyscan.commands.base import Verb, add_json, add_scan, open_run, print_json

if TYPE_CHECKING:
    from pyscan.health import Finding, Health

_TITLES = {
    "nonfinite": "not finite",
    "nothing_recorded": "nothing recorded",
    "no_gradient": "no gradient",
    "quantized": "quantised weights",
    "replicas_differ": "replicas differ",
    "rank_differs": "a rank differs",
    "rank_nonfinite": "first rank not finite",
    "off": "scanner off",
}


class HealthVerb(Verb):
    """Say what was wrong in a run, where, since when, how bad, and what to try.

    The rules are those of the watch that runs beside training: values that are
    not finite, no gradient at all, explosions, spikes, gradients that fade,
    dead blocks. The worst comes first.

    Exit status 0: nothing is wrong. 1: something is.

    example:
      pyscan health run.mscan || echo look at it
    """

    name = "health"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_scan(parser)
        add_json(parser)

    def run(self, args: argparse.Namespace) -> int:
        from pyscan import tables
        from pyscan.health import judge

        with open_run(args.scan) as run, tables.progress("Judging") as tick:
            health = judge(run, tick=tick)
        if args.json:
            print_json(_report(args.scan, health))
        else:
            _print(args.scan, health)
        return 1 if health.findings else 0


def _report(path: Path, health: Health) -> dict[str, Any]:
    return {
        "path": str(path),
        "healthy": not health.findings,
        "rows": health.num_rows,
        "steps": health.steps,
        "findings": [vars(finding) | {"advice": finding.advice} for finding in health.findings],
        "not_judged": health.not_judged,
    }


def _print(path: Path, health: Health) -> None:
    from pyscan import tables, text

    rows = text.plural(health.num_rows, "row")
    span = f", steps {health.steps[0]:,} to {health.steps[1]:,}" if health.steps else ""
    if not health.num_rows:
        verdict, style = "no rows yet, nothing to judge", "yellow"
    elif health.findings:
        verdict, style = f"{text.plural(len(health.findings), 'problem')} in {rows}{span}", "red"
    else:
        verdict, style = f"healthy in {rows}{span}", "green"
    tables.print_line(f"{path}: {verdict}", style)
    for finding in health.findings:
        tables.print_facts(_title(finding), _facts(finding))
    for line in health.not_judged:
        tables.print_line(f"not judged: {line}", "dim")


def _title(finding: Finding) -> str:
    title = _TITLES.get(finding.kind, finding.kind)
    return f"{title}, since step {finding.step:,}" + (f": {finding.site}" if finding.site else "")


def _facts(finding: Finding) -> list[tuple[str, str, str]]:
    facts = [("what", finding.text, "")]
    if finding.num_events > 1:
        facts.append(("again", f"{finding.num_events - 1} times, last at step {finding.last_step:,}", ""))
    before = finding.detail.get("before")
    if before:
        facts.append(("before", _history(before), ""))
    return [*facts, ("try", finding.advice, "")]


def _history(rows: list[dict[str, Any]]) -> str:
    """The norms of the site in the rows before its first bad value."""
    from pyscan import text

    parts = [
        f"{name} {' '.join(text.norm(row.get(name)) for row in rows)}"
        for name in ("act", "grad")
        if any(row.get(name) is not None for row in rows)
    ]
    return f"steps {rows[0]['step']:,} to {rows[-1]['step']:,}: {', '.join(parts) or 'not recorded'}"
