"""Every cause of a missing, zero or bad gradient, provoked and named; and healthy models, of which nothing is said."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pyscan
from pyscan.flow import FlowReport
from pyscan.sites import parameters_of
from tests import families
from tests.test_flow import everything, same
from tests.test_scanner import batch, llama

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))


def check(model: nn.Module, loss: Tensor | None = None, **options: Any) -> FlowReport:
    return pyscan.check_grad_flow(model, loss, verbose=False, **options)


def kinds(report: FlowReport) -> dict[str, str]:
    return {name: cause.kind for name, cause in report.causes.items()}


class Net(nn.Module):
    """Two layers; `forward` is the business of the test."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 1)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x))).square().mean()


FIRST = ["first.weight", "first.bias"]


def test_a_healthy_model_has_no_causes() -> None:
    assert check(Net(), batch=X).causes == {}


def test_frozen() -> None:
    model = Net()
    model.first.requires_grad_(False)
    report = check(model, model(X))
    assert report["none"] == FIRST
    assert {str(cause) for cause in report.causes.values()} == {"frozen (requires_grad=False)"}
    assert report.unexpected == []


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bnb-4bit", "4-bit (bitsandbytes Params4bit, stored 512x1 uint8): it has no gradient"),
        ("bnb-8bit", "8-bit (bitsandbytes Int8Params, stored 32x32 int8): it has no gradient"),
        ("torchao-int8", "quantised (torchao Int8Tensor, stored 32x32): it has no gradient"),
    ],
)
def test_quantised_and_of_which_kind(name: str, text: str) -> None:
    family = families.build(name)
    report = check(family.model, family.loss())
    causes = {name: cause for name, cause in report.causes.items() if cause.kind == "quantised"}
    assert list(causes) == report["none"]
    assert len(causes) == 14, "the seven matrices of both layers"
    assert causes["model.layers.0.self_attn.q_proj.weight"].text.startswith(text)


def test_integers_have_no_gradient() -> None:
    model = Net()
    model.codes = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    assert check(model, model(X)).causes["codes"].text == "stored as torch.int8: integers have no gradient"


def test_the_loss_itself_is_zero() -> None:
    model = Net()
    report = check(model, F.relu(-1 - model(X)))
    assert report["zero"] == list(report.stats)
    assert {str(cause) for cause in report.causes.values()} == {"the loss itself is 0, and so is every gradient"}


def test_the_loss_is_constant() -> None:
    model = Net()
    report = check(model, model(X).clamp(min=5))
    assert report["zero"] == list(report.stats)
    assert {cause.text[:35] for cause in report.causes.values()} == {"the loss is constant here (5): its "}


def test_the_loss_has_no_graph() -> None:
    model = Net()
    with torch.no_grad():
        report = check(model, model(X))
    assert report["none"] == list(report.stats)
    assert set(kinds(report).values()) == {"loss_constant"}
    assert "has no graph: computed under no_grad, as generate() does, or detached" in report.causes["first.bias"].text


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_loss_is_not_finite(value: float) -> None:
    model = Net()
    report = check(model, model(X) * value)
    assert len(report["nan"] + report["inf"]) == 4
    assert {cause.text.split(":")[0] for cause in report.causes.values()} == {f"the loss itself is {value}"}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_labels_masked(reduction: str) -> None:
    model, labels = nn.Linear(6, 3), torch.full((4,), -100)
    report = check(model, F.cross_entropy(model(X), labels, reduction=reduction))
    assert report["zero"] == ["weight", "bias"]
    assert {cause.text[:32] for cause in report.causes.values()} == {"all 4 labels are masked (-100): "}
    labels[0] = 1
    assert check(model, F.cross_entropy(model(X), labels)).causes == {}


def test_all_labels_masked_in_a_language_model() -> None:
    family = llama()
    data = {**batch(0), "labels": torch.full((2, 8), -100)}
    assert set(kinds(check(family.model, batch=data)).values()) == {"labels_masked"}


def lora(**options: Any) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], **options)
    return peft.get_peft_model(llama().model, config)


def test_the_first_lora_factor_is_zero_at_step_1_and_no_longer_at_step_2() -> None:
    model = lora()
    report = check(model, batch=batch(0))
    zero = set(report["zero"])
    assert len(zero) == 3
    assert {kinds(report)[name] for name in zero} == {"lora_first_step"}
    name = next(name for name in zero if "layers.0" in name)
    assert name.endswith("lora_A.default.weight")
    assert report.causes[name].text == f"expected at step 1: its partner {name.replace('_A', '_B')!r} is still zero"
    assert report.unexpected == []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    model(**batch(0)).loss.backward()
    optimizer.step()
    assert check(model, batch=batch(0))["zero"] == []


def test_a_lora_factor_that_is_zero_for_another_reason_is_not_expected() -> None:
    model = nn.Module()
    model.lora_A, model.lora_B = nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)
    loss = model.lora_B(model.lora_A(X) * 0).sum() + 1
    causes = check(model, loss).causes
    assert {name: cause.kind for name, cause in causes.items()} == dict.fromkeys(
        ["lora_A.weight", "lora_B.weight"], "loss_constant"
    )


class Experts(nn.Module):
    """Experts that are modules of their own; `how` the one without tokens is left out."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1)) for _ in range(3))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.experts[0](x[:2]), self.experts[1](x[2:])]
        if self.how == "called with no rows":
            parts.append(self.experts[2](x[:0]))
        return torch.cat(parts).square().mean()


@pytest.mark.parametrize("how", ["not called", "called with no rows"])
def test_an_expert_without_tokens(how: str) -> None:
    model = Experts(how)
    report = check(model, model(X))
    assert report["none" if how == "not called" else "zero"] == [n for n in report.stats if n.startswith("experts.2.")]
    assert len(report.causes) == 4
    assert set(kinds(report).values()) == {"expert_without_tokens"}
    assert report.unexpected == []


@pytest.mark.parametrize("kernel", ["grouped_mm", "batched_mm", "eager"])
def test_a_fused_expert_without_tokens_is_named_by_its_number(kernel: str) -> None:
    family = families.build(f"mixtral-{kernel}")
    gate = family.model.model.layers[1].mlp.gate
    hook = gate.register_forward_pre_hook(lambda m, args: (args[0].abs() + 1,))
    with torch.no_grad():
        gate.weight[:] = torch.tensor([1.0, 1.0, -1.0, 0.5])[:, None]
    report = check(family.model, family.loss())
    hook.remove()
    place = "model.layers.1.mlp.experts"
    mine = [name for name in report.causes if name.startswith(place)]
    assert mine == [f"{place}.{w}[{e}]" for w in ("gate_up_proj", "down_proj") for e in (2, 3)]
    assert {kinds(report)[name] for name in mine} == {"expert_without_tokens"}
    assert f"{place}.gate_up_proj" in report["ok"]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("given", ["loss", "batch"])
def test_checkpointing_without_input_gradients_in_transformers(given: str) -> None:
    model = llama().model.train()
    model.model.embed_tokens.requires_grad_(False)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.disable_input_require_grads()
    report = check(model, model(**batch(0)).loss) if given == "loss" else check(model, batch=batch(0))
    layers = [name for name in report.stats if ".layers." in name]
    assert report["none"] == ["model.embed_tokens.weight", *layers]
    assert {kinds(report)[name] for name in layers} == {"checkpoint_without_input_grads"}
    model.enable_input_require_grads()
    assert check(model, model(**batch(0)).loss)["none"] == ["model.embed_tokens.weight"]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpointing_without_input_gradients_in_a_model_of_the_users_own() -> None:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(checkpoint(self.first, x, use_reentrant=True)).square().mean()

    model = Checkpointed()
    report = check(model, batch=X)
    assert kinds(report) == dict.fromkeys(FIRST, "checkpoint_without_input_grads")
    assert check(model, batch=X.clone().requires_grad_()).causes == {}


@pytest.mark.parametrize("kind", ["fp16 model", "autocast"])
def test_underflow_in_fp16_and_the_scale_that_ends_it(kind: str) -> None:
    model = Net()
    if kind == "fp16 model":
        model.half()

        def loss(scale: float = 1.0) -> Tensor:
            return model(X.half()) * 6e-8 * scale
    else:

        def loss(scale: float = 1.0) -> Tensor:
            with torch.autocast("cpu", torch.float16):
                return model.second(model.between(model.first(X))).float().square().mean() * 1e-9 * scale

    report = check(model, loss())
    zero = [name for name in report["zero"] if name.endswith("weight")]
    assert "first.weight" in zero
    for name in zero:
        assert kinds(report)[name] == "underflow"
    scale = float(report.causes["first.weight"].text.rpartition("init_scale=")[2].rstrip(")"))
    assert math.log2(scale).is_integer()
    assert "first.weight" in check(model, loss(scale))["ok"]
    tiny = 2.0**-14
    assert tiny / 2 <= max(map(abs, check(model, loss(scale)).stats["first.weight"][:2])) <= 4 * tiny


def test_overflow_in_fp16() -> None:
    model = Net().half()
    report = check(model, (model(X.half()).float() * 2.0**30))
    assert report["inf"] or report["nan"]
    assert set(kinds(report).values()) == {"overflow"}


def test_made_in_the_backward() -> None:
    model = Net(lambda x: x + (x * 0).sqrt())
    report = check(model, batch=X)
    assert report["nan"] == FIRST
    assert set(kinds(report).values()) == {"backward_not_finite"}


def test_a_weight_that_is_bad_itself() -> None:
    model = Net()
    with torch.no_grad():
        model.first.weight[0, 0] = math.nan
    assert check(model, model(X)).causes["first.weight"].kind == "weight_not_finite"


class Cut(Net):
    """The first layer is cut off from the loss in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.inner = nn.Identity()
        self.inner.register_forward_hook(lambda m, args, out: out.detach() if how == "hook" else out)

    def forward(self, x: Tensor) -> Tensor:
        ways: dict[str, Callable[[], Tensor]] = {
            "detach": lambda: self.first(x).tanh().detach(),
            "data": lambda: self.first(x).tanh().data,
            "detached weight": lambda: F.linear(x, self.first.weight.detach(), self.first.bias.data),
            "hook": lambda: self.inner(self.first(x).tanh()),
            "argmax": lambda: F.one_hot(self.first(x).argmax(-1), 5).float(),
            "unused": lambda: (self.first(x), x[:, :5])[1],
            "not called": lambda: x[:, :5],
            "no_grad": lambda: torch.no_grad()(self.first)(x),
        }
        return self.second(ways[self.how]()).square().mean()


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("detach", "used only behind detach()"),
        ("data", "used only behind detach()"),
        ("detached weight", "used only behind detach()"),
        ("hook", "used only behind detach() in 'inner'"),
        ("argmax", "used only behind argmax, which has no gradient,"),
        ("no_grad", "used only behind no_grad in 'first'"),
        ("unused", "used, but what is computed with it does not reach the loss"),
        ("not called", "never called: 'first' takes no part in the forward"),
    ],
)
def test_a_layer_that_is_cut_off(how: str, text: str) -> None:
    model = Cut(how)
    report = check(model, batch=X)
    assert report["none"] == FIRST
    assert {str(cause) for cause in report.causes.values()} == {text}
    without = check(model, model(X))
    assert {str(cause) for cause in without.causes.values()} == {"not connected to the loss; pass batch= to learn why"}
    both = check(model, model(X), batch=X)
    assert {str(cause) for cause in both.causes.values()} == {text}


def test_a_parameter_that_its_module_does_not_touch() -> None:
    model = Net()
    model.first.extra = nn.Parameter(torch.zeros(3))
    text = check(model, batch=X).causes["first.extra"].text
    assert text == "never used: 'first' is called, but does not touch it"


def test_an_unused_pooler_is_expected() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(**{**families.TEXT, "hidden_dropout_prob": 0.0})
    model = transformers.BertModel(config)
    ids = families._ids()
    report = check(model, batch=lambda: model(ids).last_hidden_state.square().mean())
    assert list(report.causes) == ["pooler.dense.weight", "pooler.dense.bias"]
    assert set(kinds(report).values()) == {"not_in_loss"}
    assert report.unexpected == []


@pytest.mark.parametrize("function", [torch.relu, F.relu, F.relu_, nn.ReLU()])
def test_a_dead_relu_in_front_of_a_layer_and_behind_one(function: Callable[[Tensor], Tensor]) -> None:
    model = Net(lambda x: function(x - 100))
    report = check(model, batch=X)
    assert report["zero"] == [*FIRST, "second.weight"]
    assert report["ok"] == ["second.bias"]
    place = "relu_" if function is F.relu_ else "relu"
    assert report.causes["second.weight"].text.startswith(f"dead activation: its input is all zero: {place}")
    for name in FIRST:
        text = f"dead activation: no gradient comes back through {place}"
        assert report.causes[name].text.startswith(text)
        assert report.causes[name].text.endswith("which gives nothing but zeros")
    assert check(model, model(X)).causes["first.bias"].text == "the gradient is exactly zero; pass batch= to learn why"


def test_a_dead_module_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1))
    nn.init.constant_(model[0].bias, -100)
    report = check(model, batch=lambda: model(X).square().mean())
    assert (
        report.causes["2.weight"].text == "dead activation: its input is all zero: relu in '1' gives nothing but zeros"
    )
    assert "through relu in '1', which gives nothing but zeros" in report.causes["0.weight"].text


def test_a_saturated_activation() -> None:
    model = Net(lambda x: torch.sigmoid(x + 200))
    report = check(model, batch=X)
    assert report["zero"] == FIRST
    text = "dead activation: no gradient comes back through sigmoid, saturated"
    assert {str(report.causes[name]) for name in FIRST} == {text}


def test_a_weight_that_is_still_zero_further_on_is_expected() -> None:
    model = Net()
    nn.init.zeros_(model.second.weight)
    nn.init.ones_(model.second.bias)
    report = check(model, batch=X)
    assert report["zero"] == FIRST
    assert {kinds(report)[name] for name in FIRST} == {"zero_weight"}
    assert "passes 'second.weight', which is still all zero" in report.causes["first.bias"].text
    assert report.unexpected == []


@pytest.mark.parametrize(
    ("how", "kind"), [("detach", "detached"), ("not called", "never_called"), ("no_grad", "never_called")]
)
def test_a_scanner_has_seen_why(how: str, kind: str) -> None:
    model = Cut(how)
    with pyscan.attach(model) as scan:
        loss = model(X)
        loss.backward()
        scan.step()
        assert kinds(check(model)) == dict.fromkeys(FIRST, kind)
        assert kinds(check(model, model(X))) == dict.fromkeys(FIRST, kind)
    assert set(kinds(check(model)).values()) == {"unknown"}, "a closed scanner is not asked"


def test_a_scanner_has_seen_a_dead_input() -> None:
    model = Net(lambda x: F.relu(x - 100))
    with pyscan.attach(model) as scan:
        model(X).backward()
        scan.step()
        causes = check(model).causes
    assert causes["second.weight"].text == "dead activation: its input was all zero in the last step"


HEALTHY = {"frozen", "quantised", "expert_without_tokens"}


def healthy(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    family = families.FAMILIES[name]()
    family.model.train()
    report = check(family.model, batch=family.batch)
    assert report.unexpected == []
    assert report["zero"] + report["nan"] + report["inf"] == []
    assert set(kinds(report).values()) <= HEALTHY
    trainable = {n for n, p in parameters_of(family.model) if p.requires_grad}
    assert set(report["ok"]) == trainable
    init = pyscan.check_init(family.model, family.batch, verbose=False)
    assert init.findings == []
    assert pyscan.trace_nonfinite(family.model, family.batch) is None


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", families.FAMILIES)
def test_nothing_is_said_of_healthy_models(name: str) -> None:
    healthy(name, 0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", families.FAMILIES)
def test_nothing_is_said_of_healthy_models_of_ten_seeds(name: str) -> None:
    for seed in range(1, 10):
        healthy(name, seed)


class Everywhere(Cut):
    """Cut off, and with what a tape could leave behind: a weight cast to its own type, a buffer, dropout."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        noisy = F.dropout(self.norm(x) * self.norm.weight.to(torch.float32), 0.5)
        return super().forward(noisy) + noisy.square().mean()


@pytest.mark.parametrize("how", ["detach", "no_grad", "not called"])
def test_looking_for_the_cause_leaves_everything_as_it_was(how: str) -> None:
    model = Everywhere(how)
    model(X).backward()
    before = everything(model)
    for given in ({"batch": X}, {"loss": model(X), "batch": X}):
        torch.set_rng_state(before["torch"])
        before |= {key: value for key, value in everything(model).items() if "buffers" in key}
        assert check(model, **given)["none"] == FIRST
        after = everything(model)
        assert not [key for key in before if not same(before[key], after[key])]
    assert "apply" not in vars(torch.utils.checkpoint.CheckpointFunction)
