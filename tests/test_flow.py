"""check_grad_flow sorts parameters as their gradients say, and leaves a training run bit for bit as it found it."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pyscan
from tests import families
from tests.test_scanner import batch, checkpointed, llama


class Sorted(nn.Module):
    """One parameter for each status."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("ok", "zero", "none", "nan", "inf"):
            setattr(self, name, nn.Parameter(torch.zeros(3)))

    def forward(self, x: Tensor) -> Tensor:
        bad = (self.nan * 0).sqrt().sum() + self.inf.sqrt().sum()
        return (self.ok * x).sum() + (self.zero * 0).sum() + bad + 1


def test_parameters_are_sorted_by_their_gradient() -> None:
    model = Sorted()
    report = pyscan.check_grad_flow(model, model(torch.tensor([1.0, -2.0, 2.0])), verbose=False)
    assert report == {"ok": ["ok"], "zero": ["zero"], "none": ["none"], "nan": ["nan"], "inf": ["inf"]}
    assert list(report) == ["ok", "zero", "none", "nan", "inf"]
    assert report.stats["ok"] == (-2.0, 2.0, 3.0)
    assert report.stats["zero"] == (0.0, 0.0, 0.0)
    assert set(report.causes) == {"zero", "none", "nan", "inf"}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_table_has_a_line_per_parameter_and_totals(capsys: pytest.CaptureFixture[str]) -> None:
    model = Sorted()
    report = pyscan.check_grad_flow(model, model(torch.tensor([1.0, -2.0, 2.0])))
    printed = capsys.readouterr().out
    assert printed == f"{report}\n"
    lines = printed.splitlines()
    assert lines[0].split() == ["status", "name", "grad", "min", "grad", "max", "norm", "cause"]
    assert lines[1] == "ok      ok    -2.000e+00  2.000e+00  3.000e+00"
    assert [line.split()[:2] for line in lines[1:6]] == [[s, s] for s in ("ok", "zero", "none", "nan", "inf")]
    assert "5 parameters: 1 ok, 1 zero, 1 none, 1 nan, 1 inf; loss 1" in lines
    pyscan.check_grad_flow(model, model(torch.ones(3)), verbose=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_numbers_of_gradients_of_every_dtype(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(3, 5, dtype=dtype))
    model.empty = nn.Parameter(torch.zeros(0, 5, dtype=dtype))
    model.scalar = nn.Parameter(torch.zeros((), dtype=dtype))
    grad = torch.arange(-7.0, 8.0).reshape(5, 3).T  # not contiguous
    model.weight.grad = grad.to(dtype)
    model.empty.grad, model.scalar.grad = torch.zeros(0, 5, dtype=dtype), torch.tensor(2.0, dtype=dtype)
    stats = pyscan.check_grad_flow(model, verbose=False).stats
    assert stats["weight"] == (-7.0, 7.0, pytest.approx(280.0**0.5))
    assert stats["empty"] == (0.0, 0.0, 0.0)
    assert stats["scalar"].max == stats["scalar"].norm == 2.0


def test_a_gradient_whose_squares_leave_the_range_is_ok_and_has_its_norm() -> None:
    for size in (1e20, 1e-30):
        model = nn.Linear(2, 2, bias=False)
        model.weight.grad = torch.full((2, 2), size)
        report = pyscan.check_grad_flow(model, verbose=False)
        assert report["ok"] == ["weight"]
        assert report.stats["weight"].norm == pytest.approx(2 * size)


def test_the_norm_of_many_elements_is_that_of_float64() -> None:
    model = nn.Linear(2048, 1024, bias=False)
    model.weight.grad = torch.full((1024, 2048), 0.1)
    assert pyscan.check_grad_flow(model, verbose=False).stats["weight"].norm == pytest.approx(
        torch.tensor(0.1).item() * 2**10.5, rel=1e-6
    )


def test_sparse_gradients_add_repeated_rows_first() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    loss = model(torch.tensor([1, 1, 3])).sum()
    assert pyscan.check_grad_flow(model, loss, verbose=False).stats["weight"] == (1.0, 2.0, pytest.approx(10**0.5))


class Awkward(nn.Module):
    """Dropout, BatchNorm inside and outside a checkpoint, a buffer that is replaced, random numbers of all kinds."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.embed = nn.Embedding(11, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 3)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        if self.reentrant is None:
            x = self.block(x)
        else:
            x = checkpoint(self.block, x, use_reentrant=self.reentrant, preserve_rng_state=False)
        self.count = self.count + 1
        x = self.norm(x) * (1 + random.random() + np.random.rand())
        return self.head(x).square().mean()


def awkward(reentrant: bool | None) -> families.Family:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return families.Family(Awkward(reentrant).train(), {"ids": torch.arange(6)})


def everything(model: nn.Module) -> dict[str, Any]:
    """All that a check could change, with the identity of what must be the same object."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    state["numpy"] = np.random.get_state()[1].tolist() + list(np.random.get_state()[2:])
    for name, p in model.named_parameters():
        state[name] = (id(p), p.detach().clone(), p._version, p.requires_grad)
        state[f"{name} grad"] = None if p.grad is None else (id(p.grad), p.grad.clone(), p.grad._version)
        state[f"{name} hooks"] = [list((getattr(p, key) or {}).items()) for key in PARAMETER_HOOKS]
    for name, module in model.named_modules():
        state[f"{name} buffers"] = [(k, id(b), b.clone()) for k, b in module._buffers.items() if b is not None]
        state[f"{name} hooks"] = [list(getattr(module, key).items()) for key in MODULE_HOOKS]
        state[f"{name} training"] = module.training
    return state


PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


MODELS: dict[str, Callable[[], families.Family]] = {
    "awkward": lambda: awkward(None),
    "awkward, checkpointing": lambda: awkward(False),
    "awkward, reentrant checkpointing": lambda: awkward(True),
    "llama": lambda: llama(attention_dropout=0.1),
    "llama, checkpointing": lambda: families.Family(checkpointed(llama().model, False), batch(0)),
    "llama, reentrant checkpointing": lambda: families.Family(checkpointed(llama().model, True), batch(0)),
}


@pytest.mark.parametrize("num_accumulated", [0, 1, 2])
@pytest.mark.parametrize("given", ["loss", "batch", "loss and batch"])
@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_changed_and_the_step_goes_on_bit_for_bit(name: str, given: str, num_accumulated: int) -> None:
    def train(check: bool) -> dict[str, Any]:
        family = MODELS[name]()
        model = family.model
        hook = next(model.parameters()).register_hook(lambda grad: grad * 2)
        calls: list[str] = []
        last = list(model.parameters())[-1]
        last.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
        for _ in range(num_accumulated):
            family.loss().backward()
        loss = family.loss()
        if check:
            before = everything(model)
            with_loss = loss if "loss" in given else None
            report = pyscan.check_grad_flow(
                model, with_loss, batch=None if given == "loss" else family.batch, verbose=False
            )
            after = everything(model)
            assert before.keys() == after.keys()
            assert not [key for key in before if not same(before[key], after[key])]
            assert len(report["ok"]) == len(list(model.parameters())), "and it saw every gradient"
        loss.backward()
        hook.remove()
        assert calls == ["accumulated"] * (num_accumulated + 1)
        return {f"{n} grad": p.grad for n, p in model.named_parameters()} | dict(model.named_buffers())

    bare, checked = train(False), train(True)
    assert not [key for key in bare if not same(bare[key], checked[key])]


@pytest.mark.parametrize("name", MODELS)
def test_the_gradients_it_reports_are_those_of_the_backward(name: str) -> None:
    family = MODELS[name]()
    state = torch.get_rng_state()
    family.loss().backward()
    want = {n: (p.grad.min().item(), p.grad.max().item()) for n, p in family.model.named_parameters()}
    fresh = MODELS[name]()
    torch.set_rng_state(state)
    report = pyscan.check_grad_flow(fresh.model, fresh.loss(), verbose=False)
    assert {name: stats and stats[:2] for name, stats in report.stats.items()} == want


def test_without_loss_the_gradients_that_are_there_are_read() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"no parameter has a gradient: pass loss= or batch="):
        pyscan.check_grad_flow(model)
    model(torch.ones(1, 3)).sum().backward()
    model.bias.grad = None
    report = pyscan.check_grad_flow(model, verbose=False)
    assert (report["ok"], report["none"], report.loss) == (["weight"], ["bias"], None)


def test_gradients_of_other_leaves_stay_as_they_were() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(2, 1)
    x = torch.ones(1, 3, requires_grad=True)
    other(model(x)).sum().backward()
    before = [(id(p.grad), p.grad.clone()) for p in (x, *other.parameters())]
    pyscan.check_grad_flow(model, other(model(x)).sum(), verbose=False)
    assert same(before, [(id(p.grad), p.grad) for p in (x, *other.parameters())])


def test_an_optimizer_inside_the_backward_does_not_step() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: (optimizer.step(), optimizer.zero_grad()))
    before = copy.deepcopy(model.state_dict())
    report = pyscan.check_grad_flow(model, batch=lambda: model(torch.ones(1, 3)).sum(), verbose=False)
    assert report["ok"] == ["weight", "bias"]
    assert same(list(before.values()), list(model.state_dict().values()))


@pytest.mark.parametrize("given", ["loss", "batch"])
def test_the_row_of_an_attached_scanner_does_not_change(given: str) -> None:
    def train(check: bool) -> list[Any]:
        family = llama()
        with pyscan.attach(family.model) as scan:
            for k in range(3):
                loss = family.model(**batch(k)).loss
                if check:
                    arguments = (loss, None) if given == "loss" else (None, batch(k))
                    pyscan.check_grad_flow(family.model, arguments[0], batch=arguments[1], verbose=False)
                loss.backward()
                scan.step()
                family.model.zero_grad()
        assert not [event for event in scan.events if event["kind"] == "off"]
        return [(row.step, row.loss, row.tokens, row.flags, torch.from_numpy(row.cells)) for row in scan.rows]

    assert same(train(False), train(True))


def test_a_batch_may_be_keywords_arguments_a_tensor_or_a_function() -> None:
    class Squares(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().mean()

    model, x = Squares(3, 2), torch.ones(1, 3)
    for given in ({"x": x}, (x,), [x], x, lambda: {"loss": model(x)}, lambda: (model(x), None)):
        assert pyscan.check_grad_flow(model, batch=given, verbose=False)["ok"] == ["weight", "bias"]
    with torch.no_grad():
        assert pyscan.check_grad_flow(model, batch=x, verbose=False)["ok"] == ["weight", "bias"]
    with torch.inference_mode():
        assert pyscan.check_grad_flow(model, batch=x, verbose=False)["ok"] == ["weight", "bias"]
    with pytest.raises(TypeError, match="batch must be a dict, a tuple, a tensor or a function"):
        pyscan.check_grad_flow(model, batch=3)  # type: ignore[arg-type]


def test_wrong_arguments_are_refused_with_the_remedy() -> None:
    model = nn.Linear(3, 2)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got int"):
        pyscan.check_grad_flow(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="loss must be a tensor, got float"):
        pyscan.check_grad_flow(model, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"loss must be a scalar, got shape \(1, 2\): take its mean"):
        pyscan.check_grad_flow(model, model(torch.ones(1, 3)))
    with pytest.raises(ValueError, match=r"Linear returned no loss for this batch but Tensor of shape \(1, 2\)"):
        pyscan.check_grad_flow(model, batch=torch.ones(1, 3))
    loss = model(torch.ones(1, 3)).square().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time") as error:
        pyscan.check_grad_flow(model, loss)
    assert "call this before loss.backward(), or without loss after it" in error.value.__notes__[0]
    assert all(p.grad is not None for p in model.parameters()), "also a failed check puts the gradients back"


def test_names_are_those_of_the_bare_model() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    compiled = torch.compile(model, backend="eager")
    report = pyscan.check_grad_flow(compiled, batch=lambda: compiled(torch.ones(1, 3)).sum(), verbose=False)
    assert report["ok"] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_sharded_gradients_are_read_after_the_backward_only() -> None:
    class FSDPModule(nn.Linear):
        """Looks like a model that fully_shard has changed."""

    model = FSDPModule(3, 2)
    with pytest.raises(ValueError, match=r"the gradients of FSDPModule live in shards .* after loss.backward\(\)"):
        pyscan.check_grad_flow(model, model(torch.ones(1, 3)).sum())
    model(torch.ones(1, 3)).sum().backward()
    assert pyscan.check_grad_flow(model, verbose=False)["ok"] == ["weight", "bias"]
