"""Whole training steps through the GPU path on the fake device: the values of the CPU engine, nothing out of order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pyscan
from pyscan import groups, scanner
from pyscan.device_buffer import DeviceBuffer
from pyscan.latest import Row
from pyscan.writer import SKIPPED
from tests.streams.fake_device import FakeDevice
from tests.streams.reducers import RecordingReducer, StandInReducer, recording

Step = Callable[[nn.Module, torch.optim.Optimizer, int], None]

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"vocab_size": 80, "max_position_embeddings": 32, "head_dim": 32}


def llama(num_layers: int = 2, **options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=num_layers, **SIZES, **options))


def experts() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=2, **SIZES, **extra))


def checkpointed(reentrant: bool) -> nn.Module:
    model = llama()
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    return model


def frozen() -> nn.Module:
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("up_proj" in name or "q_proj" in name)
    return model


def batch(seed: int, rows: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 80, (rows, 9), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def one_backward(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    model(**batch(step)).loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()


def three_backwards(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    for micro in range(3):
        model(**batch(10 * step + micro, rows=1 + micro % 2)).loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


class Scaled:
    """Steps with a GradScaler, one of which it skips."""

    def __init__(self, *, unscales: bool = False) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.unscales = unscales

    def __call__(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        self.scaler.scale(model(**batch(step)).loss * (float("inf") if step == 2 else 1)).backward()
        if self.unscales:
            self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        self.scaler.step(optimizer)
        self.scaler.update()
        optimizer.zero_grad()


def masked_batches(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    inputs = batch(step)
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, 5 - step :] = 0
    model(**inputs, attention_mask=mask).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


class Outcome:
    """What a scan of some steps left behind."""

    def __init__(self, model: nn.Module, scan: pyscan.Scanner, launches: list[int]) -> None:
        self.rows: list[Row] = scan.rows
        self.events = scan.events
        self.parameters = [p.detach().clone() for p in model.parameters()]
        self.launches = launches  # of kernels, by step
        self.scan = scan


@contextmanager
def on_fake(monkeypatch: pytest.MonkeyPatch, device: FakeDevice, reducer: Any) -> Iterator[list[RecordingReducer]]:
    """Models are scanned as if they were on a GPU, by a reducer of this kind."""
    made: list[RecordingReducer] = []
    make = recording(device, reducer)

    def make_reducer(*args: Any) -> RecordingReducer:
        made.append(make(*args))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(
            scanner, "make_buffer", lambda sites, schema, _: DeviceBuffer(sites, schema, device, make_reducer)
        )
        yield made


def train(model: nn.Module, step: Step, num_steps: int, **options: Any) -> Outcome:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    scan = pyscan.attach(model, optimizer=optimizer, **options)
    for number in range(num_steps):
        step(model, optimizer, number)
    scan.close()
    return Outcome(model, scan, [])


def train_on_fake(
    monkeypatch: pytest.MonkeyPatch,
    device: FakeDevice,
    model: nn.Module,
    step: Step,
    num_steps: int,
    reducer: Any = StandInReducer,
    **options: Any,
) -> Outcome:
    launches: list[int] = []
    with on_fake(monkeypatch, device, reducer) as made, device.recording():

        def counted(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
            before = made[0].num_launches
            with device.step():
                step(model, optimizer, number)
            launches.append(made[0].num_launches - before)

        outcome = train(model, counted, num_steps, **options)
    outcome.launches = launches
    return outcome


def check_nobody_waits(device: FakeDevice) -> None:
    """After the first steps, in one of which the weights that the run started with are judged once."""
    assert not any(device.waits_by_step[4:])


def check(device: FakeDevice, got: Outcome, want: Outcome) -> None:
    assert device.violations == []
    check_nobody_waits(device)
    assert [row.step for row in got.rows] == [row.step for row in want.rows]
    for mine, theirs in zip(got.rows, want.rows, strict=True):
        np.testing.assert_array_equal(mine.cells, theirs.cells)
        assert mine._replace(cells=None) == theirs._replace(cells=None)
    assert [e for e in got.events if e["kind"] != "attached"] == [e for e in want.events if e["kind"] != "attached"]
    assert all(torch.equal(a, b) for a, b in zip(got.parameters, want.parameters, strict=True))


CASES: dict[str, tuple[Callable[[], nn.Module], Step, dict[str, Any]]] = {
    "plain": (llama, one_backward, {}),
    "rows": (llama, one_backward, {"rows": True}),
    "whole tensors": (llama, one_backward, {"block": 0}),
    "tied": (lambda: llama(tie_word_embeddings=True), one_backward, {}),
    "every second": (llama, one_backward, {"every": 2}),
    "accumulation": (llama, three_backwards, {}),
    "checkpointing": (lambda: checkpointed(False), one_backward, {}),
    "reentrant checkpointing": (lambda: checkpointed(True), one_backward, {}),
    "checkpointing with accumulation": (lambda: checkpointed(False), three_backwards, {}),
    "experts": (experts, one_backward, {}),
    "experts with accumulation": (experts, three_backwards, {}),
    "frozen": (frozen, one_backward, {}),
    "bfloat16": (lambda: llama().bfloat16(), one_backward, {}),
}


@pytest.mark.parametrize("group_bytes", [1 << 30, 20000], ids=["one", "many"])
@pytest.mark.parametrize("case", CASES)
def test_every_site_has_the_values_of_the_cpu_engine(
    monkeypatch: pytest.MonkeyPatch, case: str, group_bytes: int
) -> None:
    monkeypatch.setattr(groups, "MIN_GROUP_BYTES", group_bytes)
    make, step, options = CASES[case]
    device = FakeDevice(lag=300)
    want = train(make(), step, 6, **options)
    got = train_on_fake(monkeypatch, device, make(), step, 6, **options)
    check(device, got, want)
    assert not any((row.cells < 0).all() for row in got.rows)


@pytest.mark.parametrize("unscales", [False, True])
def test_the_loss_scale_and_the_verdict_of_the_scaler_come_with_the_row(
    monkeypatch: pytest.MonkeyPatch, unscales: bool
) -> None:
    device = FakeDevice(lag=300)
    want = train(llama(), Scaled(unscales=unscales), 5)
    got = train_on_fake(monkeypatch, device, llama(), Scaled(unscales=unscales), 5)
    check(device, got, want)
    assert [row.flags & SKIPPED for row in got.rows] == [0, 0, SKIPPED, 0, 0]
    assert [row.grad_scale for row in got.rows] == [1024.0] * 3 + [512.0] * 2


def test_masked_rows_do_not_count_and_nobody_waits_for_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(lag=300)
    want = train(llama(), masked_batches, 5, mask="attention_mask")
    got = train_on_fake(monkeypatch, device, llama(), masked_batches, 5, mask="attention_mask")
    assert device.violations == []
    check_nobody_waits(device)
    for mine, theirs in zip(got.rows, want.rows, strict=True):
        np.testing.assert_allclose(mine.cells, theirs.cells, rtol=1e-6)
        assert mine._replace(cells=None) == theirs._replace(cells=None)
    assert [row.tokens for row in got.rows] == [14, 13, 12, 11, 10]


def test_latest_is_one_step_behind_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(lag=100)
    with on_fake(monkeypatch, device, StandInReducer), device.recording():
        model = llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scan = pyscan.attach(model, optimizer=optimizer)
        seen = []
        for number in range(4):
            one_backward(model, optimizer, number)
            seen.append(scan.latest()["step"])
        scan.close()
    assert seen == [None, 1, 2, 3]
    assert scan.latest()["step"] == 4


def test_rows_under_way_are_kept_when_the_model_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def grow(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        one_backward(model, optimizer, step)
        if step == 1:
            model.resize_token_embeddings(90)

    device = FakeDevice(lag=300)
    want = train(llama(), grow, 6)
    got = train_on_fake(monkeypatch, device, llama(), grow, 6)
    device.waits_by_step.clear()  # the sites are found, and judged, anew
    # The order of sites is that of the step in which the row arrives: here that of the changed model.
    for outcome in (got, want):
        outcome.events = [event for event in outcome.events if event["kind"] != "execution_order"]
    check(device, got, want)


def test_a_model_of_28_layers_needs_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    got = train_on_fake(monkeypatch, device, llama(28), one_backward, 3)
    assert device.violations == []
    assert max(got.launches) <= 8


def test_nothing_is_allocated_after_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(lag=300)
    monkeypatch.setattr(groups, "MIN_GROUP_BYTES", 20000)
    train_on_fake(monkeypatch, device, llama(), one_backward, 8)
    assert device.violations == []
    by_step = device.allocations_by_step
    assert sum(map(len, by_step[:3])) > 0, "the first steps do allocate, or nothing is counted"
    assert by_step[4:] == [[], [], [], []]
    check_nobody_waits(device)
