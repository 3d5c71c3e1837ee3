"""Reading version 2 files: values, rows, events and tokens are what was written, in every state a file can be in."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import pyscan
from pyscan import codecs
from pyscan import format as fmt
from pyscan.frames import ScanFile
from pyscan.reader import open_buffer
from pyscan.schema import Channel, Schema
from pyscan.source import PathSource
from tests.make_scan import Builder, expected, make_cells, make_rows, make_schema, site

FIRST, SECOND = "model.layers.0.proj.weight", "model.layers.1.proj.weight"


def opened(builder: Builder) -> pyscan.Run:
    return open_buffer(bytes(builder.main), bytes(builder.tail))


def assert_holds(run: pyscan.Run, schema: Schema, steps: list[int]) -> None:
    """Every cell of every channel and site, against the definition."""
    assert run.steps["step"].tolist() == steps
    for channel in schema.channels:
        for info in schema.sites:
            got = run.get(channel.name, info.name, blocks=True)
            want = expected(schema, channel.name, info.name, steps)
            assert got.dtype == np.float32
            assert np.array_equal(got, want), (channel.name, info.name)


@pytest.mark.parametrize("num_rows", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("with_index", [False, True])
def test_every_cell_is_read_as_it_was_written(num_rows: int, with_index: bool) -> None:
    builder = Builder().steps(range(1, num_rows + 1))
    if with_index:
        builder.index()
    run = opened(builder)
    assert run.file.has_index == with_index
    assert_holds(run, builder.schema, list(range(1, num_rows + 1)))
    assert run.damage == []


def test_what_a_run_says_of_itself(tmp_path: Path) -> None:
    builder = Builder().steps(range(1, 10))
    with pyscan.open(builder.save(tmp_path / "run.mscan")) as run:
        assert (run.version, run.model, run.block, run.every, run.world) == (2, "tiny", 64, 1, 1)
        assert [s.name for s in run.sites] == [FIRST, SECOND]
        assert [(s.num_blocks, s.shape, s.dtype, s.tied_to) for s in run.sites] == [
            (3, (8, 192), "float32", None),
            (1, (8, 64), "float32", None),
        ]
        assert [c.name for c in run.channels] == ["act", "grad", "act_max", "grad_bad"]
        assert run.metadata == {"note": "synthetic"}
        assert len(run) == 9


def test_what_is_not_known_of_a_step_is_nan_or_zero() -> None:
    steps = opened(Builder().steps(range(1, 4))).steps
    assert steps["loss"].tolist() == pytest.approx([0.5, 1 / 3, 0.25])
    assert steps["tokens"].tolist() == [340] * 3
    assert all(np.isnan(steps[name]).all() for name in ("lr", "grad_scale", "total_norm"))


def test_without_blocks_norms_maxima_and_counts_are_combined() -> None:
    channels = (Channel("act"), Channel("top", transform="plain", op="max"), Channel("bad", codec="f32", op="add"))
    builder = Builder(make_schema((3,), channels)).steps(range(1, 100))
    run = opened(builder)
    cells = {c.name: expected(builder.schema, c.name, FIRST, range(1, 100)).astype(np.float64) for c in channels}
    assert np.allclose(run.act(FIRST), np.sqrt((cells["act"] ** 2).sum(axis=1)), rtol=1e-6)
    assert np.array_equal(run.get("top", FIRST), cells["top"].max(axis=1).astype(np.float32))
    assert np.allclose(run.get("bad", FIRST), cells["bad"].sum(axis=1), rtol=1e-6)


def test_a_slice_of_steps_reads_those_rows() -> None:
    builder = Builder().steps(range(1, 201)).tail_rows(range(201, 211))
    run = opened(builder)
    whole = run.act(FIRST, blocks=True)
    for rows in (
        slice(0, 0),
        slice(5, 6),
        slice(60, 70),
        slice(-12, None),
        slice(10, 190, 7),
        slice(199, 205),
        slice(300, 400),
    ):
        assert np.array_equal(run.act(FIRST, blocks=True, steps=rows), whole[rows])
        assert np.array_equal(run.act(FIRST, steps=rows), run.act(FIRST)[rows])
        assert np.array_equal(run.codes("act", FIRST, steps=rows), run.codes("act", FIRST)[rows])
    with pytest.raises(pyscan.ScanError, match="stride"):
        run.act(FIRST, steps=slice(None, None, -1))


def test_codes_are_the_stored_ones() -> None:
    builder = Builder().steps(range(1, 71))
    codes = opened(builder).codes("grad", FIRST)
    assert codes.dtype == np.int16
    assert np.array_equal(codes, make_cells(builder.schema, range(1, 71))[1][:3].T)


def test_names_with_or_without_weight_and_close_matches() -> None:
    run = opened(Builder().steps(range(1, 3)))
    assert np.array_equal(run.act(FIRST), run.act(FIRST.removesuffix(".weight")))
    with pytest.raises(pyscan.ScanError, match=r"did you mean .*model\.layers\.0\.proj\.weight"):
        run.act("model.layers.0.prj")
    with pytest.raises(KeyError, match="did you mean 'grad'"):
        run.get("gard", FIRST)


def test_special_codes_are_read_as_zero_infinity_nan_and_absent() -> None:
    schema = make_schema((4,), (Channel("act"),))
    builder = Builder(schema)
    codes = np.array([[-32768], [32767], [32766], [-32767]], "<i2")
    builder.writer.steps(make_rows([1]), [codes])
    row = opened(builder).act(FIRST, blocks=True)[0]
    assert row[0] == 0
    assert np.isposinf(row[1])
    assert np.isnan(row[2])
    assert pyscan.is_absent(row).tolist() == [False, False, False, True]


def test_the_tail_gives_the_rows_that_the_main_file_lacks() -> None:
    builder = Builder().steps(range(1, 65)).tail_rows(range(65, 67)).tail_rows([67])
    assert_holds(opened(builder), builder.schema, list(range(1, 68)))


def test_rows_in_both_files_are_read_once() -> None:
    builder = Builder().tail_rows(range(1, 60), first_row=0).tail_rows(range(60, 70))
    builder.steps(range(1, 65))
    assert_holds(opened(builder), builder.schema, list(range(1, 70)))


def test_a_tail_cut_anywhere_gives_its_whole_frames() -> None:
    builder = Builder(make_schema((2,))).steps(range(1, 3)).tail_rows([3]).tail_rows([4, 5])
    tail = bytes(builder.tail)
    first_end = ScanFile(tail).frames[0].end
    for size in range(len(tail) + 1):
        run = open_buffer(bytes(builder.main), tail[:size])
        want = [1, 2, 3, 4, 5] if size == len(tail) else [1, 2, 3] if size >= first_end else [1, 2]
        assert_holds(run, builder.schema, want)


def test_a_tail_of_another_run_is_left_alone() -> None:
    builder, other = Builder().steps([1]), Builder(run_id=bytes(16)).tail_rows([2], first_row=1)
    run = open_buffer(bytes(builder.main), bytes(other.tail))
    assert run.steps["step"].tolist() == [1]


def test_an_outdated_index_is_walked_past() -> None:
    builder = Builder().steps(range(1, 65)).index().steps(range(65, 70))
    run = opened(builder)
    assert not run.file.has_index
    assert_holds(run, builder.schema, list(range(1, 70)))


def test_an_index_that_lies_gives_no_wrong_value() -> None:
    builder = Builder().steps(range(1, 65)).steps(range(65, 129))
    builder.writer.frames[1] = builder.writer.frames[1]._replace(first_row=7)
    run = opened(builder.index())
    assert run.file.has_index
    assert run.steps["step"].tolist() == list(range(65, 129))
    assert "index" in run.damage[0][1]


def test_frames_of_unknown_kinds_are_skipped() -> None:
    builder = Builder().steps(range(1, 3))
    builder.writer.frame(77, b"from the future")
    builder.steps(range(3, 5))
    run = opened(builder)
    assert_holds(run, builder.schema, [1, 2, 3, 4])
    assert run.damage == []


def test_sites_are_absent_where_they_are_not_in_the_schema() -> None:
    first = make_schema((2,))
    second = make_schema(sites=(site("new.weight", 3), first.sites[0]))
    builder = Builder(first).steps(range(1, 4)).new_schema(second).steps(range(4, 70))
    run = opened(builder)
    assert [s.name for s in run.sites] == [FIRST, "new.weight"]
    new = run.act("new", blocks=True)
    assert pyscan.is_absent(new[:3]).all()
    assert np.array_equal(new[3:], expected(second, "act", "new.weight", range(4, 70)))
    old = run.act(FIRST, blocks=True)
    assert np.array_equal(old[:3], expected(first, "act", FIRST, range(1, 4)))
    assert np.array_equal(old[3:], expected(second, "act", FIRST, range(4, 70)))
    assert pyscan.is_absent(run.act("new")[:3]).all()
    assert (run.codes("act", "new")[:3] == codecs.CODE_ABSENT).all()


def test_a_resume_voids_rows_events_and_tokens_of_the_timeline_it_leaves() -> None:
    builder = Builder().steps(range(1, 101)).event("early", 10).tokens(50).event("late", 80).tokens(90)
    builder.steps(range(60, 62), resumed=True).event("again", 60).tokens(60).steps(range(62, 75))
    run = opened(builder)
    assert_holds(run, builder.schema, [*range(1, 60), *range(60, 75)])
    assert [event["kind"] for event in run.events] == ["early", "again"]
    assert run.token_steps() == [50, 60]
    with pytest.raises(pyscan.ScanError, match="step 90"):
        run.tokens(90)


def test_a_resumed_row_in_the_tail_voids_too_and_resumes_may_follow_each_other() -> None:
    builder = Builder().steps(range(1, 11)).event("gone", 8)
    builder.steps(range(6, 9), resumed=True).event("gone too", 7)
    builder.tail_rows([3, 4], resumed=True)
    run = opened(builder)
    assert_holds(run, builder.schema, [1, 2, 3, 4])
    assert run.events == []


def test_an_event_before_the_first_row_after_a_resume_is_of_the_old_timeline() -> None:
    builder = Builder().steps(range(1, 6)).event("crashed here", 6)
    builder.steps([6], resumed=True).event("went well", 6)
    assert [event["kind"] for event in opened(builder).events] == ["went well"]


def test_a_frame_torn_by_a_crash_is_stepped_over_wherever_it_was_cut() -> None:
    probe = Builder(make_schema((2,))).steps(range(1, 3)).steps(range(3, 67))
    size = len(probe.main) - probe.writer.frames[-1].offset
    for cut in range(1, size, 61):
        builder = Builder(make_schema((2,))).steps(range(1, 3)).steps(range(3, 67)).tear(cut)
        builder.steps([3, 4], resumed=True).event("on", 3).steps(range(5, 90)).index()
        run = opened(builder)
        assert_holds(run, builder.schema, list(range(1, 90)))
        builder.event("later", 89)  # no index at the end any more: the headers are walked
        walked = opened(builder)
        assert_holds(walked, builder.schema, list(range(1, 90)))
        assert [event["kind"] for event in walked.events] == ["on", "later"]
        assert probe.writer.frames[-1].offset <= walked.damage[0][0] < probe.writer.frames[-1].end


def test_tokens_come_back_under_the_names_of_their_sites() -> None:
    run = opened(Builder().steps(range(1, 3)).tokens(1).tokens(2, num_tokens=7))
    tokens = run.tokens(2)
    assert tokens["ids"].tolist() == [list(range(7))]
    norms = np.linspace(1, 2, 7) * 3
    assert np.allclose(tokens[FIRST]["act"], norms, rtol=0.00136)
    assert np.allclose(tokens[FIRST]["contribution"], norms**2, rtol=0.003)
    assert set(tokens) == {"ids", "mask", "sequences", FIRST}


class Appender:
    """Writes a Builder's bytes as the writer does: rows to the tail, full frames to the file, then empties the tail."""

    def __init__(self, path: Path, builder: Builder) -> None:
        self.path, self.builder, self.saved = path, builder, 0
        self.tail = path.with_name(path.name + ".tail")
        self.append()

    def append(self, *, piece: int = 1 << 30) -> None:
        with self.path.open("ab") as file:
            while self.saved < len(self.builder.main):
                data = self.builder.main[self.saved : self.saved + piece]
                file.write(data)
                file.flush()
                self.saved += len(data)

    def save_tail(self) -> None:
        with self.tail.open("ab") as file:
            file.write(bytes(self.builder.tail)[self.tail.stat().st_size if self.tail.exists() else 0 :])

    def clear_tail(self) -> None:
        with self.tail.open("r+b") as file:
            file.truncate(64)
        del self.builder.tail[64:]

    def rows(self, steps: range) -> None:
        """64 rows: a few at a time to the tail, then as a full frame."""
        for at in range(0, len(steps), 7):
            self.builder.tail_rows(steps[at : at + 7])
            self.save_tail()
        self.builder.steps(steps)
        self.append(piece=700)
        self.clear_tail()


def test_a_run_that_is_still_written_is_followed_without_missing_or_doubling_a_row(tmp_path: Path) -> None:
    writer = Appender(tmp_path / "run.mscan", Builder(make_schema((2,))))
    run = pyscan.open(writer.path)
    done = threading.Event()

    def write() -> None:
        for first in range(1, 64 * 30, 64):
            writer.rows(range(first, first + 64))
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    looks = 0
    while not done.is_set() or looks < 3:
        run.refresh()
        steps = run.steps["step"].tolist()
        assert steps == list(range(1, len(steps) + 1))
        assert_holds(run, writer.builder.schema, steps) if looks % 16 == 0 else run.act(FIRST)
        looks += 1
    thread.join()
    run.refresh()
    assert_holds(run, writer.builder.schema, list(range(1, 64 * 30 + 1)))
    assert run.damage == []


def test_a_tail_that_was_emptied_while_it_was_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Builder(make_schema((2,))).steps([1, 2]).save(tmp_path / "run.mscan")
    source = PathSource(str(path))
    reads = iter([b"old|new2|new3", b"new1|new2|new3", b"new1|new2|new3|new4"])
    monkeypatch.setattr(source, "_read_tail", lambda: next(reads))
    assert source.load()[0] == b"new1|new2|new3"


@pytest.mark.parametrize("pers", [("block", "site"), ("site", "block")])
def test_cells_of_a_schema_that_groups_a_channel_otherwise_are_absent(tmp_path: Path, pers: tuple[str, str]) -> None:
    first, second = (make_schema((3, 1), (Channel("act", per=per), Channel("grad"))) for per in pers)
    path = Builder(first).steps([1, 2]).new_schema(second).steps([3, 4]).save(tmp_path / "run.mscan")
    with pyscan.open(path) as run:
        values = run.act(FIRST, blocks=True)
        assert np.array_equal(values[2:], expected(second, "act", FIRST, [3, 4]))
        assert pyscan.is_absent(values[:2]).all()
        assert np.array_equal(run.grad(FIRST, blocks=True), expected(first, "grad", FIRST, [1, 2, 3, 4]))
        assert (run.codes("act", FIRST)[:2] == -32767).all()
        assert pyscan.is_absent(run.act(FIRST)).tolist() == [True, True, False, False]


def test_refresh_sees_resume_new_schema_and_close(tmp_path: Path) -> None:
    builder = Builder(make_schema((2,)))
    writer = Appender(tmp_path / "run.mscan", builder)
    run = pyscan.open(writer.path)
    builder.steps(range(1, 101))
    writer.append()
    assert run.refresh() == 100
    assert run.refresh() == 0
    builder.steps(range(51, 71), resumed=True).event("resume", 51)
    writer.append()
    assert run.refresh() == 20
    assert_holds(run, builder.schema, list(range(1, 71)))
    second = make_schema((2, 5))
    builder.new_schema(second).steps(range(71, 75)).index()
    writer.append()
    assert run.refresh() == 4
    assert [event["kind"] for event in run.events] == ["resume"]
    assert np.array_equal(run.act(SECOND, blocks=True)[70:], expected(second, "act", SECOND, range(71, 75)))


def test_refresh_over_a_torn_frame_that_is_continued(tmp_path: Path) -> None:
    builder = Builder(make_schema((2,))).steps(range(1, 65)).steps(range(65, 129))
    path = tmp_path / "run.mscan"
    last = builder.writer.frames[-1]
    path.write_bytes(builder.main[: last.offset + 700])
    run = pyscan.open(path)
    assert_holds(run, builder.schema, list(range(1, 65)))
    assert "torn" in run.damage[0][1]
    builder.tear(700).steps(range(65, 200), resumed=True)
    path.write_bytes(builder.main)  # the same bytes up to the cut, then more
    assert run.refresh() == 135
    assert_holds(run, builder.schema, list(range(1, 200)))


def test_damage_is_still_known_after_a_refresh(tmp_path: Path) -> None:
    builder = Builder(make_schema((2,))).steps(range(1, 65)).event("x", 3)
    builder.writer.frame(1, b"{}")
    builder.steps(range(65, 70)).new_schema(make_schema((2,))).steps(range(70, 80))
    frames = builder.writer.frames
    builder.main[frames[1].payload_offset] ^= 1
    builder.main[frames[2].payload_offset] ^= 1
    builder.main.extend(bytes(64))
    builder.writer.offset += 64
    writer = Appender(tmp_path / "run.mscan", builder)
    run = pyscan.open(writer.path)
    assert (len(run.steps), len(run.events)) == (10, 0)
    before = run.damage
    assert [offset for offset, _ in before[:4]] == [
        frames[1].payload_offset,
        frames[2].payload_offset,
        frames[3].offset,
        frames[4].offset,
    ]
    builder.tail_rows([80])
    writer.save_tail()
    assert run.refresh() == 1
    assert run.damage == before
    builder.steps([80, 81])
    writer.append()
    assert run.refresh() == 1
    assert len(run.events) == 0
    assert run.damage[:4] == before[:4]


def test_follow_yields_new_rows(tmp_path: Path) -> None:
    builder = Builder(make_schema((2,))).steps(range(1, 4))
    writer = Appender(tmp_path / "run.mscan", builder)
    run = pyscan.open(writer.path)
    follow = run.follow(poll_seconds=0.01)
    assert next(follow) == slice(0, 3)
    builder.steps(range(4, 9))
    threading.Timer(0.05, writer.append).start()
    started = time.monotonic()
    assert next(follow) == slice(3, 8)
    assert time.monotonic() - started < 10


def test_reading_one_site_touches_only_its_chunks() -> None:
    builder = Builder(make_schema((40,) * 20, (Channel("act"), Channel("grad")))).steps(range(1, 129))
    run = opened(builder)
    assert len(run.steps) == 128
    tested: list[int] = []
    test = run.file._test
    run.file._test = lambda frame, chunk: tested.append(chunk) or test(frame, chunk)
    run.act("model.layers.7.proj", blocks=True)
    assert tested == [9, 10] * 2  # 5 KiB in each of two frames
    run.act("model.layers.7.proj", blocks=True)
    assert tested == [9, 10] * 2


def test_a_site_that_claims_more_cells_than_the_file_could_hold_is_refused() -> None:
    huge = make_schema(sites=(site("huge.weight", 2**40),), channels=(Channel("act"),))
    builder = Builder(make_schema((2,))).steps(range(1, 300)).new_schema(huge)
    run = opened(builder)
    for blocks in (False, True):
        with pytest.raises(pyscan.ScanFormatError, match="cannot come from a file"):
            run.act("huge", blocks=blocks)
    assert len(run.act(FIRST)) == 299


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"run\.mscan.*rank00000"):
        pyscan.open(tmp_path / "run.mscan")


@pytest.mark.parametrize(
    "data", [b"", b"MSCA", b"PK\x03\x04" + bytes(100), b"MSCAN\x03\x00" + bytes(100), b"MSCAN\x02\x00"]
)
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "run.mscan"
    path.write_bytes(data)
    with pytest.raises(pyscan.ScanFormatError):
        pyscan.open(path)


def test_opening_imports_no_torch(tmp_path: Path) -> None:
    path = Builder().steps(range(1, 3)).save(tmp_path / "run.mscan")
    code = f"import sys, pyscan; pyscan.open({str(path)!r}).act({FIRST!r}); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_row_flags_reach_the_reader() -> None:
    builder = Builder(make_schema((2,)))
    rows = make_rows([1, 2])
    rows["flags"][1] |= fmt.ROW_SKIPPED | fmt.ROW_HAS_LR
    rows["lr"][1] = 0.5
    builder.writer.steps(rows, make_cells(builder.schema, [1, 2]))
    steps = opened(builder).steps
    assert steps["flags"][1] & fmt.ROW_SKIPPED
    assert np.isnan(steps["lr"][0])
    assert steps["lr"][1] == 0.5


def test_the_golden_file_is_read_as_ever() -> None:
    path = Path(__file__).parent / "data" / "golden_v2.mscan"
    run = pyscan.open(path)
    assert_holds(run, make_schema((2, 1)), list(range(1, 12)))
    assert [(event["kind"], event["step"]) for event in run.events] == [("first_nonfinite", 4), ("resume", 8)]
    assert run.token_steps() == [3]
    assert run.damage == []


def test_the_golden_file_is_written_as_ever() -> None:
    builder = Builder(make_schema((2, 1))).steps(range(1, 11)).event("first_nonfinite", 4).tokens(3).event("gone", 9)
    builder.steps(range(8, 12), resumed=True).event("resume", 8).index()
    assert bytes(builder.main) == (Path(__file__).parent / "data" / "golden_v2.mscan").read_bytes()
