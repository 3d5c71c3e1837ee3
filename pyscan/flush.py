"""Who waits for whom: groups of noted tensors go to the reducer on the right stream, in the right order.

Receives groups of tensors with what is known of them, and the order to finish a row; hands them to the reducer. The
rules: the side stream waits for those who made the tensors; the tensors are held until their stream waits for the side
stream in turn; all launches that touch the same sums are ordered; and the host waits for nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from pyscan.address_tables import AddressTables, Table
from pyscan.device import Device, Event, Stream
from pyscan.groups import Note, slots_of
from pyscan.kernels.plan import View

# Shapes come back; of those that do not (every batch of another length) the oldest plans are dropped.
MAX_PLANS = 256


class Plan(Protocol):
    """What a reducer has prepared for tensors of certain shapes."""

    num_addresses: int
    num_launches: int


class Reducer(Protocol):
    """The kernels. Sums stay with the reducer until `finish`; every call is queued on the current stream."""

    def plan(self, views: Sequence[Any], *, replace: bool) -> Any: ...
    def launch(self, plan: Any, addresses: Tensor) -> None: ...
    def finish(self, row: Tensor, inv_scale: float | Tensor) -> None: ...


class _Flight(NamedTuple):
    """Work of the side stream that may not be done yet, and the tensors it reads."""

    owner: Stream  # where the tensors were made, and where their memory is used again
    done: Event
    notes: Sequence[Note]


class _Plans:
    """Prepared launches by shapes. Those of a stream are made on it, so that their memory is freed in its order."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._plans: OrderedDict[tuple[bool, tuple[View, ...]], Any] = OrderedDict()

    def get(self, views: tuple[View, ...], replace: bool) -> Any:
        key = replace, views
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._reducer.plan(views, replace=replace)
            if len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(key)
        return plan


class _Lane:
    """Plans and tables for launches that are ordered among themselves: those of the side stream, and the others."""

    def __init__(self, device: Device, reducer: Reducer, num_slots: int) -> None:
        self._plans = _Plans(reducer)
        self._tables = AddressTables(device, 2 * num_slots)

    def prepare(self, views: tuple[View, ...], addresses: Sequence[int], replace: bool) -> tuple[Any, Tensor]:
        return self._plans.get(views, replace), self._tables.send(addresses)


class _Captured:
    """The same for launches that go into graphs: each has its own plan and table, for as long as there are replays.

    What is uploaded here is uploaded again by every replay, and not before the first.
    """

    def __init__(self, device: Device, reducer: Reducer) -> None:
        self._device = device
        self._reducer = reducer
        self.kept: list[tuple[Any, Table]] = []

    def prepare(self, views: tuple[View, ...], addresses: Sequence[int], replace: bool) -> tuple[Any, Tensor]:
        plan, table = self._reducer.plan(views, replace=replace), Table(self._device, len(addresses))
        self.kept.append((plan, table))
        return plan, table.send(self._device, addresses)


class Flusher:
    """The reducer of one scanner and the two ways to it: the side stream, and whichever stream is current."""

    def __init__(self, device: Device, reducer: Reducer, num_slots: int) -> None:
        self.num_launches = 0  # of kernels, since the beginning
        self._device = device
        self._reducer = reducer
        self._side = device.new_stream()
        self._side_lane = _Lane(device, reducer, num_slots)
        self._side_slots: set[int] = set()  # filled on the side stream since a stream last waited for it
        self._current_lane = _Lane(device, reducer, num_slots)
        self._current = device.current_stream()  # where the last launch beside the side stream was queued
        self._captured = _Captured(device, reducer)
        self._flight: _Flight | None = None
        self._events = [device.new_event(), device.new_event()]  # of flights, in turns
        self._made = device.new_event()
        self._finished: Event | None = None  # the last row, until the current stream has waited for it
        self._follow(self._current)  # the reducer's own memory was made there

    def on_side(self, notes: Sequence[Note], owner: Stream, *, replace: bool) -> Sequence[Note]:
        """Reduce tensors made on the stream `owner`, beside it; returns what was let go of: the group before.

        Nothing may write to the tensors before they are let go of, by `join` or by the group after.
        """
        self._follow(owner)
        if owner != self._current:
            self._follow(self._current)
        views = tuple(note.view for note in notes)
        done = self._events.pop(0)
        with self._device.on(self._side):
            self._launch(self._side_lane, views, _addresses(notes), replace)
            done.record(self._side)
        self._events.append(done)
        self._side_slots.update(slot for view in views for slot in slots_of(view))
        earlier, self._flight = self._flight, _Flight(owner, done, notes)
        return self._let_go(earlier)

    def on_current(self, views: tuple[View, ...], addresses: Sequence[int], *, replace: bool) -> None:
        """Reduce tensors on the current stream: they may be written to as soon as this returns."""
        stream = self._device.current_stream()
        with self._device.on(stream):
            if self._device.is_capturing():
                self._launch(self._captured, views, addresses, replace)
            else:
                self._order_current(stream, views)
                self._launch(self._current_lane, views, addresses, replace)

    def join(self, stream: Stream) -> Sequence[Note]:
        """Let the stream wait for all that the side stream was given; returns what was let go of."""
        flight, self._flight = self._flight, None
        if flight is not None:
            stream.wait_event(flight.done)
            self._side_slots.clear()
        return self._let_go(flight)

    def finish(self, row: Tensor, inv_scale: float | Tensor, result: Tensor, target: Tensor, done: Event) -> None:
        """Queue the finished row, then the copy of `result`, of which it is a part, to pinned memory `target`.

        Call `join` before. When the event `done` is done, the target is there.
        """
        stream = self._device.current_stream()
        self._order_current(stream, ())
        if not self._captured.kept:  # a replay of a graph, which nobody announces, follows the current stream only
            self._follow(stream)
            stream = self._side
        with self._device.on(stream):
            self._reducer.finish(row, inv_scale)
            self._device.copy(target, result)
            done.record(stream)
        self.num_launches += 1
        self._finished = done

    def _launch(
        self, lane: _Lane | _Captured, views: tuple[View, ...], addresses: Sequence[int], replace: bool
    ) -> None:
        """Queue one group on the current stream."""
        plan, table = lane.prepare(views, addresses, replace)
        self._reducer.launch(plan, table)
        self.num_launches += plan.num_launches

    def _follow(self, stream: Stream) -> None:
        """Let the side stream wait for what is queued on `stream` now."""
        self._made.record(stream)
        self._side.wait_event(self._made)

    def _order_current(self, stream: Stream, views: tuple[View, ...]) -> None:
        """Let `stream` wait for every launch whose sums or tables the next launch on it will touch."""
        if self._finished is not None:
            stream.wait_event(self._finished)  # the row before was taken and its sums forgotten
            self._finished = None
        if stream != self._current:
            self._made.record(self._current)
            stream.wait_event(self._made)
            self._current = stream
        if self._flight and not self._side_slots.isdisjoint(slot for view in views for slot in slots_of(view)):
            stream.wait_event(self._flight.done)

    def _let_go(self, flight: _Flight | None) -> Sequence[Note]:
        """Let the stream that made the tensors wait for their readers: it may use their memory again after that."""
        if flight is None:
            return ()
        flight.owner.wait_event(flight.done)
        return flight.notes


def _addresses(notes: Sequence[Note]) -> list[int]:
    return [tensor.data_ptr() for note in notes for tensor in note.tensors]
