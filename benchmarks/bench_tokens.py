"""The norm of every token's contribution: tokens mode beside a bare step, and beside one backward per token.

The rival is what people do without the identity: a backward for each position. Where positions do not meet (the first
benchmark) both give the same norms, which is asserted; in a decoder (the second, MiniMind's shape) a position's loss
reaches the positions before it as well, and the sum of all its gradients must be that of the whole loss.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pyscan
from benchmarks.training.models import MODELS, Training, make

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


def test_tokens_of_a_decoder(benchmark: Any) -> None:
    """A bare step and one with tokens take turns; a backward for every token is taken once: it lasts minutes."""
    shape = MODELS["minimind" if benchmark.enabled else "tiny"]
    bare, scanned = make(shape), make(shape)
    ids, losses, seconds = bare.ids, bare.ids.numel() - len(bare.ids), []

    def step(training: Training) -> float:
        start = time.perf_counter()
        training.model(input_ids=ids, labels=ids).loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        return time.perf_counter() - start

    with pyscan.attach(scanned.network, optimizer=scanned.optimizer, tokens=True) as scan:
        for turn in range(20 if benchmark.enabled else 2):
            first, second = (bare, scanned) if turn % 2 else (scanned, bare)
            taken = {id(first): step(first), id(second): step(second)}
            seconds.append((taken[id(bare)], taken[id(scanned)]))
            scan.rows.clear()
        assert scan.tokens()["lm_head.weight"]["contribution"].shape == ids.shape
    grads = benchmark.pedantic(every_token, (bare.network, ids), rounds=1)
    assert grads.num_tokens == losses
    bare.network(input_ids=ids, labels=ids).loss.backward()
    for total, p in zip(grads.totals, matrices(bare.network), strict=True):
        torch.testing.assert_close(total, p.grad, rtol=1e-3, atol=1e-3 * float(p.grad.abs().max()))
    usual = statistics.median(one for one, _ in seconds)
    ratio = statistics.median(other / one for one, other in seconds)
    each = "" if benchmark.stats is None else f", one backward per token x{benchmark.stats['mean'] / usual:.0f}"
    print(f"\n{losses} tokens, {shape.layers} layers of {shape.hidden}: bare {usual:.3f} s, tokens x{ratio:.3f}{each}")


class Grads(NamedTuple):
    num_tokens: int
    totals: list[Tensor]


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim > 1]


def every_token(model: nn.Module, ids: Tensor) -> Grads:
    """The norms that one backward per token gives, and the sum of all gradients."""
    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    losses = nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none") / len(logits)
    weights = matrices(model)
    norms, totals = [], [torch.zeros_like(p) for p in weights]
    for loss in losses:
        loss.backward(retain_graph=True)
        norms.append(torch._foreach_norm([p.grad for p in weights]))
        torch._foreach_add_(totals, [p.grad for p in weights])
        model.zero_grad()
    return Grads(len(norms), totals)
