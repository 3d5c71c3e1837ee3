"""The doctor's examination of a GPU, on the fake device as far as it can be: what it says, and when it fails."""

import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pyscan import doctor, doctor_gpu, scanner
from pyscan.device_buffer import DeviceBuffer
from pyscan.doctor_model import Sizes
from tests.streams.fake_device import FakeDevice
from tests.streams.reducers import StandInReducer, recording

CPU = torch.device("cpu")
TINY = Sizes("tiny", 64, 96, 2, 2, 50, 2, 8)


def timer(work: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - start) / times


class WrongReducer(StandInReducer):
    """Forgets the last value of every row it finishes."""

    def finish(self, row: torch.Tensor, inv_scale: float | torch.Tensor) -> None:
        super().finish(row, inv_scale)
        row[0] *= 1.00001


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()
    make = recording(device)
    monkeypatch.setattr(scanner, "make_buffer", lambda sites, schema, _: DeviceBuffer(sites, schema, device, make))
    monkeypatch.setattr(doctor_gpu, "SMALL", TINY)
    return device


def test_every_dtype_and_way_through_the_kernels_is_checked() -> None:
    checks = list(doctor_gpu.kernel_checks(CPU, StandInReducer))
    assert all(check.passed for check in checks)
    assert len(checks) == 4 * 9 * 2
    assert {check.name.split()[0] for check in checks} == {"float32", "bfloat16", "float16", "float64"}


def test_kernels_that_are_slightly_wrong_fail() -> None:
    checks = list(doctor_gpu.kernel_checks(CPU, WrongReducer))
    assert not any(check.passed for check in checks if "ordinary" in check.name)


def test_scanned_steps_that_wait_for_nothing_pass(fake: FakeDevice) -> None:
    with fake.recording():
        check = doctor_gpu.synchronisation(CPU)
    assert check.passed
    assert fake.violations == []


def test_a_scanner_that_turned_itself_off_fails(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(DeviceBuffer, "join", fail)
    with pytest.warns(RuntimeWarning, match="turned itself off"):
        check = doctor_gpu.synchronisation(CPU)
    assert not check.passed
    assert "called a synchronizing CUDA operation" in check.detail


def test_a_race_found_by_the_sanitizer_fails() -> None:
    assert doctor_gpu.sanitized([sys.executable, "-c", "pass"]).passed
    report = doctor_gpu.sanitized([sys.executable, "-c", "import sys; print('CSAN detected', file=sys.stderr)"])
    assert not report.passed
    assert "CSAN detected" in report.detail
    asked = "import os; assert os.environ['TORCH_CUDA_SANITIZER'] == '1'"
    assert doctor_gpu.sanitized([sys.executable, "-c", asked]).passed


def test_measurements_are_shares_of_what_they_stand_beside(fake: FakeDevice) -> None:
    rates = doctor_gpu.bandwidth(CPU, StandInReducer, timer, num_bytes=1 << 20)
    assert [row["dtype"] for row in rates] == ["float32", "bfloat16", "float16"]
    assert all(row["share"] > 0 for row in rates)
    row = doctor_gpu.slowdown(TINY, CPU, timer, rounds=1)
    assert row["slowdown"] > 0
    assert row["tokens"] == 16


def test_a_model_that_does_not_fit_is_said_to_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr(doctor_gpu, "Training", full)
    assert doctor_gpu.slowdown(TINY, CPU, timer) == {"model": "tiny", "skipped": "CUDA out of memory"}


def test_the_text_names_what_is_wrong() -> None:
    result = {
        "checks": [
            {"name": "float32 tiny", "passed": False, "detail": ""},
            {"name": "b", "passed": True, "detail": ""},
        ],
        "bandwidth": [{"dtype": "float32", "copy_gb_per_s": 2000.0, "reduce_gb_per_s": 1800.0, "share": 0.9}],
        "training": [
            {"model": "small", "parameters": 3e7, "tokens": 2048, "bare_ms": 12.0, "slowdown": 1.01},
            {"model": "1B", "skipped": "CUDA out of memory"},
        ],
    }
    text = "\n".join(doctor_gpu.lines(result))
    assert "1 of 2 checks passed" in text
    assert "WRONG: float32 tiny" in text
    assert "x1.0100" in text
    assert "not measured: CUDA out of memory" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_doctor_says_what_was_not_checked() -> None:
    result = {"machine": {}, "checks": [], "speed": [], "gpu": doctor.gpu(), "passed": True}
    assert "Nothing was run on a GPU" in doctor._text(result)
