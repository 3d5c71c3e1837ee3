"""Numbers, names and histories as short text: the words that tables and messages are made of.

Receives plain values; hands on strings. Knows no terminal and no file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyscan.codecs import is_absent

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-~=+*#"
# Marks of a history for what has no height: never 0, so that "nothing there" and "small" look different.
ZERO, BAD, ABSENT = -math.inf, math.inf, math.nan


def printable(text: str) -> str:
    """The text with every control character and lone surrogate escaped: a name in a file cannot steer a terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def count(number: int) -> str:
    return f"{number:,}"


def plural(number: int, noun: str) -> str:
    """`1 site`, `2 sites`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def size(num_bytes: float) -> str:
    """Bytes in powers of 1000 with three digits: `999 B`, `1.34 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB"


def duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min 20 s`, `5 h 02 min`, `3 d 4 h`."""
    if seconds < 59.5:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def norm(value: float | None) -> str:
    """A norm in at most 8 characters: `0`, `0.0123`, `12.3`, `1.2e+09`; `nan` and `inf` stay visible, None is `-`."""
    if value is None:
        return "-"
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1e-3 <= abs(value) < 99999.5:
        digits = max(0, 3 - math.floor(math.log10(abs(value))))
        return f"{value:.{min(digits, 4)}f}"
    return f"{value:.1e}"


def signed(value: float | None) -> str:
    """A score or a difference with its sign, `+1.24`; `-` where there is none."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:+.2f}" if math.isfinite(value) else f"{value:+}"


def factor(log2: float) -> str:
    """A log2 ratio as people say it: `x2.10`, `/8.00`; `-` where there is none."""
    if math.isnan(log2):
        return "-"
    value = 2 ** min(abs(log2), 1000)
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return ("x" if log2 >= 0 else "/") + (f"{value:.{digits}f}" if value < 99_999.5 else f"{value:.0e}")


def fit(names: Sequence[str], width: int) -> list[str]:
    """The names in at most `width` characters: all without `.weight` if one is too long, then without their beginnings.

    A name ends with what tells it from its neighbours, so whole components go from its front: `…layers.2.mlp.up_proj`.
    """
    if any(len(name) > width for name in names):
        names = [name.removesuffix(".weight") for name in names]
    return [name if len(name) <= width else _without_beginning(name, width) for name in names]


def _without_beginning(name: str, width: int) -> str:
    tail = name[len(name) - width + 1 :]
    component = tail.find(".")
    return "…" + (tail if component < 0 else tail[component + 1 :])


def history(norms: ArrayLike, buckets: int) -> NDArray[np.float64]:
    """Norms [steps] or [steps, cells] as at most `buckets` mean log2 levels; one that has none is ZERO, BAD or ABSENT.

    A single NaN or infinity makes its bucket BAD: it must not disappear among its neighbours.
    """
    absent, norms = is_absent(norms), np.asarray(norms, np.float64)
    if not len(norms):
        return np.zeros(norms.shape)
    starts = np.unique(np.arange(buckets) * len(norms) // buckets)
    level = np.isfinite(norms) & (norms > 0)
    logs = np.log2(np.where(level, norms, 1.0))
    filled = np.add.reduceat(level, starts, dtype=np.int64)
    means = np.add.reduceat(logs, starts) / np.maximum(filled, 1)
    bad = np.logical_or.reduceat(~np.isfinite(norms) & ~absent, starts)
    zero = np.logical_or.reduceat(norms == 0, starts)
    return np.where(bad, BAD, np.where(filled > 0, means, np.where(zero, ZERO, ABSENT)))


def sparkline(levels: Sequence[float] | NDArray[np.float64], bars: str = BARS) -> str:
    """One character per level, from the lowest bar to the highest; 0 is `·`, a NaN or infinity `!`, absent a space."""
    levels = np.asarray(levels, np.float64)
    finite = levels[np.isfinite(levels)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    marks = {ZERO: "·" if bars == BARS else "0", BAD: "!"}
    return "".join(marks.get(v) or (" " if math.isnan(v) else _bar(v, low, high, bars)) for v in levels.tolist())


def _bar(level: float, low: float, high: float, bars: str) -> str:
    if high - low < 1 / 64:  # within the rounding of a few codes: a flat line, not noise blown up
        return bars[len(bars) // 2 - 1]
    return bars[min(int((level - low) / (high - low) * len(bars)), len(bars) - 1)]
