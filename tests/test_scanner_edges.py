"""Cases at the edge of a training loop: what takes part now and then, changes its form, or goes wrong twice."""

import contextlib
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import pyscan
from tests.test_scanner import assert_matches, batch, llama, near, oracle


class TwoHeads(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(2))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](x).sum()


@pytest.mark.parametrize("width", [8, 512])  # read at the end of the backward, and while it runs
def test_weights_that_take_part_in_some_backwards_only_are_read_before_clipping(width: int) -> None:
    model = TwoHeads(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pyscan.attach(model, optimizer=optimizer) as scan:
        for heads in ((0, 0, 0, 1), (0, 1, 1, 1), (0, 0, 1, 1), (1, 0, 0, 0)):
            for head in heads:
                model(torch.ones(1, width), head).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
            stats = scan.latest()["param_stats"]
            for head in (0, 1):
                assert near(stats[f"heads.{head}.weight"]["grad_norm"], heads.count(head) * float(width))
    assert [row.flags for row in scan.rows] == [0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_model_cast_after_attach_is_read_in_its_new_dtype(dtype: torch.dtype) -> None:
    model = nn.Linear(8, 8, bias=False)
    with pyscan.attach(model) as scan:
        model.to(dtype)
        model(torch.ones(4, 8, dtype=dtype)).sum().backward()
        scan.step()
    assert near(scan.latest()["param_stats"]["weight"]["grad_norm"], 4 * 8.0)


def test_a_parameter_that_is_given_other_data_is_read_in_its_new_shape() -> None:
    model = nn.Linear(600, 8, bias=False)
    with pyscan.attach(model) as scan:
        model.weight.data = torch.ones(2, 600)
        model(torch.ones(4, 600)).sum().backward()
        scan.step()
    assert near(scan.latest()["param_stats"]["weight"]["grad_norm"], 4 * (2 * 600) ** 0.5)


def test_an_outline_of_a_model_is_left_alone() -> None:
    model = nn.Linear(8, 8).to("meta")
    with pyscan.attach(model) as scan:
        model(torch.ones(4, 8, device="meta")).sum().backward()
        scan.step()
    assert scan.latest()["param_stats"]["weight"] == {
        "activation_norm": None,
        "grad_norm": None,
        "blocks": [{"block_idx": 0, "activation_norm": None, "grad_norm": None}],
    }


class KnowsItsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, keep: Tensor) -> dict[str, Tensor]:
        return {"loss": self.linear(x).sum()}


def test_a_forward_that_only_computes_shapes_leaves_the_scan_on() -> None:
    model, keep = KnowsItsLoss(), torch.ones(4)
    with pyscan.attach(model, mask="keep") as scan:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model(torch.ones(4, 8), keep=mode.from_tensor(keep))
        want = model(torch.ones(4, 8), keep=keep)["loss"]
        want.backward()
        scan.step()
    assert [event["kind"] for event in scan.events] == ["attached", "execution_order"]
    assert scan.rows[0].loss == pytest.approx(want.item())


class BadOutput:
    @property
    def loss(self) -> Tensor:
        raise RuntimeError("not computed")


class HasABadOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> BadOutput:
        self.linear(x)
        return BadOutput()


def test_an_output_that_raises_when_looked_at_does_not_end_the_run() -> None:
    model = HasABadOutput()
    with pyscan.attach(model) as scan, pytest.warns(RuntimeWarning, match="not computed"):
        model(torch.ones(2, 8))
    assert [event["kind"] for event in scan.events] == ["attached", "off"]


def test_an_error_in_following_the_model_is_one_warning_and_never_an_exception() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pyscan.attach(model, optimizer=optimizer, include=r"^0\.weight$") as scan:
        model[0] = nn.ReLU()  # no site is left
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                optimizer.step()
    assert [str(w.message) for w in caught if "pyscan" in str(w.message)]
    assert len([w for w in caught if "pyscan" in str(w.message)]) == 1
    assert [event["kind"] for event in scan.events].count("off") == 1


def test_a_scan_that_is_off_takes_its_hooks_away_at_the_next_step() -> None:
    model = llama().model.train()
    scan = pyscan.attach(model)
    with pytest.warns(RuntimeWarning, match="turned itself off"):
        scan._fail(RuntimeError("planted"))
    scan.step()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    scan.close()


def replace_a_block(model: nn.Module) -> None:
    model.model.layers[1] = llama().model.train().model.layers[0]


def replace_the_body(model: nn.Module) -> None:
    model.model = llama().model.train().model


def add_a_head(model: nn.Module) -> None:
    model.second_head = nn.Linear(4, 4)


@pytest.mark.parametrize("change", [replace_a_block, replace_the_body, add_a_head])
def test_modules_replaced_above_a_weight_or_added_are_followed(change: Any) -> None:
    model = llama().model.train()
    with pyscan.attach(model) as scan:
        change(model)
        scan.step()
        with scan.paused():
            act, grad = oracle(model, (1,)) if change is not add_a_head else ({}, {})
        model(**batch(1)).loss.backward()
        scan.step()
        assert [event["kind"] for event in scan.events].count("model_changed") == 1
        if change is add_a_head:
            assert scan.coverage()["second_head.weight"] == "scanned"
        else:
            assert_matches(scan, (act, grad))


def test_the_latest_row_keeps_its_meaning_when_the_model_changes() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 128, bias=False))
    with pyscan.attach(model) as scan:
        model(torch.ones(4, 8)).sum().backward()
        before = model[0].weight.grad.double().norm().item()
        model.insert(0, nn.Linear(200, 8))
        scan.step()
        stats = scan.latest()["param_stats"]
        assert set(stats) == {"0.weight", "1.weight"}
        assert near(stats["0.weight"]["grad_norm"], before)
        assert set(scan.coverage()) == {"0.weight", "1.weight", "2.weight"}


def test_a_late_read_of_a_tied_weight_is_unscaled_once_in_every_channel() -> None:
    model = llama(tie_word_embeddings=True).model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pyscan.attach(model, optimizer=optimizer, rows=True) as scan:
        for seeds in ((1, 2), (1,)):
            optimizer.zero_grad()
            for seed in seeds:
                scaler.scale(model(**batch(seed)).loss).backward()
            scaler.step(optimizer)
            scaler.update()
        cells, sites = scan.rows[1].cells, scan.schema.sites
    assert scan.rows[1].flags == 2
    for index, site in enumerate(sites):
        grad = model.get_parameter(site.tied_to or site.name).grad.double()  # unscaled by the scaler
        for channel in ("grad", "grad_out"):
            assert near(cells[scan.buffer.cells(channel, index)].sum() ** 0.5, grad.norm().item()), site.name
        assert near(cells[scan.buffer.cells("grad_max", index)].item(), grad.abs().max().item())


def test_what_came_before_a_pause_does_not_reach_the_next_row() -> None:
    model, x = nn.Linear(8, 8), torch.ones(2, 8)
    with pyscan.attach(model) as scan:
        for pause in (True, False):
            model(x).sum().backward()
            with scan.paused() if pause else contextlib.nullcontext():
                scan.step()
    assert [row.step for row in scan.rows] == [2]
    assert near(scan.latest()["param_stats"]["weight"]["activation_norm"], 4.0)


def test_steps_that_the_loop_numbers_have_rows_only_where_they_were_watched() -> None:
    model, x = nn.Linear(8, 8), torch.ones(2, 8)
    with pyscan.attach(model, every=2) as scan:
        for step in (100, 101, 102, 103, 7, 8, 9, 10):
            model(x).sum().backward()
            scan.step(step=step)
    assert [row.step for row in scan.rows] == [102, 8, 10], "100 and 7 were expected to be 1 and 104"
    assert all(near(row.cells[scan.buffer.cells("act", 0)].item() ** 0.5, 4.0) for row in scan.rows)


def test_a_step_that_is_not_plain_among_plain_ones_is_recorded_as_such() -> None:
    """Steps without peculiarities are closed by a way of their own; each kind of step that is not so, between them."""
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step(num_backwards: int = 2, clip: float | None = None, **noted: Any) -> None:
        for _ in range(num_backwards):
            model(torch.ones(1, 8)).sum().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if noted:
            scan.note(**noted)
        optimizer.step()
        optimizer.zero_grad()

    with pyscan.attach(model, optimizer=optimizer) as scan:
        for _ in range(3):
            step()
        assert scan._steps.state.is_plain
        step(num_backwards=1, clip=2.0)  # fewer than expected: read late, after clipping
        step(num_backwards=1)
        step(num_backwards=1, loss=3.0, tokens=7)
        step(num_backwards=1)
        with scan.paused():
            step(num_backwards=1)
        step(num_backwards=1)
        optimizer.param_groups[0]["lr"] = 0.5
        step(num_backwards=1)
        scan.load_state_dict(scan.state_dict())
        step(num_backwards=1)
    late, resumed = pyscan.writer.AFTER_CLIP, pyscan.format.ROW_RESUMED
    assert [row.step for row in scan.rows] == [1, 2, 3, 4, 5, 6, 7, 9, 10, 11]
    assert [row.flags for row in scan.rows] == [0, 0, 0, late, 0, 0, 0, 0, 0, resumed]
    assert [row.loss for row in scan.rows] == [None] * 5 + [3.0] + [None] * 4
    assert [row.tokens for row in scan.rows] == [None] * 5 + [7] + [None] * 4
    assert [row.lr for row in scan.rows] == [0.0] * 8 + [0.5, 0.5]
    norms = [row.cells[scan.buffer.cells("grad", 0)][0] ** 0.5 for row in scan.rows]
    assert norms == pytest.approx([16.0] * 3 + [2.0] + [8.0] * 6, rel=1e-6)


@pytest.mark.parametrize("rows", [False, True])
def test_a_plain_step_has_the_row_it_would_have_the_long_way(tmp_path: Any, rows: bool) -> None:
    def scanned(name: str, *, is_plain: bool) -> tuple[list[Any], Any]:
        model = llama(tie_word_embeddings=True).model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found = []
        with pyscan.attach(model, tmp_path / name, optimizer=optimizer, rows=rows) as scan:
            if not is_plain:
                scan._may_be_plain = lambda: False
            for seed in range(4):
                model(**batch(seed)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(scan._newest()[0])
            assert scan._steps.state.is_plain == is_plain
        return found, pyscan.open(tmp_path / name)

    (quick, quick_run), (long, long_run) = scanned("quick", is_plain=True), scanned("long", is_plain=False)
    for one, other in zip(quick, long, strict=True):
        assert one._replace(cells=0) == other._replace(cells=0)
        assert (one.cells == other.cells).all()
    for name in ("step", "tokens", "loss", "lr", "flags"):
        assert (quick_run.steps[name] == long_run.steps[name]).all()
    tied = next(site for site in quick_run.sites if site.tied_to)
    assert (quick_run.grad(tied.name) == quick_run.grad(tied.tied_to)).all()
    assert (quick_run.grad(tied.name) > 0).all()


def test_plain_steps_raise_the_alarms_they_would_raise_the_long_way(tmp_path: Any) -> None:
    """A dead layer, no gradient, a spike, a loss that alone is not finite, and later a gradient that is not."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dead, self.alive = nn.Linear(8, 8), nn.Linear(8, 8)
            nn.init.constant_(self.dead.bias, -100.0)

        def forward(self, x: torch.Tensor, scale: float, told: float) -> dict[str, torch.Tensor]:
            loss = (self.alive(x) + self.dead(x).relu()).square().mean() * scale
            return {"trained": loss, "loss": loss.detach() * told}

    def alarms(name: str, *, is_plain: bool) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with pyscan.attach(model, tmp_path / name, optimizer=optimizer) as scan:
            if not is_plain:
                scan._may_be_plain = lambda: False
            for step in range(1, 70):
                scale = {25: 0.0, 40: 1e4, 65: float("nan")}.get(step, 1.0)
                told = float("inf") if step == 45 else 1.0
                model(torch.ones(2, 8), scale, told)["trained"].backward()
                optimizer.step()
                optimizer.zero_grad()
                assert step < 4 or scan._steps.state.is_plain == is_plain
        told_once = {"attached", "execution_order", "note", "init"}
        return [event for event in scan.events if event["kind"] not in told_once]

    quick, long = alarms("quick", is_plain=True), alarms("long", is_plain=False)
    assert quick == long
    assert {event["kind"]: event["step"] for event in reversed(quick)} == {
        "dead": 16, "no_gradient": 25, "spike": 40, "nonfinite": 45,
    }  # fmt: skip
    last = quick[-1]
    assert (last["kind"], last["step"]) == ("nonfinite", 65)
    assert [row["step"] for row in last["before"]] == list(range(57, 65))


@pytest.mark.parametrize("count", [3, 80])  # read at the end of the backward, and some at a time while it runs
def test_small_gradients_that_change_after_they_were_read_are_read_again(count: int) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(count)))
    x = torch.ones(4, 64)
    model(x).sum().backward()
    want = [layer.weight.grad.double().norm().item() for layer in model]
    model.zero_grad()

    def double(parameter: nn.Parameter) -> None:
        for layer in model[1:]:  # those that came before the first one, which is the last to come
            layer.weight.grad.mul_(2.0)

    with pyscan.attach(model) as scan:
        model[0].weight.register_post_accumulate_grad_hook(double)
        model(x).sum().backward()
        num_reads = scan._gradients.state.num_reads
        scan.step()
    stats = scan.latest()["param_stats"]
    found = [stats[f"{index}.weight"]["grad_norm"] for index in range(count)]
    assert found == pytest.approx([want[0], *(2 * norm for norm in want[1:])], rel=1e-5)
    assert num_reads > count if count > 64 else num_reads == count
