"""Whether the GPU engine is right on this machine, whether it makes anybody wait, and what it costs.

Receives a device, runs the kernels and scanned training steps on it, and hands results to the doctor: checks, which
pass or fail, and measurements. `python -m pyscan.doctor_gpu` runs one scanned step, for torch's own CUDA sanitizer.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import pyscan
from pyscan import engine
from pyscan.accumulate import matrix_of
from pyscan.device_buffer import MakeReducer
from pyscan.doctor_model import LARGE, SMALL, Sizes, Training
from pyscan.groups import view

BYTES = 1 << 30
ROUNDS = 5


class Check(NamedTuple):
    name: str
    passed: bool
    detail: str = ""


def examine() -> dict[str, Any]:
    """Everything, on the current GPU."""
    from pyscan.kernels.launch import Reducer

    device = torch.device("cuda", torch.cuda.current_device())
    checks = [*kernel_checks(device, Reducer), synchronisation(device), sanitized()]
    return {
        "checks": [check._asdict() for check in checks],
        "bandwidth": bandwidth(device, Reducer, timed_by_events),
        "training": [slowdown(sizes, device, timed_by_events) for sizes in (SMALL, LARGE)],
    }


def cases(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Matrices that take every way through the kernels."""
    generator = torch.Generator().manual_seed(0)
    ordinary = torch.randn(515, 1024, generator=generator).to(dtype)
    bad = ordinary.clone()
    bad[::7, ::5] = float("nan")
    bad[3, :] = -float("inf")
    large = torch.full((65, 128), min(torch.finfo(dtype).max, 1e150), dtype=torch.float64).to(dtype)
    tiny = (ordinary.double() * torch.finfo(dtype).tiny).to(dtype)
    made = {"ordinary": ordinary, "non-finite": bad, "large": large, "tiny": tiny}
    for name, x in made.items():
        yield name, x.to(device)
    x = ordinary.to(device)
    yield "odd width", x[:, :1000].contiguous()[:, :999]
    yield "unaligned", x.flatten()[1 : 1 + 512 * 1000].view(512, 1000)
    yield "strided", x[1:, 3::2]
    yield "transposed", x.T
    yield "empty", x[:0]


def kernel_checks(device: torch.device, make_reducer: MakeReducer) -> Iterator[Check]:
    """The kernels against the definition in float64 and against the CPU engine."""
    for dtype in engine.DTYPES:
        for name, x in cases(dtype, device):
            for by_rows in (False, True):
                got = _reduced(x, by_rows, make_reducer)
                host = x.cpu()
                wanted = [
                    _row(*engine.definition(host, dim=0 if by_rows else -1)),
                    _row(*pyscan.reduce(host, dim=0 if by_rows else -1)),
                ]
                passed = all(np.allclose(got, want, rtol=1e-6, atol=0, equal_nan=True) for want in wanted)
                yield Check(f"{str(dtype)[6:]} {name}{' by rows' if by_rows else ''}", passed)


def _reduced(x: Tensor, by_rows: bool, make_reducer: MakeReducer) -> np.ndarray[Any, Any]:
    """The row that a slot of the whole matrix gives."""
    length = x.shape[0 if by_rows else 1]
    num_blocks = -(-length // 64)
    slot = (64, 0, by_rows, num_blocks, 0, num_blocks, num_blocks + 1, False)
    reducer = make_reducer([slot], num_blocks + 2, x.device)
    plan = reducer.plan([view(0, x)], replace=False)
    addresses = torch.tensor([x.data_ptr()], device=x.device)
    row = torch.empty(num_blocks + 2, dtype=torch.float64, device=x.device)
    reducer.launch(plan, addresses)
    reducer.finish(row, 1.0)
    return row.cpu().numpy()


def _row(sumsq: Tensor, absmax: Tensor, bad: Tensor) -> np.ndarray[Any, Any]:
    sums = np.where(bad.numpy() > 0, np.nan, sumsq.numpy())
    largest = absmax.max().item() if absmax.numel() else 0.0
    return np.array([*sums, largest, bad.sum().item()])


def synchronisation(device: torch.device) -> Check:
    """Scanned steps while torch raises whenever something makes the host wait."""
    training = Training(SMALL, device)
    with pyscan.attach(training.model, optimizer=training.optimizer) as scan:
        for _ in range(4):
            training.step()
        with _strict():
            for _ in range(4):
                training.step()
    problems = [event["text"] for event in scan.events if event["kind"] == "off"]
    return Check("nothing waits for the GPU", not problems and len(scan.rows) == 8, "; ".join(problems))


@contextmanager
def _strict() -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def sanitized(command: list[str] | None = None) -> Check:
    """One scanned step in a process of its own under torch's CUDA sanitizer, which reports races between streams."""
    command = command or [sys.executable, "-m", "pyscan.doctor_gpu"]
    environment = os.environ | {"TORCH_CUDA_SANITIZER": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    passed = run.returncode == 0 and "CSAN" not in run.stderr
    return Check("torch's CUDA sanitizer finds no race", passed, "" if passed else run.stderr[-500:])


Timer = Callable[[Callable[[], Any], int], float]


def timed_by_events(work: Callable[[], Any], times: int) -> float:
    """Seconds of one run of the work on the GPU, without the launches before it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(times):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / times


def bandwidth(
    device: torch.device, make_reducer: MakeReducer, timer: Timer, num_bytes: int = BYTES
) -> list[dict[str, Any]]:
    """Gigabytes per second of the reduction beside those of a plain copy, which reads and writes."""
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.ones(num_bytes // dtype.itemsize // 4096, 4096, dtype=dtype, device=device)
        target = torch.empty_like(x)
        slot = (64, 0, False, 64, 0, 64, 65, False)
        reducer = make_reducer([slot], 66, device)
        plan, addresses = reducer.plan([view(0, x)], replace=True), torch.tensor([matrix_of(x)[0]], device=device)
        works: list[Callable[[], Any]] = [lambda: target.copy_(x), lambda: reducer.launch(plan, addresses)]  # noqa: B023
        copy, ours = _best(works, timer)
        rate = {"copy_gb_per_s": 2 * num_bytes / copy / 1e9, "reduce_gb_per_s": num_bytes / ours / 1e9}
        results.append({"dtype": str(dtype)[6:], **rate, "share": rate["reduce_gb_per_s"] / rate["copy_gb_per_s"]})
    return results


def _best(works: list[Callable[[], Any]], timer: Timer) -> list[float]:
    """Shortest of some runs of each, taken in turns."""
    for work in works:
        timer(work, 2)
    return [min(times) for times in zip(*([timer(work, 3) for work in works] for _ in range(ROUNDS)), strict=True)]


def slowdown(sizes: Sizes, device: torch.device, timer: Timer, rounds: int = ROUNDS) -> dict[str, Any]:
    """How much longer a scanned training step takes than a bare one, in turns."""
    try:
        training = Training(sizes, device)
        timer(training.step, 3)
        pairs = [(timer(training.step, 5), _scanned(training, timer)) for _ in range(rounds)]
    except torch.OutOfMemoryError as error:
        return {"model": sizes.name, "skipped": str(error).split(".")[0]}
    return {
        "model": sizes.name,
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "tokens": sizes.sequences * sizes.length,
        "bare_ms": 1e3 * statistics.median(bare for bare, _ in pairs),
        "slowdown": statistics.median(scanned / bare for bare, scanned in pairs),
    }


def _scanned(training: Training, timer: Timer) -> float:
    with pyscan.attach(training.model, optimizer=training.optimizer):
        timer(training.step, 3)
        return timer(training.step, 5)


def lines(result: dict[str, Any]) -> Iterator[str]:
    """The results as text."""
    failed = [check for check in result["checks"] if not check["passed"]]
    count = len(result["checks"])
    yield f"  GPU engine: {count - len(failed)} of {count} checks passed"
    for check in failed:
        yield f"    WRONG: {check['name']} {check['detail']}"
    yield "  speed on the GPU                            plain copy    reduction   share of copy"
    for row in result["bandwidth"]:
        rates = f"{row['copy_gb_per_s']:9.0f} GB/s {row['reduce_gb_per_s']:7.0f} GB/s {row['share']:15.2f}"
        yield f"    {row['dtype']:38} {rates}"
    yield "  training step                                  bare       scanned"
    for row in result["training"]:
        if "skipped" in row:
            yield f"    {row['model']:38} not measured: {row['skipped']}"
        else:
            name = f"{row['model']}, {row['parameters'] / 1e6:.0f} M weights, {row['tokens']} tokens"
            yield f"    {name:38} {row['bare_ms']:9.1f} ms    x{row['slowdown']:.4f}"


def main() -> None:
    """One scanned training step."""
    training = Training(SMALL, torch.device("cuda"))
    with pyscan.attach(training.model, optimizer=training.optimizer):
        training.step()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
