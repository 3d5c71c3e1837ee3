"""The budget: what it counts, when it changes `every`, and that the scanner's own figure is an honest one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pyscan
from pyscan import hook_cost
from pyscan.budget import LARGEST, WINDOW, Budget


def run(budget: Budget, *, scan: float, bare: float, hooks: float = 0.0, steps: int = 2048) -> list[dict[str, float]]:
    """Steps of `bare` seconds, and `scan` more where one is scanned; returns the changes of `every`."""
    changes = []
    for number in range(steps):
        scanned = number % budget.every == 0
        spent = scan if scanned else 0.0
        change = budget.step(spent, bare + hooks + spent, scanned, hooks)
        changes += [change] if change else []
    return changes


def test_overhead_is_what_a_step_takes_longer_than_a_bare_one() -> None:
    budget = Budget(1, None)
    assert budget.overhead == 0.0
    budget.step(0.03, 1.05, True, 0.02)
    assert budget.overhead == pytest.approx(0.05)
    run(budget, scan=0.1, bare=1.0, steps=WINDOW)
    assert budget.overhead == pytest.approx((0.03 + 0.02 + 0.1 * (WINDOW - 1)) / WINDOW)


@pytest.mark.parametrize(("share", "every"), [(0.011, 2), (0.039, 4), (0.07, 8), (0.009, 1)])
def test_every_is_the_smallest_power_of_two_that_keeps_the_budget(share: float, every: int) -> None:
    budget = Budget(1, 0.01)
    changes = run(budget, scan=share, bare=1.0)
    assert budget.every == every
    assert budget.overhead <= 0.01
    assert len(changes) == (every > 1)


def test_a_load_that_changes_is_followed_both_ways() -> None:
    budget = Budget(1, 0.01)
    loads = [(0.005, 1), (0.039, 4), (0.3, 32), (0.019, 2), (0.001, 1)]
    for share, every in loads:
        run(budget, scan=share, bare=1.0)
        assert budget.every == every
        assert budget.overhead <= 0.01


def test_hooks_count_in_every_step_and_leave_less_to_scanning() -> None:
    budget = Budget(1, 0.01)
    run(budget, scan=0.019, bare=1.0, hooks=0.005)
    assert budget.every == 4
    assert budget.overhead == pytest.approx(0.005 + 0.019 / 4)
    alone = Budget(1, 0.01)
    run(alone, scan=0.019, bare=1.0, hooks=0.02)
    assert alone.every == 16, "hooks above the budget do not end the scan: it takes a tenth of what they take"
    assert alone.every < LARGEST


def test_steps_of_which_there_is_nothing_to_say_are_in_the_scanners_own_figure(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pyscan.attach(model, tmp_path / "run.mscan", optimizer=optimizer) as scan:
        for num_steps in range(1, 13):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            assert scan.overhead > 0
            assert scan._budget._num_steps == num_steps
        for _ in range(20):  # more than a window, nobody asks meanwhile
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        assert scan._budget._overhead is not None


def test_steps_left_out_are_counted_with_the_next_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a gradient's hook, whose call takes a second here, and two of the optimizer, in each of 80 steps."""
    monkeypatch.setattr(hook_cost, "seconds_per_call", lambda: 1.0)
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    counted: list[tuple[bool, float, int]] = []
    with pyscan.attach(model, optimizer=optimizer, every=40) as scan:
        real = scan._budget.step

        def step(spent: float, elapsed: float, scanned: bool, hooks: float, num_steps: int) -> Any:
            assert 0 < spent < elapsed
            counted.append((scanned, hooks, num_steps))
            return real(spent, elapsed, scanned, hooks, num_steps)

        scan._budget.step = step  # type: ignore[method-assign]
        for _ in range(80):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            assert scan.overhead >= 0
    left_out = [(False, 3.0 * num_steps, num_steps) for num_steps in (1, 32, 6, 32, 7)]
    assert counted == [*left_out[:3], (True, 3.0, 1), *left_out[3:], (True, 3.0, 1)]


def test_steps_that_are_counted_together_are_as_many_steps() -> None:
    one_by_one, together = Budget(1, None), Budget(1, None)
    run(one_by_one, scan=0.1, bare=1.0, hooks=0.1, steps=WINDOW)
    together.step(0.1 * (WINDOW - 1), 1.2 * (WINDOW - 1), True, 0.1 * (WINDOW - 1), WINDOW - 1)
    assert together._overhead is None
    together.step(0.1, 1.2, True, 0.1)
    assert together._overhead == pytest.approx(one_by_one._overhead)


def test_a_hook_costs_a_little_and_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hook_cost.seconds_per_call.cache_clear()
    assert 0 <= hook_cost.seconds_per_call() < 1e-3
    assert hook_cost.seconds_per_call() == hook_cost.seconds_per_call()
    handle = nn.modules.module.register_module_forward_pre_hook(lambda module, args: pytest.fail("called"))
    try:
        hook_cost.seconds_per_call.cache_clear()
        assert hook_cost.seconds_per_call() == hook_cost.UNMEASURED
    finally:
        handle.remove()
        hook_cost.seconds_per_call.cache_clear()


def test_the_calls_of_hooks_are_in_the_scanners_own_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten gradients and two forwards: 2 x 10 calls, and two of the optimizer; here of a second each."""
    monkeypatch.setattr(hook_cost, "seconds_per_call", lambda: 1.0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    counted: list[float] = []
    with pyscan.attach(model, optimizer=optimizer) as scan:
        real = scan._budget.step

        def step(spent: float, elapsed: float, scanned: bool, hooks: float, num_steps: int) -> Any:
            counted.append(hooks)
            return real(spent, elapsed, scanned, hooks, num_steps)

        scan._budget.step = step  # type: ignore[method-assign]
        for _ in range(2):
            for _ in range(2):
                model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert counted == [22.0, 22.0]
