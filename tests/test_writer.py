"""The writer: exact bytes, every row with its values, and arguments that are refused."""

from __future__ import annotations

import math
import os
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyscan import _C
from pyscan.schema import Channel, Schema, SiteInfo
from pyscan.writer import AFTER_CLIP, SKIPPED, Writer
from tests import decode as dec
from tests.writer_cases import (
    RUN_ID,
    as_json,
    check_cells,
    make_schema,
    row_of,
    write_rows,
)


def test_the_bytes_of_a_tiny_file_are_those_of_the_format(tmp_path: Path) -> None:
    schema = b'{"model":"m","channels":[{"per":"block","codec":"log2q8"}],"sites":[{"blocks":2}]}'
    writer = _C.Writer(str(tmp_path / "run.mscan"), schema, [("log2q8", "root", 2)], RUN_ID)
    assert writer.write(5, 77, np.array([4.0, -1.0]), tokens=340, loss=1.5, flags=AFTER_CLIP)
    assert writer.write(9, 66, np.array([0.0, math.inf]), lr=0.25, grad_scale=2.0, total_norm=3.0, flags=SKIPPED)
    assert writer.close()
    data = (tmp_path / "run.mscan").read_bytes()

    def frame(kind: int, payload: bytes, step: int, row: int, rows: int, number: int) -> bytes:
        table = struct.pack("<I", zlib.crc32(payload)).ljust(64, b"\0")
        head = struct.pack(
            "<4sIQQQIIQ8sI", b"FRAM", kind, len(payload), step, row, rows, 0, number, RUN_ID[:8], zlib.crc32(table)
        )
        return head + struct.pack("<I", zlib.crc32(head)) + table + payload.ljust(dec.pad64(len(payload)), b"\0")

    created = data[32:40]
    header = struct.pack("<5sHBII16s8s20s", b"MSCAN", 2, 0, 64, 0, RUN_ID, created, b"")
    header += struct.pack("<I", zlib.crc32(header))
    records = struct.pack("<QQQffffII", 5, 77, 340, 1.5, 0, 0, 0, 2 | 8 | 16, 0)
    records += struct.pack("<QQQffffII", 9, 66, 0, 0, 0.25, 2.0, 3.0, 1 | 32 | 64 | 128, 0)
    cells = struct.pack("<4h", 256, -32768, -32767, 32767).ljust(
        64, b"\0"
    )  # cell 0: 2.0 then zero; cell 1: absent, inf
    frames = frame(1, schema, 0, 0, 0, 0), frame(2, records.ljust(128, b"\0") + cells, 5, 0, 2, 1)
    offsets = 64, 64 + len(frames[0]), 64 + len(frames[0]) + len(frames[1])
    entries = struct.pack("<QIIQQQQ", offsets[0], 1, 0, 0, 0, len(schema), 0)
    entries += struct.pack("<QIIQQQQ", offsets[1], 2, 2, 5, 0, 192, 1)
    index = entries.ljust(112, b"\0") + struct.pack("<Q8s", offsets[2], b"MSCANIDX")
    assert data == header + frames[0] + frames[1] + frame(5, index, 9, 2, 0, 2)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200])
def test_every_row_comes_back_with_its_values(tmp_path: Path, count: int) -> None:
    schema = make_schema()
    with Writer(tmp_path / "run.mscan", schema) as writer:
        write_rows(writer, schema, range(count))
    decoded = dec.decode(tmp_path / "run.mscan")
    assert decoded.steps == list(range(count))
    assert sorted(decoded.rows) == list(range(count))
    assert [frame.rows for frame in decoded.frames if frame.kind == dec.STEPS] == [64] * (count // 64) + [
        count % 64
    ] * (count % 64 > 0)
    assert all(row["time_ns"] == 1000 + row["step"] and row["loss"] == row["step"] / 2 for row in decoded.rows.values())
    check_cells(decoded, schema)
    assert [frame.number for frame in decoded.frames] == list(range(len(decoded.frames)))
    assert not (tmp_path / "run.mscan.tail").exists()


@pytest.mark.parametrize("blocks", [(), (0,), (1,), (64,), (63, 1, 1000)])
def test_odd_layouts_keep_every_cell(tmp_path: Path, blocks: tuple[int, ...]) -> None:
    schema = make_schema(blocks)
    with Writer(tmp_path / "run.mscan", schema) as writer:
        write_rows(writer, schema, range(70))
    decoded = dec.decode(tmp_path / "run.mscan")
    assert len(decoded.rows) == 70
    check_cells(decoded, schema)


def test_a_flush_puts_rows_into_the_tail_and_the_full_frame_empties_it(tmp_path: Path) -> None:
    path, schema = tmp_path / "run.mscan", make_schema()
    with Writer(path, schema, flush_seconds=1000) as writer:
        for step in range(63):
            writer.write(step, row_of(step, schema))
            writer.flush()
        decoded = dec.decode(path)
        assert (len(decoded.tail_frames), len(decoded.rows), writer.rows_flushed) == (63, 63, 63)
        check_cells(decoded, schema)
        writer.write(63, row_of(63, schema))
        writer.flush()
        decoded = dec.decode(path)
        assert (decoded.tail_frames, decoded.frames[-1].rows, writer.rows_flushed) == ([], 64, 64)
        writer.write(64, row_of(64, schema))
        writer.flush()
        assert [(frame.number, frame.first_row) for frame in dec.decode(path).tail_frames] == [(0, 64)]


def test_the_timer_flushes_without_another_row(tmp_path: Path) -> None:
    path, schema = tmp_path / "run.mscan", make_schema()
    with Writer(path, schema, flush_seconds=0.05) as writer:
        writer.write(1, row_of(1, schema))
        writer.event("note", 1)
        deadline = time.monotonic() + 5
        while writer.rows_flushed < 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        decoded = dec.decode(path)
        assert decoded.steps == [1]
        assert [event["kind"] for event in decoded.events] == ["note"]


def test_events_and_tokens_stand_in_the_file_with_the_newest_step(tmp_path: Path) -> None:
    path, schema = tmp_path / "run.mscan", make_schema()
    payload = os.urandom(9000)
    with Writer(path, schema) as writer:
        writer.write(41, row_of(41, schema))
        writer.event("alert", 41, site="layer.0.weight", value=1.5)
        writer.event("größe", 41, text="日本", values=[1.0, float("inf")], more={"loss": float("nan")})
        writer.tokens(41, payload)
        writer.flush()
    decoded = dec.decode(path)
    assert decoded.events == [
        {"kind": "alert", "step": 41, "site": "layer.0.weight", "value": 1.5},
        {"kind": "größe", "step": 41, "site": None, "text": "日本", "values": [1.0, None], "more": {"loss": None}},
    ]
    tokens, events = (next(f for f in decoded.frames if f.kind == kind) for kind in (dec.TOKENS, dec.EVENTS))
    assert tokens.payload == payload
    assert [(f.first_step, f.first_row) for f in (tokens, events)] == [(41, 1), (41, 1)]


def test_a_new_schema_closes_the_rows_before_it(tmp_path: Path) -> None:
    path, first, second = tmp_path / "run.mscan", make_schema(), make_schema((5,))
    with Writer(path, first) as writer:
        write_rows(writer, first, range(10))
        assert writer.change_schema(second)
        for step in range(10, 14):
            assert writer.write(step, row_of(step, second))
    decoded = dec.decode(path)
    assert decoded.schemas == [as_json(first), as_json(second)]
    assert [frame.kind for frame in decoded.frames] == [dec.SCHEMA, dec.STEPS, dec.SCHEMA, dec.STEPS, dec.INDEX]
    old, new = ({n: row for n, row in decoded.rows.items() if (n < 10) == early} for early in (True, False))
    check_cells(dec.Decoded(b"", rows=old), first)
    check_cells(dec.Decoded(b"", rows=new), second)
    assert (len(old), len(new)) == (10, 4)


def test_unknown_fields_are_zero_and_nan_loss_is_known(tmp_path: Path) -> None:
    path, schema = tmp_path / "run.mscan", make_schema()
    with Writer(path, schema) as writer:
        writer.write(1, row_of(1, schema), loss=math.nan)
        writer.write(2, row_of(2, schema))
    rows = dec.decode(path).rows
    assert math.isnan(rows[0]["loss"])
    assert (rows[0]["flags"], rows[1]["flags"]) == (16, 0)
    assert (rows[1]["loss"], rows[1]["lr"], rows[1]["tokens"]) == (0, 0, 0)


def test_a_clock_that_goes_backwards_is_stored_as_it_was(tmp_path: Path) -> None:
    path, schema = tmp_path / "run.mscan", make_schema()
    with Writer(path, schema) as writer:
        for step, time_ns in enumerate([10**18, 5, 2**64 - 1, 0]):
            writer.write(step, row_of(step, schema), time_ns=time_ns)
    assert [row["time_ns"] for row in dec.decode(path).rows.values()] == [10**18, 5, 2**64 - 1, 0]


def test_names_of_any_script_survive(tmp_path: Path) -> None:
    path = tmp_path / "läufe" / "прогон 1.mscan"
    path.parent.mkdir()
    schema = make_schema(model="模型 🚀", metadata={"note": 'line\nbreak "quoted"'})
    Writer(path, schema).close()
    assert dec.decode(path).schemas == [as_json(schema)]


def test_a_million_sites_are_written_in_reasonable_time(tmp_path: Path) -> None:
    sites = (SiteInfo(f"layers.{i}.weight", "linear", (8, 64), "float32", 1) for i in range(1_000_000))
    schema = Schema("wide", (Channel("act"),), tuple(sites))
    start = time.monotonic()
    with Writer(tmp_path / "run.mscan", schema, fsync="never") as writer:
        for step in range(3):
            assert writer.write(step, np.full(1_000_000, 4.0))
            writer.flush()
    seconds = time.monotonic() - start
    decoded = dec.decode(tmp_path / "run.mscan")
    assert len(decoded.schemas[0]["sites"]) == 1_000_000
    assert all((row["cells"][0] == 256).all() for row in decoded.rows.values())
    assert seconds < 20


def bytes_per_value(path: Path, cells: int, rows: int, flush_every_row: bool) -> float:
    schema = Schema("m", (Channel("act"),), (SiteInfo("w", "linear", (8, 64 * cells), "float32", cells),))
    row = np.ones(cells)
    with Writer(path, schema, flush_seconds=0.2, fsync="never") as writer:
        for step in range(rows):
            assert writer.write(step, row)
            if flush_every_row or step % 8 == 7:
                writer.flush()
    return path.stat().st_size / (rows * cells)


@pytest.mark.parametrize("flush_every_row", [False, True])
def test_a_value_takes_at_most_2_05_bytes(tmp_path: Path, flush_every_row: bool) -> None:
    assert bytes_per_value(tmp_path / "run.mscan", 10_754, 200, flush_every_row) <= 2.05


@pytest.mark.slow
@pytest.mark.parametrize("flush_every_row", [False, True])
def test_a_value_takes_at_most_2_05_bytes_over_10000_steps(tmp_path: Path, flush_every_row: bool) -> None:
    assert bytes_per_value(tmp_path / "run.mscan", 10_754, 10_000, flush_every_row) <= 2.05


def test_wrong_arguments_name_the_rule_and_the_value(tmp_path: Path) -> None:
    path = str(tmp_path / "run.mscan")

    def make(**changes: Any) -> _C.Writer:
        given = {"path": path, "schema": b"{}", "layout": [("f32", "plain", 2)], "run_id": RUN_ID, **changes}
        return _C.Writer(**given)

    for changes, message in [
        ({"run_id": b"short"}, "run_id must have 16 bytes, got 5"),
        ({"flush_seconds": 0.0}, "flush_seconds must be > 0, got 0"),
        ({"flush_seconds": math.nan}, "flush_seconds must be > 0, got nan"),
        ({"queue_rows": 1}, "queue_rows must be >= 2, got 1"),
        ({"fsync": "always"}, "fsync must be never, close or flush, got always"),
        ({"layout": [("f64", "plain", 2)]}, "codec must be log2q8, u16 or f32, got f64"),
    ]:
        with pytest.raises(ValueError, match=message):
            make(**changes)
        assert not os.path.exists(path)
    writer = make()
    with pytest.raises(ValueError, match="cells must hold 2 values as the layout says, got 3"):
        writer.write(1, 0, np.zeros(3))
    with pytest.raises(TypeError, match="cells must be float64, got the buffer format f"):
        writer.write(1, 0, np.zeros(2, np.float32))
    with pytest.raises((ValueError, BufferError), match="contiguous"):
        writer.write(1, 0, np.zeros(4)[::2])
    with pytest.raises(ValueError, match="an event must be one line of JSON"):
        writer.event(b'{"kind":\n"x"}')
    assert writer.rows_accepted == 0
    assert writer.close()


def test_calls_after_close_do_nothing(tmp_path: Path) -> None:
    path, schema = tmp_path / "run.mscan", make_schema()
    writer = Writer(path, schema)
    writer.close()
    before = path.read_bytes()
    assert not writer.write(1, row_of(1, schema))
    assert not writer.event("late", 1)
    assert not writer.tokens(1, b"x")
    assert not writer.change_schema(make_schema((9,)))
    assert not writer.flush()
    writer.close()
    assert path.read_bytes() == before
    assert writer.error is None
