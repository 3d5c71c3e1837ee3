"""Counts for dashboards: the number of weights that are ok, zero, none or nan is that of torch's own gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import pyscan
from pyscan.grad_check import count_states


class Mixed(nn.Module):
    """One weight of every state; the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.zero = nn.Linear(8, 8)
        self.bad = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.factor = 1.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.frozen(self.embed(ids))
        return self.head(x).sum() + self.zero(x).sum() * 0 + self.bad(x.detach()).sum() * self.factor


def want(model: nn.Module) -> dict[str, int]:
    """The same from `.grad`, as the guide does it: every parameter of two dimensions once."""
    counts = dict.fromkeys(("ok", "zero", "none", "nan"), 0)
    for parameter in model.parameters():
        if parameter.ndim < 2:
            continue
        grad = parameter.grad
        state = "none" if grad is None else "nan" if not grad.isfinite().all() else "zero" if not grad.any() else "ok"
        counts[state] += 1
    return {f"grad_check/{state}_params": count for state, count in counts.items()}


def train(path: Path | None) -> tuple[list[dict[str, int]], list[dict[str, int]], Any]:
    torch.manual_seed(0)
    model, live, expected = Mixed(), [], []
    with pyscan.attach(model, path, block=4) as scan:
        assert scan.grad_check() == {}
        for factor in (1.0, torch.nan, 0.0):
            model.zero_grad()
            model.factor = factor
            model(torch.arange(6)).backward()
            scan.step()
            live.append(scan.grad_check())
            expected.append(want(model))
    return live, expected, scan


def test_the_counts_of_a_row_are_those_of_torch() -> None:
    live, expected, _ = train(None)
    assert live == expected
    assert expected[1] == {
        "grad_check/ok_params": 1,
        "grad_check/zero_params": 1,
        "grad_check/none_params": 2,
        "grad_check/nan_params": 1,
    }


def test_the_counts_of_a_run_are_those_of_its_rows(tmp_path: Path) -> None:
    live, _, _ = train(tmp_path / "run.mscan")
    with pyscan.open(tmp_path / "run.mscan") as run:
        counts = run.grad_check()
    assert [{name: int(column[row]) for name, column in counts.items()} for row in range(3)] == live


def test_states_exclude_each_other_and_add_up() -> None:
    norms = np.array([[1.0, 0, -1, np.nan, np.inf, 2], [0, 0, 0, 0, 0, 0]])
    absent = norms < 0
    counts = count_states(norms, absent, np.array([0, 0, -1, 3, 0, 1]))
    assert {name.split("/")[1]: column.tolist() for name, column in counts.items()} == {
        "ok_params": [1, 0],
        "zero_params": [1, 4],
        "none_params": [1, 0],
        "nan_params": [3, 2],
    }


def test_a_version_1_run_has_counts_too() -> None:
    with pyscan.open(Path(__file__).parent / "data" / "every_value_v1.1.mscan") as run:
        counts = run.grad_check()
        assert all(len(column) == len(run.steps) for column in counts.values())
        total = sum(counts.values())
        assert (total == len(run.sites)).all()
