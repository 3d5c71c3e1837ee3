"""trace_nonfinite names the operation, module and pass that made the first bad value; masks are no culprits."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import pyscan
from tests.test_flow import MODELS, everything, same
from tests.test_scanner import CHECKPOINTING, batch, checkpointed, llama

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))


def injected(layer: int, change: Callable[[Tensor], Tensor], reentrant: bool | None) -> nn.Module:
    model = checkpointed(llama(num_hidden_layers=3).model.train(), reentrant)
    model.model.layers[layer].mlp.up_proj.register_forward_hook(lambda m, args, out: change(out))
    return model


class Large(torch.autograd.Function):
    """Zero in the forward; its gradient is larger than float32 can hold."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y * 0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return (grad.sign() * 1e30) * 1e30 + grad


THIRD = torch.tensor(2)
FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], str, str, str]] = {
    "a NaN in the forward": (lambda y: y * math.nan, "nan", "aten.mul.Tensor", "forward"),
    "0 / 0 in the forward": (lambda y: (y - y) / (y - y), "nan", "aten.div.Tensor", "forward"),
    "an overflow in the forward": (lambda y: (y * 1e30) * 1e30, "inf", "aten.mul.Tensor", "forward"),
    "a NaN in one row": (lambda y: y.index_fill(1, THIRD, math.nan), "nan", "aten.index_fill.int_Scalar", "forward"),
    "a root of zero in the backward": (lambda y: y + (y * 0).sqrt(), "nan", "aten.div.Tensor", "backward"),
    "an overflow in the backward": (lambda y: y + Large.apply(y), "inf", "aten.mul.Tensor", "backward"),
}


@pytest.mark.parametrize("reentrant", CHECKPOINTING)
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_bad_value_is_named(fault: str, layer: int, reentrant: bool | None) -> None:
    change, what, op, pass_ = FAULTS[fault]
    found = pyscan.trace_nonfinite(injected(layer, change, reentrant), batch(0))
    assert found is not None
    assert (found.op, found.pass_) == (op, pass_)
    assert found.module == f"model.layers.{layer}.mlp.up_proj"
    assert found.what == what
    assert (found.node != "") == (pass_ == "backward")
    assert ("test_nonfinite.py" in found.where) == (pass_ == "forward")
    assert f"first {found.what}: {op} in 'model.layers.{layer}.mlp.up_proj', {pass_} pass" in str(found)


@pytest.mark.parametrize("reentrant", CHECKPOINTING)
def test_large_finite_values_raise_no_alarm(reentrant: bool | None) -> None:
    assert pyscan.trace_nonfinite(injected(1, lambda y: y * 1e20 * 1e-20, reentrant), batch(0)) is None


def test_the_first_of_two_bad_values_is_named_although_the_second_is_worse() -> None:
    model = injected(0, lambda y: (y * 1e30) * 1e30, None)
    model.lm_head.register_forward_hook(lambda m, args, out: out * math.nan)
    found = pyscan.trace_nonfinite(model, batch(0))
    assert found is not None
    assert found.module == "model.layers.0.mlp.up_proj"


def test_a_bad_value_that_changes_nothing_is_no_alarm() -> None:
    model = nn.Linear(6, 1)

    def loss() -> Tensor:
        y = model(X)
        (y.detach() * math.nan).sum()
        return torch.exp(torch.zeros(1).log() + 0 * y).mean() + y.square().mean()

    assert pyscan.trace_nonfinite(model, loss) is None


class Attends(nn.Module):
    """Attention with a mask of -inf, made in one of the usual ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6)
        self.softmax = nn.Softmax(-1)
        self.register_buffer("causal", torch.full((4, 4), -math.inf).triu(1))

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).mT
        if self.how == "sdpa":
            mask = torch.zeros(4, 4).masked_fill(hidden, -math.inf)
            q = self.query(x)[None, None]
            with sdpa_kernel(SDPBackend.MATH):
                return nn.functional.scaled_dot_product_attention(q, q, q, mask).square().mean()
        ways: dict[str, Callable[[], Tensor]] = {
            "masked_fill": lambda: scores.masked_fill(hidden, -math.inf),
            "masked_fill_": lambda: scores.clone().masked_fill_(hidden, -math.inf),
            "where": lambda: torch.where(hidden, -math.inf, scores),
            "full": lambda: scores + torch.zeros(4, 4).masked_fill(hidden, 1).mul(0) + full(hidden),
            "tensor": lambda: torch.where(hidden, torch.tensor(-math.inf), scores),
            "assignment": lambda: assigned(scores, hidden),
            "buffer": lambda: scores + self.causal + 0 * hidden,
        }
        return (self.softmax(ways[self.how]()) @ x).square().mean()


def full(hidden: Tensor) -> Tensor:
    mask = torch.full(hidden.shape, -math.inf)
    mask[~hidden] = 0
    return mask


def assigned(scores: Tensor, hidden: Tensor) -> Tensor:
    scores = scores.clone()
    scores[hidden] = -math.inf
    return scores


WAYS = ["masked_fill", "masked_fill_", "where", "full", "tensor", "assignment", "buffer", "sdpa"]


@pytest.mark.parametrize("how", WAYS)
def test_a_mask_of_infinities_is_no_culprit(how: str) -> None:
    hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)
    assert pyscan.trace_nonfinite(Attends(how), (X, hidden)) is None


@pytest.mark.parametrize("how", [way for way in WAYS if way not in ("buffer", "sdpa")])
def test_a_row_that_is_masked_as_a_whole_is_blamed_on_the_softmax(how: str) -> None:
    hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)
    hidden[1] = True
    found = pyscan.trace_nonfinite(Attends(how), (X, hidden))
    assert found is not None
    assert (found.what, found.op, found.module) == ("nan", "aten._softmax.default", "softmax")
    assert found.inputs[0][0] == -math.inf


def test_what_was_bad_before_the_step_is_named() -> None:
    model = Attends("masked_fill")
    hidden = torch.zeros(4, 4, dtype=torch.bool)
    found = pyscan.trace_nonfinite(model, {"x": X / 0, "hidden": hidden})
    assert str(found) == "batch 'x' holds inf before the step begins"
    with torch.no_grad():
        model.key.weight[1, 1] = math.inf
    found = pyscan.trace_nonfinite(model, (X, hidden))
    assert str(found) == "parameter 'key.weight' holds inf before the step begins"


def test_a_value_spoiled_in_place_keeps_its_origin() -> None:
    model = nn.Linear(6, 1)

    def loss() -> Tensor:
        y = model(X) * 0
        z = torch.empty(4, 1)
        z.copy_(y / y)
        z.add_(1).mul_(2)
        z[0] = 5
        return (z + y).sum()

    found = pyscan.trace_nonfinite(model, loss)
    assert found is not None
    assert found.op == "aten.div.Tensor"
    assert found.inputs == ((0.0, 0.0), (0.0, 0.0))


def test_overflow_in_half_precision() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1)).half()
    with torch.no_grad():
        model[1].weight.fill_(60000)
    found = pyscan.trace_nonfinite(model, lambda: model(X.half() + 100).float().mean())
    assert found is not None
    assert (found.what, found.module, found.pass_) == ("inf", "1", "forward")


def test_clipping_and_the_optimizer_do_not_hide_it() -> None:
    """One bad gradient spreads to all when it is clipped; the weights from before the step tell which was first."""
    model = injected(1, FAULTS["a root of zero in the backward"][0], None)
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(**batch(0)).loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert all(p.grad.isnan().all() for p in model.parameters())
    optimizer.step()
    model.load_state_dict(weights)
    found = pyscan.trace_nonfinite(model, batch(0))
    assert found is not None
    assert found.module == "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("name", MODELS)
def test_tracing_leaves_everything_as_it_was(name: str) -> None:
    family = MODELS[name]()
    family.loss().backward()
    before: dict[str, Any] = everything(family.model)
    assert pyscan.trace_nonfinite(family.model, family.batch) is None
    pyscan.check_init(family.model, family.batch, verbose=False)
    after = everything(family.model)
    assert not [key for key in before if not same(before[key], after[key])]
