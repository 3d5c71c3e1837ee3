"""Tokens mode in the loops people have: checkpointing, accumulation, autocast, padding, packing, generation, files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pyscan
from pyscan import cli
from pyscan.token_capture import TokenCapture
from tests import families
from tests.test_tokens import BLOCK, build, scanned, sites_of
from tests.token_reference import gradients

Rows = dict[str, dict[str, Any]]


def assert_equal(found: Rows, wanted: Rows, rtol: float = 1e-12, atol: float = 0.0) -> None:
    """The same sites, channels, shapes and values."""
    assert set(found) == set(wanted)
    for name, rows in wanted.items():
        assert set(found[name]) == set(rows), name
        for channel, values in rows.items():
            np.testing.assert_allclose(found[name][channel], values, rtol, atol, err_msg=f"{name} {channel}")


def two_forwards(family: families.Family, mode: bool | str) -> dict[str, Any]:
    """Two micro-batches before one backward."""
    ids = family.batch["input_ids"]
    with pyscan.attach(family.model, tokens=mode, block=BLOCK) as scan:
        losses = [family.model(input_ids=part, labels=part).loss for part in (ids[:1], ids[1:])]
        sum(losses).backward()
        scan.step()
        return scan.tokens()


@pytest.mark.parametrize("mode", [True, "sequences"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_nothing(mode: bool | str, reentrant: bool) -> None:
    plain, checked = build("llama"), build("llama")
    checked.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    checked.model.enable_input_require_grads() if reentrant else None
    assert_equal(sites_of(scanned(checked, mode)), sites_of(scanned(plain, mode)))
    found, wanted = two_forwards(checked, mode), two_forwards(plain, mode)
    assert_equal(sites_of(found), sites_of(wanted))


@pytest.mark.parametrize("mode", [True, "blocks", "sequences"])
def test_micro_batches_stand_one_after_another(mode: bool | str) -> None:
    family = build("llama")
    ids = family.batch["input_ids"]
    whole = two_forwards(family, mode)
    with pyscan.attach(family.model, tokens=mode, block=BLOCK) as scan:
        for part in (ids[:1], ids[1:]):
            family.model(input_ids=part, labels=part).loss.backward()
        scan.step()
        tokens = scan.tokens()
    assert np.array_equal(tokens["ids"], ids.numpy())
    assert_equal(sites_of(tokens), sites_of(whole))


def test_ragged_micro_batches_are_flat() -> None:
    family = build("llama")
    ids = family.batch["input_ids"]
    with pyscan.attach(family.model, tokens=True) as scan:
        for part in (ids[:1, :5], ids):
            family.model(input_ids=part, labels=part).loss.backward()
        scan.step()
        tokens = scan.tokens()
    assert tokens["ids"].tolist() == [*ids[0, :5].tolist(), *ids.flatten().tolist()]
    assert tokens["sequences"].tolist() == [[0, 5], [5, 7], [12, 7]]
    assert all(rows["contribution"].shape == (19,) for rows in sites_of(tokens).values())


def test_a_gradient_scaler_is_divided_out() -> None:
    plain, scaled = build("llama", torch.float32), build("llama", torch.float32)
    optimizer = torch.optim.SGD(scaled.model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with pyscan.attach(scaled.model, tokens=True, optimizer=optimizer, block=BLOCK) as scan:
        scaler.scale(scaled.loss()).backward()
        scaler.step(optimizer)
        assert_equal(sites_of(scan.tokens()), sites_of(scanned(plain, True)), 1e-6)


def test_autocast_gives_the_rows_of_the_products_that_ran() -> None:
    family = build("llama", torch.float32)
    loss: Callable[[], Tensor] = family.loss

    def cast() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss()

    wanted = gradients(family.model, cast)
    with pyscan.attach(family.model, tokens=True) as scan:
        cast().backward()
        scan.step()
        for name, rows in sites_of(scan.tokens()).items():
            norms = wanted[name].grad.flatten(1).norm(dim=1).numpy()
            np.testing.assert_allclose(rows["contribution"].ravel(), norms, 0.03, 0.02 * norms.max(), err_msg=name)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("mode", [True, "sequences"])
def test_padding_changes_no_real_token(mode: bool | str, side: str) -> None:
    """A short sequence beside a long one has the rows it has alone; padded rows are kept, and the mask is there."""
    family = build("llama")
    ids = family.batch["input_ids"]
    short = ids[1:, :4]
    pad = torch.zeros(1, 3, dtype=torch.int64)
    row = torch.cat([pad, short] if side == "left" else [short, pad], 1)
    mask = torch.stack([torch.ones(7, dtype=torch.int64), (row[0] != 0).long()])
    labels = torch.cat([ids[:1], row]).masked_fill(mask == 0, -100)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    batch = {"input_ids": torch.cat([ids[:1], row]), "attention_mask": mask, "position_ids": positions}
    with pyscan.attach(family.model, tokens=mode, block=BLOCK, mask="attention_mask") as scan:
        family.model(**batch, labels=labels, num_items_in_batch=9).loss.backward()
        scan.step()
        both = scan.tokens()
        family.model(input_ids=short, labels=short, num_items_in_batch=9).loss.backward()
        scan.step()
        alone = scan.tokens()
    assert np.array_equal(both["mask"], mask.numpy() != 0)
    assert both["sequences"].tolist() == [[0, 7], [7, 7]]
    for name, rows in sites_of(alone).items():
        for channel, values in rows.items():
            found = both[name][channel][1]
            found = found if mode == "sequences" else found[mask[1].numpy() != 0]
            np.testing.assert_allclose(found, values[0], 1e-9, 1e-12, err_msg=f"{name} {channel}")


def test_packed_sequences_are_told_apart() -> None:
    family = build("llama")
    family.model.config._attn_implementation = "eager"
    parts = [family.batch["input_ids"][:1], family.batch["input_ids"][1:, :4]]
    packed = torch.cat(parts, 1)
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    labels = packed.clone()
    labels[0, 7] = -100  # nothing is predicted across the border
    starts = torch.tensor([0] * 7 + [1] * 4)
    allowed = (starts[:, None] == starts) & torch.ones(11, 11, dtype=torch.bool).tril()
    bias = torch.zeros(1, 1, 11, 11, dtype=torch.float64).masked_fill(~allowed, torch.finfo(torch.float64).min)
    with pyscan.attach(family.model, tokens="sequences", block=BLOCK) as scan:
        family.model(
            input_ids=packed, position_ids=positions, attention_mask=bias, labels=labels, num_items_in_batch=9
        ).loss.backward()
        scan.step()
        together = scan.tokens()
        for part in parts:
            family.model(input_ids=part, labels=part, num_items_in_batch=9).loss.backward()
        scan.step()
        apart = scan.tokens()
    assert together["sequences"].tolist() == [[0, 7], [7, 4]]
    assert_equal(sites_of(together), sites_of(apart), 1e-6)  # norms of layers are computed in float32


def test_one_sequence_has_the_gradient_of_the_step() -> None:
    """And acts of sequences add up to the cells of the row."""
    family = build("gpt2")
    with pyscan.attach(family.model, tokens="sequences", block=BLOCK, exclude="wpe") as scan:
        family.loss().backward()
        scan.step()
        tokens, stats = sites_of(scan.tokens()), scan.latest()["param_stats"]
    for name, rows in tokens.items():
        wanted = [block["activation_norm"] for block in stats[name]["blocks"]]
        np.testing.assert_allclose(np.sqrt(np.square(rows["act"]).sum(0)), wanted, 1e-12)
    one = families.Family(family.model, {key: value[:1] for key, value in family.batch.items()})
    family.model.zero_grad()
    with pyscan.attach(family.model, tokens="sequences", block=BLOCK) as scan:
        one.loss().backward()
        scan.step()
        tokens, stats = sites_of(scan.tokens()), scan.latest()["param_stats"]
    for name in set(tokens) - {"transformer.wte.weight", "lm_head.weight"}:  # tied: each has its own part
        wanted = [block["grad_norm"] for block in stats[name]["blocks"]]
        np.testing.assert_allclose(tokens[name]["grad"][0], wanted, 1e-12)


LAST = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_where_a_position_and_the_loss_of_its_token_coincide() -> None:
    """In the head and, of the last layer, in q, o, gate, up and down: through k and v later tokens come in."""
    family = build("llama")
    ids = family.batch["input_ids"][:1]
    logits = family.model(input_ids=ids).logits[0, :-1]
    losses = nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none") / 6
    names = [name for name, p in family.model.named_parameters() if p.ndim == 2]
    parameters = [p for p in family.model.parameters() if p.ndim == 2]
    each = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
    one = families.Family(family.model, {"input_ids": ids, "labels": ids})
    found = sites_of(scanned(one, True))
    same = set()
    for index, name in enumerate(names):
        wanted = np.array([grads[index].norm() for grads in each])
        if np.allclose(found[name]["contribution"][0, :-1], wanted, 1e-5):  # the loss itself is computed in float32
            same.add(name)
    assert same == {"lm_head.weight"} | {name for name in names if "layers.1." in name and name.split(".")[-2] in LAST}


def test_generation_is_not_recorded_and_teacher_forcing_repeats_its_rows() -> None:
    family = build("llama", torch.float32)
    model, prompt = family.model.eval(), family.batch["input_ids"][:1, :3]
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    bare = model.generate(prompt, **options)
    seen: dict[str, list[Tensor]] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda _, args, name=name: seen.setdefault(f"{name}.weight", []).append(args[0].norm(dim=-1)[0])
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    with pyscan.attach(model, tokens=True) as scan:
        text = model.generate(prompt, **options)
        assert torch.equal(text, bare)
        scan.step()
        assert sites_of(scan.tokens()) == {}
        for handle in handles:
            handle.remove()
        model(input_ids=text, labels=text).loss.backward()
        scan.step()
        rows = sites_of(scan.tokens())
    for name, norms in seen.items():
        generated = torch.cat(norms).numpy()
        forced = rows[name]["act"][0, : 3 + 4]  # the last token was never put in again
        forced = forced[-len(generated) :] if name == "lm_head.weight" else forced
        np.testing.assert_allclose(forced, generated, 1e-5, err_msg=name)


def test_training_is_bit_identical() -> None:
    results = []
    for mode in (None, True, "blocks", "sequences"):
        family = families.build("qwen3_moe")
        optimizer = torch.optim.AdamW(family.model.parameters(), 1e-2)
        scan = None if mode is None else pyscan.attach(family.model, tokens=mode, optimizer=optimizer)
        losses = []
        for _ in range(3):
            losses.append(family.loss())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        if scan is not None:
            scan.close()
            assert len(sites_of(scan.tokens())) > 20
        results.append([*losses, *family.model.parameters()])
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


class Twice(nn.Module):
    """A weight that is met twice, an in-place change of an output, and one that nothing depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.last = nn.Linear(8, 4)
        self.unused = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu_(self.shared(x))
        self.unused(h)
        return self.last(self.shared(h)).square().sum()


def test_in_place_changes_several_meetings_and_unused_outputs() -> None:
    torch.manual_seed(0)
    model, x = Twice().double(), torch.randn(2, 3, 8, dtype=torch.float64)
    wanted = gradients(model, lambda: model(x))
    with pyscan.attach(model, tokens=True) as scan:
        model(x).backward()
        scan.step()
        tokens = sites_of(scan.tokens())
    for name in ("shared.weight", "last.weight"):
        norms = wanted[name].grad.flatten(1).norm(dim=1).numpy()
        np.testing.assert_allclose(tokens[name]["contribution"].ravel(), norms, 1e-12)
    assert set(tokens["unused.weight"]) == {"act"}


class Pair(nn.Module):
    """Two weights that meet one input, the second also without gradients; the rows may come length first."""

    def __init__(self, is_turned: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self._is_turned = is_turned

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        x = inputs_embeds.transpose(0, 1).contiguous() if self._is_turned else inputs_embeds
        out = self.first(x)
        with torch.no_grad():
            self.second(x)
        return (out + self.second(x)).square().sum()


@pytest.mark.parametrize("is_turned", [False, True])
def test_rows_in_another_order_are_flat_and_calls_without_gradients_do_not_count(is_turned: bool) -> None:
    model, x = Pair(is_turned).double(), torch.randn(2, 3, 8, dtype=torch.float64)
    with pyscan.attach(model, tokens=True) as scan:
        model(inputs_embeds=x).backward()
        scan.step()
        tokens = sites_of(scan.tokens())
    wanted = x.transpose(0, 1).flatten(0, 1) if is_turned else x
    for name in ("first.weight", "second.weight"):
        np.testing.assert_allclose(tokens[name]["act"], wanted.norm(dim=-1).numpy(), 1e-12)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_quick_way_of_a_call_gives_what_the_careful_one_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = build(name)
    with monkeypatch.context() as patch:
        patch.setattr(TokenCapture, "_multiplied", None)  # whoever calls it turns the scanner off
        quick = sites_of(scanned(family, True))
    monkeypatch.setattr("pyscan._C.make_tap", lambda calls, site, careful, arrived: careful)
    assert_equal(quick, sites_of(scanned(family, True)))


def test_rows_that_are_not_finite_are_nan_and_no_other() -> None:
    model = nn.Linear(70, 4)
    x = torch.ones(5, 70)
    x[1, 3], x[2, 68] = float("inf"), float("nan")
    for mode, bad in ((True, [1, 2]), ("blocks", [(1, 0), (2, 1)])):
        with pyscan.attach(model, tokens=mode) as scan:
            model(x).sum().backward()
            scan.step()
            act = scan.tokens()["weight"]["act"]
        assert [tuple(i) if len(i) > 1 else int(i[0]) for i in np.argwhere(np.isnan(act))] == bad


def test_a_second_backward_through_a_call_is_said() -> None:
    family = build("llama")
    with pyscan.attach(family.model, tokens=True) as scan:
        loss = family.loss()
        loss.backward(retain_graph=True)
        loss.backward()
        scan.step()
        assert all("grad" not in rows for rows in sites_of(scan.tokens()).values())
        (event,) = [event for event in scan.events if event["kind"] == "tokens_missing"]
    assert "second backward" in event["text"]
    assert len(event["sites"]) == 16


def test_a_compiled_model_says_that_its_tokens_are_missing() -> None:
    family = build("llama", torch.float32)
    with pyscan.attach(family.model, tokens=True) as scan:
        family.model.model.layers[0].mlp.compile(backend="aot_eager")
        family.loss().backward()
        scan.step()
        found = sites_of(scan.tokens())
        (event,) = [event for event in scan.events if event["kind"] == "tokens_missing"]
    missing = {f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert set(event["sites"]) == missing
    assert not set(found) & missing
    assert "compiled" in event["text"]


@pytest.mark.parametrize("mode", [True, "blocks", "sequences"])
def test_the_file_is_within_three_thousandths(mode: bool | str, tmp_path: Path) -> None:
    family = families.build("qwen3_moe")
    family.batch["attention_mask"] = torch.ones_like(family.batch["input_ids"])
    path = tmp_path / "run.mscan"
    with pyscan.attach(family.model, path, tokens=mode, block=BLOCK) as scan:
        for _ in range(2):
            family.loss().backward()
            scan.step()
        exact = scan.tokens()
    with pyscan.open(path) as run:
        assert run.token_steps() == [1, 2]
        read = run.tokens(2)
        for name in ("ids", "mask", "sequences"):
            assert np.array_equal(read[name], exact[name])
        assert_equal(sites_of(read), sites_of(exact), 0.0015)
        for name, rows in sites_of(read).items():
            np.testing.assert_allclose(rows["contribution"], exact[name]["contribution"], 0.003, err_msg=name)
    assert cli.main(["check", str(path)]) == 0


def test_a_step_is_shown_as_its_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    family = build("llama", torch.float32)
    path = tmp_path / "run.mscan"
    with pyscan.attach(family.model, path, tokens=True) as scan:
        family.loss().backward()
        scan.step()
        rows = sites_of(scan.tokens())
    total = np.sqrt(sum(np.square(site["contribution"]) for site in rows.values()))
    assert cli.main(["show", str(path), "--step", "1", "--tokens", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [line["ids"] for line in shown["sequences"]] == family.batch["input_ids"].tolist()
    np.testing.assert_allclose([line["values"] for line in shown["sequences"]], total, 0.003)
    assert cli.main(["show", str(path), "--tokens", "--by", "sps", "--no-color"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 14
    assert lines[0].split("\t")[3] == str(family.batch["input_ids"][0, 0].item())
    assert cli.main(["show", str(path), "--step", "1", "--site", "lm_head"]) == 0
    assert lines[0].split("\t")[3] in capsys.readouterr().out


def test_modes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"tokens must be False, True or one of 'blocks', 'sequences', got 'rows'"):
        pyscan.attach(nn.Linear(2, 2), tokens="rows")


def test_an_input_that_hooks_keep_is_said_to_be_missing() -> None:
    family = build("llama")
    with pyscan.attach(family.model, tokens="sequences") as scan:
        with torch.autograd.graph.save_on_cpu():
            loss = family.loss()
        loss.backward()
        scan.step()
        assert all(set(rows) == {"act"} for rows in sites_of(scan.tokens()).values())
        assert ["hooks keep" in event["text"] for event in scan.events if event["kind"] == "tokens_missing"] == [True]
