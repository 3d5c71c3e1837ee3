"""The way of addresses to the device: pinned tables, used in turns.

Receives a list of addresses, copies it to the device on the current stream without waiting, and hands on the table
there. A pinned table is not written again before its copy is done.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyscan.device import Device

# Copies under way at the same time before the host waits for the oldest. A step makes a handful of them.
MAX_TABLES = 64


class Table:
    """Pinned memory, its twin on the device, and when the last copy from one to the other was done."""

    def __init__(self, device: Device, capacity: int) -> None:
        self.pinned = device.pinned(capacity, torch.int64)
        self.on_device = device.empty(capacity, torch.int64)
        self.copied = device.new_event()

    def send(self, device: Device, addresses: Sequence[int]) -> Tensor:
        """Queue the copy; returns the part of the twin that it fills."""
        count = len(addresses)
        device.fill(self.pinned, addresses)
        device.copy(self.on_device[:count], self.pinned[:count])
        return self.on_device[:count]


class AddressTables:
    """Tables of at most `capacity` addresses for launches that are ordered among themselves.

    That order is what allows a twin on the device to be used again; the pinned tables have their events.
    """

    def __init__(self, device: Device, capacity: int) -> None:
        self._device = device
        self._capacity = max(capacity, 1)
        self._ring: list[Table] = []
        self._next = 0

    def send(self, addresses: Sequence[int]) -> Tensor:
        """The addresses in the device's memory, for what is queued on the current stream after this."""
        table = self._free()
        sent = table.send(self._device, addresses)
        table.copied.record(self._device.current_stream())
        return sent

    def _free(self) -> Table:
        """The next table if its copy is done, else one more; the host waits only when there are very many."""
        position = self._next
        if position == len(self._ring):
            self._ring.append(Table(self._device, self._capacity))
        elif not self._ring[position].copied.query():
            if len(self._ring) < MAX_TABLES:
                self._ring.insert(position, Table(self._device, self._capacity))
            else:
                self._ring[position].copied.synchronize()
        self._next = (position + 1) % max(len(self._ring), 2)
        return self._ring[position]
