"""The runs a viewer shows, kept up to date: which rows there are, and which steps two runs have in common.

Receives the paths of one or two scans, opened once; hands on runs and overviews under a lock, because a run that looks
at its file again must not be read at the same time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyscan.compare import common_steps
from pyscan.errors import ScanError
from pyscan.names import match_names
from pyscan.overview import Overview
from pyscan.reader import open as open_run
from pyscan.run import Run
from pyscan.viewer.query import BadRequestError

# However many pages ask, files are looked at again at most this often.
_REFRESH_SECONDS = 0.2


class Session:
    """One or two open runs, and the axis of steps that is shown of them."""

    def __init__(self, paths: Sequence[str | os.PathLike[str]], *, tokenizer: Any = None) -> None:
        if not 1 <= len(paths) <= 2:
            raise ValueError(f"a viewer shows one run or two, got {len(paths)}")
        self.paths = [os.fspath(path) for path in paths]
        self.tokenizer = tokenizer
        self.runs: list[Run] = [open_run(path) for path in self.paths]
        self.changes = 0  # how often the sites of a run became others: a page must draw its map anew
        self._lock = threading.Lock()
        self._looked = time.monotonic()
        self._ends: dict[tuple[int, str], tuple[int, tuple[float, float]]] = {}
        self._describe()

    @contextmanager
    def reading(self, *, refresh: bool = False) -> Iterator[Session]:
        """Hold the runs still; with `refresh`, after a look for new rows."""
        with self._lock:
            if refresh and time.monotonic() - self._looked > _REFRESH_SECONDS:
                self._refresh()
            yield self

    def run(self, number: int) -> Run:
        if not 0 <= number < len(self.runs):
            raise BadRequestError(f"run must be below {len(self.runs)}, got {number}")
        return self.runs[number]

    def rows(self, at: int) -> list[int]:
        """The row of each run at a place of the axis."""
        if not 0 <= at < len(self.steps):
            raise BadRequestError(f"at must be below {len(self.steps)}, the number of steps shown, got {at}")
        return [int(places[at]) for places in self._rows]

    def ends(self, measure: str) -> tuple[float, float]:
        """Of the colour scale for all runs; looked for anew when a run has doubled."""
        found = [self._ends_of(number, measure) for number in range(len(self.runs))]
        return min(low for low, _ in found), max(high for _, high in found)

    def close(self) -> None:
        with self._lock:
            for run in self.runs:
                run.close()

    def _ends_of(self, number: int, measure: str) -> tuple[float, float]:
        rows = len(self.runs[number].steps)
        seen, ends = self._ends.get((number, measure), (-1, (0.0, 1.0)))
        if seen < 1 or rows >= 2 * seen or rows < seen:
            ends = self.overviews[number].ends(measure)
            self._ends[number, measure] = rows, ends
        return ends

    def _refresh(self) -> None:
        """A file caught in the middle of a change is looked at next time; one that became another is opened anew."""
        self._looked = time.monotonic()
        before = [(len(run.steps), _last_time(run)) for run in self.runs]
        for number, run in enumerate(self.runs):
            try:
                run.refresh()
            except (ScanError, OSError):
                with suppress(ScanError, OSError):
                    self.runs[number] = open_run(self.paths[number])
                    run.close()
        if before != [(len(run.steps), _last_time(run)) for run in self.runs]:
            self._describe()

    def _describe(self) -> None:
        shapes = [[(site.name, site.num_blocks, site.num_row_blocks) for site in run.sites] for run in self.runs]
        if shapes != getattr(self, "_shapes", None):
            self._shapes = shapes
            self.changes += 1
            self._ends.clear()
            self._pair()
        self.overviews = [Overview(run) for run in self.runs]
        self.steps: NDArray[Any] = self.runs[0].steps["step"]
        self._rows: list[NDArray[np.intp]] = [np.arange(len(self.steps))]
        if len(self.runs) == 2:
            common = common_steps(*self.runs)
            self.steps, self._rows = common.steps, [common.rows_a, common.rows_b]

    def _pair(self) -> None:
        """Places of the sites that both runs have."""
        self.pairs: list[tuple[int, int]] = []
        if len(self.runs) == 2:
            names = [[site.name for site in run.sites] for run in self.runs]
            places = [{name: place for place, name in enumerate(given)} for given in names]
            self.pairs = [(places[0][a], places[1][b]) for a, b in match_names(*names).pairs]


def _last_time(run: Run) -> tuple[int, int]:
    steps = run.steps
    return (int(steps["step"][-1]), int(steps["time_ns"][-1])) if len(steps) else (0, 0)
