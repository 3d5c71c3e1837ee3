"""Training steps of many small weights, bare, scanned, and with the same capture in plain torch. Runs under valgrind.

All that a scanner adds to a step is in the difference: hooks, reductions, the end of the backward, the row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import pyscan
from benchmarks.hooks import plain_capture
from benchmarks.instructions.counted import counted
from benchmarks.instructions.shapes import NUM_SITES, NUM_STEPS, ROWS, WIDTH


def training(attach: Callable[[nn.Module, torch.optim.Optimizer], Callable[[], None]]) -> Callable[[], None]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_SITES)))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    after_backward = attach(model, optimizer)
    x: Tensor = torch.randn(ROWS, WIDTH)

    def step() -> None:
        model(x).square().mean().backward()
        after_backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def bare(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    return lambda: None


def scanned(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    scan = pyscan.attach(model, optimizer=optimizer, watch=False)
    return lambda: scan.rows.clear()


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    capture = plain_capture(model)

    def after_backward() -> None:
        capture.after_backward()
        capture.rows.clear()

    return after_backward


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, attach in (("bare", bare), ("pyscan", scanned), ("plain torch", plain)):
        counted(f"step {name}", training(attach), repeat=NUM_STEPS)
