"""What a dashboard is shown of a run: per row a few named numbers, and now and then a heat map.

Receives an open run and which of its sites, channels and steps to show; hands on one `Point` per row, read in pieces of
bounded size. Live or from a finished file, the numbers are those of the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pyscan.analysis import block_widths, features_of
from pyscan.codecs import is_absent
from pyscan.format import ROW_HAS_LOSS, ROW_HAS_LR, ROW_HAS_TOKENS
from pyscan.grad_check import run_counts
from pyscan.integrations.heatmap import Pixels, heat_map

if TYPE_CHECKING:
    from pyscan.codecs import Array
    from pyscan.run import Run
    from pyscan.schema import SiteInfo

# Rows read at once: a frame of the file.
_WINDOW = 64
_KNOWN = {"loss": ROW_HAS_LOSS, "lr": ROW_HAS_LR, "tokens": ROW_HAS_TOKENS}


@dataclass(frozen=True)
class Selection:
    """Which sites (a regular expression on their names), which channels of them, and of which steps."""

    sites: str | None = None
    channels: tuple[str, ...] = ("act", "grad")
    every: int = 1  # rows whose step is a multiple of this
    heat_every: int = 100  # heat maps of rows whose step is a multiple of this; 0: none

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("heat_every", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if isinstance(self.channels, str):
            raise TypeError(f"channels is a sequence of names, got the text {self.channels!r}")
        try:
            re.compile(self.sites or "")
        except re.error as error:
            raise ValueError(f"sites must be a regular expression, got {self.sites!r}: {error}") from None

    def choose(self, run: Run) -> list[SiteInfo]:
        return [site for site in run.sites if re.search(self.sites or "", site.name)]


class Point(NamedTuple):
    """One row: numbers by the name of their curve, pictures by the name of their heat map."""

    step: int
    time_ns: int
    numbers: dict[str, float]
    pictures: dict[str, Pixels]


def points(run: Run, rows: slice, selection: Selection) -> Iterator[Point]:
    """The rows of a slice that are to be shown: curves `act/SITE`, `grad/SITE`, ..., `row/loss`, `row/lr`, `row/tokens`
    and `grad_check/...`, heat maps `heat/act`, `heat/grad`. What was not observed has no number."""
    start, stop, _ = rows.indices(len(run.steps))
    steps = run.steps["step"]
    for at in range(start, stop, _WINDOW):
        window = slice(at, min(at + _WINDOW, stop))
        wanted = steps[window] % selection.every == 0
        pictured = steps[window] % (selection.heat_every or 1) == 0 if selection.heat_every else wanted & False
        if (wanted | pictured).any():
            yield from _window(run, window, wanted, pictured, selection)


def _window(run: Run, window: slice, wanted: Array, pictured: Array, selection: Selection) -> Iterator[Point]:
    sites = selection.choose(run)
    curves: dict[str, Array] = {
        f"{channel}/{site.name}": run.get(channel, site.name, steps=window)
        for channel in selection.channels
        for site in sites
    }
    curves |= run_counts(run, window)
    rows = run.steps[window]
    for row in np.flatnonzero(wanted | pictured):
        record = rows[row]
        numbers = {f"row/{name}": float(record[name]) for name, flag in _KNOWN.items() if record["flags"] & flag}
        numbers |= {name: float(curve[row]) for name, curve in curves.items() if not is_absent(curve[row])}
        pictures = _pictures(run, window.start + int(row), sites, selection.channels) if pictured[row] else {}
        yield Point(int(record["step"]), int(record["time_ns"]), numbers if wanted[row] else {}, pictures)


def _pictures(run: Run, row: int, sites: list[SiteInfo], channels: tuple[str, ...]) -> dict[str, Pixels]:
    """A heat map per channel that has blocks."""
    place = slice(row, row + 1)
    found = {}
    for name in channels:
        if run.channel(name).per == "block":
            norms = [run.get(name, site.name, True, steps=place)[0] for site in sites]
            widths = [
                block_widths(features_of(site), len(line), run.block) for site, line in zip(sites, norms, strict=True)
            ]
            found[f"heat/{name}"] = heat_map(norms, widths)
    return found
