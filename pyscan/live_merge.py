"""The files of all ranks as one file that grows while they do.

`LiveMerge` receives the name the rank files share and the name to write; each `update` appends the steps that all ranks
have finished since. `start` does so every few seconds in a process of its own, which ends when the one that started it
does: training waits for nothing, and nothing is sent between ranks but what the file system carries.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from pyscan.errors import ScanError
from pyscan.frame_writer import FrameWriter
from pyscan.payloads import Event
from pyscan.rank_files import find_ranks
from pyscan.ranks import PASSING_EVENTS, RankedRun, open_ranks
from pyscan.rewrite import write_merged

_PATIENCE_SECONDS = 10.0
_NICENESS = 10


def live_path(path: str | os.PathLike[str]) -> Path:
    """Where the merged view of a run stands while it is being written."""
    return Path(path).with_suffix(".live.mscan")


class LiveMerge:
    """The merged file appears with its first row, in the place of an older one."""

    def __init__(self, source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
        self._source, self._target = os.fspath(source), os.fspath(target)
        self._run: RankedRun | None = None
        self._file: BinaryIO | None = None
        self._num_rows = 0
        self._schema = b""
        self._told: set[str] = set()

    def update(self) -> int:
        """Append what all ranks have by now; the number of new rows. A rank that has no file yet is waited for."""
        run, first_new = self._look()
        if run is None or run.missing_ranks or first_new == len(run):
            return 0
        return self._append(run, first_new)

    def close(self) -> None:
        """Append the rest, also if a rank is missing, what is to be said of ranks, and the index."""
        run, first_new = self._look()
        if run is not None:
            if first_new < len(run):
                self._append(run, first_new)
            if self._file is not None:
                self._tell(run.events)
                self._writer.index()
            run.close()
        if self._file is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def is_behind(self) -> bool:
        """Whether some rank of the present world has rows that another has not."""
        return self._run is None or any(event["kind"] == "rank_shorter" for event in self._run.recorded_events)

    def _look(self) -> tuple[RankedRun | None, int]:
        """The run as it is now, and the first of its rows that is not in the file, or stands there as it was before."""
        if self._run is not None:
            added = self._run.refresh()
            return self._run, min(len(self._run) - added, self._num_rows)
        if find_ranks(self._source):
            with contextlib.suppress(ScanError):  # the first file may have no schema yet
                self._run = open_ranks(self._source)
        return self._run, 0

    def _append(self, run: RankedRun, first: int) -> int:
        temporary = Path(f"{self._target}.{os.getpid()}.part")
        is_new = self._file is None
        if self._file is None:
            self._file = temporary.open("wb")
            self._writer = FrameWriter(self._file.write, os.urandom(16), time.time_ns())
        schema = run.schema
        if schema.to_json() != self._schema:
            self._schema = schema.to_json()
            self._writer.schema(schema)
        write_merged(run, self._writer, first)
        self._num_rows = len(run)
        self._tell(event for event in run.events if event["kind"] not in PASSING_EVENTS)
        self._file.flush()
        if is_new:
            temporary.replace(self._target)
        return len(run) - first

    def _tell(self, events: Iterable[Event]) -> None:
        lines = {json.dumps(event, sort_keys=True): event for event in events}
        self._writer.events(event for line, event in lines.items() if line not in self._told)
        self._told |= set(lines)


def start(path: str | os.PathLike[str], seconds: float) -> subprocess.Popen[bytes]:
    """Merge every so many seconds, in a process that ends when its standard input does."""
    command = [sys.executable, "-m", "pyscan.live_merge", os.fspath(path), os.fspath(live_path(path)), str(seconds)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=process.wait, daemon=True).start()
    return process


def main(source: str, target: str, seconds: float) -> None:
    os.nice(_NICENESS)
    merge = LiveMerge(source, target)
    while not select.select([sys.stdin], [], [], seconds)[0]:
        merge.update()
    merge.update()
    deadline = time.monotonic() + _PATIENCE_SECONDS  # ranks do not end at the same moment
    while merge.is_behind() and time.monotonic() < deadline:
        time.sleep(0.1)
        merge.update()
    merge.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
