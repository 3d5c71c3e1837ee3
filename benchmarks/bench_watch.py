"""What the watch adds to a training step of the MiniMind shape, in time and in instructions.

The rules see rows of 57 sites (hidden 512, 8 layers). valgrind counts their instructions, as the difference between two
runs of different length, which nothing else on the machine disturbs. The step they are set against, on 340 tokens, has
6 floating-point operations per weight and token and at best 32 of them in an instruction (AVX-512): so few instructions
no real step has, and the share of the watch is below the one printed.

    python benchmarks/bench_watch.py            # microseconds per row
    python benchmarks/bench_watch.py --count    # instructions per row, and their share of a step
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from pyscan.schema import SiteInfo
from pyscan.watch import RowWatch

HIDDEN, INNER, LAYERS, KEYS, VOCABULARY, TOKENS = 512, 1408, 8, 128, 6400, 340
FLOPS_PER_INSTRUCTION = 32
MOST = 0.002  # of a step's instructions


def sites() -> list[SiteInfo]:
    """The weights of the model, whose embedding is tied to its head."""
    shapes = {"q": (HIDDEN, HIDDEN), "k": (KEYS, HIDDEN), "v": (KEYS, HIDDEN), "o": (HIDDEN, HIDDEN)}
    shapes |= {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    named = {f"layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in shapes.items()}
    named["embed.weight"] = (VOCABULARY, HIDDEN)
    return [SiteInfo(name, "linear", shape, "float32", -(-shape[1] // 64)) for name, shape in named.items()]


def rows(count: int) -> list[np.ndarray]:
    """Healthy rows, as the scanner gives them."""
    found, random = sites(), np.random.default_rng(0)
    num_blocks = 2 * sum(site.num_blocks for site in found)
    ends = np.repeat([1.0, 0.0], 2 * len(found))
    return [np.concatenate([np.exp(random.normal(0, 0.4, num_blocks)), ends]) for _ in range(count)]


def watch(number: int, given: list[np.ndarray]) -> int:
    """Let the rules see so many rows; returns how many alarms there were."""
    rules = RowWatch(sites())
    return sum(len(rules.see(step, given[step % len(given)], 2.0)) for step in range(number))


def test_watch(benchmark: Any) -> None:
    given = rows(64)
    assert benchmark(watch, 160, given) == 0
    benchmark.group = "watch, 160 rows of 57 sites"


def instructions(few: int = 160, many: int = 800) -> float:
    """Instructions per row: what a longer run takes more than a shorter one."""
    counts = []
    for number in (few, many):
        command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable, __file__]
        output = subprocess.run([*command, "--rows", str(number)], capture_output=True, text=True, check=True).stderr
        found = re.search(r"Collected : (\d+)", output)
        assert found is not None, output[-500:]
        counts.append(int(found[1]))
    return (counts[1] - counts[0]) / (many - few)


def fewest_instructions_of_a_step() -> float:
    return 6 * TOKENS * sum(math.prod(site.shape) for site in sites()) / FLOPS_PER_INSTRUCTION


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind counts the instructions")
def test_the_watch_takes_less_than_its_share_of_a_step() -> None:
    assert instructions() < MOST * fewest_instructions_of_a_step()


def measure(number: int = 3200) -> float:
    """Processor seconds per row, the best of five."""
    given, best = rows(64), float("inf")
    for _ in range(5):
        start = time.thread_time()
        watch(number, given)
        best = min(best, (time.thread_time() - start) / number)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--rows", type=int, help="only let the rules see so many rows")
    arguments = parser.parse_args()
    if arguments.rows:
        watch(arguments.rows, rows(64))
    elif arguments.count:
        row, step = instructions(), fewest_instructions_of_a_step()
        print(f"{row:,.0f} instructions per row, over {step:,.0f} per step: below {row / step:.4%} (limit {MOST:.1%})")
    else:
        print(f"{measure() * 1e6:.1f} us per row of {len(sites())} sites, {len(rows(1)[0])} cells")


if __name__ == "__main__":
    main()
