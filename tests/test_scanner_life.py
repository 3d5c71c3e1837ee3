"""A scanner is a guest: it survives what happens to its model, and what happens to it never ends the run."""

import copy
import io
import os
import pickle
import re
import subprocess
import sys
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import pyscan
from tests import families
from tests.test_scanner import assert_matches, batch, llama, near, oracle


def kinds(scan: pyscan.Scanner) -> list[str]:
    return [event["kind"] for event in scan.events]


def test_copies_of_the_model_are_not_recorded() -> None:
    model = llama().model.train()
    with pyscan.attach(model) as scan:
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        copies = [
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(saved, weights_only=False),
        ]
        for other in copies:
            other.train()(**batch(1)).loss.backward()
        scan.step()
        stats = scan.latest()["param_stats"]
    assert (scan.rows[0].loss, scan.rows[0].tokens) == (None, None)
    assert {s["activation_norm"] for s in stats.values()} == {s["grad_norm"] for s in stats.values()} == {None}


def test_a_copy_can_be_scanned_itself() -> None:
    model = llama().model.train()
    want = oracle(model, (1,))
    with pyscan.attach(model):
        other = copy.deepcopy(model)
    with pyscan.attach(other) as scan:
        other(**batch(1)).loss.backward()
        scan.step()
    assert_matches(scan, want)


def test_saving_is_unchanged(tmp_path: Any) -> None:
    model = llama().model
    keys = list(model.state_dict())
    with pyscan.attach(model):
        assert list(model.state_dict()) == keys
        model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_closing_leaves_no_trace_on_the_model() -> None:
    model = llama().model
    before = [sorted(module.__dict__) for module in model.modules()]
    scan = pyscan.attach(model)
    scan.close()
    scan.close()
    assert [sorted(module.__dict__) for module in model.modules()] == before
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_resized_embeddings_are_followed() -> None:
    model = llama().model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pyscan.attach(model, optimizer=optimizer) as scan:
        model(**batch(1)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.resize_token_embeddings(families.VOCAB + 7)
        optimizer.step()  # noticed here
        with scan.paused():
            want = oracle(model, (1,))
        model(**batch(1)).loss.backward()
        optimizer.step()
        assert_matches(scan, want)
    assert kinds(scan).count("model_changed") == 1
    assert "off" not in kinds(scan)


def test_unfreezing_and_assigned_parameters_are_followed(tmp_path: Any) -> None:
    model = llama().model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model.lm_head.weight.requires_grad_(False)
    with pyscan.attach(model, tmp_path / "run.mscan", optimizer=optimizer) as scan:
        assert "frozen" in scan.coverage()["lm_head.weight"]
        optimizer.step()
        model.lm_head.weight.requires_grad_(True)
        optimizer.step()
        assert scan.coverage()["lm_head.weight"] == "scanned"
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        optimizer.step()
        with scan.paused():
            want = oracle(model, (1,))
        model(**batch(1)).loss.backward()
        scan.step()
        assert_matches(scan, want)
    assert kinds(scan).count("model_changed") == 2
    assert pyscan.open(tmp_path / "run.mscan").steps["step"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("where", ["before the step", "after the step"])
def test_the_first_error_turns_the_scanner_off_and_warns_once(tmp_path: Any, where: str) -> None:
    model = llama().model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[dict[str, Any]] = []
    with pyscan.attach(model, tmp_path / "run.mscan", optimizer=optimizer, on_event=seen.append) as scan:
        for k in range(2):
            model(**batch(k)).loss.backward()
        optimizer.step()

        def broken(*args: object) -> None:
            raise RuntimeError("planted")

        # The next step has fewer backwards, so that its gradients are read late and its row is closed the careful way.
        if where == "before the step":
            scan._gradients.sites_of = broken
        else:
            scan._steps.learning_rate = broken
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for k in range(3):
                model(**batch(k)).loss.backward()
                optimizer.step()
        messages = [str(w.message) for w in caught if "pyscan" in str(w.message)]
    assert len(messages) == 1
    assert "turned itself off at step 2: RuntimeError: planted" in messages[0]
    assert [event["kind"] for event in seen] == ["attached", "execution_order", "off"]
    run = pyscan.open(tmp_path / "run.mscan")
    assert run.steps["step"].tolist() == [1]
    assert [event["kind"] for event in run.events] == ["attached", "execution_order", "off"]


class Touchy(torch.optim.SGD):
    """After its second step it raises when somebody looks at its groups."""

    error: BaseException | None = None
    num_steps = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "param_groups" and (error := super().__getattribute__("error")) is not None:
            self.error = None
            raise error
        return super().__getattribute__(name)

    def break_after(self, step: int, error: BaseException) -> None:
        def after(*_: object) -> None:
            self.num_steps += 1
            if self.num_steps == step:
                self.error = error

        self.register_step_post_hook(after)


@pytest.mark.parametrize("error", [RuntimeError("planted"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_after_a_plain_step_errors_stay_inside_and_interrupts_do_not(error: BaseException) -> None:
    model = llama().model.train()
    optimizer = Touchy(model.parameters(), lr=0.1)
    optimizer.break_after(4, error)
    interrupts = 0
    with pyscan.attach(model, optimizer=optimizer) as scan, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(6):
            model(**batch(k)).loss.backward()
            assert k < 2 or scan._steps.state.is_plain == (k < 4 or interrupts == 1)
            try:
                optimizer.step()
            except KeyboardInterrupt:
                interrupts += 1
            optimizer.zero_grad()
    messages = [str(w.message) for w in caught if "pyscan" in str(w.message)]
    if isinstance(error, Exception):
        assert interrupts == 0
        assert [row.step for row in scan.rows] == [1, 2, 3]
        assert len(messages) == 1
        assert "turned itself off at step 4: RuntimeError: planted" in messages[0]
    else:
        assert interrupts == 1
        assert messages == []
        assert len(scan.rows) == 5


@pytest.mark.parametrize("where", ["set_grad", "take"])
def test_errors_anywhere_stay_inside(where: str) -> None:
    model = llama().model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pyscan.attach(model, optimizer=optimizer) as scan:

        def broken(*args: object) -> None:
            raise RuntimeError("planted")

        setattr(scan.buffer, where, broken)
        model.lm_head.weight.grad = torch.zeros(model.lm_head.weight.shape[::-1]).T  # not plain

        def two_steps() -> None:
            for _ in range(2):
                model(**batch(1)).loss.backward()
                optimizer.step()

        with pytest.warns(RuntimeWarning, match="turned itself off"):
            two_steps()
    assert kinds(scan) == ["attached", "off"]


def test_warnings_as_errors_do_not_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(4, 4)
    with pyscan.attach(model) as scan:
        scan.buffer.add_input = None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(torch.ones(4, 2).T).sum().backward()  # not contiguous: the careful way, which is broken
    assert "turned itself off" in capsys.readouterr().err


def test_a_callback_that_raises_turns_the_scanner_off_and_not_the_run() -> None:
    def on_event(event: dict[str, Any]) -> None:
        raise KeyError("mine")

    with pytest.warns(RuntimeWarning, match="KeyError"):
        pyscan.attach(nn.Linear(4, 4), on_event=on_event).close()


def test_a_keyboard_interrupt_passes_and_the_next_step_is_right() -> None:
    model = llama().model.train()
    want = oracle(model, (1,))
    with pyscan.attach(model) as scan:

        def interrupt(module: nn.Module, args: object) -> None:
            raise KeyboardInterrupt

        handle = model.model.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(**batch(1))
        handle.remove()
        scan.step()
        model(**batch(1)).loss.backward()
        scan.step()
    assert_matches(scan, want)


def test_a_second_scanner_on_the_same_model_is_refused_with_the_remedy() -> None:
    model = llama().model
    with pyscan.attach(model), pytest.raises(ValueError, match="scanned already: close that scan first"):
        pyscan.attach(model)
    pyscan.attach(model).close()


def test_two_models_are_scanned_side_by_side() -> None:
    first, second = llama().model.train(), llama().model.train()
    want = oracle(first, (1,)), oracle(second, (2,))
    with pyscan.attach(first) as one, pyscan.attach(second) as two:
        loss = first(**batch(1)).loss + second(**batch(2)).loss
        loss.backward()
        one.step()
        two.step()
    assert_matches(one, want[0])
    assert_matches(two, want[1])


def test_forwards_in_several_threads_all_count() -> None:
    model, x = nn.Linear(64, 64), torch.randn(50, 64)
    with pyscan.attach(model) as scan:
        threads = [threading.Thread(target=lambda: [model(x) for _ in range(25)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        scan.step()
    want = (100 * x.double().square().sum()).sqrt().item()
    assert near(scan.latest()["param_stats"]["weight"]["activation_norm"], want)


def test_worker_processes_of_a_data_loader_leave_the_scan_alone(tmp_path: Any) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(12, 8))
    with pyscan.attach(model, tmp_path / "run.mscan", optimizer=optimizer):
        for _ in range(2):
            for (x,) in torch.utils.data.DataLoader(data, batch_size=4, num_workers=2):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert pyscan.open(tmp_path / "run.mscan").steps["step"].tolist() == [1, 2, 3, 4, 5, 6]


EXIT = """
import sys, torch, pyscan
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scan = pyscan.attach(model, sys.argv[1], optimizer=optimizer)
for _ in range(3):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
assert "pyscan.kernels" not in sys.modules, "the kernels are not imported on a CPU"
"""


def test_a_script_that_never_closes_loses_nothing(tmp_path: Any) -> None:
    path = tmp_path / "run.mscan"
    subprocess.run([sys.executable, "-c", EXIT, path], check=True, env=os.environ, timeout=120)
    assert pyscan.open(path).steps["step"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"every": 0}, ValueError, "every must be an int >= 1, got 0"),
        ({"block": -1}, ValueError, "block must be an int >= 0, got -1"),
        ({"budget": 1.5}, ValueError, "budget is a share.*got 1.5"),
        ({"mask": 3}, TypeError, "mask names a keyword"),
        ({"optimizer": 3}, TypeError, r"optimizer must be a torch.optim.Optimizer.*scan\.step\(\)"),
        ({"include": "("}, ValueError, "include must be a regular expression"),
        ({"include": "nothing like it"}, ValueError, "leave none of"),
        ({"on_event": 3}, TypeError, "on_event must be callable"),
    ],
)
def test_attach_refuses_bad_arguments_with_the_remedy(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        pyscan.attach(nn.Linear(4, 4), **options)


def test_a_model_without_weights_says_what_it_holds() -> None:
    with pytest.raises(ValueError, match="no weight matrix found in LayerNorm: it holds 1 LayerNorm"):
        pyscan.attach(nn.LayerNorm(8))
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got function"):
        pyscan.attach(lambda x: x)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    ("family", "sentence"),
    [
        ("bnb-4bit", "is 4-bit .*: it has no gradient; scan its LoRA matrices"),
        ("frozen", r"is frozen \(requires_grad=False\): recording its input activation only"),
    ],
)
def test_why_a_gradient_is_missing_is_one_sentence_with_the_parameter(family: str, sentence: str) -> None:
    built = families.build(family)
    with pyscan.attach(built.model) as scan:
        notes = [event for event in scan.events if event["kind"] == "note"]
    hits = [event for event in notes if re.search(sentence, event["text"])]
    assert hits
    assert all(repr(event["site"]) in event["text"] for event in hits)


def test_a_step_without_gradients_says_so() -> None:
    """The other half of seed 000: scanning inside generate(), which runs under no_grad."""
    model = llama(eos_token_id=None).model
    with pyscan.attach(model) as scan:
        model.generate(batch(1)["input_ids"], max_new_tokens=2, do_sample=False)
        scan.step()
        texts = [event["text"] for event in scan.events if event["kind"] == "nothing_recorded"]
    assert len(texts) == 1
    assert "no_grad" in texts[0]
    assert "generate()" in texts[0]


def test_a_budget_raises_every_and_says_so(tmp_path: Any) -> None:
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(30)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pyscan.attach(model, tmp_path / "run.mscan", optimizer=optimizer, budget=0.001) as scan:
        for _ in range(200):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        every = scan.every
    assert every > 1
    run = pyscan.open(tmp_path / "run.mscan")
    changes = [event for event in run.events if event["kind"] == "every"]
    assert changes[-1]["after"] == every
    late = run.steps["step"][run.steps["step"] > changes[-1]["step"]]
    assert (late % every == 0).all(), "steps are chosen by number, so that all ranks keep the same ones"


def test_scan_overhead_is_a_share_of_the_step() -> None:
    model = llama().model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pyscan.attach(model, optimizer=optimizer) as scan:
        for _ in range(5):
            model(**batch(1)).loss.backward()
            optimizer.step()
        assert 0 < scan.overhead < 1


def test_vmap_jit_trace_and_meta_inputs_are_left_alone() -> None:
    model, x = nn.Linear(8, 8), torch.randn(3, 4, 8)
    with pyscan.attach(model) as scan:
        torch.vmap(model)(x)
        torch.jit.trace(model, x[0], check_trace=False)
        copy.deepcopy(model).to("meta")(x.to("meta"))
        scan.step()
        assert scan.latest()["param_stats"]["weight"]["activation_norm"] is None
        model(x).sum().backward()
        scan.step()
    assert near(scan.latest()["param_stats"]["weight"]["activation_norm"], x.double().norm().item())
    assert "off" not in kinds(scan)
