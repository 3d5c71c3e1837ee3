"""What this machine has, whether the engine is right on it, and how fast it is beside a plain read.

Receives nothing, hands a verdict to the command line: status 0 if every check passed.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch

import pyscan
from pyscan import _C, engine

_NO_GPU = """  no GPU here: the checks above are of the CPU engine. Nothing was run on a GPU: not its kernels,
  not its streams, not its speed. On a machine with one, this command examines all of them."""

# Larger than any last-level cache met so far, so that the figures are those of memory.
BYTES = 256 << 20


def run(json_output: bool = False) -> int:
    """Examine, print, and return the exit status."""
    result: dict[str, Any] = {"machine": machine(), "checks": checks(), "speed": speed(), "gpu": gpu()}
    all_checks = result["checks"] + (result["gpu"]["checks"] if result["gpu"] else [])
    result["passed"] = all(check["passed"] for check in all_checks)
    print(json.dumps(result, indent=2) if json_output else _text(result))
    return 0 if result["passed"] else 1


def machine() -> dict[str, Any]:
    """Versions and hardware."""
    return {
        "pyscan": pyscan.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "compiled with": _C.compiler,
        "instruction set": _C.isa,
        "best instruction set": _C.isas[-1],
        "cores": os.cpu_count(),
        "torch threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def gpu() -> dict[str, Any] | None:
    """What doctor_gpu.py finds; None where there is no GPU."""
    if not torch.cuda.is_available():
        return None
    from pyscan import doctor_gpu

    return doctor_gpu.examine()


def checks() -> list[dict[str, Any]]:
    """The engine against its definition: ordinary, odd, extreme and non-finite values of every dtype."""
    generator = torch.Generator().manual_seed(0)
    results = []
    for dtype in engine.DTYPES:
        ordinary = torch.randn(513, 1000, generator=generator).to(dtype)
        bad = ordinary.clone()
        bad[::7, ::5] = float("nan")
        bad[3, :] = -float("inf")
        tiny = (ordinary.double() * torch.finfo(dtype).tiny).to(dtype)
        # Squares of float64 leave its range above 1e154: no sum could hold them.
        large = torch.full((65, 65), min(torch.finfo(dtype).max, 1e150), dtype=torch.float64)
        cases = {
            "ordinary": ordinary,
            "strided": ordinary[1:, 3::2].T,
            "non-finite": bad,
            "tiny": tiny,
            "large": large.to(dtype),
        }
        for name, x in cases.items():
            results.append({"name": f"{_short(dtype)} {name}", "passed": _agree(x)})
    return results


def _agree(x: torch.Tensor) -> bool:
    got, want = pyscan.reduce(x), engine.definition(x)
    close = torch.allclose(got[0], want[0], rtol=1e-6, atol=0)
    return close and torch.equal(got[1], want[1]) and torch.equal(got[2], want[2])


def speed() -> list[dict[str, Any]]:
    """Gigabytes per second of the reduction, and of torch.sum over the same bytes, one thread and all of them."""
    results = []
    threads = torch.get_num_threads()
    for num_threads in sorted({1, threads}):
        torch.set_num_threads(num_threads)
        try:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                x = torch.ones(BYTES // dtype.itemsize // 2048, 2048, dtype=dtype)
                plain = x.view(torch.float32)
                read, ours = _best(plain.sum, functools.partial(pyscan.reduce, x))
                results.append(
                    {
                        "dtype": _short(dtype),
                        "threads": num_threads,
                        "read_gb_per_s": BYTES / read / 1e9,
                        "reduce_gb_per_s": BYTES / ours / 1e9,
                        "share_of_read": read / ours,
                    }
                )
        finally:
            torch.set_num_threads(threads)
    return results


def _best(*calls: Callable[[], Any]) -> list[float]:
    """Shortest of five runs of each, taken in turns."""
    best = [float("inf")] * len(calls)
    for _ in range(5):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _text(result: dict[str, Any]) -> str:
    lines = ["pyscan doctor", ""]
    lines += [f"  {name:22} {'none' if value is None else value}" for name, value in result["machine"].items()]
    failed = [check["name"] for check in result["checks"] if not check["passed"]]
    count = len(result["checks"])
    lines += ["", f"  engine against its definition: {count - len(failed)} of {count} checks passed"]
    lines += [f"    WRONG: {name}" for name in failed]
    lines += ["", "  speed, tensors larger than the cache   threads   plain read   reduction   share of read"]
    lines += [
        f"    {row['dtype']:34} {row['threads']:7} {row['read_gb_per_s']:7.1f} GB/s {row['reduce_gb_per_s']:6.1f} GB/s"
        f" {row['share_of_read']:15.2f}"
        for row in result["speed"]
    ]
    if result["gpu"] is None:
        lines += ["", _NO_GPU]
    else:
        from pyscan import doctor_gpu

        lines += ["", *doctor_gpu.lines(result["gpu"])]
    lines += ["", "PASS" if result["passed"] else "FAIL: the engine gives wrong results on this machine"]
    return "\n".join(lines)
