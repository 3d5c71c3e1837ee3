"""Inside torch.compile: one graph, no recompile, the values of eager code, whenever the scanner is attached."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import pyscan
from tests import families
from tests.test_scanner import assert_matches, batch, llama, oracle


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("when", ["before compile", "after compile", "after the first call"])
def test_values_equal_eager_whenever_it_is_attached(backend: str, when: str) -> None:
    model = llama().model.train()
    want = oracle(model, (1,))
    if when == "before compile":
        scan = pyscan.attach(model)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    if when == "after the first call":
        compiled(**batch(1)).loss.backward()
        model.zero_grad()
    if when != "before compile":
        scan = pyscan.attach(compiled)
    for _ in range(2):
        compiled(**batch(1)).loss.backward()
        scan.step()
        assert_matches(scan, want)
        model.zero_grad()
    scan.close()


def test_one_graph_for_twenty_steps_pauses_and_every() -> None:
    model = llama().model.train()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    seen = set()
    with pyscan.attach(compiled, every=2) as scan:
        for k in range(20):
            if k % 5 == 3:
                with scan.paused():
                    compiled(**batch(k)).loss.backward()
                    scan.step()
            else:
                compiled(**batch(k)).loss.backward()
                scan.step()
            model.zero_grad()
            seen.add(scan.latest()["param_stats"].get("lm_head.weight", {}).get("activation_norm"))
    assert num_graphs() == 1
    assert not counters["graph_break"]
    assert len(seen) > 5, "the value follows the input"


def test_compiled_layer_by_layer_shares_graphs_as_without_the_scanner() -> None:
    graphs = []
    for scanned in (False, True):
        torch.compiler.reset()
        counters.clear()
        model = llama(num_hidden_layers=10).model.train()
        want = oracle(model, (1,))
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
        scan = pyscan.attach(model) if scanned else None
        model(**batch(1)).loss.backward()
        graphs.append(num_graphs())
        if scan is not None:
            scan.step()
            assert_matches(scan, want)
            scan.close()
    assert graphs[1] == graphs[0]


def test_a_copy_of_a_scanned_model_is_not_recorded_when_compiled() -> None:
    import copy

    model = llama().model.train()
    with pyscan.attach(model) as scan:
        other = torch.compile(copy.deepcopy(model), backend="aot_eager")
        other(**batch(1)).loss.backward()
        scan.step()
        assert {s["activation_norm"] for s in scan.latest()["param_stats"].values()} == {None}


def test_after_close_compiled_code_runs_on_and_records_nothing() -> None:
    model = llama().model.train()
    compiled = torch.compile(model, backend="aot_eager")
    scan = pyscan.attach(compiled)
    compiled(**batch(1)).loss.backward()
    scan.step()
    scan.close()
    compiled(**batch(2)).loss.backward()
    assert scan.latest()["step"] == 1


def test_generate_with_a_compiled_model_records_nothing() -> None:
    model = llama(eos_token_id=None).model.train()
    compiled = torch.compile(model, backend="aot_eager")
    with pyscan.attach(compiled) as scan, torch.no_grad():
        compiled(**batch(1))
        scan.step()
        assert {s["activation_norm"] for s in scan.latest()["param_stats"].values()} == {None}


def test_an_input_hidden_in_a_compiled_region_is_named() -> None:
    family = families.build("encoder")
    compiled = torch.compile(family.model, backend="aot_eager")
    with pyscan.attach(compiled) as scan:
        family.loss(compiled).backward()
        scan.step()
        events: list[dict[str, Any]] = [event for event in scan.events if event["kind"] == "input_not_seen"]
    hidden = set(events[0]["sites"])
    assert "encoder.layers.0.self_attn.in_proj_weight" in hidden
    assert all("compiled region" in scan.coverage()[name] for name in hidden)


def test_a_linear_inside_a_compiled_function_is_seen() -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    with pyscan.attach(model) as scan:
        torch.compile(lambda x: model(x).sum(), backend="aot_eager")(x).backward()
        scan.step()
    got = scan.latest()["param_stats"]["weight"]["activation_norm"]
    assert got == pytest.approx(x.double().norm().item())
