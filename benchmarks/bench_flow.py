"""A gradient check beside one forward and backward of the same model.

The two take turns in one process, in changing order; the figure is the median over rounds of the check's time divided
by that of the plain forward and backward of its round. The check includes its own backward, with `batch` also its own
forward; the table is not printed.

    python benchmarks/bench_flow.py --model minimind --rounds 20
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pyscan
from benchmarks.training.models import MODELS, make


def contestants(model: str) -> dict[str, Callable[[], float]]:
    """Each runs once and says how many seconds it took."""
    made = make(MODELS[model])
    network, batch = made.network, {"input_ids": made.ids, "labels": made.ids}

    def plain() -> None:
        network(**batch).loss.backward()
        network.zero_grad()

    def check(network: nn.Module, **given: Any) -> None:
        report = pyscan.check_grad_flow(network, verbose=False, **given)
        assert len(report["ok"]) == len(list(network.parameters()))

    def after_forward() -> float:
        loss = network(**batch).loss
        return timed(lambda: check(network, loss=loss))

    return {
        "forward and backward": lambda: timed(plain),
        "forward and backward again": lambda: timed(plain),
        "check of a loss": after_forward,
        "check of a batch": lambda: timed(lambda: check(network, batch=batch)),
        "trace_nonfinite": lambda: timed(lambda: pyscan.trace_nonfinite(network, batch)),
    }


def timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare(model: str, rounds: int) -> dict[str, tuple[float, float, float]]:
    """Median, p20 and p80 of the ratio to the plain forward and backward of the same round."""
    everyone = contestants(model)
    taken: dict[str, list[float]] = {name: [] for name in everyone}
    for turn in range(rounds + (rounds > 1)):
        names = list(everyone)
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            taken[name].append(everyone[name]())
    first = int(rounds > 1)  # the first round warms up
    bare = taken["forward and backward"]
    ratios = {n: sorted(t / b for t, b in zip(times[first:], bare[first:], strict=True)) for n, times in taken.items()}
    return {n: (statistics.median(r), r[int(0.2 * len(r))], r[int(0.8 * (len(r) - 1))]) for n, r in ratios.items()}


def table(results: dict[str, tuple[float, float, float]]) -> str:
    return "\n".join(f"  {name:28} x{m:.3f} [{low:.3f}..{high:.3f}]" for name, (m, low, high) in results.items())


@pytest.mark.parametrize("model", ["tiny", "minimind"])
def test_grad_flow(benchmark: Any, model: str) -> None:
    if model != "tiny" and not benchmark.enabled:
        pytest.skip("only with timing: the tiny model is checked in the same way in a tenth of the time")
    rounds = {"tiny": 40, "minimind": 12}[model] if benchmark.enabled else 1
    results = benchmark.pedantic(compare, args=(model, rounds), rounds=1)
    benchmark.group = "gradient check"
    benchmark.extra_info |= {name: round(result[0], 3) for name, result in results.items()}
    if benchmark.enabled:
        print(f"\n{model}\n{table(results)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="minimind")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"{arguments.model}, {arguments.rounds} rounds\n{table(compare(arguments.model, arguments.rounds))}")


if __name__ == "__main__":
    main()
