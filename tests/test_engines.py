"""Which engine a model gets, and which models get none."""

import subprocess
import sys
import types

import pytest
import torch
from torch import nn

import pyscan
from pyscan import engines
from pyscan.accumulate import StepBuffer, channels, site_info
from pyscan.device_buffer import DeviceBuffer
from pyscan.schema import Schema
from pyscan.sites import find_sites
from tests.streams.fake_device import FakeDevice
from tests.streams.reducers import recording


def model_on(*devices: str) -> nn.Module:
    """A model whose weights claim to be on these devices."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in devices))
    for module, device in zip(model, devices, strict=True):
        kind = type("Elsewhere", (nn.Parameter,), {"device": torch.device(device)})
        module.weight = kind(module.weight.detach())
    return model


@pytest.mark.parametrize(
    ("devices", "device"),
    [(["cpu", "cpu"], "cpu"), (["meta", "cpu"], "cpu"), (["meta"], "cpu"), (["cuda:1", "cuda:1"], "cuda:1")],
)
def test_a_model_is_where_its_weights_are(devices: list[str], device: str) -> None:
    assert engines.device_of(model_on(*devices)) == torch.device(device)


def test_a_model_on_a_device_without_an_engine_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'0\.weight' is on device 'mps', for which there is no engine"):
        pyscan.attach(model_on("mps"))


def test_a_model_on_several_devices_is_refused() -> None:
    with pytest.raises(ValueError, match=r"on several devices \('0\.weight' on cuda:0, '1\.weight' on cuda:1\)"):
        pyscan.attach(model_on("cuda:0", "cuda:1"))
    with pytest.raises(ValueError, match="one process per GPU"):
        pyscan.attach(model_on("cpu", "cuda:0"))


def test_the_engine_follows_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = find_sites(nn.Linear(8, 8)).sites
    schema = Schema(model="", channels=channels(False), sites=tuple(map(site_info, sites)))
    assert type(engines.make_buffer(sites, schema, torch.device("cpu"))) is StepBuffer
    fake = FakeDevice()
    launch = types.ModuleType("launch")
    launch.Reducer = recording(fake)
    monkeypatch.setitem(sys.modules, "pyscan.kernels.launch", launch)
    monkeypatch.setattr("pyscan.device.CudaDevice", lambda device: fake)
    assert type(engines.make_buffer(sites, schema, torch.device("cuda"))) is DeviceBuffer


def test_a_gpu_without_triton_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="a model on cuda:0 needs Triton: pip install triton"):
        pyscan.attach(model_on("cuda:0"))


TRAIN = """
import contextlib, sys, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with {scan} as scan:
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
print(sorted(name for name in sys.modules if "triton" in name or name.startswith("pyscan.kernels")))
"""


def test_a_scan_on_the_cpu_imports_nothing_for_gpus() -> None:
    scans = ["contextlib.nullcontext()", "__import__('pyscan').attach(model, optimizer=optimizer)"]
    bare, scanned = (
        subprocess.run([sys.executable, "-c", TRAIN.format(scan=scan)], capture_output=True, text=True, check=True)
        for scan in scans
    )
    assert scanned.stdout == bare.stdout
