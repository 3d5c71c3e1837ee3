"""The report of a gradient check as text: one line per parameter, totals, and the causes counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyscan.case import Cause
    from pyscan.grad_stats import GradStats

_HEAD = ("status", "name", "grad min", "grad max", "norm", "cause")


def table(
    lists: Mapping[str, list[str]],
    stats: Mapping[str, GradStats | None],
    causes: Mapping[str, Cause],
    loss: float | None,
) -> str:
    """What `print(report)` shows."""
    statuses = {name: status for status, names in lists.items() for name in names}
    names = dict.fromkeys([*stats, *causes])
    rows = [_row(name, statuses.get(name, "note"), stats.get(name), causes) for name in names]
    widths = [max(len(row[i]) for row in [_HEAD, *rows]) for i in range(5)]
    lines = [_line(row, widths) for row in [_HEAD, *rows]]
    totals = ", ".join(f"{len(names)} {status}" for status, names in lists.items())
    shown = "" if loss is None else f"; loss {loss:.6g}"
    return "\n".join([*lines, "", f"{len(statuses)} parameters: {totals}{shown}", *_summary(causes)])


def _row(name: str, status: str, stats: GradStats | None, causes: Mapping[str, Cause]) -> tuple[str, ...]:
    numbers = [f"{value:.3e}" for value in stats] if stats is not None else ["", "", ""]
    return (status, name, *numbers, str(causes.get(name, "")))


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    status, name, *numbers, cause = row
    cells = [status.ljust(widths[0]), name.ljust(widths[1])]
    cells += [number.rjust(width) for number, width in zip(numbers, widths[2:], strict=True)]
    return "  ".join([*cells, cause]).rstrip()


def _summary(causes: Mapping[str, Cause]) -> list[str]:
    """Every kind of cause with its first text, what is not expected first and the commonest first."""
    texts: dict[tuple[bool, str], list[str]] = {}
    for cause in causes.values():
        texts.setdefault((cause.expected, cause.kind), []).append(cause.text)
    ordered = sorted(texts.items(), key=lambda item: (item[0][0], -len(item[1])))
    return [f"  {len(found)} x {found[0]}{' (expected)' if expected else ''}" for (expected, _), found in ordered]
