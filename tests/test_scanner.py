"""One meaning for every number: what the scanner records against float64 references that use none of its hooks."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import pyscan
from pyscan.latest import Row
from pyscan.writer import SKIPPED
from tests import families, link

BLOCK = 16
TOLERANCE = 1e-5


def norms(x: Tensor, dim: int, block: int) -> list[float]:
    """Norm of each block of a matrix along `dim`, in float64."""
    parts = x.double().split(block or max(x.shape[dim], 1), dim)
    return [part.norm().item() for part in parts]


def near(got: float | None, want: float) -> bool:
    return got is not None and abs(got - want) <= TOLERANCE * abs(want) + 1e-12


def check_stats(stats: dict[str, Any], act: list[float] | None, grad: list[float] | None, name: str) -> None:
    for key, want in (("activation_norm", act), ("grad_norm", grad)):
        if want is None:
            assert stats[key] is None, f"{name}: {key} was not to be observed"
            continue
        assert near(stats[key], sum(v * v for v in want) ** 0.5), f"{name}: {key} {stats[key]} {want}"
        assert len(stats["blocks"]) == len(want), name
        for block, value in zip(stats["blocks"], want, strict=True):
            assert near(block[key], value), f"{name}: block {block} {value}"


def references(family: families.Family, steps: list[Callable[[], Tensor]]) -> dict[str, tuple[Any, Any]]:
    """Input and gradient norms of every site, from an observer of its own and from .grad."""
    from pyscan.sites import find_sites

    sites = find_sites(family.model, block=BLOCK).sites
    recording = link.record(sites, lambda: [loss().backward() for loss in steps])
    rows: dict[str, list[Tensor]] = {}
    for index, uses in recording.uses.items():
        for use in uses:
            for expert, part in link.segments(use):
                if part.numel():
                    rows.setdefault(sites[index + expert].name, []).append(part)
    result = {}
    for site in sites:
        block = 0 if site.expert is not None else BLOCK
        act = norms(torch.cat(rows[site.name]), 1, block) if site.name in rows else None
        grad = None
        if site.trainable and site.parameter is not None and site.parameter.grad is not None:
            grad = norms(site.matrix(site.parameter.grad), site.in_axis, block)
        result[site.name] = (act, grad)
    return result


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", families.FAMILIES)
def test_latest_equals_float64_references_for_every_site(name: str) -> None:
    truth = families.build(name)
    want = references(truth, [truth.loss])
    family = families.build(name)
    with pyscan.attach(family.model, block=BLOCK) as scan:
        family.loss().backward()
        scan.step()
        stats = scan.latest()["param_stats"]
    assert set(stats) == set(want), "the full set of sites, none missing"
    for site, (act, grad) in want.items():
        check_stats(stats[site], act, grad, site)


def llama(**config: Any) -> families.Family:
    torch.manual_seed(0)
    return families._text("llama", **config)()


def batch(seed: int) -> dict[str, Tensor]:
    ids = torch.randint(3, families.VOCAB, (2, 8), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


class Products(TorchFunctionMode):
    """Sums of squares of the input of every F.linear of a model, by parameter name; sees no hook and needs none."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(p): n for n, p in model.named_parameters()}
        self.sums: dict[str, float] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and id(args[1]) in self.names and torch.is_grad_enabled():
            name = self.names[id(args[1])]
            self.sums[name] = self.sums.get(name, 0.0) + args[0].detach().double().square().sum().item()
        return func(*args, **(kwargs or {}))


def oracle(model: nn.Module, seeds: tuple[int, ...]) -> tuple[dict[str, float], dict[str, float]]:
    """Norms of inputs and of accumulated gradients, without hooks and without checkpointing."""
    products = Products(model)
    with products:
        for seed in seeds:
            model(**batch(seed)).loss.backward()
    act = {name: total**0.5 for name, total in products.sums.items()}
    grad = {name: p.grad.double().norm().item() for name, p in model.named_parameters() if p.ndim > 1}
    model.zero_grad()
    return act, grad


def assert_matches(scan: pyscan.Scanner, want: tuple[dict[str, float], dict[str, float]]) -> None:
    act, grad = want
    stats = scan.latest()["param_stats"]
    assert set(stats) == set(grad)
    for name, norm in grad.items():
        assert near(stats[name]["grad_norm"], norm), f"{name} {stats[name]['grad_norm']} {norm}"
        if name in act:
            assert near(stats[name]["activation_norm"], act[name]), name


CHECKPOINTING = [None, False, True]


def checkpointed(model: nn.Module, reentrant: bool | None) -> nn.Module:
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
    return model


@pytest.mark.parametrize("reentrant", CHECKPOINTING)
def test_recompute_under_checkpointing_counts_once(reentrant: bool | None) -> None:
    want = oracle(llama().model.train(), (1,))
    model = checkpointed(llama().model.train(), reentrant)
    with pyscan.attach(model) as scan:
        model(**batch(1)).loss.backward()
        scan.step()
    assert_matches(scan, want)


@pytest.mark.parametrize("reentrant", CHECKPOINTING)
def test_gradients_are_accumulated_and_read_before_clipping(reentrant: bool | None) -> None:
    want = oracle(llama().model.train(), (1, 2, 3))
    model = checkpointed(llama().model.train(), reentrant)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pyscan.attach(model, optimizer=optimizer) as scan:
        for _ in range(3):  # in the first step the number of backwards is not known yet, then it is
            for seed in (1, 2, 3):
                model(**batch(seed)).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
            assert_matches(scan, want)
        assert [row.flags for row in scan.rows] == [0, 0, 0]


def test_only_the_last_backward_of_a_step_is_read() -> None:
    model = llama().model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pyscan.attach(model, optimizer=optimizer) as scan:
        for expected in (3, 1):  # in the first step the number of backwards is not known yet
            before = scan._gradients.state.num_reads
            for seed in (1, 2, 3):
                model(**batch(seed)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert scan._gradients.state.num_reads - before == expected * len(scan.schema.sites)


def test_a_shorter_step_is_read_late_and_says_so() -> None:
    model = llama().model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pyscan.attach(model, optimizer=optimizer) as scan:
        for seeds in ((1, 2), (1,), (1, 2, 3)):
            for seed in seeds:
                model(**batch(seed)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert [row.flags for row in scan.rows] == [0, 2, 0]
    assert_matches(scan, oracle(model, (1, 2, 3)))


@pytest.mark.parametrize("reentrant", CHECKPOINTING)
def test_two_forwards_before_one_backward_both_count(reentrant: bool | None) -> None:
    want = oracle(llama().model.train(), (1, 2))
    model = checkpointed(llama().model.train(), reentrant)
    with pyscan.attach(model) as scan:
        (model(**batch(1)).loss + model(**batch(2)).loss).backward()
        scan.step()
    assert_matches(scan, want)


class InAndOut(nn.Module):
    """One Linear, used outside and then inside a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, reentrant: bool) -> Tensor:
        y = self.linear(x)
        return torch.utils.checkpoint.checkpoint(self.linear, y, use_reentrant=reentrant).square().sum()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_module_outside_and_inside_a_checkpoint_counts_both(reentrant: bool) -> None:
    torch.manual_seed(0)
    model, x = InAndOut(), torch.randn(5, 8)
    with pyscan.attach(model) as scan:
        model(x, reentrant).backward()
        scan.step()
    want = (x.double().square().sum() + model.linear(x).detach().double().square().sum()).sqrt().item()
    assert near(scan.latest()["param_stats"]["linear.weight"]["activation_norm"], want)


def test_the_same_tensor_met_by_several_weights_is_read_once() -> None:
    """Weights that met one tensor have one result, bit for bit, and the tensor is let go when the forward is over."""
    model = llama().model.train()
    with pyscan.attach(model) as scan:
        model(**batch(1)).loss.backward()
        scan.step()
        stats = scan.latest()["param_stats"]
    for layer in range(2):
        for group in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            found = {stats[f"model.layers.{layer}.{name}.weight"]["activation_norm"] for name in group}
            assert len(found) == 1


def test_the_engine_repeats_what_it_read_for_the_same_tensor() -> None:
    """Memory that changes without a new version shows who read it again: only the first of the two weights did."""
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.ones(4, 8)
    with pyscan.attach(model) as scan:
        model[0](x)
        x.numpy()[:] = 5.0
        model[1](x)
        scan.step()
        stats = scan.latest()["param_stats"]
    assert stats["0.weight"]["activation_norm"] == stats["1.weight"]["activation_norm"] == 32**0.5


class ChangesInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            x.mul_(3.0)
        return y.sum() + self.second(x).sum()


def test_an_input_changed_in_place_between_two_weights_is_read_again() -> None:
    model, x = ChangesInPlace(), torch.ones(4, 8)
    model.first.weight.requires_grad_(False)
    with pyscan.attach(model) as scan:
        model(x).backward()
        scan.step()
    stats = scan.latest()["param_stats"]
    assert near(stats["first.weight"]["activation_norm"], 32**0.5)
    assert near(stats["second.weight"]["activation_norm"], 3 * 32**0.5)


def test_a_new_tensor_at_an_old_address_is_not_taken_for_the_last_one() -> None:
    model = nn.Linear(8, 8)
    with pyscan.attach(model) as scan:
        for k in (1.0, 2.0):
            model(torch.full((4, 8), k)).sum().backward()
        scan.step()
    assert near(scan.latest()["param_stats"]["weight"]["activation_norm"], (32 * 1 + 32 * 4) ** 0.5)


class TakesPartOfItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.whole, self.part = nn.Linear(8, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.whole(x) + self.part(x[:, :4])).sum()


def test_a_view_that_begins_at_the_same_address_is_another_input() -> None:
    model, x = TakesPartOfItsInput(), torch.arange(1.0, 41.0).view(5, 8)
    with pyscan.attach(model) as scan:
        model(x).backward()
        scan.step()
    stats = scan.latest()["param_stats"]
    assert near(stats["whole.weight"]["activation_norm"], x.double().norm().item())
    assert near(stats["part.weight"]["activation_norm"], x[:, :4].double().norm().item())


class CallsByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(input=x).sum()


def test_an_input_given_by_keyword_is_seen() -> None:
    model, x = CallsByKeyword(), torch.randn(4, 8)
    with pyscan.attach(model) as scan:
        model(x).backward()
        scan.step()
    assert near(scan.latest()["param_stats"]["linear.weight"]["activation_norm"], x.double().norm().item())


def test_without_gradients_nothing_is_recorded() -> None:
    model = llama(eos_token_id=None).model.train()
    with pyscan.attach(model) as scan:
        model.generate(batch(1)["input_ids"], max_new_tokens=3, do_sample=False)
        with torch.no_grad():
            model(**batch(1))
        with torch.inference_mode():
            model(**batch(1))
        scan.step()
        stats = scan.latest()["param_stats"]
    assert {s["activation_norm"] for s in stats.values()} == {None}
    assert {s["grad_norm"] for s in stats.values()} == {None}


def test_attaching_inside_inference_mode_scans_what_is_trained_later() -> None:
    model = llama().model.train()
    want = oracle(model, (1,))
    with torch.inference_mode():
        scan = pyscan.attach(model)
    model(**batch(1)).loss.backward()
    scan.step()
    scan.close()
    assert_matches(scan, want)


def test_padded_rows_are_left_out_by_the_mask() -> None:
    model = llama().model.train()
    ids = batch(1)["input_ids"]
    mask = torch.ones_like(ids)
    mask[0, 5:] = 0
    seen: list[Tensor] = []
    handle = model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda m, a: seen.append(a[0].detach()))
    with pyscan.attach(model, mask="attention_mask") as scan:
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        scan.step()
    handle.remove()
    want = seen[0][mask.bool()].double().norm().item()
    stats = scan.latest()
    assert near(stats["param_stats"]["model.layers.1.mlp.down_proj.weight"]["activation_norm"], want)
    assert stats["token_count"] == 13


@pytest.mark.parametrize("fused", [False, True])
def test_loss_scale_is_divided_out_and_an_overflow_is_a_skipped_row(fused: bool) -> None:
    model = llama().model.train()
    want = oracle(model, (1,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pyscan.attach(model, optimizer=optimizer) as scan:
        for overflow in (False, True, False):
            loss = model(**batch(1)).loss * (float("inf") if overflow else 1.0)
            scaler.scale(loss).backward()
            if not fused:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        flags, scales = [row.flags for row in scan.rows], [row.grad_scale for row in scan.rows]
    assert flags == [0, 1, 0]
    assert scales == [1024.0, 1024.0, 512.0]
    assert_matches(scan, want)


@pytest.mark.parametrize("fused", [False, True])
def test_a_late_read_under_the_scaler_is_unscaled_once(fused: bool) -> None:
    model = llama().model.train()
    want = oracle(model, (1,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pyscan.attach(model, optimizer=optimizer) as scan:
        for seeds in ((1, 2), (1,)):
            for seed in seeds:
                scaler.scale(model(**batch(seed)).loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert [row.flags for row in scan.rows] == [0, 2]
    assert_matches(scan, want)


def test_a_closure_runs_its_backward_inside_the_step() -> None:
    model = llama().model.train()
    want = oracle(model, (2,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(**batch(1)).loss.backward()  # stale

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(**batch(2)).loss
        loss.backward()
        return loss

    with pyscan.attach(model, optimizer=optimizer) as scan:
        optimizer.step(closure)
        assert [row.flags for row in scan.rows] == [0]
    assert_matches(scan, want)


def test_a_closure_that_adds_the_last_micro_batch_is_waited_for() -> None:
    model = llama().model.train()
    want = oracle(model, (1, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def closure() -> Tensor:
        loss = model(**batch(2)).loss
        loss.backward()
        return loss

    with pyscan.attach(model, optimizer=optimizer) as scan:
        for _ in range(2):
            model(**batch(1)).loss.backward()
            optimizer.step(closure)
            optimizer.zero_grad()
            assert_matches(scan, want)
        assert [row.flags for row in scan.rows] == [0, 0], "not what was there before the closure"


class Searches(torch.optim.SGD):
    """Calls its closure several times a step, as a line search does."""

    num_calls = 1

    def step(self, closure: Callable[[], Tensor]) -> Tensor:
        return [closure() for _ in range(self.num_calls)][-1]


@pytest.mark.parametrize("width", [8, 512])  # read at the end of the backward, and while it runs
def test_a_closure_that_is_called_several_times_counts_as_it_was_last(width: int) -> None:
    model = nn.Linear(width, width, bias=False)
    optimizer = Searches(model.parameters(), lr=0.0)
    factors: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()  # the next gradient may get the same memory
        factors.append(len(factors) + 1.0)
        loss = factors[-1] * model(torch.ones(1, width)).sum()
        loss.backward()
        return loss

    with pyscan.attach(model, optimizer=optimizer) as scan:
        for optimizer.num_calls in (4, 2, 3):
            optimizer.step(closure)
            assert near(scan.latest()["param_stats"]["weight"]["grad_norm"], factors[-1] * width)


def test_sparse_embedding_gradients_add_repeated_rows_first() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 32, sparse=True), nn.Linear(32, 4))
    ids = torch.tensor([[1, 2, 1, 1]])
    with pyscan.attach(model, block=16) as scan:
        model(ids).square().sum().backward()
        scan.step()
    dense = model[0].weight.grad.to_dense()
    check_stats(scan.latest()["param_stats"]["0.weight"], norms(model[0](ids)[0], 1, 16), norms(dense, 1, 16), "0")


def test_an_optimizer_that_steps_inside_the_backward_is_seen_from_its_second_step() -> None:
    model = llama().model.train()
    want = oracle(model, (1,))

    def step_now(p: nn.Parameter) -> None:
        p.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_now)
    with pyscan.attach(model) as scan:
        for _ in range(2):
            model(**batch(1)).loss.backward()
            scan.step()
    assert_matches(scan, want)


@pytest.mark.parametrize("width", [8, 512])  # read at the end of the backward, and while it runs
def test_a_hook_that_changes_the_gradient_after_ours_is_followed(width: int) -> None:
    def double(parameter: nn.Parameter) -> None:
        parameter.grad.mul_(2.0)

    model = nn.Linear(width, width, bias=False)
    with pyscan.attach(model) as scan:
        model.weight.register_post_accumulate_grad_hook(double)
        model(torch.ones(4, width)).sum().backward()
        scan.step()
    assert near(scan.latest()["param_stats"]["weight"]["grad_norm"], 2 * 4 * float(width))


@pytest.mark.parametrize("row_between", [False, True])
def test_an_exception_in_one_backward_heals_at_the_next(row_between: bool) -> None:
    model = llama().model.train()
    want = oracle(model, (1,))

    def boom(grad: Tensor) -> None:
        raise MemoryError("out of memory")

    with pyscan.attach(model) as scan:
        handle = model.model.layers[0].mlp.up_proj.weight.register_hook(boom)
        with pytest.raises(MemoryError):
            model(**batch(1)).loss.backward()
        handle.remove()
        model.zero_grad()
        if row_between:
            scan.step()
        model(**batch(1)).loss.backward()
        scan.step()
    if not row_between:  # the inputs of the backward that failed were seen too
        want = {name: 2**0.5 * norm for name, norm in want[0].items()}, want[1]
    assert_matches(scan, want)
    assert [row.flags for row in scan.rows] == [0] * len(scan.rows)


def test_several_optimizers_close_the_row_at_the_last_one() -> None:
    model = llama().model.train()
    want = oracle(model, (1,))
    first = torch.optim.SGD(model.model.parameters(), lr=0.0)
    second = torch.optim.SGD(model.lm_head.parameters(), lr=0.0)
    with pyscan.attach(model, optimizer=[first, second]) as scan:
        for _ in range(3):
            model(**batch(1)).loss.backward()
            num_rows = len(scan.rows)
            first.step()
            assert len(scan.rows) == num_rows
            second.step()
            model.zero_grad()
        assert [row.step for row in scan.rows] == [1, 2, 3]
    assert_matches(scan, want)


def test_autocast_inputs_are_read_as_the_weight_meets_them() -> None:
    model, x = CallsByKeyword(), torch.randn(64, 8)
    with pyscan.attach(model) as scan:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x)
        loss.backward()
        scan.step()
    got = scan.latest()["param_stats"]["linear.weight"]
    assert near(got["activation_norm"], x.double().norm().item())
    assert near(got["grad_norm"], model.linear.weight.grad.double().norm().item())


def test_unused_is_absent_and_zero_is_zero() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x).sum()

    model = Two()
    with pyscan.attach(model) as scan:
        model(torch.zeros(3, 4)).backward()
        scan.step()
    stats = scan.latest()["param_stats"]
    assert stats["used.weight"]["activation_norm"] == stats["used.weight"]["grad_norm"] == 0.0
    assert stats["idle.weight"]["activation_norm"] is stats["idle.weight"]["grad_norm"] is None


def test_a_bad_value_shows_in_its_block_and_its_count() -> None:
    model, x = nn.Linear(128, 4), torch.ones(3, 128)
    x[1, 70] = float("nan")
    with pyscan.attach(model) as scan:
        model(x).nansum().backward()
        scan.step()
        cells, buffer = scan.rows[0].cells, scan.buffer
    blocks = scan.latest()["param_stats"]["weight"]["blocks"]
    assert near(blocks[0]["activation_norm"], (3 * 64) ** 0.5)
    assert blocks[1]["activation_norm"] != blocks[1]["activation_norm"]
    assert cells[buffer.cells("act_bad", 0)].tolist() == [1]
    assert cells[buffer.cells("act_max", 0)].tolist() == [1]


def test_rows_adds_the_gradient_per_block_of_outputs() -> None:
    family = families.build("gpt2")
    with pyscan.attach(family.model, block=BLOCK, rows=True) as scan:
        family.loss().backward()
        scan.step()
        row: Row = scan.rows[0]
    from pyscan.sites import find_sites

    for index, site in enumerate(find_sites(family.model, block=BLOCK, rows=True).sites):
        if site.parameter is not None and site.expert is None and site.tied_to is None:
            want = norms(site.matrix(site.parameter.grad), 1 - site.in_axis, BLOCK)
            got = row.cells[scan.buffer.cells("grad_out", index)] ** 0.5
            torch.testing.assert_close(torch.from_numpy(got), torch.tensor(want).double(), rtol=1e-5, atol=1e-12)


def test_a_row_knows_its_loss_rate_tokens_and_step() -> None:
    model = llama().model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with pyscan.attach(model, optimizer=optimizer) as scan:
        losses = [model(**batch(seed)).loss for seed in (1, 2)]
        sum(losses).backward()
        optimizer.step()
    row = scan.rows[0]
    assert row.loss == pytest.approx(sum(loss.item() for loss in losses) / 2)
    assert (row.step, row.tokens, row.lr, row.grad_scale) == (1, 32, 0.25, None)


@pytest.fixture
def trained(tmp_path: Any) -> Iterator[Callable[..., Any]]:
    """Trains a tiny model with the scanner on and opens what it wrote."""

    def run(num_steps: int = 5, name: str = "run.mscan", **options: Any) -> tuple[list[Row], Any]:
        model = llama().model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        rows: list[Row] = []
        with pyscan.attach(model, tmp_path / name, optimizer=optimizer, **options) as scan:
            for seed in range(num_steps):
                model(**batch(seed)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                rows += [newest[0]] if (newest := scan._newest()) is not None else []
        return rows, pyscan.open(tmp_path / name)

    return run


def test_the_file_holds_the_rows_within_the_error_of_its_code(trained: Callable[..., Any]) -> None:
    rows, run = trained(70)
    assert run.steps["step"].tolist() == list(range(1, 71))
    assert run.steps["loss"].tolist() == pytest.approx([row.loss for row in rows])
    assert run.steps["tokens"].tolist() == [16] * 70
    for index, site in enumerate(run.sites):
        for channel in ("act", "grad"):
            begin = sum(s.num_blocks for s in run.sites[:index]) + (
                sum(s.num_blocks for s in run.sites) if channel == "grad" else 0
            )
            want = torch.tensor([row.cells[begin] for row in rows]).sqrt()
            got = torch.tensor(run.get(channel, site.name, blocks=True)[:, 0]).double()
            torch.testing.assert_close(got, want, rtol=0.001356, atol=0)


def test_every_leaves_out_steps_by_their_number(trained: Callable[..., Any]) -> None:
    _, run = trained(10, every=3)
    assert run.steps["step"].tolist() == [3, 6, 9]


def train_with_notes(every: int, num_steps: int, pauses: tuple[int, ...] = ()) -> pyscan.Scanner:
    """The loop says of each step a loss and a number of tokens, both the step's number."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pyscan.attach(model, optimizer=optimizer, every=every) as scan:
        for step in range(1, num_steps + 1):
            scan.note(loss=float(step), tokens=step)
            with scan.paused() if step in pauses else contextlib.nullcontext():
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return scan


@pytest.mark.parametrize("pauses", [(), (3, 12, 15), (8,)])
def test_what_is_left_out_leaves_nothing_to_the_next_row(pauses: tuple[int, ...]) -> None:
    rows = train_with_notes(8, 80, pauses).rows
    scanned = [step for step in range(8, 81, 8) if step not in pauses]
    assert [(row.step, row.loss, row.tokens) for row in rows] == [(step, step, step) for step in scanned]


def test_steps_left_out_one_after_another_end_in_one_compiled_call(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    real = pyscan.Scanner._close_row

    def close_row(self: pyscan.Scanner, *args: Any, **kwargs: Any) -> None:
        closed.append(self._step)
        real(self, *args, **kwargs)

    monkeypatch.setattr(pyscan.Scanner, "_close_row", close_row)
    train_with_notes(8, 24)
    assert closed == [1, 7, 8, 15, 16, 23, 24], "those with a row, those before them, and the first"


def test_a_model_that_changes_in_a_step_left_out_is_followed_at_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pyscan.attach(model, optimizer=optimizer, every=8) as scan:
        for step in range(1, 9):
            if step == 4:
                model.append(nn.Linear(8, 8))
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [(event["step"], event["added"]) for event in scan.events if event["kind"] == "model_changed"] == [
        (4, ["1.weight"])
    ]
    assert {name for name, stats in scan.latest()["param_stats"].items() if stats["grad_norm"]} == {
        "0.weight", "1.weight"
    }  # fmt: skip


def test_resume_continues_the_numbering(trained: Callable[..., Any]) -> None:
    trained(4)
    _, run = trained(3, resume=True)
    assert run.steps["step"].tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_a_state_dict_voids_the_abandoned_timeline(tmp_path: Any) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(scan: pyscan.Scanner, num_steps: int) -> None:
        for _ in range(num_steps):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with pyscan.attach(model, tmp_path / "run.mscan", optimizer=optimizer) as scan:
        train(scan, 4)
        state = scan.state_dict()
        train(scan, 3)
    with pyscan.attach(model, tmp_path / "run.mscan", optimizer=optimizer, resume=True) as scan:
        scan.load_state_dict(state)
        train(scan, 2)
    assert pyscan.open(tmp_path / "run.mscan").steps["step"].tolist() == [1, 2, 3, 4, 5, 6]


def test_an_existing_file_is_not_overwritten(trained: Callable[..., Any]) -> None:
    trained(1)
    with pytest.raises(FileExistsError, match="resume"):
        trained(1)


def test_paused_steps_have_no_rows() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pyscan.attach(model, optimizer=optimizer) as scan:
        for k in range(4):
            with scan.paused() if k == 1 else contextlib.nullcontext():
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert [row.step for row in scan.rows] == [1, 3, 4]


def test_a_step_that_one_of_two_optimizers_skips_is_marked_skipped() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (first, second)]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with pyscan.attach(nn.Sequential(first, second), optimizer=optimizers) as scan:
        for overflow in (False, True, False):
            for module in (first, second):
                loss = module(torch.ones(2, 4)).sum()
                scaler.scale(loss * torch.inf if overflow and module is first else loss).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
        assert [row.flags & SKIPPED for row in scan.rows] == [0, SKIPPED, 0]


def test_a_scaler_that_keeps_no_record_of_its_steps_turns_the_scanner_off_and_nothing_else() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with pyscan.attach(model, optimizer=optimizer) as scan:
        optimizer.register_step_post_hook(lambda *args: setattr(scaler, "_per_optimizer_states", {}))
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        before = model.weight.detach().clone()
        with pytest.warns(RuntimeWarning, match="turned itself off"):
            scaler.step(optimizer)
    assert not torch.equal(model.weight, before)
    assert scan.events[-1]["kind"] == "off"
