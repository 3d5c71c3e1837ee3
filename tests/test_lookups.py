"""Of the gradient of a large embedding only the looked-up rows are read: where they are all of it, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pyscan
from pyscan import _C, lookups

ROWS, FEATURES = 6000, 48


@pytest.fixture(autouse=True)
def _small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "LARGE_BYTES", 4 * ROWS * FEATURES)


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, FEATURES, **options)
        self.head = nn.Linear(FEATURES, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids)).square().mean()  # type: ignore[no-any-return]


def make_ids(seed: int = 0, count: int = 60) -> Tensor:
    """Some rows more than once, the first and the last among them."""
    drawn = torch.randint(0, ROWS, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.cat([drawn, drawn[:7], torch.tensor([0, ROWS - 1])]).reshape(3, -1)


def check(scan: pyscan.Scanner, grad: Tensor) -> None:
    """The newest row holds the norms of this gradient, in blocks of 16."""
    dense = grad.to_dense().double()
    got = scan.latest()["param_stats"]["embedding.weight"]
    want = [part.norm().item() for part in dense.split(16, 1)]
    assert [block["grad_norm"] for block in got["blocks"]] == pytest.approx(want, rel=1e-5)
    cells = scan.rows[-1].cells
    site = next(i for i, info in enumerate(scan.schema.sites) if info.name == "embedding.weight")
    assert cells[scan.buffer.cells("grad_max", site)].item() == pytest.approx(dense.abs().max().item(), rel=1e-6)


def row_reads(scan: pyscan.Scanner) -> int:
    state = scan._gradients.state
    assert isinstance(state, _C.GradientWatch)
    return state.num_row_reads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}, {"scale_grad_by_freq": True}])
def test_looked_up_rows_are_all_that_is_read(dtype: torch.dtype, options: dict[str, Any]) -> None:
    lookups.LARGE_BYTES = 1
    torch.manual_seed(0)
    model = Model(**options).to(dtype)
    with pyscan.attach(model, block=16) as scan:
        for step in range(3):
            model(make_ids(step)).backward()
            scan.step()
            assert model.embedding.weight.grad is not None
            check(scan, model.embedding.weight.grad)
            model.zero_grad()
        assert row_reads(scan) == 3


def test_a_value_that_is_not_finite_is_seen() -> None:
    model = Model()
    with torch.no_grad():
        model.embedding.weight[ROWS - 1] = torch.inf
    with pyscan.attach(model) as scan:
        model(make_ids()).backward()
        scan.step()
        assert row_reads(scan) == 1
        site = next(i for i, info in enumerate(scan.schema.sites) if info.name == "embedding.weight")
        assert scan.rows[-1].cells[scan.buffer.cells("grad_bad", site)].item() == FEATURES


def twice(model: Model) -> None:
    (model(make_ids(0)) + model(make_ids(1))).backward()


def with_a_penalty(model: Model) -> None:
    (model(make_ids()) + model.embedding.weight.square().sum()).backward()


def with_a_penalty_before(model: Model) -> None:
    """Its gradient comes after that of the lookup, and autograd adds it in the place of that."""
    penalty = model.embedding.weight.square().sum()
    (model(make_ids()) + penalty).backward()


def tied(model: Model) -> None:
    hidden = model.embedding(make_ids())
    (hidden @ model.embedding.weight.T).square().mean().backward()


def with_a_hook_that_adds(model: Model) -> None:
    handles = [model.embedding.weight.register_hook(lambda grad: grad + 1) for _ in range(3)]
    model(make_ids()).backward()
    for handle in handles:
        handle.remove()


def with_a_hook_that_comes_late(model: Model) -> None:
    loss = model(make_ids())
    handles = [model.embedding.weight.register_hook(lambda grad: grad + 1) for _ in range(2)]
    loss.backward()
    for handle in handles:
        handle.remove()


def in_two_backwards(model: Model) -> None:
    model(make_ids(0)).backward()
    model(make_ids(1)).backward()


def with_forwards_before_backwards(model: Model) -> None:
    losses = [model(make_ids(seed)) for seed in range(2)]
    for loss in losses:
        loss.backward()


def only_the_first_of_two_forwards(model: Model) -> None:
    first, _ = [model(make_ids(seed)) for seed in range(2)]
    first.backward()


def on_top_of_zeros(model: Model) -> None:
    model.embedding.weight.grad = torch.zeros_like(model.embedding.weight)
    model(make_ids()).backward()


def on_top_of_ones(model: Model) -> None:
    model.embedding.weight.grad = torch.ones_like(model.embedding.weight)
    model(make_ids()).backward()


def after_gradients_for_somebody_else(model: Model) -> None:
    loss = model(make_ids(0))
    torch.autograd.grad(loss, [model.embedding.weight])
    with_a_penalty(model)


def checkpointed(model: Model) -> None:
    checkpoint(model, make_ids(), use_reentrant=False).backward()


def again_through_the_same_graph(model: Model) -> None:
    loss = model(make_ids())
    loss.backward(retain_graph=True)
    loss.backward()


def with_a_graph_of_its_own(model: Model) -> None:
    model(make_ids()).backward(create_graph=True)


def of_most_rows(model: Model) -> None:
    model(torch.arange(ROWS)).backward()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize(
    "backward",
    [
        twice, with_a_penalty, with_a_penalty_before, tied, with_a_hook_that_adds, with_a_hook_that_comes_late,
        in_two_backwards,
        with_forwards_before_backwards, only_the_first_of_two_forwards, on_top_of_zeros, on_top_of_ones,
        after_gradients_for_somebody_else, checkpointed, again_through_the_same_graph, with_a_graph_of_its_own,
        of_most_rows,
    ],
)  # fmt: skip
def test_whatever_else_is_in_a_gradient_is_recorded(backward: Callable[[Model], None]) -> None:
    torch.manual_seed(0)
    model = Model()
    with pyscan.attach(model, block=16) as scan:
        for _ in range(3):  # from the second step on it is known how many backwards there are
            backward(model)
            scan.step()
            assert model.embedding.weight.grad is not None
            check(scan, model.embedding.weight.grad)
            model.zero_grad()


def test_a_sparse_gradient_and_rows_of_outputs_are_read_as_ever() -> None:
    for options, rows in (({"sparse": True}, False), ({}, True)):
        model = Model(**options)
        with pyscan.attach(model, block=16, rows=rows) as scan:
            model(make_ids()).backward()
            scan.step()
            assert model.embedding.weight.grad is not None
            check(scan, model.embedding.weight.grad)
            assert row_reads(scan) == 0


def test_small_embeddings_and_paused_scans_ask_autograd_for_nothing() -> None:
    lookups.LARGE_BYTES *= 2
    model = Model()
    with pyscan.attach(model, block=16) as scan:
        model(make_ids()).backward()
        scan.step()
        assert row_reads(scan) == 0
    lookups.LARGE_BYTES //= 2
    with pyscan.attach(model, block=16) as scan, scan.paused():
        model(make_ids()).backward()
        scan.step()
        assert row_reads(scan) == 0


def test_gradients_stay_bit_for_bit_and_are_not_copied() -> None:
    torch.manual_seed(0)
    model = Model()
    model(make_ids()).backward()
    assert model.embedding.weight.grad is not None
    plain = model.embedding.weight.grad.clone()
    model.zero_grad()
    made: list[int] = []
    with pyscan.attach(model) as scan:
        out = model.embedding(make_ids())
        out.grad_fn.register_hook(lambda grads, _: made.append(grads[0].data_ptr()))  # type: ignore[union-attr]
        model.head(out).square().mean().backward()
        assert row_reads(scan) == 1
    assert torch.equal(model.embedding.weight.grad, plain)
    assert made == [model.embedding.weight.grad.data_ptr()]
