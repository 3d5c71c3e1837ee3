"""What the tests of the writer share: schemas, rows whose values depend on step and place, and processes that die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pyscan.writer import Writer, layout_of
from tests import decode as dec

ROOT = Path(__file__).parent.parent
BOUND = 0.001356
RUN_ID = bytes(range(16))


def channel(name: str, per: str, codec: str = "log2q8", transform: str = "root") -> dict[str, str]:
    return {"name": name, "per": per, "codec": codec, "transform": transform, "op": "sumsq"}


CHANNELS = [
    channel("act", "block"),
    channel("grad_out", "row_block"),
    channel("act_max", "site", transform="plain"),
    channel("raw", "site", "u16", "plain"),
    channel("exact", "block", "f32"),
]


def make_schema(blocks: tuple[int, ...] = (3, 1), model: str = "tiny", **more: Any) -> dict[str, Any]:
    sites = [
        {
            "name": f"layer.{i}.weight",
            "kind": "linear",
            "shape": [8, 64 * n],
            "dtype": "f32",
            "blocks": n,
            "row_blocks": i,
        }
        for i, n in enumerate(blocks)
    ]
    return {
        "model": model,
        "block": 64,
        "every": 1,
        "channels": CHANNELS,
        "sites": sites,
        "rank": 0,
        "world": 1,
        **more,
    }


def num_cells(schema: dict[str, Any]) -> int:
    return sum(count for _, _, count in layout_of(schema))


def row_of(step: int, schema: dict[str, Any]) -> np.ndarray:
    """Cells that depend on the step and on their place, so that a row or a cell in the wrong place is seen."""
    return (1.0 + np.arange(num_cells(schema))) * (1.0 + step % 97)


def write_rows(writer: Writer, schema: dict[str, Any], steps: range) -> None:
    for step in steps:
        assert writer.write(step, row_of(step, schema), time_ns=1000 + step, loss=step / 2)
        if step % 8 == 7:
            writer.flush()


def check_cells(decoded: dec.Decoded, schema: dict[str, Any]) -> None:
    for row in decoded.rows.values():
        expected, first = row_of(row["step"], schema), 0
        for (codec, transform, count), codes in zip(layout_of(schema), row["cells"], strict=True):
            part = expected[first : first + count]
            first += count
            true = np.sqrt(part) if transform == "root" else part
            true = np.minimum(true, 65535) if codec == "u16" else true
            tolerance = {"log2q8": BOUND, "u16": 0, "f32": 1e-7}[codec]
            assert np.allclose(dec.values(codes, codec), true, rtol=tolerance, atol=0), (row["step"], codec)


def run_python(code: str, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code, *args], env=env, capture_output=True, text=True, timeout=60, check=False, **options
    )


def crash(path: Path, schema: dict[str, Any], count: int) -> None:
    """A writer that dies after flushing `count` rows: it leaves a tail and no index."""
    code = """if True:
        import json, os, sys
        sys.path.insert(0, sys.argv[3])
        from pyscan.writer import Writer
        from tests.writer_cases import row_of
        schema = json.loads(sys.argv[2])
        writer = Writer(sys.argv[1], schema, flush_seconds=1000)
        for step in range(int(sys.argv[4])):
            writer.write(step, row_of(step, schema), loss=step / 2)
            if step % 8 == 7:
                writer.event("note", step)
                writer.flush()
        writer.flush()
        os._exit(9)
    """
    result = run_python(code, str(path), json.dumps(schema), str(ROOT), str(count))
    assert result.returncode == 9, result.stderr


def fill_until_error(writer: Writer, schema: dict[str, Any], most: int = 100_000) -> int:
    """Write and flush until the writer turns itself off; returns the rows that had been reported as flushed."""
    flushed = 0
    for step in range(most):
        writer.write(step, row_of(step, schema))
        writer.flush()
        if writer.error is not None:
            return flushed
        flushed = writer.rows_flushed
    raise AssertionError("no error came")


def check_survivors(path: Path, schema: dict[str, Any], flushed: int) -> None:
    decoded = dec.decode(path, strict=False)
    assert decoded.steps[:flushed] == list(range(flushed))
    check_cells(decoded, schema)
