"""What the tests of the writer share: schemas, rows whose values depend on step and place, and processes that die."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from pyscan.schema import Channel, Layout, Schema, SiteInfo
from pyscan.writer import Writer
from tests import decode as dec

ROOT = Path(__file__).parent.parent
BOUND = 0.001356
RUN_ID = bytes(range(16))


CHANNELS = (
    Channel("act"),
    Channel("grad_out", "row_block"),
    Channel("act_max", "site", transform="plain"),
    Channel("raw", "site", "u16", "plain"),
    Channel("exact", codec="f32"),
)


def make_schema(blocks: tuple[int, ...] = (3, 1), model: str = "tiny", **more: Any) -> Schema:
    sites = (SiteInfo(f"layer.{i}.weight", "linear", (8, 64 * n), "float32", n, i) for i, n in enumerate(blocks))
    return Schema(model, CHANNELS, tuple(sites), **more)


def as_json(schema: Schema) -> dict[str, Any]:
    return json.loads(schema.to_json())


def num_cells(schema: Schema) -> int:
    return sum(Layout(schema).num_cells)


def row_of(step: int, schema: Schema) -> np.ndarray:
    """Cells that depend on the step and on their place, so that a row or a cell in the wrong place is seen."""
    return (1.0 + np.arange(num_cells(schema))) * (1.0 + step % 97)


def write_rows(writer: Writer, schema: Schema, steps: range) -> None:
    for step in steps:
        assert writer.write(step, row_of(step, schema), time_ns=1000 + step, loss=step / 2)
        if step % 8 == 7:
            writer.flush()


def check_cells(decoded: dec.Decoded, schema: Schema) -> None:
    for row in decoded.rows.values():
        expected, first = row_of(row["step"], schema), 0
        for (codec, transform, count), codes in zip(Layout(schema).packing(), row["cells"], strict=True):
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


def crash(path: Path, schema: Schema, count: int) -> None:
    """A writer that dies after flushing `count` rows: it leaves a tail and no index."""
    code = """if True:
        import os, sys
        sys.path.insert(0, sys.argv[3])
        from pyscan.schema import Schema
        from pyscan.writer import Writer
        from tests.writer_cases import row_of
        schema = Schema.from_json(sys.argv[2].encode())
        writer = Writer(sys.argv[1], schema, flush_seconds=1000)
        for step in range(int(sys.argv[4])):
            writer.write(step, row_of(step, schema), loss=step / 2)
            if step % 8 == 7:
                writer.event("note", step)
                writer.flush()
        writer.flush()
        os._exit(9)
    """
    result = run_python(code, str(path), schema.to_json().decode(), str(ROOT), str(count))
    assert result.returncode == 9, result.stderr


def fill_until_error(writer: Writer, schema: Schema, most: int = 100_000) -> int:
    """Write and flush until the writer turns itself off; returns the rows that had been reported as flushed."""
    flushed = 0
    for step in range(most):
        writer.write(step, row_of(step, schema))
        writer.flush()
        if writer.error is not None:
            return flushed
        flushed = writer.rows_flushed
    raise AssertionError("no error came")


def check_survivors(path: Path, schema: Schema, flushed: int) -> None:
    decoded = dec.decode(path, strict=False)
    assert decoded.steps[:flushed] == list(range(flushed))
    check_cells(decoded, schema)
