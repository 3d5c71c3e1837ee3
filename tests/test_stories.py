"""Four stories of days spent looking for a cause, rebuilt small: the scanner names it in one line, so does the file.

Gradients that are always 0 (4-bit weights; scanning inside generate(); a loss masked to nothing), and a loss that
explodes although gradients are clipped at every step (a badly initialised head saturates the probabilities).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyscan
from pyscan.cli import main
from tests import families

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def diagnosis(scan: pyscan.Scanner, kind: str) -> dict[str, Any]:
    assert not [event for event in scan.events if event["kind"] == "off"]
    return next(event for event in scan.events if event["kind"] == kind)


def verdict(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit status of `pyscan health`, its first verdict and the sentence under it."""
    capsys.readouterr()
    status = main(["health", str(path)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 40, "one screen"
    return (status, lines[1], lines[2].strip()) if status else (status, lines[0], "")


def test_four_bit_weights_have_no_gradient(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family, path = families.build("bnb-4bit"), tmp_path / "run.mscan"
    with pyscan.attach(family.model, path) as scan:
        for _ in range(3):
            family.loss().backward()
            scan.step()
    text = diagnosis(scan, "note")["text"]
    assert "is 4-bit (bitsandbytes Params4bit" in text
    assert "it has no gradient" in text
    status, title, what = verdict(path, capsys)
    assert status == 1
    assert title.startswith("quantised weights, since step 1")
    assert "14 of 16 weights are quantised (fp4): they have no gradient" in what


def test_four_bit_weights_below_an_adapter_are_as_they_should_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    family, path = families.build("bnb-4bit"), tmp_path / "run.mscan"
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(family.model, config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    with pyscan.attach(model, path, optimizer=optimizer):
        for _ in range(20):
            family.loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert verdict(path, capsys)[0] == 0


def test_generate_records_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family, path = families.build("llama"), tmp_path / "run.mscan"
    with pyscan.attach(family.model, path) as scan:
        for _ in range(2):
            family.model.generate(family.batch["input_ids"], max_new_tokens=3, do_sample=False)
            scan.step()
    assert "generate() and no_grad() record nothing" in diagnosis(scan, "nothing_recorded")["text"]
    status, title, what = verdict(path, capsys)
    assert (status, title) == (1, "nothing recorded, since step 1")
    assert "no forward of this model ran with gradients enabled" in what


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_masked_to_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], reduction: str) -> None:
    family, path = families.build("llama"), tmp_path / "run.mscan"
    batch = {**family.batch, "labels": torch.full_like(family.batch["labels"], -100)}
    if reduction == "sum":
        batch["num_items_in_batch"] = 7
    optimizer = torch.optim.AdamW(family.model.parameters(), 1e-3)
    with pyscan.attach(family.model, path, optimizer=optimizer) as scan:
        for _ in range(3):
            family.model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    event = diagnosis(scan, "no_gradient")
    assert event["step"] == 1
    assert "masked (-100)" in event["text"]
    status, title, what = verdict(path, capsys)
    assert (status, title) == (1, "no gradient, since step 1")
    assert what == f"what  {event['text']}"


class Classifier(nn.Module):
    """A trained trunk that is frozen, and two new networks on top: one gives location and scale of a Cauchy variable,
    the other the probability of each class, P(S > C) = 1/2 + arctan((loc - C) / scale) / pi."""

    def __init__(self, gain: float | None) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.LayerNorm(64))
        self.trunk.requires_grad_(False)
        self.abduction = nn.Linear(64, 33)
        self.action = nn.Linear(32, 5)
        for new in (self.abduction, self.action):
            if gain is None:
                nn.init.normal_(new.weight, std=5.0)
            else:
                nn.init.xavier_uniform_(new.weight, gain=gain)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loc, scale = self.abduction(self.trunk(x)).split([32, 1], dim=-1)
        probability = 0.5 + torch.arctan(self.action(loc) / nn.functional.softplus(scale)) / math.pi
        target = nn.functional.one_hot(labels, 5).float()
        return {"loss": -(target * probability.log() + (1 - target) * (1 - probability).log()).mean()}


def classify(path: Path, gain: float | None) -> tuple[pyscan.Scanner, list[float]]:
    torch.manual_seed(0)
    model = Classifier(gain)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)
    x, labels = torch.randn(64, 32), torch.randint(5, (64,))
    losses = []
    with pyscan.attach(model, path, optimizer=optimizer) as scan:
        for _ in range(20):
            loss = model(x, labels)["loss"]
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return scan, losses


def test_clipping_cannot_stop_a_loss_that_is_infinite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.mscan"
    scan, losses = classify(path, gain=None)
    assert not math.isfinite(losses[0])
    event = diagnosis(scan, "nonfinite")
    assert (event["step"], event["pass"], event["site"]) == (1, "backward", "action.weight")
    assert event["inputs_finite"] is True
    assert "the loss itself is not finite: it is made in the loss" in event["text"]
    status, title, what = verdict(path, capsys)
    assert (status, title) == (1, "not finite, since step 1: action.weight")
    assert what == f"what  {event['text']}"
    assert main(["health", "--json", str(path)]) == 1
    first = json.loads(capsys.readouterr().out)["findings"][0]
    assert "clipping does not help" in first["advice"]


def test_the_same_with_a_modest_initialisation_is_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.mscan"
    _, losses = classify(path, gain=0.1)
    assert losses[-1] < losses[0]
    status, line, _ = verdict(path, capsys)
    assert status == 0, line
    assert line.endswith("healthy in 20 rows, steps 1 to 20")
