"""The reader beside the compiled writer: a file being written, resumed and closed is read right at every moment."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

import pyscan
from pyscan import _C, codecs
from pyscan.check import check
from pyscan.rewrite import repair
from pyscan.schema import Channel, Layout, Schema
from pyscan.writer import Writer
from tests.make_scan import RUN_ID, expected, make_schema, value

CHANNELS = (Channel("act", transform="plain"), Channel("bad", "site", "f32", "plain", "add"))
NAMES = ("model.layers.0.proj.weight", "model.layers.1.proj.weight")


def writer_for(path: Path, schema: Schema, *, resume: bool = False) -> Writer:
    return Writer(path, schema, run_id=RUN_ID, flush_seconds=0.01, resume=resume)


def write(writer: Writer, schema: Schema, step: int) -> None:
    counts = Layout(schema).num_cells
    cells = np.array([value(number, cell, step) for number, count in enumerate(counts) for cell in range(count)])
    while not writer.write(step, cells):
        time.sleep(0.001)


def assert_holds(run: pyscan.Run, schema: Schema, steps: list[int]) -> None:
    assert run.steps["step"].tolist() == steps
    for channel in ("act", "bad"):
        for name in NAMES:
            assert np.array_equal(run.get(channel, name, blocks=True), expected(schema, channel, name, steps))


def test_a_reader_beside_the_writer_never_misses_doubles_or_mistakes_a_row(tmp_path: Path) -> None:
    schema = make_schema((3, 2), CHANNELS)
    path = tmp_path / "run.mscan"
    writer = writer_for(path, schema)
    writer.flush()
    run = pyscan.open(path)
    for step in range(1, 1001):
        write(writer, schema, step)
        if step % 9 == 0:
            run.refresh()
            steps = run.steps["step"].tolist()
            assert steps == list(range(1, len(steps) + 1))
            assert np.array_equal(run.act(NAMES[1], blocks=True), expected(schema, "act", NAMES[1], steps))
            end = run.file.frames[-1].end
            assert all(offset >= end for offset, _ in run.damage)  # a frame that is being written at this moment
    writer.flush()
    run.refresh()
    assert run.damage == []
    assert_holds(run, schema, list(range(1, 1001)))
    writer.event("end", 1000)
    writer.close()
    run.refresh()
    assert_holds(run, schema, list(range(1, 1001)))
    assert [event["kind"] for event in run.events] == ["end"]
    assert pyscan.open(path).file.has_index
    assert check(path) == []


def test_a_reader_stays_right_over_a_crash_a_resume_and_a_repair(tmp_path: Path) -> None:
    schema = make_schema((3, 2), CHANNELS)
    path, crashed = tmp_path / "run.mscan", tmp_path / "crashed.mscan"
    writer = writer_for(path, schema)
    for step in range(1, 101):
        write(writer, schema, step)
    writer.event("old", 95)
    writer.flush()
    for suffix in ("", ".tail"):  # the files as a killed process leaves them
        Path(f"{crashed}{suffix}").write_bytes(Path(f"{path}{suffix}").read_bytes())
    writer.close()
    with crashed.open("ab") as file:
        file.write(b"FRAM, then nothing")
    run = pyscan.open(crashed)
    assert_holds(run, schema, list(range(1, 101)))
    repair(crashed, tmp_path / "repaired.mscan")
    assert_holds(pyscan.open(tmp_path / "repaired.mscan"), schema, list(range(1, 101)))
    resumed = writer_for(crashed, schema, resume=True)
    run.refresh()
    assert_holds(run, schema, list(range(1, 101)))
    for step in range(90, 180):
        write(resumed, schema, step)
    resumed.event("new", 95)
    resumed.flush()
    run.refresh()
    assert_holds(run, schema, list(range(1, 180)))
    resumed.close()
    run.refresh()
    assert_holds(run, schema, list(range(1, 180)))
    assert [event["kind"] for event in run.events] == ["new"]
    assert not any("tail" in reason for _, reason in check(crashed))


def test_codes_of_the_writer_and_of_numpy_are_the_same() -> None:
    rng = np.random.default_rng(0)
    values = np.concatenate([np.exp2(rng.uniform(-130, 130, 100_000)), [0.0, np.inf, np.nan]])
    packed = _C.pack(values, "log2q8", "plain")
    mine = codecs.encode(values, "log2q8")
    assert np.abs(packed.astype(int) - mine).max() <= 1  # a value between two codes may go either way
    assert (packed == mine).mean() > 0.999
    assert np.array_equal(packed[-3:], mine[-3:])
