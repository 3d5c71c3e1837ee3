"""Two writers of one file, and a file that is continued after a close, a crash or a cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pyscan
from pyscan.writer import Writer
from tests import decode as dec
from tests.writer_cases import (
    RUN_ID,
    as_json,
    check_cells,
    crash,
    make_schema,
    row_of,
    write_rows,
)


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


def test_resume_with_other_versions_metadata_and_every_goes_on_with_the_same_cells(tmp_path: Path) -> None:
    path, schema = tmp_path / "run.mscan", make_schema(versions={"torch": "2.6"})
    crash(path, schema, 20)
    later = make_schema(versions={"torch": "2.7"}, metadata={"host": "b"}, every=5)
    with Writer(path, later, resume=True) as writer:
        assert writer.last_step == 19
        write_rows(writer, later, range(20, 90))
    decoded = dec.decode(path)
    assert decoded.schemas == [as_json(schema), as_json(later)]
    check_cells(decoded, schema)
    with pyscan.open(path) as run:
        assert run.steps["step"].tolist() == list(range(90))
        assert (run.every, run.versions, run.metadata) == (5, {"torch": "2.7"}, {"host": "b"})
        assert not pyscan.is_absent(run.get("exact", "layer.0", blocks=True)).any()


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
    assert decoded.schemas == [as_json(schema), as_json(wider)]
    assert decoded.steps == list(range(8))


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
            write_rows(writer, schema, range(1000, 1150))
        survivors = sum(f.rows for f in frames if f.kind == dec.STEPS and f.offset + f.size <= cut)
        decoded = dec.decode(path, strict=False)
        assert decoded.steps == [*range(survivors), *range(1000, 1150)], cut
        check_cells(decoded, schema)
        assert sorted(decoded.rows) == list(range(survivors + 150))


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
