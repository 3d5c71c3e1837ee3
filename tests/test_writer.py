"""The writer: exact bytes, resume, and every way a disk or a process can fail."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyscan import _C
from pyscan.writer import AFTER_CLIP, SKIPPED, Writer, encode_json, layout_of
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


# The format -----------------------------------------------------------------------------------------------------------


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
        writer.event("größe", 41, text="日本")
        writer.tokens(41, payload)
        writer.flush()
    decoded = dec.decode(path)
    assert decoded.events == [
        {"kind": "alert", "step": 41, "site": "layer.0.weight", "value": 1.5},
        {"kind": "größe", "step": 41, "site": None, "text": "日本"},
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
    assert decoded.schemas == [first, second]
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
    assert dec.decode(path).schemas == [schema]


def test_a_million_sites_are_written_in_reasonable_time(tmp_path: Path) -> None:
    sites = [{"name": f"layers.{i}.weight", "blocks": 1} for i in range(1_000_000)]
    schema = {"model": "wide", "channels": [channel("act", "block")], "sites": sites}
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
    schema = {"model": "m", "channels": [channel("act", "block")], "sites": [{"name": "w", "blocks": cells}]}
    row = np.ones(cells)
    with Writer(path, schema, flush_seconds=0.2, fsync="never") as writer:
        for step in range(rows):
            assert writer.write(step, row)
            if flush_every_row:
                writer.flush()
    return path.stat().st_size / (rows * cells)


@pytest.mark.parametrize("flush_every_row", [False, True])
def test_a_value_takes_at_most_2_05_bytes(tmp_path: Path, flush_every_row: bool) -> None:
    assert bytes_per_value(tmp_path / "run.mscan", 10_754, 200, flush_every_row) <= 2.05


@pytest.mark.slow
@pytest.mark.parametrize("flush_every_row", [False, True])
def test_a_value_takes_at_most_2_05_bytes_over_10000_steps(tmp_path: Path, flush_every_row: bool) -> None:
    assert bytes_per_value(tmp_path / "run.mscan", 10_754, 10_000, flush_every_row) <= 2.05


# Arguments ------------------------------------------------------------------------------------------------------------


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


# Two writers, resume --------------------------------------------------------------------------------------------------


def test_an_existing_file_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "run.mscan"
    Writer(path, make_schema()).close()
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match="pass resume=True to continue it, or choose another path"):
        Writer(path, make_schema())
    assert path.read_bytes() == before


def test_two_writers_of_one_file_are_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    path, schema = tmp_path / "run.mscan", make_schema()
    with Writer(path, schema) as writer:
        writer.write(1, row_of(1, schema))
        writer.flush()
        with pytest.raises(BlockingIOError, match="another process or scanner is writing this file"):
            Writer(path, schema, resume=True)
        writer.write(2, row_of(2, schema))
    assert dec.decode(path).steps == [1, 2]


def test_resume_appends_and_marks_the_first_row(tmp_path: Path) -> None:
    path, schema = tmp_path / "run.mscan", make_schema()
    with Writer(path, schema) as writer:
        write_rows(writer, schema, range(70))
    before = path.read_bytes()
    with Writer(path, schema, resume=True, run_id=bytes(16)) as writer:
        assert writer.last_step == 69
        write_rows(writer, schema, range(50, 120))
    assert path.read_bytes()[: len(before)] == before
    decoded = dec.decode(path)
    assert decoded.steps == [*range(70), *range(50, 120)]
    assert [n for n, row in decoded.rows.items() if row["flags"] & 4] == [70]
    assert len(decoded.schemas) == 1
    assert [frame.number for frame in decoded.frames] == list(range(len(decoded.frames)))
    check_cells(decoded, schema)


def test_resume_of_a_path_that_does_not_exist_begins_a_file(tmp_path: Path) -> None:
    path, schema = tmp_path / "run.mscan", make_schema()
    with Writer(path, schema, resume=True) as writer:
        assert writer.last_step == 0
        write_rows(writer, schema, range(3))
    assert [row["flags"] for row in dec.decode(path).rows.values()] == [16] * 3


def test_resume_with_changed_sites_writes_a_schema_and_another_model_is_refused(tmp_path: Path) -> None:
    path, schema, wider = tmp_path / "run.mscan", make_schema(), make_schema((3, 2))
    with Writer(path, schema) as writer:
        write_rows(writer, schema, range(5))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="holds a scan of the model 'tiny', got 'other'; choose another path"):
        Writer(path, make_schema(model="other"), resume=True)
    assert path.read_bytes() == before
    with Writer(path, wider, resume=True) as writer:
        write_rows(writer, wider, range(5, 8))
    decoded = dec.decode(path)
    assert decoded.schemas == [schema, wider]
    assert decoded.steps == list(range(8))


def crash(path: Path, schema: dict[str, Any], count: int) -> None:
    """A writer that dies after flushing `count` rows: it leaves a tail and no index."""
    code = """if True:
        import json, os, sys
        sys.path.insert(0, sys.argv[3])
        from tests.test_writer import Writer, row_of
        schema = json.loads(sys.argv[2])
        writer = Writer(sys.argv[1], schema, flush_seconds=1000)
        for step in range(int(sys.argv[4])):
            writer.write(step, row_of(step, schema), loss=step / 2)
            if step % 8 == 7:
                writer.flush()
        writer.flush()
        os._exit(9)
    """
    result = run_python(code, str(path), json.dumps(schema), str(ROOT), str(count))
    assert result.returncode == 9, result.stderr


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 100])
def test_resume_after_a_crash_brings_the_tail_into_the_main_file(tmp_path: Path, count: int) -> None:
    path, schema = tmp_path / "run.mscan", make_schema()
    crash(path, schema, count)
    assert dec.decode(path).steps == list(range(count))
    writer = Writer(path, schema, resume=True)
    assert dec.decode(path).tail_frames == []
    assert dec.decode(path).steps == list(range(count))
    assert writer.last_step == max(count - 1, 0)
    write_rows(writer, schema, range(count, count + 70))
    writer.close()
    decoded = dec.decode(path)
    assert decoded.steps == list(range(count + 70))
    assert [n for n, row in decoded.rows.items() if row["flags"] & 4] == [count]
    check_cells(decoded, schema)


def test_resume_after_a_crash_with_changed_sites_keeps_the_rows_of_the_tail(tmp_path: Path) -> None:
    path, schema, wider = tmp_path / "run.mscan", make_schema(), make_schema((7,))
    crash(path, schema, 20)
    with Writer(path, wider, resume=True) as writer:
        writer.write(20, row_of(20, wider))
    decoded = dec.decode(path)
    assert decoded.steps == list(range(21))
    check_cells(dec.Decoded(b"", rows={n: r for n, r in decoded.rows.items() if n < 20}), schema)


def test_rows_that_are_in_both_files_are_not_doubled_by_a_resume(tmp_path: Path) -> None:
    """A crash after the full frame was written and before the tail was emptied."""
    path, schema = tmp_path / "run.mscan", make_schema()
    tail = path.with_name("run.mscan.tail")
    crash(path, schema, 60)
    old_tail = tail.read_bytes()
    with Writer(path, schema, resume=True) as writer:
        writer.flush()
    tail.write_bytes(old_tail)
    with Writer(path, schema, resume=True):
        pass
    assert dec.decode(path).steps == list(range(60))


@pytest.mark.parametrize("cut", [1, 63, 64, 100, 1000])
def test_a_torn_tail_gives_up_only_its_last_frame(tmp_path: Path, cut: int) -> None:
    path, schema = tmp_path / "run.mscan", make_schema()
    crash(path, schema, 20)  # flushed at 8, 16 and 20 rows
    tail = path.with_name("run.mscan.tail")
    frame_bytes = dec.decode(path).tail_frames[-1].size
    tail.write_bytes(tail.read_bytes()[:-cut])
    with Writer(path, schema, resume=True) as writer:
        writer.write(50, row_of(50, schema))
    survivors = 16 if cut <= frame_bytes else 8
    assert dec.decode(path).steps == [*range(survivors), 50]


@pytest.mark.parametrize("keep", [0, 1, 40, 63, 64])
def test_a_file_without_a_whole_frame_is_begun_anew(tmp_path: Path, keep: int) -> None:
    path, schema = tmp_path / "run.mscan", make_schema()
    Writer(path, schema, run_id=RUN_ID).close()
    path.write_bytes(path.read_bytes()[:keep])
    with Writer(path, schema, resume=True) as writer:
        write_rows(writer, schema, range(3))
    decoded = dec.decode(path)
    assert decoded.steps == [0, 1, 2]
    assert not any(row["flags"] & 4 for row in decoded.rows.values())


def test_a_file_cut_anywhere_can_be_continued_and_nothing_good_is_lost(tmp_path: Path) -> None:
    """The torn frame keeps its place, and its header does not swallow the frames appended behind it."""
    path, schema = tmp_path / "run.mscan", make_schema((200,))
    with Writer(path, schema) as writer:
        write_rows(writer, schema, range(130))
    whole = path.read_bytes()
    frames = dec.decode(path).frames
    rng = np.random.default_rng(0)
    cuts = {f.offset + delta for f in frames for delta in (0, 1, 64, 65, 128, f.size - 1)} | set(
        rng.integers(64, len(whole), 20)
    )
    for cut in sorted(cuts):
        path.write_bytes(whole[:cut])
        with Writer(path, schema, resume=True, fsync="never") as writer:
            for step in range(1000, 1300):
                writer.write(step, row_of(step, schema))
        survivors = sum(f.rows for f in frames if f.kind == dec.STEPS and f.offset + f.size <= cut)
        decoded = dec.decode(path, strict=False)
        assert decoded.steps == [*range(survivors), *range(1000, 1300)], cut
        check_cells(decoded, schema)
        assert sorted(decoded.rows) == list(range(survivors + 300))


def test_events_between_a_resume_and_its_first_row_are_not_written_before_it(tmp_path: Path) -> None:
    """They belong to the new timeline: a frame of theirs must say that the resumed row has come."""
    path, schema = tmp_path / "run.mscan", make_schema()
    with Writer(path, schema) as writer:
        write_rows(writer, schema, range(10))
    with Writer(path, schema, resume=True) as writer:
        writer.event("resume", 5)
        writer.flush()
        assert dec.decode(path).events == []
        writer.write(5, row_of(5, schema))
        writer.flush()
        (frame,) = (f for f in dec.decode(path).frames if f.kind == dec.EVENTS)
        assert (frame.first_row, frame.first_step) == (11, 5)


@pytest.mark.parametrize("content", [b"hello", b"x" * 100, b"MSCAN\x01\0" + bytes(100), b"MSCAN\x02\0" + bytes(100)])
def test_resume_leaves_files_of_others_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.mscan"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="choose another path"):
        Writer(path, make_schema(), resume=True)
    assert path.read_bytes() == content


# Errors of the disk ---------------------------------------------------------------------------------------------------


def test_paths_that_cannot_be_written_are_refused_early(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Writer(tmp_path / "missing" / "run.mscan", make_schema())
    with pytest.raises(OSError, match="must be a regular file"):
        Writer(tmp_path, make_schema(), resume=True)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="must be a regular file"):
        Writer(tmp_path / "pipe", make_schema(), resume=True)


def test_a_read_only_directory_is_refused_early() -> None:
    code = """if True:
        import os, sys
        from pyscan.writer import Writer
        if os.getuid() == 0:
            os.setuid(65534)
        try:
            Writer(sys.argv[1], {"model": "m", "channels": [], "sites": []})
        except PermissionError as error:
            print("refused", error.filename)
    """
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        result = run_python(code, f"{folder}/run.mscan")
    assert result.stdout.strip() == f"refused {folder}/run.mscan", result.stderr


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


def test_a_removed_directory_turns_the_writer_off_with_one_warning(tmp_path: Path) -> None:
    folder, schema = tmp_path / "gone", make_schema()
    folder.mkdir()
    writer = Writer(folder / "run.mscan", schema)
    writer.write(1, row_of(1, schema))
    shutil.rmtree(folder)
    with pytest.warns(RuntimeWarning, match="pyscan stopped recording: .*deleted while it was being written"):
        writer.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not writer.write(2, row_of(2, schema))
        writer.close()
    assert "deleted" in str(writer.error)


LIMITED = """if True:
    import json, os, resource, signal, sys, warnings
    sys.path.insert(0, sys.argv[3])
    from tests.test_writer import Writer, row_of, fill_until_error
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]), resource.RLIM_INFINITY))
    schema = json.loads(sys.argv[2])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            writer = Writer(sys.argv[1], schema)
        except OSError as error:
            print(json.dumps({"errno": error.errno, "exists": os.path.exists(sys.argv[1])}))
            sys.exit()
        flushed = fill_until_error(writer, schema)
        late = writer.write(1, row_of(1, schema))
        writer.close()
    print(json.dumps({"flushed": flushed, "error": writer.error, "late": late, "warnings": len(caught)}))
"""


@pytest.mark.parametrize("limit", [30_000, 100_000, 150_000, 200_003])
def test_a_file_size_limit_kills_nobody_and_loses_no_flushed_row(tmp_path: Path, limit: int) -> None:
    """With the default action of SIGXFSZ, which ends a process: the signal must never be delivered."""
    path, schema = tmp_path / "run.mscan", make_schema((100,))
    result = run_python(LIMITED, str(path), json.dumps(schema), str(ROOT), str(limit))
    assert result.returncode == 0, (result.returncode, result.stderr)
    report = json.loads(result.stdout)
    assert "File too large" in report["error"]
    assert (report["late"], report["warnings"]) == (False, 1)
    assert report["flushed"] > 0
    check_survivors(path, schema, report["flushed"])
    with Writer(path, schema, resume=True) as writer:
        writer.write(10_000, row_of(10_000, schema))
    decoded = dec.decode(path, strict=False)
    assert decoded.steps[: report["flushed"]] == list(range(report["flushed"]))
    assert decoded.steps[-1] == 10_000
    check_cells(decoded, schema)


@pytest.mark.parametrize("limit", [0, 10, 64, 200])
def test_a_file_that_cannot_even_begin_is_not_left_behind(tmp_path: Path, limit: int) -> None:
    path = tmp_path / "run.mscan"
    result = run_python(LIMITED, str(path), json.dumps(make_schema()), str(ROOT), str(limit))
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {"errno": errno.EFBIG, "exists": False}


@pytest.mark.parametrize("kilobytes", [256, 512])
def test_a_full_disk_loses_no_flushed_row(tmp_path: Path, kilobytes: int) -> None:
    disk, schema = tmp_path / "disk", make_schema((100,))
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        path = disk / "run.mscan"
        writer = Writer(path, schema)
        with pytest.warns(RuntimeWarning, match="No space left on device"):
            flushed = fill_until_error(writer, schema)
        assert flushed > 64
        writer.close()
        check_survivors(path, schema, flushed)
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        Writer(path, schema, resume=True).close()
        check_survivors(path, schema, flushed)
        assert not path.with_name("run.mscan.tail").exists()
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# The queue ------------------------------------------------------------------------------------------------------------


def occupy(writer: Writer) -> None:
    """Give the writer thread so much to write that it takes no row from the queue for well over 20 ms."""
    assert writer.tokens(0, bytes(60_000_000))
    writer.flush(wait=False)
    time.sleep(0.005)


def test_rows_that_the_disk_cannot_take_are_dropped_counted_and_named(tmp_path: Path) -> None:
    path, schema = tmp_path / "run.mscan", make_schema()
    writer = Writer(path, schema, queue_rows=2, fsync="never")
    accepted, seconds = [], []
    occupy(writer)
    for step in range(12):
        start = time.monotonic()
        if writer.write(step, row_of(step, schema)):
            accepted.append(step)
        seconds.append(time.monotonic() - start)
    dropped = sorted(set(range(12)) - set(accepted))
    assert (writer.rows_accepted, writer.rows_dropped) == (len(accepted), len(dropped))
    assert accepted[:2] == [0, 1]
    assert dropped[0] == 2
    assert seconds[2] >= 0.02  # the first row without a slot waits; the others find that nothing has moved
    assert sum(seconds[step] > 0.015 for step in dropped) == 1
    writer.flush()
    assert writer.write(100, row_of(100, schema))
    writer.close()
    decoded = dec.decode(path)
    assert decoded.steps == [*accepted, 100]
    assert decoded.events == [
        {"kind": "dropped_rows", "step": 2, "site": None, "count": len(dropped), "steps": dropped},
    ]
    assert writer.error is None


def test_a_row_that_finds_a_slot_within_20_ms_is_not_dropped(tmp_path: Path) -> None:
    path, schema = tmp_path / "run.mscan", make_schema((1000,))
    with Writer(path, schema, queue_rows=2, fsync="never") as writer:
        for step in range(1000):
            assert writer.write(step, row_of(step, schema))
    assert len(dec.decode(path).rows) == 1000


def test_waiting_messages_take_bounded_memory(tmp_path: Path) -> None:
    with Writer(tmp_path / "run.mscan", make_schema(), flush_seconds=1000, fsync="never") as writer:
        assert writer.tokens(1, bytes(40_000_000))
        assert not writer.tokens(2, bytes(40_000_000))
        writer.flush()
        assert writer.tokens(3, bytes(40_000_000))
        assert writer.error is None


def test_many_threads_may_write_and_every_accepted_row_is_there(tmp_path: Path) -> None:
    path, schema = tmp_path / "run.mscan", make_schema()
    accepted: list[list[int]] = [[] for _ in range(4)]
    with Writer(path, schema, flush_seconds=0.01) as writer:

        def work(thread: int) -> None:
            for step in range(thread * 1000, thread * 1000 + 300):
                if writer.write(step, row_of(step, schema)):
                    accepted[thread].append(step)
                if step % 50 == 0:
                    writer.event("note", step)
                    writer.flush(wait=step % 100 == 0)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert writer.rows_accepted + writer.rows_dropped == 1200
    decoded = dec.decode(path)
    assert sorted(decoded.steps) == sorted(step for steps in accepted for step in steps)
    assert sum(event["kind"] == "note" for event in decoded.events) == 24
    check_cells(decoded, schema)


# Fork and exit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ending", ["os._exit(0)", "writer.close(); os._exit(0)", "del writer; os._exit(0)", "sys.exit(0)"]
)
def test_a_forked_child_changes_nothing_and_ends(tmp_path: Path, ending: str) -> None:
    """Like a DataLoader worker: whatever the child does with its copy, the parent's file is as without it."""
    code = f"""if True:
        import json, os, sys
        sys.path.insert(0, sys.argv[3])
        from tests.test_writer import Writer, row_of
        schema = json.loads(sys.argv[2])
        writer = Writer(sys.argv[1], schema, flush_seconds=1000)
        for step in range(40):
            writer.write(step, row_of(step, schema))
            if step == 7:
                writer.flush()
            if step % 10 == 9:
                child = os.fork()
                if child == 0:
                    accepted = [writer.write(1000, row_of(0, schema)), writer.event("child", 0), writer.flush(),
                                writer.tokens(0, b"x"), writer.change_schema(schema)]
                    if any(accepted) or writer.error is not None:
                        os._exit(3)
                    {ending}
                assert os.waitpid(child, 0)[1] == 0
        writer.close()
        assert writer.error is None
    """
    path, schema = tmp_path / "run.mscan", make_schema()
    result = run_python(code, str(path), json.dumps(schema), str(ROOT))
    assert result.returncode == 0, result.stderr
    decoded = dec.decode(path)
    assert decoded.steps == list(range(40))
    assert decoded.events == []
    check_cells(decoded, schema)


def test_a_child_neither_releases_the_lock_nor_keeps_it(tmp_path: Path) -> None:
    code = """if True:
        import json, os, signal, sys, time
        sys.path.insert(0, sys.argv[3])
        from tests.test_writer import Writer
        writer = Writer(sys.argv[1], json.loads(sys.argv[2]))
        if os.fork() == 0:
            writer.close()
            del writer
            print("child", os.getpid(), flush=True)
            os.close(1)
            time.sleep(60)
            os._exit(0)
        sys.stdin.read()
        os._exit(0)
    """
    path, schema = tmp_path / "run.mscan", make_schema()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(path), json.dumps(schema), str(ROOT)]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = int(parent.stdout.readline().split()[1])
        try:
            with pytest.raises(BlockingIOError):
                Writer(path, schema, resume=True)
            parent.stdin.close()
            parent.wait(30)
            Writer(path, schema, resume=True).close()  # the parent is gone, its child lives on
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize(
    "ending",
    ["pass", "keep = [writer]; writer = None", "sys.exit(1)", "raise RuntimeError('training failed')", "del writer"],
)
def test_a_process_that_ends_without_close_leaves_a_closed_file(tmp_path: Path, ending: str) -> None:
    code = f"""if True:
        import json, sys
        sys.path.insert(0, sys.argv[3])
        from tests.test_writer import Writer, row_of
        schema = json.loads(sys.argv[2])
        writer = Writer(sys.argv[1], schema, flush_seconds=1000)
        for step in range(10):
            writer.write(step, row_of(step, schema))
        {ending}
    """
    path, schema = tmp_path / "run.mscan", make_schema()
    run_python(code, str(path), json.dumps(schema), str(ROOT))
    decoded = dec.decode(path)
    assert decoded.steps == list(range(10))
    assert decoded.frames[-1].kind == dec.INDEX
    assert not path.with_name("run.mscan.tail").exists()


def test_close_does_not_wait_for_a_thread_that_holds_the_interpreter(tmp_path: Path) -> None:
    """Other Python threads run while one waits for a flush: the interpreter lock is given up around waits."""
    path, schema = tmp_path / "run.mscan", make_schema((50_000,))
    ticks = 0
    stop = threading.Event()

    def count() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0)

    thread = threading.Thread(target=count)
    with Writer(path, schema, fsync="flush") as writer:
        thread.start()
        for step in range(70):
            writer.write(step, row_of(step, schema))
            writer.flush()
        before = ticks
        writer.flush()
        stop.set()
        thread.join()
    assert before > 70


@pytest.mark.parametrize("fsync", ["never", "close", "flush"])
def test_every_fsync_mode_writes_the_same_file(tmp_path: Path, fsync: str) -> None:
    path, schema = tmp_path / "run.mscan", make_schema()
    with Writer(path, schema, run_id=RUN_ID, fsync=fsync) as writer:
        write_rows(writer, schema, range(70))
    decoded = dec.decode(path)
    assert decoded.run_id == writer.run_id == RUN_ID
    assert decoded.steps == list(range(70))


def test_the_schema_is_one_line_of_plain_json() -> None:
    assert encode_json({"a": [1, 2.5], "é": None}) == '{"a":[1,2.5],"é":null}'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_json({"a": math.nan})
    with pytest.raises(ValueError, match="per must be block, row_block or site, got 'head' in channel 'x'"):
        layout_of({"channels": [channel("x", "head")], "sites": []})


def test_the_writer_needs_no_tensor_library() -> None:
    result = run_python("import sys, pyscan.writer; print('torch' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr


def test_limits_of_the_host_are_untouched(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGXFSZ), resource.getrlimit(resource.RLIMIT_FSIZE), signal.pthread_sigmask(0, [])
    Writer(tmp_path / "run.mscan", make_schema()).close()
    assert before == (
        signal.getsignal(signal.SIGXFSZ),
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.pthread_sigmask(0, []),
    )
