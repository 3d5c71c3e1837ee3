"""The norms of one row as a picture: a line per site, a column per block, from the lowest cell (dark) to the highest.

Receives norms as read from a file; hands on pixels, and pixels as the bytes of a PNG file.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pyscan.analysis import levels
from pyscan.codecs import is_absent

Pixels = NDArray[np.uint8]  # [height, width, 3]

# Equal steps of lightness from dark blue to yellow, readable without colour vision.
_COLOURS = np.array([[13, 8, 90], [86, 34, 145], [180, 60, 120], [238, 130, 70], [250, 240, 120]], np.float64)
_NOTHING = (128, 128, 128)  # not observed, or the site has no such block
_ZERO = (0, 0, 0)
_NOT_FINITE = (255, 0, 0)
# A cell is a square of up to this many pixels; pictures stay near this wide.
_CELL, _WIDTH = 12, 768


def heat_map(norms: Sequence[NDArray[np.float32]], widths: Sequence[NDArray[np.float64]]) -> Pixels:
    """Norms and features of the blocks of each site as pixels; colour is log2(norm / sqrt(features))."""
    num_columns = max((len(line) for line in norms), default=1) or 1
    cells = np.full((max(len(norms), 1), num_columns, 3), _NOTHING, np.uint8)
    scores = [levels(line, width) for line, width in zip(norms, widths, strict=True)]
    finite = np.concatenate([score[np.isfinite(score)] for score in scores] or [np.zeros(0)])
    low, high = (finite.min(), finite.max()) if finite.size else (0.0, 1.0)
    for at, (line, score) in enumerate(zip(norms, scores, strict=True)):
        cells[at, : len(line)] = _paint(line, score, low, high)
    size = max(1, min(_CELL, _WIDTH // num_columns))
    return cells.repeat(size, axis=0).repeat(size, axis=1)


def _paint(norms: NDArray[np.float32], score: NDArray[np.float64], low: float, high: float) -> Pixels:
    place = np.nan_to_num((score - low) / max(high - low, 1e-9)) * (len(_COLOURS) - 1)
    colours = [np.interp(place, np.arange(len(_COLOURS)), _COLOURS[:, i]) for i in range(3)]
    pixels = np.rint(np.stack(colours, axis=-1)).astype(np.uint8)
    pixels[~np.isfinite(norms)] = _NOT_FINITE
    pixels[norms == 0] = _ZERO
    pixels[is_absent(norms)] = _NOTHING
    return pixels


def png(pixels: Pixels) -> bytes:
    """The picture as a PNG file: 8 bits, RGB, each line without a filter."""
    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)
    lines[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
