"""The colours of every picture: page, report, notebook and terminal.

Receives scores; hands on red, green and blue. The sequential scale rises in lightness alone and the diverging ones run
from blue to orange, so both are read without full colour vision; what is no number has colours of its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

RGB = tuple[int, int, int]
Pixels = NDArray[np.uint8]  # [..., 3]

# Anchors at equal distances; between them colours are mixed linearly.
SEQUENTIAL: tuple[RGB, ...] = ((24, 18, 72), (44, 72, 142), (34, 128, 146), (86, 182, 120), (252, 240, 138))
DIVERGING: tuple[RGB, ...] = ((28, 76, 158), (128, 172, 218), (240, 240, 236), (240, 172, 92), (172, 78, 8))
DIVERGING_DARK: tuple[RGB, ...] = ((112, 176, 255), (52, 96, 162), (42, 46, 54), (172, 96, 28), (255, 182, 92))

ABSENT: RGB = (128, 128, 128)  # not observed
ZERO: RGB = (0, 0, 0)
NOT_FINITE: RGB = (230, 0, 126)

SCALES = {"sequential": SEQUENTIAL, "diverging": DIVERGING, "diverging_dark": DIVERGING_DARK}
MARKS = {"absent": ABSENT, "zero": ZERO, "not_finite": NOT_FINITE}


def paint(places: ArrayLike, scale: tuple[RGB, ...] = SEQUENTIAL) -> Pixels:
    """Colours of places between 0 and 1; what lies outside has the colour of the end."""
    anchors = np.array(scale, np.float64)
    at = np.clip(np.nan_to_num(np.asarray(places, np.float64)), 0, 1) * (len(anchors) - 1)
    parts = [np.interp(at, np.arange(len(anchors)), anchors[:, i]) for i in range(3)]
    return np.rint(np.stack(parts, axis=-1)).astype(np.uint8)


def plotly_scale(scale: tuple[RGB, ...]) -> list[list[object]]:
    """The scale as Plotly wants it."""
    return [[i / (len(scale) - 1), f"rgb{rgb}"] for i, rgb in enumerate(scale)]
