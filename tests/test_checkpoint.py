"""A scan goes on where a checkpoint left it: no step twice, none missing, nothing of what was abandoned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pyscan
from pyscan import format as fmt
from pyscan.checkpoint import Checkpoint


class Loop:
    """A model that can be trained further, in one scan after the other."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.model = nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

    def attach(self, **options: Any) -> pyscan.Scanner:
        return pyscan.attach(self.model, self.path, optimizer=self.optimizer, **options)

    def train(self, num_steps: int, size: float = 1.0) -> None:
        for _ in range(num_steps):
            self.model(torch.full((2, 8), size)).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


@pytest.fixture
def loop(tmp_path: Path) -> Loop:
    return Loop(tmp_path / "run.mscan")


def history(loop: Loop) -> list[tuple[int, float]]:
    """Step and input norm of every row; the norm of a row of ones is 4."""
    assert loop.path is not None
    with pyscan.open(loop.path) as run:
        return list(zip(run.steps["step"].tolist(), run.act("weight").round(1).tolist(), strict=True))


def test_the_state_says_what_is_needed_and_holds_plain_values(loop: Loop) -> None:
    with loop.attach(every=2) as scan:
        scan.loggers["wandb"] = "abc123"
        loop.train(4)
        state = scan.state_dict()
        assert scan._writer is not None
        run_id = scan._writer.run_id.hex()
    assert state == {
        "step": 4,
        "path": str(loop.path),
        "run_id": run_id,
        "world": 1,
        "every": 2,
        "loggers": {"wandb": "abc123"},
    }
    with loop.attach(resume=True) as scan:
        scan.load_state_dict(state)
        assert scan.loggers == {"wandb": "abc123"}
        assert scan.state_dict()["run_id"] == run_id


def test_the_rows_up_to_a_checkpoint_are_in_the_file_when_it_is_made(loop: Loop) -> None:
    with loop.attach() as scan:
        loop.train(5)
        scan.state_dict()
        assert [step for step, _ in history(loop)] == [1, 2, 3, 4, 5]


def test_a_left_out_step_after_the_checkpoint_leaves_nothing_of_the_abandoned_part(loop: Loop) -> None:
    with loop.attach() as scan:
        loop.train(4)
        state = scan.state_dict()
        loop.train(6, size=8.0)
    with loop.attach(resume=True, every=4) as scan:
        scan.load_state_dict(state)
        loop.train(8)
    assert history(loop) == [(step, 4.0) for step in (1, 2, 3, 4, 5, 8, 12)]


def test_a_pause_after_the_checkpoint_leaves_nothing_of_the_abandoned_part(loop: Loop) -> None:
    with loop.attach() as scan:
        loop.train(4)
        state = scan.state_dict()
        loop.train(6, size=8.0)
    with loop.attach(resume=True) as scan:
        scan.load_state_dict(state)
        with scan.paused():
            loop.train(2)
        loop.train(2)
    assert loop.path is not None
    run = pyscan.open(loop.path)
    assert run.steps["step"].tolist() == [1, 2, 3, 4, 5, 7, 8]
    assert pyscan.is_absent(run.act("weight")).tolist() == [False] * 4 + [True, False, False]
    assert (run.steps["flags"] & fmt.ROW_RESUMED).nonzero()[0].tolist() == [4]


def test_going_back_inside_one_scan_voids_as_well(loop: Loop) -> None:
    """A loop that rolls back after a spike, without a new process."""
    with loop.attach() as scan:
        loop.train(3)
        state = scan.state_dict()
        loop.train(4, size=8.0)
        loop.model(torch.full((2, 8), 100.0)).sum().backward()  # of a step that is never taken
        loop.optimizer.zero_grad()
        scan._event("note", text="of the abandoned part")
        scan.load_state_dict(state)
        loop.train(2)
    assert history(loop) == [(step, 4.0) for step in range(1, 6)]
    assert loop.path is not None
    events = [(event["kind"], event["step"]) for event in pyscan.open(loop.path).events]
    assert ("resumed", 4) in events
    assert not [event for event in events if event[0] == "note"], "what was said of the abandoned part is gone"


def test_rows_in_memory_go_back_too() -> None:
    loop = Loop(None)
    with loop.attach() as scan:
        loop.train(3)
        state = scan.state_dict()
        loop.train(2, size=8.0)
        scan.load_state_dict(state)
        assert scan.latest()["step"] is None, "the newest row is of the abandoned part"
        loop.train(1)
    assert [row.step for row in scan.rows] == [1, 2, 3, 4]
    assert [event["step"] for event in scan.events if event["kind"] == "resumed"] == [4]


def test_another_file_and_another_number_of_ranks_are_told(loop: Loop, tmp_path: Path) -> None:
    with loop.attach() as scan:
        loop.train(2)
        state = scan.state_dict() | {"world": 4, "added_later": 1}
    loop.path = tmp_path / "second.mscan"
    with loop.attach() as scan:
        with pytest.warns(RuntimeWarning) as told:
            scan.load_state_dict(state)
        loop.train(1)
    texts = [str(warning.message) for warning in told]
    assert len(texts) == 2
    assert "second.mscan is not the file that was being written" in texts[0]
    assert "there are 1 ranks now and there were 4. It continues at step 3." in texts[1]
    assert history(loop) == [(3, 4.0)]


def test_a_budget_goes_on_with_the_steps_it_had_chosen(loop: Loop) -> None:
    with loop.attach() as scan:
        state = scan.state_dict() | {"every": 8}
    with loop.attach(resume=True, budget=0.5) as scan:
        scan.load_state_dict(state)
        assert scan.every == 8
    with loop.attach(resume=True) as scan:
        scan.load_state_dict(state)
        assert scan.every == 1, "without a budget the user's own word counts"


@pytest.mark.parametrize("state", [{}, {"step": -1}, {"step": 1.5}, {"step": True}, {"step": 1, "world": 0}])
def test_the_state_of_something_else_is_refused(loop: Loop, state: dict[str, Any]) -> None:
    with loop.attach() as scan, pytest.raises(ValueError, match=r"state of a scan|scan's state"):
        scan.load_state_dict(state)


def test_a_checkpoint_survives_its_own_state() -> None:
    saved = Checkpoint(7, "run.mscan", "ab", 2, 4, {"wandb": "x"})
    assert Checkpoint.from_state(saved.to_state()) == saved
    assert saved.differences(saved) == []
