"""Damage: a file cut or flipped at any byte opens to what is whole or is refused, and `check` sees every flip."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

import pyscan
from pyscan.check import check, check_buffer
from pyscan.frames import ScanFile
from pyscan.reader import open_buffer
from pyscan.schema import Channel
from tests.make_scan import Builder, expected, make_schema

NAME = "model.layers.0.proj.weight"


def small(with_index: bool) -> Builder:
    """Every kind of frame, and more than one chunk in a steps frame."""
    schema = make_schema((2, 1), (Channel("act"), Channel("grad"), Channel("bad", "site", "f32", "plain", "add")))
    builder = Builder(schema).steps(range(1, 4)).event("first", 2).tokens(2).steps(range(4, 44)).event("second", 6)
    return builder.index() if with_index else builder


def assert_true_or_absent(run: pyscan.Run, builder: Builder) -> None:
    """Nothing that is read may be wrong: each row is one that was written, each cell its value or absent."""
    steps = run.steps["step"].tolist()
    assert set(steps) <= set(range(1, 44))
    assert steps == sorted(set(steps))
    for channel in ("act", "grad", "bad"):
        got = run.get(channel, NAME, blocks=True)
        want = expected(builder.schema, channel, NAME, steps)
        assert ((got == want) | pyscan.is_absent(got)).all()
    events = run.events
    assert [e["kind"] for e in events] in ([], ["first"], ["second"], ["first", "second"])


@pytest.mark.parametrize("with_index", [False, True])
def test_a_file_cut_at_any_byte_opens_to_its_whole_frames(with_index: bool) -> None:
    builder = small(with_index)
    data = bytes(builder.main)
    frames = ScanFile(data).frames
    for size in range(len(data)):
        if size < frames[0].end:
            with pytest.raises(pyscan.ScanFormatError):
                open_buffer(data[:size])
            continue
        run = open_buffer(data[:size])
        whole = [frame for frame in frames if frame.end <= size]
        assert run.file.frames == whole
        assert len(run.steps) == sum(frame.rows for frame in whole if frame.kind == 2)
        if size % 97 == 0:
            assert_true_or_absent(run, builder)
            assert not pyscan.is_absent(run.act(NAME, blocks=True)).any()
        if size not in [frame.end for frame in frames]:
            assert run.damage, size


@pytest.mark.parametrize("with_index", [False, True])
@pytest.mark.parametrize("mask", [0xFF, 0x10])
def test_every_flipped_byte_is_detected_and_gives_no_wrong_value(with_index: bool, mask: int) -> None:
    builder = small(with_index)
    data = bytearray(builder.main)
    for place in range(len(data)):
        data[place] ^= mask
        flipped = bytes(data)
        data[place] ^= mask
        assert check_buffer(flipped), f"flip at {place} not detected"
        try:
            run = open_buffer(flipped)
        except pyscan.ScanFormatError:
            continue
        assert_true_or_absent(run, builder)


def test_every_flipped_byte_of_the_tail_is_detected() -> None:
    builder = Builder(make_schema((2,))).steps(range(1, 3)).tail_rows([3, 4])
    assert check_buffer(bytes(builder.main), bytes(builder.tail)) == []
    for place in range(len(builder.tail)):
        tail = bytearray(builder.tail)
        tail[place] ^= 0xFF
        assert check_buffer(bytes(builder.main), bytes(tail)), f"flip at {place} not detected"
        assert open_buffer(bytes(builder.main), bytes(tail)).steps["step"].tolist() in ([1, 2], [1, 2, 3, 4])


def test_an_undamaged_file_has_nothing_to_report(tmp_path) -> None:
    path = small(with_index=True).save(tmp_path / "run.mscan")
    calls: list[tuple[int, int]] = []
    assert check(path, progress=lambda done, total: calls.append((done, total))) == []
    assert calls[-1] == (path.stat().st_size, path.stat().st_size)


def test_cells_of_a_bad_chunk_are_absent_and_all_others_are_right() -> None:
    builder = Builder(make_schema((50,), (Channel("act"),))).steps(range(1, 65)).steps(range(65, 129))
    frame = builder.writer.frames[1]
    builder.main[frame.payload_offset + 4096 + 5] ^= 1
    run = open_buffer(bytes(builder.main))
    got = run.act(NAME, blocks=True)
    want = expected(builder.schema, "act", NAME, range(1, 129))
    absent = pyscan.is_absent(got)
    # the second chunk begins 1024 bytes into the cells: 8 blocks of 64 rows, and holds 32 blocks
    lost = np.zeros((128, 50), bool)
    lost[:64, 8:40] = True
    assert np.array_equal(absent, lost)
    assert np.array_equal(got[~absent], want[~absent])
    assert run.damage == [(frame.payload_offset + 4096, "damaged chunk of frame 1")]
    assert np.isfinite(run.act(NAME)).all()


def test_a_frame_with_a_bad_row_table_gives_no_rows() -> None:
    builder = Builder().steps(range(1, 65)).steps(range(65, 129)).steps(range(129, 150))
    builder.main[builder.writer.frames[2].payload_offset] ^= 1
    run = open_buffer(bytes(builder.main))
    assert run.steps["step"].tolist() == [*range(1, 65), *range(129, 150)]
    assert len(run.damage) == 1


def test_a_steps_frame_that_does_not_fit_its_schema_is_named_and_skipped() -> None:
    builder = Builder().steps(range(1, 3))
    builder.writer.frame(2, bytes(704), first_step=3, rows=7)
    builder.writer.next_row += 7
    builder.steps(range(10, 12))
    run = open_buffer(bytes(builder.main))
    assert run.steps["step"].tolist() == [1, 2, 10, 11]
    assert "does not fit its schema" in run.damage[0][1]


def test_a_frame_that_claims_the_whole_address_space_is_no_frame() -> None:
    builder = Builder().steps(range(1, 3))
    frame = builder.writer.frames[1]
    header = bytearray(builder.main[frame.offset : frame.offset + 64])
    for claim in (2**64 - 1, 2**63, 2**40):
        header[8:16] = claim.to_bytes(8, "little")
        header[60:] = zlib.crc32(header[:60]).to_bytes(4, "little")
        builder.main[frame.offset : frame.offset + 64] = header
        run = open_buffer(bytes(builder.main))
        assert len(run.steps) == 0
        assert "ends beyond" in run.damage[0][1]


def test_a_bad_later_schema_hides_the_rows_it_governs_until_the_next_one() -> None:
    builder = Builder(make_schema((2,))).steps(range(1, 3))
    builder.writer.frame(1, b"{}")
    builder.steps(range(3, 5)).new_schema(make_schema((2,))).steps(range(5, 7))
    run = open_buffer(bytes(builder.main))
    assert run.steps["step"].tolist() == [1, 2, 5, 6]
    assert ["bad schema" in reason or "without a schema" in reason for _, reason in run.damage] == [True, True]


def test_rows_of_hostile_numbers_do_not_stop_the_reader() -> None:
    builder = Builder(make_schema((2,)))
    builder.writer.next_row = 2**64 - 4
    builder.steps(range(1, 4), resumed=True).event("x", 2**64 - 1)
    run = open_buffer(bytes(builder.main), bytes(Builder(make_schema((2,))).tail_rows([9]).tail))
    assert len(run.steps) == 3
    assert len(run.events) <= 1
