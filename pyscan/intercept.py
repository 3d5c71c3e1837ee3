"""Stand between a forward and the torch functions it calls, for as long as somebody listens and no longer.

Two ways: a Patch replaces one function by name, at about 1 us a call; the Watch, a TorchFunctionMode, sees every
function of its thread, at about 2 us for each. Both call the original first, return its result untouched, and tell the
listeners of the calling thread; on every other thread they are the original.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from pyscan.uses import COPIES, MATMULS

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Listener(Protocol):
    """Hears of matrix products from its `patches`, and of products and copies from the watch if it `watches`."""

    patches: tuple[str, ...]
    watches: bool

    @property
    def owner(self) -> object: ...
    def patched(self, name: str, args: Args, kwargs: Kwargs, out: object) -> None: ...
    def watched(self, name: str, args: Args, kwargs: Kwargs, out: object) -> None: ...
    def copied(self, name: str, args: Args, out: object) -> None: ...


def listen(listener: Listener) -> None:
    """Put in place what `listener` needs, on this thread, until `unlisten`."""
    _THREAD.listeners.append(listener)
    for name in listener.patches:
        PATCHES[name].acquire()
    if listener.watches:
        _THREAD.watch.acquire()


def unlisten(listener: Listener) -> None:
    _THREAD.listeners.remove(listener)
    for name in listener.patches:
        PATCHES[name].release()
    if listener.watches:
        _THREAD.watch.release()


def listeners() -> list[Listener]:
    """Those of this thread, the outermost first."""
    return _THREAD.listeners


class Patch:
    """Replaces one function of a module while anybody, on any thread, listens to it.

    A method of torch.Tensor is never replaced: from Python 3.13 a class changed 1,000 times loses its method cache.
    """

    def __init__(self, home: Any, name: str) -> None:
        self._home = home
        self._name = name
        self._lock = threading.Lock()  # guards the three below
        self._num_users = 0
        self._original: Callable[..., Any] | None = None
        self._replacement: Callable[..., Any] | None = None  # kept: making it anew costs more than using it

    def acquire(self) -> None:
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                current = getattr(self._home, self._name)
                if current is not self._original:
                    self._original, self._replacement = current, self._replace(current)
                setattr(self._home, self._name, self._replacement)

    def release(self) -> None:
        with self._lock:
            self._num_users -= 1
            # Someone may have wrapped the replacement meanwhile: it stays inside theirs, and tells nobody any more.
            if self._num_users == 0 and getattr(self._home, self._name) is self._replacement:
                setattr(self._home, self._name, self._original)

    def _replace(self, original: Callable[..., Any]) -> Callable[..., Any]:
        name = self._name

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            if self._replacement is replacement:
                for listener in _THREAD.listeners:
                    if name in listener.patches:
                        listener.patched(name, args, kwargs, out)
            return out

        return replacement


class Watch(TorchFunctionMode):
    """One for each thread: entered by its first listener that watches, left by the last."""

    def __init__(self) -> None:
        super().__init__()
        self._num_users = 0

    def acquire(self) -> None:
        self._num_users += 1
        if self._num_users == 1:
            self.__enter__()  # type: ignore[no-untyped-call]

    def release(self) -> None:
        self._num_users -= 1
        if self._num_users == 0:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in MATMULS:
            for listener in _THREAD.listeners:
                if listener.watches:
                    listener.watched(name, args, kwargs or {}, out)
        elif name in COPIES:
            for listener in _THREAD.listeners:
                if listener.watches:
                    listener.copied(name, args, out)
        return out


class _Thread(threading.local):
    def __init__(self) -> None:
        self.listeners: list[Listener] = []
        self.watch = Watch()


PATCHES = {
    "linear": Patch(F, "linear"),
    "matmul": Patch(torch, "matmul"),
    "bmm": Patch(torch, "bmm"),
    **({"_grouped_mm": Patch(torch, "_grouped_mm")} if hasattr(torch, "_grouped_mm") else {}),
}
_THREAD = _Thread()
