"""The report of a gradient check as text: one line per parameter, totals, and the causes counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyscan.causes import Cause
    from pyscan.flow import GradStats

_HEAD = ("status", "name", "grad min", "grad max", "norm", "cause")


def table(
    lists: Mapping[str, list[str]], stats: Mapping[str, GradStats], causes: Mapping[str, Cause], loss: float | None
) -> str:
    """What `print(report)` shows."""
    statuses = {name: status for status, names in lists.items() for name in names}
    order = [name for name in [*stats, *statuses, *causes]]
    rows = [_row(name, statuses.get(name, "note"), stats, causes) for name in dict.fromkeys(order)]
    widths = [max(len(row[i]) for row in [_HEAD, *rows]) for i in range(5)]
    lines = [_line(row, widths) for row in [_HEAD, *rows]]
    totals = ", ".join(f"{len(names)} {status}" for status, names in lists.items())
    shown = "" if loss is None else f"; loss {loss:.6g}"
    return "\n".join([*lines, "", f"{len(statuses)} parameters: {totals}{shown}", *_summary(causes)])


def _row(name: str, status: str, stats: Mapping[str, GradStats], causes: Mapping[str, Cause]) -> tuple[str, ...]:
    numbers = [f"{value:.3e}" for value in stats[name]] if name in stats else ["", "", ""]
    return (status, name, *numbers, str(causes.get(name, "")))


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    status, name, *numbers, cause = row
    cells = [status.ljust(widths[0]), name.ljust(widths[1])]
    cells += [number.rjust(width) for number, width in zip(numbers, widths[2:], strict=True)]
    return "  ".join([*cells, cause]).rstrip()


def _summary(causes: Mapping[str, Cause]) -> list[str]:
    """Every cause once, what is not expected first and the commonest first."""
    counts = Counter((cause.expected, cause.text) for cause in causes.values())
    ordered = sorted(counts.items(), key=lambda item: (item[0][0], -item[1]))
    return [f"  {count} x {text}{' (expected)' if expected else ''}" for (expected, text), count in ordered]
