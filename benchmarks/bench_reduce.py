"""The reduction beside a pure read of the same bytes and beside plain torch computing the same three statistics.

`test_share_of_a_pure_read` takes the contestants in turns and states ratios: those hold on a noisy machine, where two
separate timings do not.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import pyscan

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = {"memory": 256 << 20, "cache": 1 << 20}


def matrix(dtype: torch.dtype, num_bytes: int) -> torch.Tensor:
    cols = 2048 if num_bytes > 16 << 20 else 512
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_bytes // dtype.itemsize // cols, cols, generator=generator).to(dtype)


def pure_read(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.float32).sum()


def plain_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three statistics as one writes them in torch: norms in float32, no copy to float64."""
    blocks = x.unflatten(-1, (-1, 64))
    sumsq = torch.linalg.vector_norm(blocks, dim=-1, dtype=torch.float32).square().sum(0)
    absmax = blocks.abs().amax((0, 2))
    bad = torch.isfinite(blocks).logical_not_().sum((0, 2))
    return sumsq, absmax, bad


def assert_equal_results(x: torch.Tensor) -> None:
    ours, theirs = pyscan.reduce(x), plain_torch(x)
    torch.testing.assert_close(ours[0], theirs[0].double(), rtol=1e-3, atol=0)  # float32 sums over 1e5 rows
    assert torch.equal(ours[1], theirs[1].double())
    assert torch.equal(ours[2], theirs[2])


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", [pure_read, pyscan.reduce, plain_torch], ids=["pure_read", "pyscan", "plain_torch"])
def test_cache_sized(benchmark: Any, one_thread: None, call: Callable[..., Any], dtype: torch.dtype) -> None:
    x = matrix(dtype, SIZES["cache"])
    assert_equal_results(x)
    benchmark.group = f"reduce 1 MB, {dtype}"
    benchmark(call, x)


def in_turns(calls: list[Callable[[], Any]], rounds: int) -> list[float]:
    """Best time of each call, the calls taking turns."""
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_share_of_a_pure_read(benchmark: Any, one_thread: None, size: str, dtype: torch.dtype) -> None:
    x = matrix(dtype, SIZES[size] if benchmark.enabled else 1 << 20)
    assert_equal_results(x)
    repeat = 200 if size == "cache" and benchmark.enabled else 1
    rounds = 7 if benchmark.enabled else 1

    def measure() -> list[float]:
        reads = in_turns([lambda: pure_read(x), lambda: pyscan.reduce(x)], rounds * repeat)
        plain = in_turns([lambda: plain_torch(x)], min(rounds, 2) * (repeat // 50 or 1))
        torch.set_num_threads(2)
        two = in_turns([lambda: pyscan.reduce(x)], rounds * repeat)
        torch.set_num_threads(1)
        return reads + plain + two

    read, ours, plain, two = benchmark.pedantic(measure, rounds=1)
    benchmark.group = "reduce, ratios"
    benchmark.extra_info |= {
        "gb_per_s": round(x.nbytes / ours / 1e9, 1),
        "share_of_pure_read": round(read / ours, 2),
        "times_plain_torch": round(plain / ours, 1),
        "two_threads_over_one": round(ours / two, 2),
    }
    if benchmark.enabled:
        print(f"\n{size:6} {dtype!s:14}", benchmark.extra_info)
