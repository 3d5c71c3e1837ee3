"""The norm of every token's contribution: tokens mode beside a bare step, and beside one backward per token.

The rival is what people do without the identity: a backward for each position. Where positions do not meet (the first
benchmark) both give the same norms, which is asserted; in a decoder (the second, MiniMind's shape) a position's loss
reaches the positions before it as well, and the sum of all its gradients must be that of the whole loss.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pyscan
from benchmarks.training.models import MODELS, make

WIDTH, DEPTH, TOKENS = 256, 4, 64


def make_rows() -> tuple[nn.Sequential, Tensor]:
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
    model, x = make_rows()

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


@pytest.mark.parametrize("who", ["bare", "tokens", "one backward per token"])
def test_tokens_of_a_decoder(benchmark: Any, who: str) -> None:
    shape = MODELS["minimind" if benchmark.enabled else "tiny"]
    model, _, _, ids = vars(make(shape)).values()

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    def every_token() -> None:
        logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
        losses = nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none") / len(logits)
        for loss in losses:
            loss.backward(retain_graph=True)
            found.append(torch.stack([p.grad.norm() for p in weights]))
            summed[:] = [total + p.grad for total, p in zip(summed, weights, strict=True)]
            model.zero_grad()

    benchmark.group = f"every token of a decoder of {shape.layers} layers of {shape.hidden}, {shape.tokens} tokens"
    if who == "one backward per token":
        weights = [p for p in model.parameters() if p.ndim > 1]
        found: list[Tensor] = []
        summed = [torch.zeros(()) for _ in weights]
        benchmark.pedantic(every_token, rounds=1)
        assert len(found) == ids.numel() - len(ids)
        model(input_ids=ids, labels=ids).loss.backward()
        for total, p in zip(summed, weights, strict=True):
            torch.testing.assert_close(total, p.grad, rtol=1e-3, atol=1e-3 * float(p.grad.abs().max()))
        return
    with pyscan.attach(model, tokens=True) if who == "tokens" else contextlib.nullcontext() as scan:

        def run() -> None:
            step()
            if scan is not None:
                scan.step()
                scan.rows.clear()

        benchmark.pedantic(run, rounds=15, warmup_rounds=2)
        if scan is not None:
            assert scan.tokens()["lm_head.weight"]["contribution"].shape == ids.shape
