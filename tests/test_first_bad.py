"""The first value that is not finite is named: planted in a known place, in the forward or in the backward only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pyscan
from pyscan.first_bad import Fault, Orders, complete, first_bad
from pyscan.health import judge

LAYERS = 5
WIDTH = 24
# None, the kind that records in the forward, and the kind that records in the backward, last layer first.
CHECKPOINTING = {"plain": None, "checkpointed": False, "reentrant": True}


class BadBackward(torch.autograd.Function):
    """The identity, whose gradient is not finite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        bad = grad.clone()
        bad.view(-1)[3] = ctx.value
        return bad, None


class Layer(nn.Module):
    """Two weights, defined in the other order than they run in."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.between: Callable[[Tensor], Tensor] = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.between(self.first(x).tanh()))


class Net(nn.Module):
    """Layers, defined from the last to the first, and a head."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleDict({f"layer{i}": Layer() for i in reversed(range(LAYERS))})
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for i in range(LAYERS):
            layer = self.layers[f"layer{i}"]
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


def train(
    net: Net,
    path: Path | None,
    *,
    break_at: int,
    between: Callable[[Tensor], Tensor],
    layer: int,
    clip: bool,
    **options: Any,
) -> pyscan.Scanner:
    """Good steps, a bad one, and one more with whatever weights that left."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    x = torch.randn(6, WIDTH)
    with pyscan.attach(net, path, optimizer=optimizer, **options) as scan:
        for step in range(1, break_at + 2):
            if step == break_at:
                net.layers[f"layer{layer}"].between = between
            net(x).square().mean().backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return scan


def alarms(scan: pyscan.Scanner) -> list[dict[str, Any]]:
    assert not [event for event in scan.events if event["kind"] == "off"]
    return [event for event in scan.events if event["kind"] == "nonfinite"]


def nan_at_one(x: Tensor) -> Tensor:
    return torch.where(torch.arange(x.numel()).reshape(x.shape) == 7, torch.nan, x)


def overflow(x: Tensor) -> Tensor:
    return x * 1e30 * 1e30


FORWARD = {"nan": nan_at_one, "overflow": overflow, "log of 0": lambda x: (x * 0).log()}


@pytest.mark.parametrize("clip", [False, True], ids=["no clip", "clip"])
@pytest.mark.parametrize("kind", CHECKPOINTING)
@pytest.mark.parametrize("fault", FORWARD)
@pytest.mark.parametrize("layer", [1, LAYERS - 1])
def test_a_bad_activation_is_named_where_it_was_made(
    tmp_path: Path, layer: int, fault: str, kind: str, clip: bool
) -> None:
    path = tmp_path / "run.mscan"
    scan = train(Net(CHECKPOINTING[kind]), path, break_at=5, between=FORWARD[fault], layer=layer, clip=clip, block=8)
    (event,) = alarms(scan)
    assert event["step"] == 5
    assert event["pass"] == "forward"
    assert event["site"] == f"layers.layer{layer}.second.weight"
    assert event["after"] == f"layers.layer{layer}.first.weight"
    assert event["inputs_finite"] is False
    assert event["values"] == (1 if fault == "nan" else 6 * WIDTH)
    assert [row["step"] for row in event["before"]] == [1, 2, 3, 4]
    assert all(row["act"] > 0 and row["grad"] > 0 and row["act_max"] > 0 for row in event["before"])
    with pyscan.open(path) as run:
        written = [event for event in run.events if event["kind"] == "nonfinite"]
        assert written == [event]
        verdict = judge(run).findings[0]
    assert (verdict.kind, verdict.step, verdict.site) == ("nonfinite", 5, event["site"])
    assert verdict.text == event["text"]


@pytest.mark.parametrize("clip", [False, True], ids=["no clip", "clip"])
@pytest.mark.parametrize("kind", CHECKPOINTING)
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("layer", [1, LAYERS - 1])
def test_a_bad_gradient_is_named_where_it_was_made(
    tmp_path: Path, layer: int, value: float, kind: str, clip: bool
) -> None:
    path = tmp_path / "run.mscan"
    scan = train(
        Net(CHECKPOINTING[kind]),
        path,
        break_at=5,
        between=lambda x: BadBackward.apply(x, value),
        layer=layer,
        clip=clip,
        block=8,
    )
    (event,) = alarms(scan)
    assert (event["step"], event["pass"]) == (5, "backward")
    assert event["site"] == f"layers.layer{layer}.first.weight"
    assert event["after"] == f"layers.layer{layer}.second.weight", "the gradient that came just before was finite"
    assert event["inputs_finite"] is True
    with pyscan.open(path) as run:
        verdict = judge(run).findings[0]
    assert (verdict.kind, verdict.step, verdict.site) == ("nonfinite", 5, event["site"])
    assert verdict.text == event["text"]


def test_clipping_does_not_hide_which_gradient_was_bad() -> None:
    """After clip_grad_norm_ every gradient is NaN; the row was read before it."""
    net = Net()
    scan = train(net, None, break_at=5, between=lambda x: BadBackward.apply(x, torch.nan), layer=1, clip=True, block=0)
    row = scan.rows[4]
    names = [site.name for site in scan.schema.sites]
    bad = {name for name, count in zip(names, row.cells[-len(names) :], strict=True) if count > 0}
    assert bad == {"embed.weight", "layers.layer0.first.weight", "layers.layer0.second.weight"} | {
        "layers.layer1.first.weight"
    }
    assert alarms(scan)[0]["sites"] == 4


def test_large_finite_values_raise_no_alarm() -> None:
    net = Net()
    for layer in net.layers.values():
        layer.between = lambda x: x * 1e20
        layer.second.register_forward_hook(lambda module, args, out: out * 1e-20)
    with pyscan.attach(net) as scan:
        for _ in range(20):
            (net(torch.randn(6, WIDTH)).square().mean() * 1e20).backward()
            scan.step(loss=1e20)
            net.zero_grad()
    assert {event["kind"] for event in scan.events} == {"attached", "execution_order"}, scan.events
    stats = scan.latest()["param_stats"]["layers.layer1.second.weight"]
    assert stats["activation_norm"] > 1e19
    assert stats["grad_norm"] > 1e18


def test_a_bad_batch_has_nothing_before_it() -> None:
    net = Net()
    x = torch.randn(6, WIDTH)
    x[2, 2] = torch.inf
    with pyscan.attach(net) as scan:
        net(x).sum().backward()
        scan.step()
    (event,) = alarms(scan)
    assert (event["site"], event["after"], event["step"]) == ("embed.weight", None, 1)
    assert "look at the batch" in event["text"]


def test_a_bad_loss_with_good_activations_is_blamed_on_the_loss() -> None:
    net = Net()
    with pyscan.attach(net) as scan:
        loss = (net(torch.randn(6, WIDTH)) * 0).log().sum()
        loss.backward()
        scan.step(loss=loss.item())
    (event,) = alarms(scan)
    assert (event["site"], event["pass"], event["loss_finite"]) == ("head.weight", "backward", False)
    assert "made in the loss" in event["text"]


def test_a_bad_loss_that_was_not_backpropagated_is_told_too() -> None:
    net = Net()
    with pyscan.attach(net) as scan:
        net(torch.randn(6, WIDTH)).sum().backward()
        scan.step(loss=float("inf"))
    (event,) = alarms(scan)
    assert (event["site"], event["pass"], event["after"]) == (None, "loss", "head.weight")


def test_a_generate_before_the_step_does_not_change_the_order() -> None:
    """A partial forward without gradients meets the head first; the training forward counts."""
    net = Net()
    with pyscan.attach(net) as scan:
        with torch.no_grad():
            net.head(torch.randn(2, WIDTH))
        net.layers["layer1"].between = nan_at_one
        net(torch.randn(6, WIDTH)).sum().backward()
        scan.step()
    assert alarms(scan)[0]["site"] == "layers.layer1.second.weight"


def test_the_order_is_announced_once_and_complete() -> None:
    net = Net()
    scan = train(net, None, break_at=3, between=lambda x: x, layer=0, clip=False)
    (order,) = [event for event in scan.events if event["kind"] == "execution_order"]
    names = [site.name for site in scan.schema.sites]
    forward = [names[i] for i in order["forward"]]
    inner = [f"layers.layer{i}.{part}.weight" for i in range(LAYERS) for part in ("first", "second")]
    assert forward == ["embed.weight", *inner, "head.weight"]
    assert [names[i] for i in order["backward"]] == forward[::-1]


@pytest.mark.parametrize(("patience", "fires"), [(16, False), (5, True)])
def test_a_skipped_step_of_a_scaler_is_no_alarm_until_it_lasts(patience: int, fires: bool) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=10_000)
    with pyscan.attach(net, optimizer=optimizer, watch=pyscan.Watch(patience=patience)) as scan:
        for _ in range(30):
            scaler.scale(net(torch.randn(6, WIDTH)).square().mean() * 64).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    skipped = sum(row.flags & 1 for row in scan.rows)
    assert 5 <= skipped < 16, "the scaler finds its scale"
    assert [event["step"] for event in alarms(scan)] == ([patience] if fires else [])


def test_a_forward_fault_comes_before_a_backward_one_whatever_the_counts() -> None:
    act, grad = np.array([0.0, 0, 1]), np.array([5.0, 5, 5])
    assert first_bad(act, grad, Orders()) == Fault("forward", 2, 1, False, 1, 1)
    assert first_bad(act * 0, grad, Orders([0, 1, 2], [1, 2, 0])) == Fault("backward", 1, None, True, 5, 3)
    assert first_bad(act * 0, grad * 0, Orders()) is None
    unseen = np.array([-1.0, 0, -1])
    assert first_bad(unseen, np.array([-1.0, 0, 2]), Orders([1], [1, 2])) == Fault("backward", 2, 1, None, 2, 1)


def test_sites_the_order_leaves_out_follow_the_one_defined_before_them() -> None:
    assert complete([], 3) == [0, 1, 2]
    assert complete([3, 1], 6) == [0, 3, 4, 5, 1, 2]
    assert complete([0, 1, 2], 3) == [0, 1, 2]
    assert complete([], 0) == []
