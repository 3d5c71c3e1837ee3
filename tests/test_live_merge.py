"""One file that grows with the files of all ranks: the steps all of them have, each once, as a later merge has them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import pyscan
from pyscan import cli, codecs, live_merge, process
from pyscan.check import check
from pyscan.format import ROW_RESUMED
from pyscan.live_merge import LiveMerge, live_path
from pyscan.ranks import rank_path
from pyscan.schema import Schema
from tests.make_scan import Builder, make_rows, site
from tests.test_ranks import CHANNELS, ddp, random_values, write_ddp, write_rank


def write_first(path: Path, num_steps: int, skip: tuple[int, ...] = ()) -> None:
    """The first steps of a run of three ranks."""
    rng = np.random.default_rng(1)
    grads = random_values(rng, 2, 2, 100)["grad"]
    for rank in range(3):
        mesh, rules = ddp(rank, 3)
        values = random_values(rng, 2, 2, 100) | {"grad": grads}
        first = {name: cells[:, :num_steps] for name, cells in values.items()}
        sites = [site(f"{name}.weight", 1, merge=rules) for name in "ab"]
        if rank not in skip:
            write_rank(path, rank, 3, sites, first, range(1, num_steps + 1), mesh=mesh)


def same_as_the_ranks(path: Path, live: Path) -> None:
    with pyscan.open(path) as run, pyscan.open(live) as merged:
        assert np.array_equal(run.steps["step"], merged.steps["step"])
        for channel in run.channels:
            for site in run.sites:
                assert np.array_equal(run.codes(channel.name, site.name), merged.codes(channel.name, site.name))


def test_rows_are_appended_as_all_ranks_finish_them(tmp_path: Path) -> None:
    path, live = tmp_path / "run.mscan", tmp_path / "live.mscan"
    merge = LiveMerge(path, live)
    assert merge.update() == 0
    write_first(path, 10, skip=(1,))
    assert merge.update() == 0
    assert not live.exists(), "a rank is still to come"
    write_first(path, 10)
    assert merge.update() == 10
    with pyscan.open(live) as run:
        assert len(run) == 10
        write_first(path, 100)
        write_first(path, 90, skip=(0, 1))  # rank 2 is behind
        assert merge.update() == 80
        assert run.refresh() == 80
    merge.close()
    same_as_the_ranks(path, live)
    assert check(live) == []
    with pyscan.open(live) as run:
        kinds = [event["kind"] for event in run.events]
        assert run.file.has_index
    assert kinds.count("rank_shorter") == 1
    assert kinds.count("hello") == 3, "an event is written once"


def test_a_restart_voids_what_it_abandons(tmp_path: Path) -> None:
    path, live = tmp_path / "run.mscan", tmp_path / "live.mscan"
    write_ddp(path, world=2, steps=range(1, 31))
    merge = LiveMerge(path, live)
    assert merge.update() == 30
    written = np.random.default_rng(5)
    for rank in range(2):
        with pyscan.open(rank_path(str(path), rank)) as run:
            builder = Builder(run.schema, run_id=run.file.header.run_id)
            codes = {c.name: np.concatenate([run.codes(c.name, s.name) for s in run.sites], 1).T for c in run.channels}
            rows = run.timeline.rows.copy()
        builder.writer.steps(rows, list(codes.values()))
        again = rows[20:25].copy()
        again["time_ns"] += 10**9
        again["flags"][0] |= ROW_RESUMED
        builder.writer.steps(again, [written.permutation(cells[:, :5]) for cells in codes.values()])
        builder.save(Path(rank_path(str(path), rank)))
    assert merge.update() == 5
    merge.close()
    same_as_the_ranks(path, live)
    with pyscan.open(live) as run:
        assert run.steps["step"].tolist() == list(range(1, 26))
    assert check(live) == []


def test_a_model_that_grows_is_followed(tmp_path: Path) -> None:
    path, live = tmp_path / "run.mscan", tmp_path / "live.mscan"
    rng = np.random.default_rng(2)

    def write(rank: int, num_steps: int) -> None:
        mesh, rules = ddp(rank, 2)
        first = [site("a.weight", 1, merge=rules)]
        both = [*first, site("b.weight", 1, merge=rules)]
        builder = Builder(Schema("m", CHANNELS, tuple(first), rank=rank, world=2, mesh=mesh), run_id=bytes([rank] * 16))
        for sites, steps in ((first, range(1, 11)), (both, range(11, num_steps + 1))):
            if sites is both:
                builder.writer.schema(Schema("m", CHANNELS, tuple(both), rank=rank, world=2, mesh=mesh))
            values = random_values(rng, len(sites), len(sites), len(steps))
            builder.writer.steps(make_rows(steps), [codecs.encode(values[c.name], c.codec) for c in CHANNELS])
        builder.save(Path(rank_path(str(path), rank)))

    merge = LiveMerge(path, live)
    for num_steps in (10, 20):
        for rank in range(2):
            write(rank, num_steps)
        merge.update()
    merge.close()
    with pyscan.open(live) as run:
        assert run.steps["step"].tolist() == list(range(1, 21))
        assert pyscan.is_absent(run.act("b")).tolist() == [True] * 10 + [False] * 10
    assert check(live) == []


def test_what_ranks_do_to_each_other_is_told_once_and_as_it_happens(tmp_path: Path) -> None:
    path, live = tmp_path / "run.mscan", tmp_path / "live.mscan"
    rng = np.random.default_rng(0)
    acts = np.exp2(rng.normal(0, 0.03, (4, 2, 80)))
    acts[3, 1, 40] *= 4.0

    def write(num_steps: int) -> None:
        for rank in range(4):
            mesh, rules = ddp(rank, 4)
            values = random_values(rng, 2, 2, num_steps) | {"grad": np.ones((2, num_steps))}
            values |= {"act": acts[rank, :, :num_steps], "act_bad": np.zeros((2, num_steps))}
            sites = [site(f"{name}.weight", 1, merge=rules) for name in "ab"]
            write_rank(path, rank, 4, sites, values, range(1, num_steps + 1), mesh=mesh)

    merge, told = LiveMerge(path, live), []
    for num_steps in (20, 45, 80):
        write(num_steps)
        merge.update()
        with pyscan.open(live) as run:
            told.append([(e["step"], e["rank"]) for e in run.events if e["kind"] == "rank_differs"])
    merge.close()
    assert told[0] == []
    assert told[1][0] == (41, 3)
    assert told[2][0] == (41, 3)
    with pyscan.open(live) as run:
        assert len(set(map(str, run.events))) == len(run.events)


def test_it_merges_in_a_process_of_its_own_that_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    path = tmp_path / "run.mscan"
    live = live_path(path)
    assert live == tmp_path / "run.live.mscan"
    write_first(path, 30)
    child = live_merge.start(path, 0.1)
    until(live.exists)
    write_first(path, 60)
    until(lambda: len(pyscan.open(live)) == 60)
    assert os.getpriority(os.PRIO_PROCESS, child.pid) > os.getpriority(os.PRIO_PROCESS, 0)
    child.stdin.close()
    until(lambda: child.poll() is not None)
    assert child.returncode == 0
    same_as_the_ranks(path, live)
    assert pyscan.open(live).file.has_index


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


def test_the_command_follows_until_it_is_interrupted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, live = tmp_path / "run.mscan", tmp_path / "now.mscan"
    write_first(path, 30)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", interrupt)
        assert cli.main(["merge", str(path), "-o", str(live), "--follow", "5"]) == 0
    assert "30 rows" in capsys.readouterr().err
    same_as_the_ranks(path, live)
    assert cli.main(["merge", str(live), "-o", str(tmp_path / "x.mscan"), "--follow", "5"]) == 2
    assert "one file already" in capsys.readouterr().err
    assert cli.main(["merge", str(path), "-o", str(live), "--follow", "0"]) == 2
    assert "above 0" in capsys.readouterr().err


def test_a_machine_that_starts_no_process_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, seconds: float) -> None:
        raise BlockingIOError("no process left")

    monkeypatch.setattr(process, "rank_and_world", lambda: (0, 2))
    monkeypatch.setattr(live_merge, "start", refuse)
    with pytest.warns(RuntimeWarning, match="no process left"):
        scan = pyscan.attach(nn.Linear(4, 2), tmp_path / "run.mscan", live=True)
    scan.close()


def test_it_is_a_process_that_imports_no_torch() -> None:
    code = "import sys, pyscan.live_merge; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
