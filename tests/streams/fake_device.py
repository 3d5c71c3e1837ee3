"""A device that runs nothing by itself and checks everything: streams, events and memory with vector clocks.

Tensors are ordinary CPU tensors and every operation is carried out at once, so all values are right; what is checked
is the order. Each actor (the host, every stream) has a clock; launches, events and waits hand clocks on. While the
device records, every torch operation counts as a launch on the current stream that reads and writes memory. Two
accesses to the same memory, one of them a write, must be ordered by what the program did, or they are a violation.
Memory that is let go of counts as written to by the stream it was made on: the allocator may give it away at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pyscan
from pyscan.device import HostMemory

PACKAGE = str(Path(pyscan.__file__).parent)
HOST = "host"
Clock = dict[str, int]

# These make the host wait on a real device.
SYNCHRONISING = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero", "_unique2", "bincount"}
# These only make memory.
ALLOCATING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Memory:
    """One storage, or something else that is read and written, with the accesses that still matter."""

    def __init__(self, name: str, home: str, storage: Any = None) -> None:
        self.name = name
        self.home = home  # the stream that may use it again
        self.ref = None if storage is None else StorageWeakRef(storage)
        self.begin = 0 if storage is None else storage.data_ptr()
        self.end = self.begin + (0 if storage is None else storage.nbytes())
        self.last_write: tuple[str, int, str] | None = None
        self.reads: dict[str, tuple[int, str]] = {}


class FakeStream:
    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device, self.name = device, name
        device.clocks[name] = {}

    def wait_event(self, event: FakeEvent) -> None:
        self.device.sweep()
        self.device.forbid_in_capture("a stream waits for an event from outside", event.captured)
        if event.clock is not None:  # waiting for an event that was never recorded is allowed, and does nothing
            self.device.merge(self.name, event.clock)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


class FakeEvent:
    """Done when the device has been given `device.lag` launches more: work takes its time."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.clock: Clock | None = None
        self.due = 0  # in launches
        self.captured = False

    def record(self, stream: FakeStream) -> None:
        self.device.sweep()
        self.device.merge(stream.name, self.device.clocks[HOST])
        self.clock, self.due = dict(self.device.clocks[stream.name]), self.device.num_launches + self.device.lag
        self.captured = self.device.capturing

    def query(self) -> bool:
        self.device.sweep()
        self.device.forbid_in_capture("an event is asked")
        if self.clock is None or self.device.num_launches >= self.due:
            self.device.merge(HOST, self.clock or {})
            return True
        return False

    def synchronize(self) -> None:
        self.device.sweep()
        self.device.forbid_in_capture("the host waits")
        self.device.num_waits += 1
        self.device.merge(HOST, self.clock or {})


class FakeDevice(HostMemory):
    """Implements pyscan.device.Device. What went wrong is in `violations`."""

    torch_device = torch.device("cpu")

    def __init__(self, lag: int = 10) -> None:
        self.lag = lag
        self.num_launches = 0  # of any kind
        self.clocks: dict[str, Clock] = {HOST: {}}
        self.violations: list[str] = []
        self.num_waits = 0  # of the host
        self.synchronised: list[str] = []  # operations of pyscan that would make the host wait
        self.allocations: list[str] = []  # made by pyscan, or through this device
        self.allocations_by_step: list[list[str]] = []
        self.waits_by_step: list[int] = []  # of the host, of either kind
        self.capturing = False
        self.main = self._current = FakeStream(self, "main")
        self._memories: dict[int, Memory] = {}
        self._shared: set[int] = set()  # keys of memories that another than their home has used
        self._sums: dict[Any, Memory] = {}

    # What pyscan asks for

    def current_stream(self) -> FakeStream:
        return self._current

    def new_stream(self) -> FakeStream:
        return FakeStream(self, f"stream{len(self.clocks)}")

    def new_event(self) -> FakeEvent:
        return FakeEvent(self)

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def is_capturing(self) -> bool:
        return self.capturing

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        x = torch.empty(count, dtype=dtype)
        self._memory(x)
        self.allocations.append("device")
        return x

    def pinned(self, count: int, dtype: torch.dtype) -> Tensor:
        x = torch.empty(count, dtype=dtype)
        self._memories[x.untyped_storage()._cdata] = Memory("pinned memory", HOST, x.untyped_storage())
        self.allocations.append("pinned")
        return x

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source)

    def fill(self, pinned: Tensor, values: Sequence[int]) -> None:
        self._host("fill", pinned, writes=True)
        super().fill(pinned, values)

    def read(self, pinned: Tensor) -> Any:
        self._host("read", pinned, writes=False)
        return super().read(pinned)

    # What the tests ask for

    @contextmanager
    def recording(self) -> Iterator[FakeDevice]:
        with _Recorder(self):
            yield self
        self.sweep()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count what happens in one training step by itself."""
        self.allocations, self.synchronised, self.num_waits = [], [], 0
        yield
        self.allocations_by_step.append(self.allocations)
        self.waits_by_step.append(self.num_waits + len(self.synchronised))

    def launch(self, what: str, reads: Sequence[Memory], writes: Sequence[Memory]) -> None:
        """Work on the current stream, after all that the host has done."""
        self.sweep()
        self.num_launches += 1
        name = self._current.name
        self.merge(name, self.clocks[HOST])
        self._tick(name)
        for memory in reads:
            self._access(memory, name, what, writes=False)
        for memory in writes:
            self._access(memory, name, what, writes=True)

    def sums(self, key: Any) -> Memory:
        """Memory that is no tensor: the sums of a slot, the scratch of a plan."""
        return self._sums.setdefault(key, Memory(f"{key}", self._current.name))

    def at(self, address: int) -> Memory:
        """The living memory at an address."""
        for key, memory in self._memories.items():
            if memory.begin <= address < memory.end and memory.ref is not None and not memory.ref.expired():
                self._shared.add(key)
                return memory
        self.violations.append("a launch reads memory that was let go of")
        return Memory("nothing", HOST)

    def merge(self, actor: str, clock: Clock) -> None:
        mine = self.clocks[actor]
        for name, time in clock.items():
            if mine.get(name, 0) < time:
                mine[name] = time

    def sweep(self) -> None:
        """See what was let go of since the last call, before the order changes any further."""
        for key in list(self._shared):
            memory = self._memories.get(key)
            if memory is None or memory.ref is None or not memory.ref.expired():
                continue
            self._shared.discard(key)
            del self._memories[key]
            self._check(memory, memory.home, "its release", writes=True)

    def forbid_in_capture(self, what: str, allowed: bool = False) -> None:
        if self.capturing and not allowed:
            self.violations.append(f"{what} while a graph is captured")

    def saw(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """One torch operation, as a launch on the current stream."""
        name = function.overloadpacket.__name__
        is_ours = _called_by_pyscan()
        if is_ours and (name in SYNCHRONISING or _has_bool_index(name, args)):
            self.synchronised.append(name)
        if name in SYNCHRONISING:
            self.merge(HOST, self.clocks[self._current.name])
        written = {id(x) for x in _written(function, args, kwargs)}
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        storages = {_key(x) for x in inputs}
        fresh = [x for x in outputs if _key(x) not in storages and _key(x) not in self._memories]
        if fresh and is_ours:
            self.allocations.append(name)
        made = [self._memory(x) for x in fresh]
        if not written and not fresh:
            return  # a view: no access
        if name in ALLOCATING:
            return
        reads = [self._memory(x) for x in inputs if id(x) not in written]
        self.launch(name, reads, [*made, *(self._memory(x) for x in inputs if id(x) in written)])

    # The machinery

    def _memory(self, x: Tensor) -> Memory:
        storage = x.untyped_storage()
        key = storage._cdata
        memory = self._memories.get(key)
        if memory is None:
            memory = self._memories[key] = Memory(f"tensor {tuple(x.shape)}", self._current.name, storage)
        if memory.home != self._current.name:
            self._shared.add(key)
        return memory

    def _host(self, what: str, pinned: Tensor, *, writes: bool) -> None:
        self.sweep()
        self._tick(HOST)
        self._access(self._memory(pinned), HOST, what, writes=writes)

    def _tick(self, actor: str) -> None:
        self.clocks[actor][actor] = self.clocks[actor].get(actor, 0) + 1

    def _access(self, memory: Memory, actor: str, what: str, *, writes: bool) -> None:
        self._check(memory, actor, what, writes=writes)
        time = self.clocks[actor][actor]
        if writes:
            memory.last_write, memory.reads = (actor, time, what), {}
        else:
            memory.reads[actor] = (time, what)

    def _check(self, memory: Memory, actor: str, what: str, *, writes: bool) -> None:
        seen = self.clocks[actor]
        earlier = [] if memory.last_write is None else [memory.last_write]
        if writes:
            earlier += [(name, time, by) for name, (time, by) in memory.reads.items()]
        for name, time, by in earlier:
            if name != actor and seen.get(name, 0) < time:
                text = f"{memory.name}: {what} on {actor} is not ordered after {by} on {name}"
                self.violations.append(text)


class _Recorder(TorchDispatchMode):
    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._device.sweep()
        result = func(*args, **kwargs)
        self._device.saw(func, args, kwargs, result)
        return result


def _key(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _written(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    found = []
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_leaves(value) if isinstance(x, Tensor)]
    return found


def _has_bool_index(name: str, args: Any) -> bool:
    return name == "index" and any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1])


def _called_by_pyscan() -> bool:
    """Not so inside a GradScaler's own step, around which pyscan has put a frame."""
    frame = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith("grad_scaler.py"):
        if frame.f_code.co_filename.startswith(PACKAGE):
            return True
        frame = frame.f_back
    return False
