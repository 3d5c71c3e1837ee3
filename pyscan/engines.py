"""Which engine reads a model: that of the CPU, or that of the GPU it is on.

Receives a model and hands on the device it is on, then the step buffer for it. What belongs to GPUs is imported only
for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Union

import torch
from torch import nn

from pyscan.accumulate import StepBuffer
from pyscan.schema import Schema
from pyscan.sites import Site

if TYPE_CHECKING:
    from pyscan.device_buffer import DeviceBuffer

Buffer = Union[StepBuffer, "DeviceBuffer"]

CPU = torch.device("cpu")
_NOWHERE = "meta"  # weights that are elsewhere until they are used


def device_of(model: nn.Module) -> torch.device:
    """Where the model is; refused if there is no engine for it."""
    found: dict[torch.device, str] = {}  # with the first parameter there
    for name, parameter in model.named_parameters():
        if parameter.device.type != _NOWHERE:
            found.setdefault(parameter.device, name)
    for device, name in found.items():
        if device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"{name!r} is on device {device.type!r}, for which there is no engine: "
                "pyscan scans models on the CPU or on a CUDA or ROCm GPU"
            )
    if len(found) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in found.items())
        raise ValueError(
            f"the model is on several devices ({places}): pyscan scans models on one device; "
            "shard it with one process per GPU instead"
        )
    device = next(iter(found), CPU)
    if device.type == "cuda" and find_spec("triton") is None:
        raise ValueError(f"scanning a model on {device} needs Triton: pip install triton")
    return device


def make_buffer(sites: Sequence[Site], schema: Schema, device: torch.device) -> Buffer:
    """The step buffer of the engine for `device`."""
    if device.type == "cpu":
        return StepBuffer(sites, schema)
    from pyscan.device import CudaDevice
    from pyscan.device_buffer import DeviceBuffer
    from pyscan.kernels.launch import Reducer

    return DeviceBuffer(sites, schema, CudaDevice(device), Reducer)
