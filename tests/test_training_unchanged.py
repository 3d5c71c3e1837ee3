"""Training is bit-identical with and without the scanner: losses, gradients, weights, generated tokens."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pyscan
from tests.test_scanner import batch, checkpointed, llama

NUM_STEPS = 20


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> float:
    loss = model(**batch(k)).loss
    loss.backward()
    optimizer.step()
    return loss.item()


def autocast(model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> float:
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch(k)).loss
    loss.backward()
    optimizer.step()
    return loss.item()


class Scaled:
    """fp16 autocast with a GradScaler and one overflow."""

    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> float:
        with torch.autocast("cpu", torch.float16):
            loss = model(**batch(k)).loss
        self.scaler.scale(loss * (float("inf") if k == 7 else 1.0)).backward()
        self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.scaler.step(optimizer)
        self.scaler.update()
        return loss.item()


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, k: int) -> float:
    total = 0.0
    for micro in range(4):
        loss = model(**batch(4 * k + micro)).loss / 4
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return total


LOOPS: dict[str, tuple[Callable[[], Any], Callable[[nn.Module], nn.Module]]] = {
    "plain": (lambda: plain, lambda m: m),
    "checkpointing": (lambda: plain, lambda m: checkpointed(m, False)),
    "reentrant checkpointing": (lambda: plain, lambda m: checkpointed(m, True)),
    "autocast bf16": (lambda: autocast, lambda m: m),
    "fp16 GradScaler with an overflow": (Scaled, lambda m: m),
    "accumulation 4 with clipping": (lambda: accumulated, lambda m: m),
    "compiled": (lambda: plain, lambda m: torch.compile(m, backend="aot_eager")),
}


def train(name: str, scan_path: Any) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    torch.manual_seed(0)
    torch.compiler.reset()
    make_step, wrap = LOOPS[name]
    model = llama(attention_dropout=0.1, eos_token_id=None).model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step, wrapped = make_step(), wrap(model)
    scan = pyscan.attach(wrapped, scan_path, optimizer=optimizer) if scan_path else contextlib.nullcontext()
    losses = []
    torch.manual_seed(1)
    with scan:
        for k in range(NUM_STEPS):
            losses.append(step(wrapped, optimizer, k))
            optimizer.zero_grad()
        model.eval()
        tokens = model.generate(batch(0)["input_ids"], max_new_tokens=8, do_sample=True)
    return losses, {**model.state_dict(), "generated tokens": tokens}, scan


@pytest.mark.parametrize("name", LOOPS)
def test_losses_weights_and_generated_tokens_are_bit_identical(name: str, tmp_path: Any) -> None:
    losses, weights, _ = train(name, None)
    scanned_losses, scanned_weights, scan = train(name, tmp_path / "run.mscan")
    assert losses == scanned_losses
    assert weights.keys() == scanned_weights.keys()
    assert all(torch.equal(weights[key], scanned_weights[key]) for key in weights)
    run = pyscan.open(tmp_path / "run.mscan")
    assert run.steps["step"].tolist() == list(range(1, NUM_STEPS + 1)), "and every step was recorded"
    skipped = [8] if "overflow" in name else []
    assert run.steps["step"][run.steps["flags"] & 1 != 0].tolist() == skipped
    assert not [event for event in scan.events if event["kind"] == "off"]
    assert (run.act("model.layers.1.mlp.down_proj") > 0).all()
