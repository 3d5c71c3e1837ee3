"""The map of a model as lines of characters: a line per layer, modules side by side, in colour where there is any.

Receives an open run, a row and the columns of a terminal; hands on lines of text and colour and knows no terminal.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyscan import colours
from pyscan.codecs import is_absent
from pyscan.grid import Row, Section, arrange
from pyscan.overview import Overview, Picture
from pyscan.text import ASCII_BARS, BARS, fit, printable

if TYPE_CHECKING:
    from pyscan.codecs import Floats
    from pyscan.run import Run

_Z_END = 3.0


class Piece(NamedTuple):
    text: str
    background: colours.RGB | None = None


Line = list[Piece]


def heat_lines(run: Run, row: int, measure: str, *, width: int, colour: bool = True, bars: str = BARS) -> list[Line]:
    """The whole model in at most `width` columns; without colour the height of a bar stands for it."""
    overview = Overview(run)
    picture = overview.picture(row, measure)
    low, high = (-_Z_END, _Z_END) if measure == "sps" else overview.ends(measure)
    scale = colours.DIVERGING_DARK if measure == "sps" else colours.SEQUENTIAL
    cells = _Cells(picture, overview.counts(overview.per(measure)))
    sections = arrange(run.sites)
    labels = [row.label for section in sections for row in section.rows]
    gutter = min(max([len(label) for label in labels] or [0]), max(width // 4, 4))
    lines: list[Line] = []
    for section in sections:
        sizes = [max(cells.size(row.boxes.get(i, [])) for row in section.rows) for i in range(len(section.columns))]
        per_mark = max(1, math.ceil(sum(sizes) / max(width - gutter - 1 - len(sizes), 1)))
        widths = [math.ceil(size / per_mark) for size in sizes]
        if section.title:
            lines.append([Piece(" " * (gutter + 1) + _heads(section, widths))])
        for layer in section.rows:
            marks = _marks(layer, cells, widths, per_mark)
            lines.append([Piece(fit([printable(layer.label)], gutter)[0].rjust(gutter) + " ")])
            for box in marks:
                lines[-1] += [*(_piece(mark, low, high, scale, bars if not colour else "") for mark in box), Piece(" ")]
    return lines


class _Cells:
    """Scores and values of a picture by site."""

    def __init__(self, picture: Picture, counts: list[int]) -> None:
        self._picture = picture
        self._counts = counts
        self._ends = np.cumsum(counts)

    def size(self, box: list[int]) -> int:
        return sum(self._counts[site] for site in box)

    def of(self, box: list[int]) -> tuple[NDArray[np.float64], Floats]:
        spans = [np.arange(self._ends[site] - self._counts[site], self._ends[site]) for site in box]
        places = np.concatenate(spans or [np.zeros(0, np.intp)]).astype(np.intp)
        return self._picture.scores[places], self._picture.values[places]


def _heads(section: Section, widths: list[int]) -> str:
    """The last word of each column, as far as there is room."""
    words = [printable(column.rpartition(".")[2]).removesuffix("_proj") for column in section.columns]
    return "".join(f"{word[:width]:<{width}} " for word, width in zip(words, widths, strict=True))


# A mark stands for some cells: their mean score, or why they have none.
_NOTHING, _ZERO, _BAD = math.nan, -math.inf, math.inf


def _marks(row: Row, cells: _Cells, widths: list[int], per_mark: int) -> list[list[float]]:
    found = []
    for column, width in enumerate(widths):
        scores, values = cells.of(row.boxes.get(column, []))
        pieces = [slice(at, at + per_mark) for at in range(0, len(scores), per_mark)]
        marks = [_mark(scores[piece], values[piece]) for piece in pieces]
        found.append(marks + [_NOTHING] * (width - len(marks)))
    return found


def _mark(scores: NDArray[np.float64], values: Floats) -> float:
    if (~np.isfinite(values) & ~is_absent(values)).any() and not np.isfinite(scores).all():
        return _BAD
    known = scores[np.isfinite(scores)]
    if known.size:
        return float(known.mean())
    return _ZERO if (values == 0).any() else _NOTHING


def _piece(mark: float, low: float, high: float, scale: tuple[colours.RGB, ...], bars: str) -> Piece:
    """A coloured space; with `bars`, a bar."""
    if math.isnan(mark):
        return Piece(" ")
    if mark == _BAD:
        return Piece("!", None if bars else colours.NOT_FINITE)
    if mark == _ZERO:
        return Piece("0" if bars == ASCII_BARS else "·", None if bars else colours.ZERO)
    place = min(max((mark - low) / max(high - low, 1e-9), 0.0), 1.0)
    if bars:
        return Piece(bars[min(int(place * len(bars)), len(bars) - 1)])
    red, green, blue = colours.paint(place, scale).tolist()
    return Piece(" ", (red, green, blue))
