"""Microseconds that capturing costs per site and step, beside the same capture in plain torch (hooks.py).

Many small weights, so that what is paid per site shows and not the reading. The contestants take turns, step by step;
the figure is what their median step takes longer than the bare one, divided by the number of sites.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pyscan
from benchmarks.hooks import plain_capture

NUM_SITES, WIDTH, ROWS = 64, 64, 16


class Training:
    """A chain of Linear layers with data; `after_backward` may be set."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_SITES)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self.x = torch.randn(ROWS, WIDTH)
        self.after_backward: Callable[[], None] = lambda: None

    def step(self) -> None:
        self.model(self.x).sum().backward()
        self.after_backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def in_turns(trainings: dict[str, Training], rounds: int) -> dict[str, float]:
    """Microseconds per site of each, more than the first."""
    taken: dict[str, list[float]] = {name: [] for name in trainings}
    for _ in range(rounds):
        for name, training in trainings.items():
            start = time.perf_counter()
            training.step()
            taken[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    bare = medians[next(iter(medians))]
    return {name: (median - bare) / NUM_SITES * 1e6 for name, median in medians.items()}


@pytest.fixture
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_hooks(benchmark: Any, one_thread: None) -> None:
    bare, scanned, plain = Training(), Training(), Training()
    capture = plain_capture(plain.model)
    plain.after_backward = capture.after_backward
    with pyscan.attach(scanned.model, optimizer=scanned.optimizer) as scan:
        rounds = 300 if benchmark.enabled else 2
        trainings = {"bare": bare, "pyscan": scanned, "plain torch": plain}
        figures = benchmark.pedantic(in_turns, args=(trainings, rounds), rounds=1)
        assert_same(scan, capture.rows)
    benchmark.group = "hooks"
    benchmark.extra_info |= {f"us_per_site_{name}": round(us, 2) for name, us in figures.items()}
    if benchmark.enabled:
        print("\n" + ", ".join(f"{name}: {us:.2f} us per site" for name, us in figures.items()))


def assert_same(scan: pyscan.Scanner, rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
    """Every number of every step: norms of blocks, maxima, counts of bad values."""
    assert len(scan.rows) == len(rows)
    for row, (norms, maxima, bad) in zip(scan.rows, rows, strict=True):
        cells = {
            name: np.concatenate([row.cells[scan.buffer.cells(name, i)] for i in range(NUM_SITES)])
            for name in ("act", "grad", "act_max", "grad_max", "act_bad", "grad_bad")
        }
        blocks = np.sqrt(np.concatenate([cells["act"], cells["grad"]]))
        np.testing.assert_allclose(blocks, norms.double().numpy(), rtol=1e-5)
        assert np.concatenate([cells["act_max"], cells["grad_max"]]).tolist() == maxima.double().tolist()
        assert np.concatenate([cells["act_bad"], cells["grad_bad"]]).tolist() == bad.double().tolist()
