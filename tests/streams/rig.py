"""A device buffer on the fake device beside a CPU engine, which are given the same tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pyscan.accumulate import StepBuffer, channels, site_info
from pyscan.device_buffer import DeviceBuffer
from pyscan.schema import Schema
from pyscan.sites import find_sites
from tests.streams.fake_device import FakeDevice
from tests.streams.reducers import recording

ROWS, FEATURES = 6, 70


class Rig:
    """`num_sites` linear weights of 70 x 70; those in `frozen` do not train."""

    def __init__(self, num_sites: int = 3, *, frozen: tuple[int, ...] = (), lag: int = 10) -> None:
        model = nn.Sequential(*(nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(num_sites)))
        for site in frozen:
            model[site].requires_grad_(False)
        sites = find_sites(model).sites
        schema = Schema(model="rig", channels=channels(False), sites=tuple(map(site_info, sites)))
        self.device = FakeDevice(lag)
        self.buffer = DeviceBuffer(sites, schema, self.device, recording(self.device))
        self.expected = StepBuffer(sites, schema)
        self.rows: list[NDArray[np.float64]] = []  # that have arrived
        self.numbers: list[list[float]] = []
        self.sent: list[NDArray[np.float64]] = []  # what they must be

    @contextmanager
    def training(self) -> Iterator[Rig]:
        """Everything inside is recorded; afterwards all rows are there and right, and nothing was out of order."""
        with self.device.recording():
            yield self
            self.take(self.buffer.wait_arrivals())
        self.check()

    def check(self) -> None:
        assert self.device.violations == []
        assert len(self.rows) == len(self.sent)
        for got, want in zip(self.rows, self.sent, strict=True):
            np.testing.assert_array_equal(got, want)

    def make(self, rows: int = ROWS) -> Tensor:
        """A tensor that the training has computed on the current stream."""
        return torch.randn(rows, FEATURES) * 2

    def see(self, site: int, x: Tensor, *, at_once: bool = False) -> None:
        self.expected.add_input(site, x)
        self.buffer.add_input(site, x, at_once=at_once)

    def watch(self, site: int, grad: Tensor) -> None:
        self.expected.set_grad(site, grad)
        self.buffer.watch_grad(self.buffer.grad_slots(site), grad)

    def set(self, site: int, grad: Tensor) -> None:
        self.expected.set_grad(site, grad)
        self.buffer.set_grad(site, grad)

    def end_step(self, *numbers: Tensor, scale: Tensor | float = 1.0) -> None:
        self.sent.append(self.expected.take(float(scale)))
        self.take(self.buffer.send_row(len(self.sent), numbers, scale))

    def take(self, arrivals: Iterator[object]) -> None:
        for facts, cells, numbers in arrivals:
            self.rows.append(cells)
            self.numbers.append(numbers.tolist())
            assert facts == len(self.rows), "rows arrive in order"

    def cells(self, row: int, channel: str, site: int) -> NDArray[np.float64]:
        return self.rows[row][self.buffer.cells(channel, site)]
