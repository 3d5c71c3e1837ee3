"""A training step with the scanner beside the same step without it, and beside other ways to record it.

Timed, it is `python -m benchmarks.training`: contestants in processes of their own, taking turns. As a test, all that
need no other library train a few steps of the tiny model in this process, to the same losses as the bare one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from benchmarks import results
from benchmarks.training import ratios, report, rounds
from benchmarks.training.contestants import CONTESTANTS
from benchmarks.training.processes import Server, ran
from benchmarks.training.worker import Worker

CASES = {
    "tiny": {"model": "tiny"},
    "tiny accumulation 4": {"model": "tiny", "accumulate": 4},
    "minimind": {"model": "minimind"},
}
PEERS = {"msprobe", "nvdlfw-inspect", "wandb.watch"}  # they change the process they are in
SECONDS = 40  # per table; `make bench-training` takes as long as it needs


@pytest.mark.parametrize("case", CASES)
def test_training_step(benchmark: Any, tmp_path: Path, case: str) -> None:
    if not benchmark.enabled:
        pytest.skip("only with timing: the contestants are tested below, without processes of their own")
    options: dict[str, Any] = {"names": ["pyscan", "plain torch"], "rounds": None, "seconds": SECONDS, **CASES[case]}
    result = benchmark.pedantic(rounds.compare, kwargs=options | {"log": tmp_path / "log"}, rounds=1)
    benchmark.group = "training step"
    figures = result["contestants"]
    benchmark.extra_info |= {name: round(one["wall"]["quiet"], 4) for name, one in figures.items()}
    print("\n" + report.table(result))
    assert all(one["same_losses"] for one in figures.values())


def test_every_contestant_trains_to_the_losses_of_the_bare_one() -> None:
    losses, written = {}, {}
    for name in CONTESTANTS.keys() - PEERS:
        worker = Worker("tiny", accumulate=2)
        worker.become(name)
        losses[name] = [loss for _ in range(2) for loss in worker.turn(2)["losses"]]
        written[name] = worker.leave()
    assert all(mine == losses["bare"] and len(mine) == 4 for mine in losses.values())
    assert written["pyscan"]["values_per_step"] > written["plain torch"]["values_per_step"] > 0
    assert written["naive torch"]["bytes_per_step"] > 0 == written["bare"]["bytes_per_step"]


def test_contestants_in_processes_exchange_their_roles(tmp_path: Path) -> None:
    with Server(tmp_path / "log") as server:
        comparison = rounds.Comparison(server, ["pyscan", "plain torch"], "tiny", threads=1)
        comparison.num_steps = 1
        for shift in range(4):
            comparison.rounds(1, shift)
    taken = comparison.taken
    assert list(taken) == ["bare", "bare again", "pyscan", "plain torch"]
    assert comparison.swaps, "all of these can leave"
    assert all({turn.process for turn in one.turns} == {0, 1, 2, 3} for one in taken.values())
    assert all(one.losses == taken["bare"].losses for one in taken.values())
    assert min(seconds for one in taken.values() for turn in one.turns for seconds in turn.wall) > 0
    assert comparison.written["pyscan"]["bytes_per_step"] > 0


def test_a_contestant_that_cannot_attach_is_listed_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYSCAN_BENCH_BUDGET", "-1")
    options: dict[str, Any] = {"rounds": 1, "seconds": 1.0, "log": tmp_path / "log", "threads": 1}
    result = rounds.compare(["pyscan budget"], "tiny", **options)
    assert "budget" in result["unavailable"]["pyscan budget"]
    assert list(result["contestants"]) == ["bare", "bare again"]


def test_only_the_slices_of_a_turn_count() -> None:
    slices = [(0.0, 1.0), (3.0, 4.0), (8.0, 9.0)]
    assert ran(slices, 0.5, 8.25) == pytest.approx(0.5 + 1.0 + 0.25)
    assert ran(slices, 1.0, 3.0) == 0


def test_the_speed_of_a_process_is_divided_out() -> None:
    def turns(factor: float, order: list[int]) -> ratios.Taken:
        return ratios.Taken([ratios.Turn(p, [factor * speeds[p]] * 2, [factor * speeds[p]] * 2) for p in order])

    speeds = [1.0, 1.3, 0.8]
    orders = {"bare": [0, 1, 2], "bare again": [1, 2, 0], "pyscan": [2, 0, 1]}
    taken = {name: turns(1.02 if name == "pyscan" else 1, order) for name, order in orders.items()}
    for ratio in ratios.ratios(taken, exchanged=True)["pyscan"].values():
        assert (ratio.p20, ratio.median, ratio.p80, ratio.quiet) == pytest.approx((1.02,) * 4)
    assert ratios.ratios(taken, exchanged=False)["pyscan"]["wall"].p80 > 1.1


def test_steps_that_the_machine_disturbs_do_not_move_the_figure_of_the_undisturbed() -> None:
    random = np.random.default_rng(0)
    mine, bare = (factor * (1 + random.random((200, 5)) * 0.01) for factor in (1.02, 1.0))
    mine[random.random(mine.shape) < 0.5] *= 2
    ratio, error = ratios.ratio_of_undisturbed(mine, [bare])
    assert ratio == pytest.approx(1.02, abs=0.005)
    assert error < 0.005 < ratios.ratio_of_turns(mine, [bare])[-1]


def made_up(pyscan: float, *, noise: float = 0.0, error: float = 0.002) -> dict[str, Any]:
    def figures(ratio: float) -> dict[str, Any]:
        clock = {"median": ratio, "p20": ratio - 0.01, "p80": ratio + 0.01, "error": error}
        clock |= {"quiet": ratio, "quiet_error": error}
        return {
            "wall": clock, "processor": clock, "same_losses": True, "bytes_per_step": 5.0, "values_per_step": 2,
            "claimed": None,
        }  # fmt: skip

    ratios = {"bare": 1.0, "bare again": 1.0 + noise, "pyscan": pyscan}
    return {
        "model": "tiny", "rounds": 30, "steps_per_turn": 8, "settled": True, "bare_ms": 12.0,
        "unavailable": {"msprobe": "No module named 'msprobe'"},
        "contestants": {name: figures(ratio) for name, ratio in ratios.items()},
    }  # fmt: skip


def test_only_what_the_noise_cannot_explain_counts_as_slower() -> None:
    assert report.slower(made_up(1.013), made_up(1.01)) == []
    assert len(report.slower(made_up(1.02), made_up(1.01))) == 2
    assert report.slower(made_up(1.02, noise=-0.01), made_up(1.01)) == []
    assert report.slower(made_up(1.0), made_up(1.05)) == []


def test_rounds_go_on_until_bare_against_bare_is_known() -> None:
    def ratio(quiet: float, quiet_error: float) -> dict[str, ratios.Ratio]:
        return {"wall": ratios.Ratio(1, 1, 1, 0, 1, 0.001), "processor": ratios.Ratio(1, 1, 1, 0, quiet, quiet_error)}

    assert ratios.is_settled(ratio(1.004, 0.004))
    assert not ratios.is_settled(ratio(1.006, 0.004)), "one is slower than the other"
    assert not ratios.is_settled(ratio(1.0, 0.006)), "it is not known well enough"


def test_a_result_is_kept_with_its_machine_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.training.__main__ import draw

    monkeypatch.setattr(results, "RESULTS", tmp_path)
    at = results.circumstances()
    results.keep("training-tiny-scanner", made_up(1.01), at | {"date": "2001"})
    results.keep("training-tiny-scanner", made_up(1.02), at)
    draw(at)
    kept = results.last_kept("training-tiny-scanner")
    assert kept is not None
    assert kept["result"] == json.loads(json.dumps(made_up(1.02)))
    assert kept["machine"]["cores"] >= 1
    assert kept["versions"]["torch"]
    folder = tmp_path / at["commit"]
    assert "</svg>" in (folder / "training.svg").read_text()
    assert "| pyscan | x1.0200 | x1.0200 | x1.0200 |" in (folder / "training.md").read_text()
    assert "unavailable: No module named 'msprobe'" in (folder / "training.md").read_text()
