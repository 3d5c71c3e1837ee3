"""How the cost of a scan grows: with sites, tokens, width and block size, and what a file grows by per step.

Receives nothing; trains chains of Linear layers and fits a line through the seconds that the scanner takes of a step.
Beside it stands the physical limit: the bytes that must be read at the measured bandwidth of one plain read. Prints a
table; with --keep writes pictures under benchmarks/results.

    python -m benchmarks.growth [--rounds 100] [--keep]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import pyscan
from benchmarks import results

WARMUP = 3


class Case(NamedTuple):
    sites: int = 8
    tokens: int = 256
    width: int = 256
    block: int = 64

    @property
    def bytes_read(self) -> int:
        """Of inputs and gradients, once each."""
        return 4 * self.sites * (self.tokens * self.width + self.width * self.width)


AXES: dict[str, list[Case]] = {
    "sites": [Case(sites=n) for n in (4, 8, 16, 32, 64)],
    "tokens": [Case(tokens=n) for n in (64, 256, 1024, 2048, 4096)],
    "width": [Case(width=n) for n in (128, 256, 512, 768, 1024)],
    "block": [Case(sites=16, block=n) for n in (8, 16, 32, 64, 128, 256)],
}


class Training:
    """A chain of Linear layers, scanned; `spent` and `rest` are the seconds of its steps."""

    def __init__(self, case: Case, path: Path) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(case.width, case.width, bias=False) for _ in range(case.sites)]
        for layer in layers:  # else values fade from layer to layer, below what a float32 can square
            nn.init.normal_(layer.weight, std=case.width**-0.5)
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-6)
        self.x = torch.randn(case.tokens, case.width)
        self.spent: list[float] = []
        self.rest: list[float] = []
        self.scan = pyscan.attach(self.model, path, optimizer=self.optimizer, block=case.block)
        self._count, self.scan._budget.step = self.scan._budget.step, self._step_ends  # type: ignore[method-assign]

    def _step_ends(self, spent: float, elapsed: float, scanned: bool, hooks: float, num_steps: int) -> Any:
        self.spent.append(spent + hooks)
        return self._count(spent, elapsed, scanned, hooks, num_steps)

    def step(self) -> None:
        start = time.perf_counter()
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        seconds = time.perf_counter() - start
        assert self.scan.overhead > 0  # asked for it, the scanner counts the step
        self.rest.append(seconds - self.spent[-1])


def extra_seconds(cases: list[Case], rounds: int) -> list[tuple[float, float]]:
    """Of each case, in turns: seconds that the scanner takes of a step by its own clock, and seconds of the rest.

    The difference of whole steps with and without a scanner drowns in the noise of a shared machine. That makes some
    steps longer and none shorter, so the figure is one that a fifth of the steps stay below.
    """
    with tempfile.TemporaryDirectory() as directory:
        trainings = [Training(case, Path(directory) / f"{index}.mscan") for index, case in enumerate(cases)]
        for _ in range(rounds + WARMUP):
            for training in trainings:
                training.step()
                training.step()  # the first one finds the caches as another case has left them
        for training in trainings:
            training.scan.close()
    return [(_low(training.spent[1::2]), _low(training.rest[1::2])) for training in trainings]


def _low(seconds: list[float]) -> float:
    return float(np.quantile(seconds[WARMUP:], 0.2))


def read_seconds(num_bytes: int) -> float:
    """A plain read of so many bytes in memory, cold, by one thread."""
    x = torch.ones(64 << 20)
    seconds = min(_timed(lambda: x.sum()) for _ in range(5))
    return num_bytes * seconds / x.nbytes


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def fit(x: list[float], y: list[float]) -> tuple[float, float, float]:
    """Slope, intercept and share of the variance that the line explains."""
    slope, intercept = np.polyfit(x, y, 1)
    rest = np.asarray(y) - (slope * np.asarray(x) + intercept)
    total = np.var(y)
    return float(slope), float(intercept), float(1 - np.var(rest) / total) if total else 1.0


def measure_axis(axis: str, rounds: int, gigabytes_per_second: float) -> dict[str, Any]:
    """One line of growth: cost against the bytes that are read, or against the number of cells for `block`."""
    cases = AXES[axis]
    taken = extra_seconds(cases, rounds)
    over = [c.sites * 2 * -(-c.width // c.block) if axis == "block" else c.bytes_read for c in cases]
    slope, intercept, explained = fit([float(n) for n in over], [extra for extra, _ in taken])
    return {
        "axis": axis,
        "values": [getattr(case, axis) for case in cases],
        "against": "cells" if axis == "block" else "bytes",
        "over": over,
        "extra_us": [1e6 * extra for extra, _ in taken],
        "bare_us": [1e6 * bare for _, bare in taken],
        "limit_us": [case.bytes_read / gigabytes_per_second / 1e3 for case in cases],
        "slope": slope,
        "intercept_us": 1e6 * intercept,
        "explained": explained,
    }


def file_growth(counts: tuple[int, ...] = (500, 1000, 2000, 4000, 8000)) -> dict[str, Any]:
    """Bytes of a file, and microseconds to hand a row over, after so many steps."""
    from pyscan.schema import Channel, Schema, SiteInfo
    from pyscan.writer import Writer

    cells = 1000
    schema = Schema("growth", (Channel("act"),), (SiteInfo("w", "linear", (8, 64 * cells), "float32", cells),))
    row, sizes, times = np.random.default_rng(0).random(cells) + 0.5, [], []
    with tempfile.TemporaryDirectory() as directory:
        for count in counts:
            path, taken = Path(directory) / f"{count}.mscan", []
            with Writer(path, schema, fsync="never") as writer:
                for step in range(1, count + 1):
                    taken.append(_timed(lambda step=step: writer.write(step, row, time_ns=0, loss=1.0)))
                    time.sleep(0 if step % 8 else 0.0005)  # a training step gives the writer time
                assert writer.rows_dropped == 0
            sizes.append(path.stat().st_size)
            times.append(1e6 * statistics.median(taken[-250:]))
    slope, intercept, explained = fit([float(n) for n in counts], [float(n) for n in sizes])
    return {
        "steps": list(counts), "bytes": sizes, "cells": cells, "bytes_per_value": slope / cells,
        "intercept_bytes": intercept, "explained": explained, "hand_over_us": times,
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    lines = [f"plain read, one thread: {result['read_gb_per_s']:.1f} GB/s"]
    for axis in result["axes"]:
        unit = (
            f"{1e-9 / axis['slope']:.1f} GB/s" if axis["against"] == "bytes" else f"{axis['slope'] * 1e9:.1f} ns a cell"
        )
        lines.append(
            f"{axis['axis']:7} {axis['values']}: {[round(us) for us in axis['extra_us']]} us longer; slope {unit}, "
            f"{axis['intercept_us']:+.0f} us at zero, {axis['explained']:.1%} of the variance; "
            f"limit {[round(us) for us in axis['limit_us']]} us"
        )
    steps = result["steps"]
    hand_over = [round(us, 1) for us in steps["hand_over_us"]]
    lines.append(f"steps   {steps['steps']}: {steps['bytes_per_value']:.4f} bytes a value; hand-over {hand_over} us")
    return "\n".join(lines)


def picture(result: dict[str, Any], path: Path, note: str) -> None:
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.use("agg")
    figure, panels = plt.subplots(2, 3, figsize=(12, 7))
    for axes, axis in zip(panels.flat, result["axes"], strict=False):
        x = axis["values"]
        line = [1e6 * axis["slope"] * n + axis["intercept_us"] for n in axis["over"]]
        axes.plot(x, axis["extra_us"], "o", label="measured")
        axes.plot(x, line, "-", linewidth=1, label=f"line over {axis['against']}, R² {axis['explained']:.3f}")
        axes.plot(x, axis["limit_us"], "--", color="gray", label="limit: one plain read, cold")
        axes.set_title(axis["axis"], fontsize=9)
        axes.set_ylabel("us per step", fontsize=8)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=7)
    steps = result["steps"]
    panels.flat[4].plot(steps["steps"], [n / 1e6 for n in steps["bytes"]], "o-")
    panels.flat[4].set_title(f"file: {steps['bytes_per_value']:.3f} bytes a value", fontsize=9)
    panels.flat[4].set_ylabel("MB", fontsize=8)
    panels.flat[5].plot(steps["steps"], steps["hand_over_us"], "o-")
    panels.flat[5].set_title("hand-over of a row of 1,000 cells, by steps so far", fontsize=9)
    panels.flat[5].set_ylabel("us", fontsize=8)
    panels.flat[5].set_ylim(bottom=0)
    figure.text(0.01, 0.005, note, fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path)
    plt.close(figure)


def measure(rounds: int) -> dict[str, Any]:
    bandwidth = 1e9 / read_seconds(10**9) / 1e9
    axes = [measure_axis(axis, rounds, bandwidth) for axis in AXES]
    return {"read_gb_per_s": bandwidth, "rounds": rounds, "axes": axes, "steps": file_growth()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--keep", action="store_true", help="write result and picture under benchmarks/results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(arguments.rounds)
    print(table(result))
    if arguments.keep:
        at = results.circumstances()
        results.keep("growth", result, at)
        note = f"pyscan {at['commit']}, {at['date'][:10]}; {at['machine']['processor']}; one thread"
        picture(result, results.directory(at) / "growth.svg", note)


if __name__ == "__main__":
    main()
