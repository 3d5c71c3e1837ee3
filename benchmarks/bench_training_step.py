"""A training step with the scanner beside the same step without it, and beside other ways to record it.

Timed, it is `python -m benchmarks.training`: contestants in processes of their own, taking turns. As a test, all that
need no other library train a few steps of the tiny model in this process, to the same losses as the bare one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks import results
from benchmarks.training import report, rounds
from benchmarks.training.contestants import CONTESTANTS
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
    benchmark.extra_info |= {name: round(one["wall"]["median"], 4) for name, one in figures.items()}
    print("\n" + report.table(result))
    assert all(one["same_losses"] for one in figures.values())


def test_every_contestant_trains_to_the_losses_of_the_bare_one() -> None:
    unavailable, workers = [], {}
    for name in CONTESTANTS.keys() - PEERS:
        try:
            workers[name] = Worker(name, "tiny", accumulate=2)
        except ImportError as error:
            unavailable.append((name, str(error)))
    taken = rounds.take_turns(workers, 2, rounds=2)
    closed = {name: worker.close() for name, worker in workers.items()}
    assert all(mine.losses == taken["bare"].losses and len(mine.wall) == 2 for mine in taken.values())
    assert all("pyscan.attach has no" in reason for _, reason in unavailable)
    assert closed["pyscan"]["values_per_step"] > closed["plain torch"]["values_per_step"] > 0
    assert closed["naive torch"]["bytes_per_step"] > 0 == closed["bare"]["bytes_per_step"]


def made_up(pyscan: float, *, noise: float = 0.0, error: float = 0.002) -> dict[str, Any]:
    def figures(ratio: float) -> dict[str, Any]:
        clock = {"median": ratio, "p20": ratio - 0.01, "p80": ratio + 0.01, "error": error}
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
    def taken(one: list[float], two: list[float]) -> dict[str, rounds.Taken]:
        return {"bare": rounds.Taken(one, one), "bare again": rounds.Taken(two, two)}

    even, noisy = [1.0, 1.001] * 15, [1.0, 1.1] * 15
    assert rounds.is_settled(taken(even, even))
    assert not rounds.is_settled(taken(even[:10], even[:10])), "too few rounds"
    assert not rounds.is_settled(taken([1.01 * t for t in even], even)), "one is slower than the other"
    assert not rounds.is_settled(taken(noisy, even)), "the median is not known well enough"


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
    assert "| pyscan | x1.0200 |" in (folder / "training.md").read_text()
    assert "unavailable: No module named 'msprobe'" in (folder / "training.md").read_text()
