"""Ranks that train together, under torchrun with gloo: merged, their rows are those of one process with all rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyscan
from pyscan.check import check
from pyscan.live_merge import live_path
from pyscan.source import PathSource
from pyscan.version2 import FileRun
from tests import ranks_experts

ROOT = Path(__file__).parent.parent
SITES = [f"{name}.weight" for name in ("down", "embed", "head", "mix", "up")]
TWO = ("ddp", "fsdp")
TWO_SLOW = ("ddp_static", "ddp_no_sync", "fsdp_kept", "fsdp_accumulated", "tp", "sequence_tp", "pipeline")
FOUR = ("hsdp", "fsdp_tp", "pipeline")


def torchrun(num_ranks: int, *arguments: str, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += ["--max-restarts", str(restarts), "-m", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)


def launch(directory: Path, num_ranks: int, *cases: str) -> dict[str, Any]:
    done = torchrun(num_ranks, "tests.ranks_worker", str(directory), *cases)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((directory / "results.json").read_text())
    return found


def assert_whole(result: dict[str, Any], *, unreduced: tuple[str, ...] = ()) -> None:
    """The rows of all ranks are those of one process, in memory and in the file, and nothing else has changed."""
    assert "error" not in result, result["error"]
    assert result["identical"], "losses or weights differ from those without the scanner"
    assert result["same_collectives"]
    assert result["collectives"] > 0
    assert result["bytes_sent"] > 0
    assert {event["kind"] for event in result["events"]} <= ({"note"} if unreduced else set())
    assert (result["sites"], result["steps"]) == (SITES, [1, 2, 3])
    assert (result["late"], result["num_rows"], result["damage"]) == (0, 3, [])
    assert "off" not in result["kinds"]
    places = [
        f"{c}/{s}" for s in SITES for c in ("act", "grad", "grad_out", "act_max", "grad_max", "act_bad", "grad_bad")
    ]
    assert sorted(result["in_memory"]) == sorted(result["in_file"]) == sorted(places)
    for place in places:
        if place.startswith("grad") and place.split("/")[1] in unreduced:
            assert result["in_memory"][place] == float("inf"), "a gradient that nobody has added up must be absent"
            continue
        assert result["in_memory"][place] < 1e-5, place
        assert result["in_file"][place] < 0.002, place


def wait_until_whole(path: Path) -> None:
    """The process that merges beside the training ends a moment after it."""
    end = time.monotonic() + 60
    while not path.exists() or not FileRun(PathSource(str(path))).file.has_index:
        assert time.monotonic() < end, f"{path} is not finished"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return launch(tmp_path_factory.mktemp("two"), 2, *TWO)


@pytest.fixture(scope="module")
def two_slow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return launch(tmp_path_factory.mktemp("two_slow"), 2, *TWO_SLOW, "fsdp_bf16")


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path_factory.mktemp("four")
    return directory, launch(directory, 4, "corrupt", *FOUR)


@pytest.mark.parametrize("case", TWO)
def test_two_ranks_together_are_one_process_with_the_whole_batch(two: dict[str, Any], case: str) -> None:
    assert_whole(two[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", TWO_SLOW)
def test_every_way_to_share_a_model_between_two_ranks(two_slow: dict[str, Any], case: str) -> None:
    assert_whole(two_slow[case], unreduced=("mix.weight",) if case == "sequence_tp" else ())


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUR)
def test_every_way_to_share_a_model_between_four_ranks(four: tuple[Path, dict[str, Any]], case: str) -> None:
    assert_whole(four[1][case])


@pytest.mark.slow
def test_in_mixed_precision_a_rank_records_its_own_input_and_its_own_part_of_the_gradient(
    two_slow: dict[str, Any],
) -> None:
    result = two_slow["fsdp_bf16"]
    assert (result["identical"], result["same_collectives"], result["events"]) == (True, True, [])
    assert result["own"] < 1e-5


@pytest.mark.slow
def test_a_rank_with_a_corrupted_weight_is_named_at_the_step_it_happens(four: tuple[Path, dict[str, Any]]) -> None:
    with pyscan.open(four[0] / "corrupt.mscan") as run:
        told = [event for event in run.events if event["kind"] in ("rank_differs", "replicas_differ")]
    assert (told[0]["kind"], told[0]["step"], told[0]["rank"]) == ("rank_differs", 6, 2)
    assert told[0]["site"] == "down.weight", "the first site that meets what the corrupted weight made"
    assert all(event["step"] >= 6 for event in told)


@pytest.mark.slow
def test_a_job_whose_worker_is_killed_goes_on_with_every_step_once(tmp_path: Path) -> None:
    done = torchrun(2, "tests.ranks_elastic", str(tmp_path), "40", "27", restarts=3)
    assert done.returncode == 0, done.stderr[-6000:]
    assert (tmp_path / "killed").exists()
    path = tmp_path / "run.mscan"
    assert check(path) == []
    with pyscan.open(path) as run:
        assert run.steps["step"].tolist() == list(range(1, 41))
        assert [event["kind"] for event in run.events].count("resumed") == 2
        assert not pyscan.is_absent(run.act("0.weight")).any()
    wait_until_whole(live_path(path))
    with pyscan.open(path) as run, pyscan.open(live_path(path)) as live:
        assert np.array_equal(live.steps["step"], run.steps["step"])
        assert np.array_equal(live.codes("act", "0.weight"), run.codes("act", "0.weight"))
        assert np.array_equal(live.codes("grad", "2.weight"), run.codes("grad", "2.weight"))
    assert check(live_path(path)) == []
    # Nobody says at which step it goes on: the ranks may not agree.
    (tmp_path / "checkpoint.pt").rename(tmp_path / "kept.pt")
    done = torchrun(2, "tests.ranks_elastic", str(tmp_path), "1")
    assert done.returncode == 0, done.stderr[-3000:]
    with pyscan.open(path) as run:
        told = [event["rank"] for event in run.events if "without scan.load_state_dict" in event.get("text", "")]
    assert told == [0, 1]
    (tmp_path / "kept.pt").rename(tmp_path / "checkpoint.pt")
    # One rank fewer: the run goes on from its last checkpoint, which is step 40.
    done = torchrun(1, "tests.ranks_elastic", str(tmp_path), "55")
    assert done.returncode == 0, done.stderr[-3000:]
    assert check(path) == []
    with pyscan.open(path) as run:
        assert run.steps["step"].tolist() == list(range(1, 56))
        assert (run.world, run.missing_ranks) == (1, ())
        changed = [event for event in run.events if event["kind"] == "world_changed"]
        assert [(event["step"], event["before"], event["world"]) for event in changed] == [(41, 2, 1)]
        assert not pyscan.is_absent(run.act("0.weight")).any()


@pytest.mark.slow
def test_experts_that_live_on_one_rank_each_are_seen_with_the_tokens_of_all(tmp_path: Path) -> None:
    done = torchrun(2, "tests.ranks_experts", str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    for implementation in ("eager", "grouped_mm"):
        scan, _ = ranks_experts.train(ranks_experts.make(implementation), 0, 1, watch=False)
        wanted = scan.latest()["param_stats"]
        ranks = [json.loads((tmp_path / f"{implementation}-{rank}.json").read_text()) for rank in range(2)]
        assert [(rank["same_losses"], rank["events"]) for rank in ranks] == [(True, [])] * 2
        with pyscan.open(tmp_path / f"{implementation}.mscan") as run:
            assert [site.name for site in run.sites] == list(wanted)
            for name, stats in wanted.items():
                act, grad = float(run.act(name)[-1]), float(run.grad(name)[-1])
                assert act == pytest.approx(stats["activation_norm"], rel=2e-3), name
                assert grad == pytest.approx(stats["grad_norm"], rel=2e-3), name
        experts = [name for name in wanted if ".experts." in name]
        assert len(experts) == 16
        for name in experts:
            held = [rank["latest"][name] for rank in ranks if rank["latest"][name]["activation_norm"] is not None]
            assert len(held) == 1, f"{name} lives on one rank"
            assert held[0]["activation_norm"] == pytest.approx(wanted[name]["activation_norm"], rel=1e-5)
            assert held[0]["grad_norm"] == pytest.approx(wanted[name]["grad_norm"], rel=1e-5)
