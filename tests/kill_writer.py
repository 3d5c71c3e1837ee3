"""A process that writes rows until it is killed, and says on its output what it has handed over and what was flushed.

Run by test_kill.py as `python -m tests.kill_writer PATH PAUSE_SECONDS`; imports little, to start fast.
"""

from __future__ import annotations

import os
import sys
import time

import numpy as np

from pyscan.schema import Channel, Schema, SiteInfo
from pyscan.writer import Writer

FLUSH_SECONDS = 0.2
NUM_CELLS = 300
MOST_ROWS = 4000
SCHEMA = Schema("killed", (Channel("act"),), (SiteInfo("w", "linear", (8, 64 * NUM_CELLS), "float32", NUM_CELLS),))


def cells_of(step: int) -> np.ndarray:
    """Sums of squares whose roots are exact powers of two: they survive packing unchanged."""
    return np.exp2(2.0 * ((np.arange(NUM_CELLS) * 7 + step) % 50))


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def main(path: str, pause_seconds: float) -> None:
    writer = Writer(path, SCHEMA, flush_seconds=FLUSH_SECONDS, fsync="never")
    say("ready")
    flushed = 0
    for step in range(MOST_ROWS):
        if writer.write(step, cells_of(step)):
            say(f"accepted {step} {time.monotonic()}")
        if step % 10 == 9:
            writer.event("note", step)
        if writer.rows_flushed > flushed:
            flushed = writer.rows_flushed
            say(f"flushed {flushed}")
        if pause_seconds:
            time.sleep(pause_seconds)
    time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
