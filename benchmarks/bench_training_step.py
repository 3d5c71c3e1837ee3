"""A training step with the scanner beside the same step without it, and beside plain torch norms.

Contestants live in one process with the same weights and data and take turns, step by step, in rotating order, so that
the drift of a noisy machine hits all alike. The figure is the median over rounds of a contestant's step divided by the
mean of two bare ones; how far the two bare ones differ is the noise of the run.

    python benchmarks/bench_training_step.py --model minimind --rounds 60 [--accumulate 4] [--compile]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pyscan

# hidden, layers, feed-forward, heads, key-value heads, head width, vocabulary, batch, tokens
MODELS = {
    "tiny": (64, 4, 176, 4, 2, 16, 512, 2, 64),
    "small": (256, 4, 704, 4, 2, 64, 2048, 2, 256),
    "minimind": (512, 8, 1408, 8, 2, 64, 6400, 1, 340),
}


@dataclass
class Trainer:
    """One contestant: a model, its optimizer and what runs beside it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    ids: torch.Tensor
    accumulate: int
    after_backward: Callable[[], None] = lambda: None
    close: Callable[[], None] = lambda: None

    def step(self) -> tuple[float, float, float]:
        """Wall seconds, processor seconds of this thread, and the loss."""
        wall, processor = time.perf_counter(), time.thread_time()
        for _ in range(self.accumulate):
            loss = self.model(input_ids=self.ids, labels=self.ids).loss
            loss.backward()
        self.after_backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - wall, time.thread_time() - processor, loss.item()


def trainer(name: str, model: str, *, accumulate: int = 1, compiled: bool = False) -> Trainer:
    transformers = pytest.importorskip("transformers")
    hidden, layers, inner, heads, kv, width, vocabulary, batch, tokens = MODELS[model]
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        hidden_size=hidden, num_hidden_layers=layers, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=kv, head_dim=width, vocab_size=vocabulary, tie_word_embeddings=False,
    )  # fmt: skip
    network = transformers.Qwen3ForCausalLM(config).train()
    optimizer = torch.optim.AdamW(network.parameters(), 1e-4)
    ids = torch.randint(0, vocabulary, (batch, tokens))
    called = torch.compile(network) if compiled else network
    made = Trainer(called, optimizer, ids, accumulate)
    if name == "pyscan":
        path = Path(tempfile.mkdtemp(prefix="pyscan-bench-")) / "run.mscan"
        made.close = pyscan.attach(called, path, optimizer=optimizer).close
    elif name == "plain torch":
        made.after_backward = plain_torch(network)
    return made


def plain_torch(model: nn.Module) -> Callable[[], None]:
    """What a careful engineer writes instead: one norm per input and per gradient, one row a step, kept in memory."""
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    norms: dict[int, torch.Tensor] = {}
    rows: list[torch.Tensor] = []

    def watch(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            norms[index] = torch.linalg.vector_norm(args[0].detach(), dtype=torch.float32)

        return hook

    for index, linear in enumerate(linears):
        linear.register_forward_pre_hook(watch(index))

    @torch.no_grad()
    def after_backward() -> None:
        grads = torch._foreach_norm([w.grad for w in weights if w.grad is not None])
        rows.append(torch.stack([*norms.values(), *grads]))

    return after_backward


def compare(names: list[str], model: str, rounds: int, **options: Any) -> dict[str, dict[str, float]]:
    """Ratios of wall and processor time against bare, with p20 and p80, for each contestant."""
    everyone = ["bare", "bare again", *names]
    trainers = {name: trainer(name, model, **options) for name in everyone}
    taken: dict[str, list[tuple[float, float, float]]] = {name: [] for name in everyone}
    warmup = 3 if rounds > 1 else 0
    for turn in range(rounds + warmup):
        shift = turn % len(everyone)
        for name in everyone[shift:] + everyone[:shift]:
            figures = trainers[name].step()
            if turn >= warmup:
                taken[name].append(figures)
    for each in trainers.values():
        each.close()
    losses = {name: [loss for _, _, loss in steps] for name, steps in taken.items()}
    assert all(losses[name] == losses["bare"] for name in everyone), "every contestant trains to the same losses"
    return {name: _ratios(taken[name], taken["bare"], taken["bare again"]) for name in everyone}


def _ratios(mine: list[Any], bare: list[Any], again: list[Any]) -> dict[str, float]:
    def against(kind: int) -> list[float]:
        return sorted(m[kind] / ((b[kind] + a[kind]) / 2) for m, b, a in zip(mine, bare, again, strict=True))

    wall, processor = against(0), against(1)
    return {
        "wall": statistics.median(wall),
        "p20": wall[int(0.2 * len(wall))],
        "p80": wall[min(int(0.8 * len(wall)), len(wall) - 1)],
        "processor": statistics.median(processor),
        "ms": statistics.median(m[0] for m in mine) * 1e3,
    }


def table(title: str, results: dict[str, dict[str, float]]) -> str:
    lines = [title]
    lines += [
        f"  {name:12} x{r['wall']:.4f} [{r['p20']:.4f}..{r['p80']:.4f}]  processor x{r['processor']:.4f}"
        f"  {r['ms']:8.1f} ms"
        for name, r in results.items()
    ]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("model", "options"),
    [("tiny", {}), ("tiny", {"accumulate": 4}), ("minimind", {})],
    ids=["tiny", "tiny accumulation 4", "minimind"],
)
def test_training_step(benchmark: Any, model: str, options: dict[str, Any]) -> None:
    rounds = {"tiny": 150, "minimind": 30}[model] if benchmark.enabled else 1
    names = ["pyscan", "plain torch"]
    results = benchmark.pedantic(compare, args=(names, model, rounds), kwargs=options, rounds=1)
    benchmark.group = "training step"
    benchmark.extra_info |= {name: round(result["wall"], 4) for name, result in results.items()}
    if benchmark.enabled:
        print("\n" + table(f"{model} {options}", results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="minimind")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    names = ["pyscan"] if arguments.compile else ["pyscan", "plain torch"]
    results = compare(
        names, arguments.model, arguments.rounds, accumulate=arguments.accumulate, compiled=arguments.compile
    )
    print(table(f"{arguments.model}, {arguments.rounds} rounds, accumulation {arguments.accumulate}", results))


if __name__ == "__main__":
    main()
