"""The compiled core without torch: the reduction of small tensors, packing, handing a row over. Runs under valgrind."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.instructions.counted import counted
from pyscan import _C
from pyscan.schema import Channel, Schema, SiteInfo
from pyscan.writer import Writer

NUM_CELLS = 10_754


def reduce(rows: int, cols: int, dtype: int = 0) -> None:
    """float32 is 0, bfloat16 is 1."""
    x = np.random.default_rng(0).standard_normal((rows, cols)).astype(np.float32)
    x = x if dtype == 0 else (x.view(np.uint32) >> 16).astype(np.uint16)
    out = [np.zeros(cols // 64) for _ in range(3)]
    name = "float32" if dtype == 0 else "bfloat16"
    address = x.ctypes.data

    def call() -> None:
        _C.reduce_into(address, dtype, rows, cols, cols, 1, *out, block=64)

    counted(f"reduce {rows}x{cols} {name}", call, repeat=20)


def pack() -> None:
    cells = np.exp(np.random.default_rng(0).normal(0, 6, NUM_CELLS))
    counted(f"pack {NUM_CELLS} cells", lambda: _C.pack(cells, "log2q8", "root"), repeat=20)


def hand_over() -> None:
    """On the training thread alone; the writer's own is counted apart and not looked at."""
    sites = (SiteInfo("w", "linear", (8, 64 * NUM_CELLS), "float32", NUM_CELLS),)
    row = np.random.default_rng(0).random(NUM_CELLS) + 0.5
    with tempfile.TemporaryDirectory() as directory:
        schema = Schema("bench", (Channel("act"),), sites)
        with Writer(Path(directory) / "run.mscan", schema, fsync="never", queue_rows=64) as writer:
            counted(f"hand over {NUM_CELLS} cells", lambda: writer.write(1, row, time_ns=0, loss=1.0), repeat=20)
            assert writer.rows_dropped == 0


if __name__ == "__main__":
    reduce(128, 64)
    reduce(340, 512)
    reduce(340, 512, dtype=1)
    pack()
    hand_over()
