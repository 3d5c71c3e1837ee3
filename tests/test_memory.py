"""A scanner needs no memory that grows, and keeps no activation longer than the forward it belongs to."""

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.autograd.profiler import profile
from torch.utils.checkpoint import checkpoint

import pyscan
from tests.test_scanner import batch, checkpointed, llama

# Between the two readings lie 1,500 steps: a leak of 525 bytes a step, less than one small tensor, is over the bound.
MAX_GROWTH = 768 << 10

GROWTH = """
import gc, sys, psutil, torch, pyscan
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, process = torch.randn(16, 64), psutil.Process()
sizes = {}
with pyscan.attach(model, sys.argv[1], optimizer=optimizer) as scan:
    for step in range(1, 2001):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (500, 2000):
            gc.collect()
            sizes[step] = process.memory_info().rss
    assert all(event["kind"] != "off" for event in scan.events), scan.events
print(sizes[500], sizes[2000])
"""


def test_resident_size_is_flat_from_step_500_to_step_2000(tmp_path: Path) -> None:
    path = tmp_path / "run.mscan"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", GROWTH, str(path)]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=300).stdout
    early, late = map(int, output.split())
    print(f"resident after 500 steps {early / 2**20:.1f} MiB, after 2,000 steps {late / 2**20:.1f} MiB")
    assert len(pyscan.open(path).steps) == 2000
    assert late - early < MAX_GROWTH


def peak_bytes(step: Any) -> int:
    """The most that torch's CPU allocator has given out at once during `step`, above what there was before."""
    with profile(use_cpu=True, profile_memory=True) as record:
        step()
    # Every allocation and release is an event of its own, in the order of time.
    events = sorted(
        (event for event in record.kineto_results.events() if event.name() == "[memory]"),
        key=lambda event: event.start_ns(),
    )
    assert events, "the profiler saw no allocation"
    now = most = 0
    for event in events:
        now += event.nbytes()
        most = max(most, now)
    return most


def high_water() -> int:
    """The peak resident size of this process so far."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


@pytest.fixture(scope="module")
def fifty_million() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=15, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return transformers.Qwen3ForCausalLM(config).train()


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_with_checkpointing_the_peak_rises_by_less_than_one_percent(fifty_million: nn.Module, reentrant: bool) -> None:
    model = checkpointed(fifty_million, reentrant)
    ids = torch.randint(8192, (2, 256), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    step()
    bare, bare_resident = peak_bytes(step), high_water()
    with pyscan.attach(model) as scan:
        step()
        scan.step()
        scanned = peak_bytes(step)
        scan.step()
        stats = scan.latest()["param_stats"]
    resident = high_water()
    assert all(s["activation_norm"] and s["grad_norm"] for s in stats.values()), "the full set of sites"
    num_parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{num_parameters / 1e6:.1f} million parameters, {'' if reentrant else 'non-'}reentrant: peak of the allocator "
        f"bare {bare / 2**20:.2f} MiB, scanned {scanned / 2**20:.2f} MiB (x{scanned / bare:.5f}); peak resident size "
        f"(VmHWM) before {bare_resident / 2**20:.0f} MiB, after {resident / 2**20:.0f} MiB"
    )
    assert 45e6 < num_parameters < 55e6
    assert scanned < 1.01 * bare


class Leaves(nn.Module):
    """Tells of every tensor that meets a Linear."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.reentrant = reentrant
        self.inputs: list[weakref.ref[Tensor]] = []

    def _layer(self, layer: nn.Module, x: Tensor) -> Tensor:
        x = x.tanh()
        self.inputs.append(weakref.ref(x))
        return layer(x)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if self.reentrant is None:
                x = self._layer(layer, x)
            else:
                x = checkpoint(self._layer, layer, x, use_reentrant=self.reentrant)
        return x.sum()

    def num_alive(self) -> int:
        return sum(reference() is not None for reference in self.inputs)


@pytest.mark.parametrize("way", ["quick", "careful"])
def test_no_input_is_kept_after_the_forward(way: str) -> None:
    model = Leaves(None).requires_grad_(False)  # frozen: autograd keeps none either
    if way == "careful":
        model.register_forward_hook(lambda *_: None)
    gc.disable()
    try:
        with pyscan.attach(model) as scan:
            with torch.enable_grad():
                model(torch.ones(2, 8))
            assert len(model.inputs) == 4
            assert model.num_alive() == 0
            scan.step()
            assert scan.latest()["param_stats"]["layers.3.weight"]["activation_norm"]
    finally:
        gc.enable()


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("num_backwards", [1, 3])  # not every backward of a longer step is read
def test_no_input_is_kept_after_the_backward(reentrant: bool | None, num_backwards: int) -> None:
    model = Leaves(reentrant)
    gc.disable()
    try:
        with pyscan.attach(model) as scan:
            for _ in range(2):
                for _ in range(num_backwards):
                    model(torch.ones(2, 8, requires_grad=True)).backward()
                    assert model.num_alive() == 0
                scan.step()
    finally:
        gc.enable()
    assert len(model.inputs) == 2 * num_backwards * 4 * (1 if reentrant is None else 2)


def test_an_input_of_a_forward_that_raised_is_let_go_at_the_next_step() -> None:
    model = llama().model.train()
    inputs: list[weakref.ref[Tensor]] = []

    def boom(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        inputs.append(weakref.ref(args[0]))
        raise MemoryError("planted")

    with pyscan.attach(model) as scan:
        model.model.layers[1].mlp.down_proj.register_forward_pre_hook(boom)
        with pytest.raises(MemoryError):
            model(**batch(1))
        scan.step()
        gc.collect()
        assert inputs[0]() is None
