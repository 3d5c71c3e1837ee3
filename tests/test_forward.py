"""What is taken from the model's own forward: loss and number of tokens, by the quick way and by the careful one."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyscan

IDS = torch.arange(6).reshape(2, 3)


class Net(nn.Module):
    """Its loss is `loss`, whatever the ids; `form` says what it returns."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 4)
        self.form = form
        self.last_input: Any = None

    def forward(
        self,
        input_ids: Tensor,
        loss: float = 1.0,
        attention_mask: Tensor | None = None,
        num_items_in_batch: int | None = None,
    ) -> Any:
        x = self.embed(input_ids) if not input_ids.is_floating_point() else input_ids
        x = x * 2
        self.last_input = weakref.ref(x)
        total = self.head(x).sum()
        value = total - total.detach() + loss
        if self.form == "dict":
            return {"loss": value.double(), "logits": x.detach().clone()}
        return SimpleNamespace(loss=value.bfloat16() if self.form == "bfloat16" else value)


def rows(net: Net, calls: list[tuple[tuple[Any, ...], dict[str, Any]]], **options: Any) -> list[Any]:
    """(loss, tokens) of three steps, each of these calls of the model."""
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    with pyscan.attach(net, optimizer=optimizer, **options) as scan:
        for _ in range(3):
            for args, kwargs in calls:
                out = net(*args, **kwargs)
                (out["loss"] if isinstance(out, dict) else out.loss).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not [event for event in scan.events if event["kind"] == "off"]
    return [(row.loss, row.tokens) for row in scan.rows]


# `mask` names a keyword that nobody gives: nothing changes but the way.
@pytest.mark.parametrize("options", [{}, {"mask": "attention_mask"}], ids=["quick", "careful"])
@pytest.mark.parametrize("form", ["object", "dict", "bfloat16"])
@pytest.mark.parametrize(
    ("calls", "wanted"),
    [
        ([((IDS,), {"loss": 2.0})], (2.0, 6)),
        ([((), {"input_ids": IDS.int(), "loss": 2.0})], (2.0, 6)),
        ([((IDS,), {"loss": 2.0}), ((IDS[:1],), {"loss": 4.0})], (3.0, 9)),
        # A model that is told the items of the whole step returns shares of the loss.
        ([((IDS,), {"loss": 2.0, "num_items_in_batch": 9})] * 2, (4.0, 12)),
        ([((IDS,), {"loss": 2.0, "num_items_in_batch": None})] * 2, (2.0, 12)),
        ([((torch.ones(2, 3, 4),), {"loss": 2.0})], (2.0, None)),
    ],
    ids=["positional", "keyword", "two forwards", "shares", "no shares", "no ids"],
)
def test_both_ways_take_the_same_loss_and_tokens(
    form: str, calls: list[Any], wanted: tuple[float, int | None], options: dict[str, Any]
) -> None:
    assert rows(Net(form), calls, **options) == [wanted] * 3


@pytest.mark.parametrize("form", ["object", "dict"])
def test_the_quick_way_keeps_no_input_after_the_forward(form: str) -> None:
    net = Net(form).requires_grad_(False)  # frozen: autograd keeps none either
    net.embed.requires_grad_(True)
    optimizer = torch.optim.SGD(net.embed.parameters(), 0.0)
    gc.disable()
    try:
        with pyscan.attach(net, optimizer=optimizer):
            for _ in range(3):
                out = net(IDS)
                assert net.last_input() is None
                (out["loss"] if isinstance(out, dict) else out.loss).backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        gc.enable()


def test_forwards_without_gradients_count_for_nothing() -> None:
    net = Net("object")
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    with pyscan.attach(net, optimizer=optimizer) as scan:
        for _ in range(3):
            with torch.no_grad():
                net(IDS, loss=50.0)
            net(IDS, loss=2.0).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [(row.loss, row.tokens) for row in scan.rows] == [(2.0, 6)] * 3


class Interrupted:
    """What a model returns whose loss is computed when somebody asks for it, and the user presses Ctrl-C meanwhile."""

    num_asked = 0

    @property
    def loss(self) -> Tensor:
        Interrupted.num_asked += 1
        if Interrupted.num_asked == 2:
            raise KeyboardInterrupt
        return torch.ones(())


def test_an_interrupt_while_the_output_is_looked_at_reaches_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net("object")
    monkeypatch.setattr(Interrupted, "num_asked", 0)
    with pyscan.attach(net) as scan:
        monkeypatch.setattr(Net, "forward", lambda self, ids: (self.head(self.embed(ids)), Interrupted())[1])
        net(IDS)
        with pytest.raises(KeyboardInterrupt):
            net(IDS)
        assert Interrupted.num_asked == 2, "asked once, not again by the careful way"
        net(IDS)
        assert not [event for event in scan.events if event["kind"] == "off"]
