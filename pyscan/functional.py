"""See the inputs of weights that no module call shows: attention projections, fused experts, `weight @ x`.

Receives the sites with observe="functional" and hands each use of one to a sink, while the module that consumes it runs
with gradients enabled. Attention and grouped experts are seen by replacing one torch function for that time, everything
else by a TorchFunctionMode. Nothing is replaced while no such module runs, and no result is ever changed.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from pyscan.sites import Site
from pyscan.uses import COPIES, MATMULS, Frame, Sink, Slot

# Before 2.11 transformers may take another way than torch._grouped_mm on a CPU, which only the mode sees.
_GROUPED_IS_SURE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 11)


class FunctionalCapture:
    """Hooks on the modules that consume functional sites, calling `sink(site, x, offsets)` at each use.

    `site` indexes the list of sites; the last dimension of `x` is the input axis. With `offsets` (on the device of x),
    rows offsets[e-1] to offsets[e] of `x` met site + e, and an empty range met nothing. The first error goes to
    `on_error` and ends the capture; the forward goes on. `problems` says, by site, what could not be linked.
    """

    def __init__(self, sites: Sequence[Site], sink: Sink, *, on_error: Callable[[Exception], None]) -> None:
        self.problems: dict[int, str] = {}
        self._sink = sink
        self._on_error = on_error
        self._active = True
        self._handles = []
        for module, slots in _owners(sites).items():
            self._handles.append(module.register_forward_pre_hook(_Enter(self, slots)))
            self._handles.append(module.register_forward_hook(_Leave(self, slots), always_call=True))

    def remove(self) -> None:
        """Take the hooks away, and leave what this thread may be in the middle of."""
        self._active = False
        for handle in self._handles:
            handle.remove()
        for running in [r for r in _running() if r.capture is self]:
            running.end()

    def enter(self, module: nn.Module, slots: list[Slot]) -> None:
        # A module found running has been cut by a KeyboardInterrupt, which runs no forward hooks.
        self.leave(module)
        if self._active and torch.is_grad_enabled():
            _Running(self, module, Frame(slots, self.problems)).begin()

    def leave(self, module: nn.Module) -> None:
        for running in [r for r in _running() if r.capture is self and r.module is module]:
            running.end()

    def see(self, frame: Frame, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._active or not torch.is_grad_enabled():
            return
        try:
            use = frame.use(name, args, kwargs)
            if use is not None:
                self._sink(*use)
        except Exception as error:
            self._active = False
            self._on_error(error)

    def follow(self, frame: Frame, name: str, args: tuple[Any, ...], out: object) -> None:
        try:
            frame.follow(name, args, out)
        except Exception as error:
            self._active = False
            self._on_error(error)


def _owners(sites: Sequence[Site]) -> dict[nn.Module, list[Slot]]:
    owners: dict[nn.Module, list[Slot]] = {}
    for index, site in enumerate(sites):
        if site.observe != "functional" or site.expert:  # the first expert stands for its parameter
            continue
        others = itertools.takewhile(lambda s: s.expert, itertools.islice(sites, index + 1, None))
        num_experts = None if site.expert is None else 1 + sum(1 for _ in others)
        slot = Slot(index, site.name, site.holder, site.attribute, site.in_axis, site.shape[1], num_experts)
        owners.setdefault(site.module, []).append(slot)
    return owners


def _nothing(*args: object) -> None:
    """What a hook becomes in a copy of the model: a copy is not scanned."""


def _make_nothing() -> Callable[..., None]:
    return _nothing


class _Hook:
    def __init__(self, capture: FunctionalCapture, slots: list[Slot]) -> None:
        self._capture = capture
        self._slots = slots

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _make_nothing, ()


class _Enter(_Hook):
    def __call__(self, module: nn.Module, args: object) -> None:
        if not torch.compiler.is_compiling():
            self._capture.enter(module, self._slots)


class _Leave(_Hook):
    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        if not torch.compiler.is_compiling():
            self._capture.leave(module)


class _Running:
    """One forward of an owner on one thread: what is in place for it, and the frame that gets the calls."""

    def __init__(self, capture: FunctionalCapture, module: nn.Module, frame: Frame) -> None:
        self.capture = capture
        self.module = module
        self.frame = frame
        self.watcher = _PATCHES.get(_function_of(module)) or _watch()

    def begin(self) -> None:
        _running().append(self)
        self.watcher.acquire()

    def end(self) -> None:
        _running().remove(self)
        self.watcher.release()


def _function_of(module: nn.Module) -> str:
    """The one function through which all weights of `module` are used; empty when that is not known."""
    if isinstance(module, nn.MultiheadAttention):
        return "linear"
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    return "_grouped_mm" if implementation == "grouped_mm" and _GROUPED_IS_SURE else ""


class _Thread(threading.local):
    """Owners running on this thread, outermost first; several captures may have the same module in it."""

    def __init__(self) -> None:
        self.running: list[_Running] = []
        self.watch = _Watch()


def _running() -> list[_Running]:
    return _THREAD.running


def _watch() -> _Watch:
    return _THREAD.watch


class _Patch:
    """Replaces one function of a module while any thread runs an owner; on other threads it is the original.

    A method of torch.Tensor is never replaced: from Python 3.13 a class changed 1,000 times loses its method cache.
    """

    def __init__(self, home: Any, name: str) -> None:
        self._home = home
        self._name = name
        self._lock = threading.Lock()  # guards the three below
        self._num_users = 0
        self._original: Callable[..., Any] | None = None
        self._replacement: Callable[..., Any] | None = None

    def acquire(self) -> None:
        with self._lock:
            self._num_users += 1
            if self._num_users == 1:
                self._original = getattr(self._home, self._name)
                self._replacement = self._replace(self._original)
                setattr(self._home, self._name, self._replacement)

    def release(self) -> None:
        with self._lock:
            self._num_users -= 1
            if self._num_users == 0:
                # Someone may have wrapped the replacement meanwhile: then it stays inside theirs and only passes on.
                if getattr(self._home, self._name) is self._replacement:
                    setattr(self._home, self._name, self._original)
                self._replacement = None

    def _replace(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            out = original(*args, **kwargs)
            if self._replacement is replacement:
                for running in _running():
                    if running.watcher is self:
                        running.capture.see(running.frame, self._name, args, kwargs)
            return out

        return replacement


class _Watch(TorchFunctionMode):
    """Sees every torch function of its thread while an owner that needs it runs there."""

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
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in MATMULS:
            for running in _running():
                if running.watcher is self:
                    running.capture.see(running.frame, name, args, kwargs or {})
        elif name in COPIES:
            for running in _running():
                if running.watcher is self:
                    running.capture.follow(running.frame, name, args, out)
        return out


_PATCHES = {"linear": _Patch(F, "linear"), "_grouped_mm": _Patch(torch, "_grouped_mm")}
_THREAD = _Thread()
