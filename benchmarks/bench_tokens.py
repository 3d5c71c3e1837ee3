"""The norm of every token's contribution: tokens mode beside a bare step, and beside one backward per token.

The rival is what people do without the identity: a copy of the question for each position. It backpropagates the output
gradient of one position at a time through every weight; both must give the same norms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pyscan

WIDTH, DEPTH, TOKENS = 256, 4, 64


def make() -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(1, TOKENS, WIDTH)


def per_token(model: nn.Sequential, x: Tensor) -> list[list[Tensor]]:
    """One backward per token: here rows do not meet each other, so a token's loss is all that reaches its rows."""
    losses = model(x).square().sum(-1)[0]
    weights = [layer.weight for layer in model if isinstance(layer, nn.Linear)]
    return [[g.norm() for g in torch.autograd.grad(loss, weights, retain_graph=True)] for loss in losses]


@pytest.mark.parametrize("who", ["bare", "tokens", "one backward per token"])
def test_tokens(benchmark: Any, who: str) -> None:
    model, x = make()

    def step() -> None:
        model(x).square().sum().backward()
        model.zero_grad()

    run: Callable[[], Any] = step
    if who == "tokens":
        scan = pyscan.attach(model, tokens=True)

        def run() -> None:
            step()
            scan.step()
            scan.rows.clear()
    elif who != "bare":

        def run() -> None:
            per_token(model, x)

    benchmark.group = f"contribution of {TOKENS} tokens to {DEPTH} weights of {WIDTH}x{WIDTH}"
    benchmark.pedantic(run, rounds=15, warmup_rounds=2)
    if who == "tokens":
        found = np.stack([rows["contribution"] for rows in scan.tokens().values() if isinstance(rows, dict)], 1)
        scan.close()
        np.testing.assert_allclose(found, torch.tensor(per_token(model, x)).numpy(), 1e-4)
