"""Repair, compact and merge: the new file is whole, holds what it should, and appears only when it is finished."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import pyscan
from pyscan.check import check
from pyscan.convert import export_version1, import_version1
from pyscan.rewrite import compact, merge, repair
from pyscan.schema import Channel
from tests.make_scan import Builder, expected, make_schema
from tests.test_ranks import write_ddp, write_hybrid
from tests.test_reader import FIRST, assert_holds


def test_repair_keeps_all_that_is_whole_and_the_rows_of_the_tail(tmp_path: Path) -> None:
    builder = Builder(make_schema((50,), (Channel("act"),))).steps(range(1, 129)).event("x", 3).tokens(5)
    builder.steps(range(129, 193)).tail_rows(range(193, 200)).tail_rows([200])
    frames = builder.writer.frames
    builder.main[frames[1].payload_offset + 4096 + 5] ^= 1  # cells of the first 64 rows
    builder.main[frames[2].offset + 3] ^= 1  # the header of the next 64
    builder.main.extend(b"FRAM torn")
    source = builder.save(tmp_path / "run.mscan")
    before = source.read_bytes()
    calls: list[tuple[int, int]] = []
    repair(source, tmp_path / "fixed.mscan", progress=lambda done, total: calls.append((done, total)))
    assert source.read_bytes() == before
    assert check(tmp_path / "fixed.mscan") == []
    damaged, run = pyscan.open(source), pyscan.open(tmp_path / "fixed.mscan")
    assert run.file.has_index
    assert run.steps["step"].tolist() == [*range(1, 65), *range(129, 201)]
    assert run.steps.tobytes() == damaged.steps.tobytes()
    one, other = damaged.act(FIRST, blocks=True), run.act(FIRST, blocks=True)
    assert np.array_equal(one.copy().view(np.uint32), other.copy().view(np.uint32))
    assert pyscan.is_absent(other[:64, 8:40]).all()
    assert np.array_equal(other[64:], expected(builder.schema, "act", FIRST, [*range(129, 201)]))
    assert [event["kind"] for event in run.events] == ["x"]
    assert run.tokens(5)["ids"].tolist() == [[0, 1, 2, 3, 4]]
    assert calls[-1][0] <= calls[-1][1]


def test_repair_keeps_resumes_and_schemas(tmp_path: Path) -> None:
    second = make_schema((2, 4))
    builder = Builder(make_schema((2,))).steps(range(1, 50)).event("gone", 45)
    builder.new_schema(second).steps(range(40, 60), resumed=True).tail_rows(range(55, 58), resumed=True)
    source = builder.save(tmp_path / "run.mscan")
    repair(source, tmp_path / "fixed.mscan")
    one, other = pyscan.open(source), pyscan.open(tmp_path / "fixed.mscan")
    assert other.steps["step"].tolist() == list(range(1, 58))
    assert one.steps.tobytes() == other.steps.tobytes()
    assert one.events == other.events == []
    assert np.array_equal(one.act(FIRST), other.act(FIRST))


@pytest.mark.parametrize("cut", range(0, 9000, 937))
def test_a_file_cut_anywhere_repairs_to_its_whole_frames(tmp_path: Path, cut: int) -> None:
    builder = Builder(make_schema((2,))).steps(range(1, 65)).event("x", 3).steps(range(65, 100))
    path = tmp_path / "run.mscan"
    path.write_bytes(builder.main[: max(len(builder.main) - cut, 1100)])
    repair(path, tmp_path / "fixed.mscan")
    assert check(tmp_path / "fixed.mscan") == []
    steps = pyscan.open(path).steps["step"].tolist()
    assert_holds(pyscan.open(tmp_path / "fixed.mscan"), builder.schema, steps)


def test_a_file_flipped_anywhere_repairs_to_a_whole_file_with_what_could_be_read(tmp_path: Path) -> None:
    builder = Builder(make_schema((2, 1))).steps(range(1, 20)).event("x", 3).tokens(4).steps(range(20, 84))
    path, fixed = tmp_path / "run.mscan", tmp_path / "fixed.mscan"
    for place in range(64, len(builder.main), 41):
        data = bytearray(builder.main)
        data[place] ^= 0x55
        path.write_bytes(data)
        try:
            run = pyscan.open(path)
        except pyscan.ScanFormatError:
            continue
        repair(path, fixed)
        assert check(fixed) == []
        again = pyscan.open(fixed)
        assert run.steps.tobytes() == again.steps.tobytes()
        assert run.events == again.events
        pair = [r.act(FIRST, blocks=True).copy().view(np.uint32) for r in (run, again)]
        assert np.array_equal(*pair)
        fixed.unlink()


def test_compact_drops_what_is_voided_and_fills_the_frames(tmp_path: Path) -> None:
    second = make_schema((2, 4))
    builder = (
        Builder(make_schema((2,))).steps(range(1, 101), num_rows=10).event("kept", 20).tokens(30).event("gone", 95)
    )
    builder.tokens(97).steps(range(90, 130), resumed=True, num_rows=7).event("kept too", 110)
    builder.new_schema(second).steps(range(130, 140)).tokens(135).tail_rows(range(140, 143))
    source = builder.save(tmp_path / "run.mscan")
    compact(source, tmp_path / "small.mscan")
    assert check(tmp_path / "small.mscan") == []
    one, other = pyscan.open(source), pyscan.open(tmp_path / "small.mscan")
    assert other.steps["step"].tolist() == list(range(1, 143))
    assert one.steps.tobytes() == other.steps.tobytes()
    assert [frame.rows for frame in other.file.frames if frame.kind == 2] == [64, 64, 1, 13]
    assert [event["kind"] for event in other.events] == ["kept", "kept too"]
    # written before the rows of these numbers: 89 of the first 100 rows are left, 40 follow
    assert [frame.first_row for frame in other.file.frames if frame.kind == 3] == [89, 129]
    assert other.token_steps() == [30, 135]
    for name in ("act", "grad", "act_max", "grad_bad"):
        for info in one.sites:
            pair = [run.get(name, info.name, blocks=True).copy().view(np.uint32) for run in (one, other)]
            assert np.array_equal(*pair)
    assert (tmp_path / "small.mscan").stat().st_size < source.stat().st_size


def test_merge_writes_what_the_ranks_give_together(tmp_path: Path) -> None:
    write_ddp(tmp_path / "run.mscan")
    merge(tmp_path / "run.mscan", tmp_path / "one.mscan")
    assert check(tmp_path / "one.mscan") == []
    many, one = pyscan.open(tmp_path / "run.mscan"), pyscan.open(tmp_path / "one.mscan")
    assert (one.world, one.file.has_index) == (1, True)
    assert one.steps.tobytes() == many.steps.tobytes()
    assert one.events == many.events
    for channel in many.channels:
        for info in many.sites:
            assert np.array_equal(one.codes(channel.name, info.name), many.codes(channel.name, info.name))


def test_merge_tells_of_replicas_that_differ(tmp_path: Path) -> None:
    write_hybrid(tmp_path / "run.mscan", differ=2.0)
    merge(tmp_path / "run.mscan", tmp_path / "one.mscan")
    assert [e["step"] for e in pyscan.open(tmp_path / "one.mscan").events if e["kind"] == "replicas_differ"] == [67]


@pytest.mark.parametrize("rewrite", [repair, compact, merge, import_version1, export_version1])
def test_an_existing_file_is_never_overwritten(tmp_path: Path, rewrite) -> None:
    source = Builder().steps(range(1, 3)).save(tmp_path / "run.mscan")
    if rewrite is merge:
        write_ddp(tmp_path / "ranks.mscan")
        source = tmp_path / "ranks.mscan"
    if rewrite is import_version1:
        source = Path(__file__).parent / "data" / "every_value_v1.1.mscan"
    target = tmp_path / "there.mscan"
    target.write_bytes(b"precious")
    with pytest.raises(FileExistsError, match="choose another name"):
        rewrite(source, target)
    assert target.read_bytes() == b"precious"


def test_what_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    source = Builder().steps(range(1, 300)).save(tmp_path / "run.mscan")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compact(source, tmp_path / "small.mscan", progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["run.mscan"]


def test_each_verb_says_which_files_it_takes(tmp_path: Path) -> None:
    two = Builder().steps(range(1, 3)).save(tmp_path / "run.mscan")
    one = Path(__file__).parent / "data" / "every_value_v1.1.mscan"
    write_ddp(tmp_path / "ranks.mscan")
    target = tmp_path / "out.mscan"
    for rewrite, source, message in (
        (merge, two, "one file already"),
        (import_version1, two, "version 2 already"),
        (repair, one, "import it first"),
        (compact, tmp_path / "ranks.mscan", "merge them"),
    ):
        with pytest.raises(pyscan.ScanError, match=message):
            rewrite(source, target)
    assert not target.exists()


def test_a_run_without_rows_can_be_rewritten(tmp_path: Path) -> None:
    source = Builder().save(tmp_path / "run.mscan")
    for i, rewrite in enumerate((repair, compact, export_version1)):
        rewrite(source, tmp_path / f"{i}.mscan")
        assert len(pyscan.open(tmp_path / f"{i}.mscan").steps) == 0


def test_a_reader_that_holds_the_file_is_not_disturbed_by_a_repair_beside_it(tmp_path: Path) -> None:
    builder = Builder().steps(range(1, 100))
    source = builder.save(tmp_path / "run.mscan")
    run = pyscan.open(source)
    assert len(run.steps) == 99
    repair(source, tmp_path / "fixed.mscan")
    (tmp_path / "fixed.mscan").replace(source)
    assert_holds(run, builder.schema, list(range(1, 100)))
    run.refresh()
    assert_holds(run, builder.schema, list(range(1, 100)))
