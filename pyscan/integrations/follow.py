"""A thread that reads a scan's file while it grows and shows the new rows to a sink: a dashboard of some kind.

Receives the scan, a sink and how often to look. Nothing of this runs on the training thread, and what goes wrong here
ends the following, with one warning, and not the run.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import warnings
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import numpy as np

from pyscan.errors import ScanError
from pyscan.integrations.curves import Point, Selection, points
from pyscan.reader import open as open_run

if TYPE_CHECKING:
    from pyscan.codecs import Array
    from pyscan.run import Run
    from pyscan.scanner import Scanner


class Sink(Protocol):
    """Where points go."""

    def push(self, point: Point) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


class Follower:
    """Shows rows that come after it was made; `close` shows the last ones and closes the sink."""

    def __init__(self, scan: Scanner, sink: Sink, selection: Selection, seconds: float) -> None:
        if scan.path is None:
            raise ValueError("rows are followed through the file of a scan, and this one has none: give attach a path")
        if not seconds > 0:
            raise ValueError(f"seconds must be > 0, got {seconds}")
        self.error: Exception | None = None
        self._scan = scan
        self._sink = sink
        self._selection = selection
        self._seconds = seconds
        self._process = os.getpid()
        self._stop = threading.Event()
        scan.flush()  # rows of an abandoned timeline are in the file now, and are not new
        self._run: Run = open_run(scan.path)
        self._shown = self._run.steps.copy()
        self._thread = threading.Thread(target=self._work, name="pyscan-follower", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """Show what is left. Closing twice is allowed; in a forked process it does nothing."""
        if self._stop.is_set() or os.getpid() != self._process:
            return
        atexit.unregister(self.close)
        self._scan.flush()
        self._stop.set()
        self._thread.join()

    def __enter__(self) -> Follower:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        try:
            while not self._stop.wait(self._seconds):
                self._show()
            self._show()
        except Exception as error:
            self._give_up(error)
        with contextlib.suppress(Exception):  # what a broken sink still has to say is known by now
            self._sink.close()
        self._run.close()

    def _show(self) -> None:
        """Show the rows that were not there before; a file caught in the middle of a change is looked at next time."""
        try:
            self._run.refresh()
        except (ScanError, OSError):
            if self._stop.is_set():
                raise
            return
        first = _num_equal(self._shown, self._run.steps)
        self._shown = self._run.steps.copy()
        for point in points(self._run, slice(first, None), self._selection):
            self._sink.push(point)
        self._sink.flush()

    def _give_up(self, error: Exception) -> None:
        self.error = error
        text = f"pyscan no longer shows rows: {type(error).__name__}: {error}. They are still recorded."
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        except Warning:
            print(text, file=sys.stderr)


def _num_equal(before: Array, now: Array) -> int:
    """How many rows at the beginning are the same: after a resume others may stand in the place of old ones."""
    count = min(len(before), len(now))
    same = (before["step"][:count] == now["step"][:count]) & (before["time_ns"][:count] == now["time_ns"][:count])
    return count if same.all() else int(np.argmin(same))
