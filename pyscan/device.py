"""Streams, events and pinned memory of one device, and nothing else of torch.cuda.

The engine for GPUs asks for these few things only, so that the same code runs on CUDA, on ROCm (which torch calls
cuda too) and on a stand-in that records the order of everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Stream(Protocol):
    """A queue of work on the device. Two objects for the same queue are equal."""

    def wait_event(self, event: Any, /) -> None:
        """What is queued from now on runs after the event; the host does not wait."""


class Event(Protocol):
    """A point in a stream. It may be recorded again as soon as those who wait for it have said so."""

    def record(self, stream: Any, /) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Device(Protocol):
    """What the engine needs of a device. Copies and allocations belong to the stream that is current."""

    @property
    def torch_device(self) -> torch.device: ...
    def current_stream(self) -> Stream: ...
    def new_stream(self) -> Stream: ...
    def new_event(self) -> Event: ...
    def on(self, stream: Any, /) -> AbstractContextManager[Any]:
        """Make the stream, and its device, current."""

    def is_capturing(self) -> bool:
        """Whether what is queued now goes into a graph to be replayed: nothing may be asked or waited for."""

    def empty(self, count: int, dtype: torch.dtype) -> Tensor: ...
    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host that the device can read and write by itself."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy; the host does not wait."""

    def fill(self, pinned: Tensor, values: Sequence[int]) -> None:
        """Write the first values of pinned memory; no copy from it may be under way."""

    def read(self, pinned: Tensor) -> NDArray[Any]:
        """The values of pinned memory, to keep; the copy to it must be done."""


class HostMemory:
    """How the host reads and writes pinned memory."""

    def fill(self, pinned: Tensor, values: Sequence[int]) -> None:
        pinned.numpy()[: len(values)] = values

    def read(self, pinned: Tensor) -> NDArray[Any]:
        return np.array(pinned.numpy())


class CudaDevice(HostMemory):
    """A GPU, by torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.torch_device = torch.device(device.type, index)

    def current_stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.torch_device)

    def new_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]

    def new_event(self) -> torch.cuda.Event:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def on(self, stream: torch.cuda.Stream, /) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, device=self.torch_device)

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)
