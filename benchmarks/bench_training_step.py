"""A training step with the scanner beside the same step without it, and beside other ways to record it.

Timed, it is `python -m benchmarks.training`: contestants as twins of one training, taking turns. As a test, all that
need no other library train a few steps of the tiny model, to the same losses as the bare one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import results
from benchmarks.training import models, ratios, report, rounds
from benchmarks.training.contestants import CONTESTANTS, Attached, Contestant
from benchmarks.training.worker import Marks, Worker

CASES = {
    "tiny": {"model": "tiny"},
    "tiny accumulation 4": {"model": "tiny", "accumulate": 4},
    "minimind": {"model": "minimind"},
}
SECONDS = 90  # per table, of which starting takes some; `make bench-training` takes as long as it needs
BURNT = 0.3


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two that share their cores with another process spin for as long as it runs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", CASES)
def test_training_step(benchmark: Any, tmp_path: Path, case: str) -> None:
    if not benchmark.enabled:
        pytest.skip("only with timing: the contestants are tested below")
    options: dict[str, Any] = {"names": ["pyscan", "plain torch"], "rounds": None, "seconds": SECONDS, **CASES[case]}
    result = benchmark.pedantic(rounds.compare, kwargs=options | {"log": tmp_path / "log"}, rounds=1)
    benchmark.group = "training step"
    figures = result["contestants"]
    benchmark.extra_info |= {name: round(one["wall"]["median"], 4) for name, one in figures.items()}
    print("\n" + report.table(result))
    assert all(one["same_losses"] for one in figures.values())


def test_twins_share_the_memory_of_weights_and_optimizer_state() -> None:
    common = models.make(models.MODELS["tiny"])
    with pytest.raises(ValueError, match="must have taken a step"):
        models.twin(common)
    loss = models.step(common)
    before = [p.clone() for p in common.network.parameters()]
    twins = [models.twin(common) for _ in range(2)]
    assert all(models.step(twin) == loss for twin in twins)
    for twin in twins:
        for mine, theirs, old in zip(twin.network.parameters(), common.network.parameters(), before, strict=True):
            assert mine is not theirs
            assert mine.data_ptr() == theirs.data_ptr()
            assert mine.equal(old), "the learning rate is 0"
            state, common_state = twin.optimizer.state[mine], common.optimizer.state[theirs]
            assert all(state[key].data_ptr() == common_state[key].data_ptr() for key in common_state)
            assert state["step"] == 3


def test_every_contestant_trains_to_the_losses_of_the_bare_one() -> None:
    names = [name for name, contestant in CONTESTANTS.items() if not contestant.is_alone]
    worker = Worker("tiny", accumulate=2)
    for name in names:
        worker.join(name)
    turns = [(name, worker.turn(name, 2)) for _ in range(2) for name in names]
    written = {name: worker.leave(name) for name in names}
    assert len({loss for _, turn in turns for loss in turn["losses"]}) == 1
    assert all(len(turn["losses"]) == 2 for _, turn in turns)
    assert {turn[clock].shape for _, turn in turns for clock in ratios.CLOCKS} == {(2 * (4 + 2) * 2 + 2,)}
    assert all(min(turn[clock]) > 0 for _, turn in turns for clock in ratios.CLOCKS)
    assert {name for name, turn in turns if turn["claimed"]} >= {"pyscan", "pyscan tokens"}
    assert written["pyscan"]["values_per_step"] > written["plain torch"]["values_per_step"] > 0
    assert written["naive torch"]["bytes_per_step"] > 0 == written["bare"]["bytes_per_step"]


def burn() -> None:
    while time.thread_time() < BURNT:
        hashlib.sha256(bytes(1 << 20))  # without the interpreter's lock


@pytest.mark.parametrize("kind", [ThreadPoolExecutor, ProcessPoolExecutor])
def test_what_works_in_the_background_is_billed_to_its_owner(
    monkeypatch: pytest.MonkeyPatch, kind: Callable[[int], Executor]
) -> None:
    """It works while another one, which waits for it, has its turn."""
    with kind(1) as pool:

        def owner(training: models.Training, directory: Path) -> Attached:
            pool.submit(int).result()  # starts it
            return Attached()

        def other(training: models.Training, directory: Path) -> Attached:
            return Attached(after_step=lambda: pool.submit(burn).result())

        monkeypatch.setitem(CONTESTANTS, "owner", Contestant(owner, ""))
        monkeypatch.setitem(CONTESTANTS, "other", Contestant(other, ""))
        worker = Worker("tiny")
        worker.join("other")
        worker.join("owner")
        others, owners, next_of_owner = (worker.turn(name, 1) for name in ("other", "owner", "owner"))
    assert others["processor"].sum() + others["background"] < 0.9 * BURNT
    assert owners["background"] > 0.7 * BURNT
    assert owners["processor"].sum() < 0.9 * BURNT
    assert next_of_owner["background"] < 0.1 * BURNT, "only once"


def test_contestants_in_processes_and_one_that_cannot_attach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSCAN_BENCH_BUDGET", "-1")
    for name, change in {"plain torch": {"is_alone": True}, "pyscan budget": {"steps_per_turn": 1}}.items():
        monkeypatch.setitem(CONTESTANTS, name, dataclasses.replace(CONTESTANTS[name], **change))
    options: dict[str, Any] = {"rounds": 2, "seconds": 1.0, "log": tmp_path / "log", "threads": 1}
    result = rounds.compare(["pyscan", "pyscan budget", "plain torch"], "tiny", **options)
    assert "budget" in result["unavailable"]["pyscan budget"]
    assert "Traceback" in (tmp_path / "log").read_text()
    assert list(result["contestants"]) == ["bare", "bare again", "pyscan", "plain torch"]
    assert all(one["same_losses"] for one in result["contestants"].values())
    assert result["contestants"]["pyscan"]["bytes_per_step"] > 0
    assert (result["rounds"], result["launches"], result["settled"]) == (2, 1, False)


STRETCHES = np.array([0.2, 0.7, 0.1])  # their parts of a step


def turns(factor: float, num_rounds: int, *, noise: float = 0.02, background: float = 0.0) -> ratios.Taken:
    random, seconds = np.random.default_rng(int(1000 * factor)), 1 + np.arange(num_rounds) % 7  # the machine's speed
    noisy = factor * seconds * (1 + noise * random.standard_normal(num_rounds))
    stretches = list(np.outer(noisy, STRETCHES))
    return ratios.Taken(stretches, stretches, [background * num_rounds] + [0.0] * (num_rounds - 1))


def taken(num_rounds: int, *, again: float = 1.001) -> dict[str, ratios.Taken]:
    factors = {"bare": 1.0, "bare again": again, "pyscan": 1.02}
    return {name: turns(factor, num_rounds) for name, factor in factors.items()}


def test_turns_are_compared_with_the_bare_ones_of_their_round() -> None:
    few, many = (ratios.ratios(taken(num_rounds))["pyscan"]["wall"] for num_rounds in (50, 2000))
    assert many.median == pytest.approx(1.02, abs=0.003)
    assert many.p20 < many.median < many.p80
    assert 0.0005 < many.error < few.error / 3 < 0.005
    assert ratios.ratios(taken(5))["pyscan"]["wall"].error == np.inf


def test_slow_moments_of_the_machine_favour_nobody() -> None:
    random = np.random.default_rng(0)
    slow = [list(1 + random.exponential(0.1, (20_000, 1))) for _ in range(3)]
    found = {
        name: ratios.Taken(one, one, [0.0]) for name, one in zip(("bare", "bare again", "pyscan"), slow, strict=True)
    }
    ratio = ratios.ratios(found)["pyscan"]["wall"]
    assert ratio.median == pytest.approx(1.0, abs=0.003)  # to the mean of the bare ones it is 0.989
    assert ratio.error < 0.003


def test_a_slow_moment_spoils_a_stretch_and_not_the_step() -> None:
    """A scanner that costs 4 % of one half of the step, on a machine that is slow in a third of all moments."""
    random = np.random.default_rng(0)
    costs = {"bare": np.ones(20), "bare again": np.ones(20), "pyscan": np.repeat([1.04, 1.0], 10)}
    found = {}
    for name, cost in costs.items():
        is_slow = random.random((200, 20)) < 1 / 3
        noise = 0.01 * random.standard_normal((200, 20)) + is_slow * random.exponential(0.5, (200, 20))
        seconds = list(cost * (1 + noise))
        found[name] = ratios.Taken(seconds, seconds, [0.0])
    by_stretch = ratios.ratios(found)["pyscan"]["wall"]
    for one in found.values():
        one.wall = [seconds.sum(keepdims=True) for seconds in one.wall]
    whole = ratios.ratios(found)["pyscan"]["wall"]
    assert by_stretch.median == pytest.approx(1.02, abs=2 * by_stretch.error)
    assert by_stretch.error < 0.4 * whole.error
    assert (by_stretch.p20, by_stretch.p80) == pytest.approx((whole.p20, whole.p80))


def test_stretches_lie_between_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two steps: the time between the steps belongs to none."""
    moments = iter([0.0, 1.0, 3.0, 10.0, 13.0, 14.0])
    marks = Marks()
    monkeypatch.setattr(time, "perf_counter", lambda: next(moments))
    for _ in range(6):
        marks.mark()
    wall, processor = marks.take(2)
    assert wall.tolist() == [2.0, 1.5]
    assert processor.shape == (2,)


def test_work_in_bursts_counts_as_if_it_were_spread() -> None:
    found = taken(100) | {"pyscan": turns(1.0, 100, noise=0.0, background=0.4)}
    ratio = ratios.ratios(found)["pyscan"]
    assert ratio["processor"].median == pytest.approx(1.1, abs=0.01)
    assert ratio["wall"].median == pytest.approx(1.0, abs=0.01)


def test_it_is_settled_when_bare_is_bare_and_the_scanner_is_known() -> None:
    assert ratios.is_settled(ratios.ratios(taken(2000)))
    assert not ratios.is_settled(ratios.ratios(taken(2000, again=1.01))), "one is slower than the other"
    assert not ratios.is_settled(ratios.ratios(taken(20))), "it is not known well enough"
    vague = taken(2000) | {"pyscan": turns(1.02, 2000, noise=0.5)}
    assert not ratios.is_settled(ratios.ratios(vague)), "the scanner is not known well enough"


def made_up(pyscan: float, *, noise: float = 0.0, error: float = 0.002) -> dict[str, Any]:
    def figures(ratio: float) -> dict[str, Any]:
        clock = {"median": ratio, "p20": ratio - 0.01, "p80": ratio + 0.01, "error": error}
        return {
            "wall": clock, "processor": clock, "same_losses": True, "bytes_per_step": 5.0, "values_per_step": 2,
            "claimed": None,
        }  # fmt: skip

    ratios = {"bare": 1.0, "bare again": 1.0 + noise, "pyscan": pyscan}
    return {
        "model": "tiny", "rounds": 30, "launches": 1, "steps_per_turn": 8, "settled": True, "bare_ms": 12.0,
        "unavailable": {"msprobe": "No module named 'msprobe'"},
        "contestants": {name: figures(ratio) for name, ratio in ratios.items()},
    }  # fmt: skip


def test_only_what_the_noise_cannot_explain_counts_as_slower() -> None:
    assert report.slower(made_up(1.013), made_up(1.01)) == []
    assert len(report.slower(made_up(1.02), made_up(1.01))) == 2
    assert report.slower(made_up(1.02, noise=-0.01), made_up(1.01)) == []
    assert report.slower(made_up(1.0), made_up(1.05)) == []


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
    assert "| pyscan | x1.0200 ± 0.0020 | 1.010 to 1.030 | x1.0200 ± 0.0020 |" in (folder / "training.md").read_text()
    assert "unavailable: No module named 'msprobe'" in (folder / "training.md").read_text()
