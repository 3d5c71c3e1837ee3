"""Attach to the modules of a model and detach again; nothing else.

Every watched module carries a probe, and one shared function as its forward hook: in eager code the function hands the
call to the probe; inside torch.compile it becomes one opaque operator on a tensor that stands for the probe, so that
neither the number of layers nor the state of the scanner makes a new graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pyscan.gradients import nothing

PROBE = "_pyscan_probe"
KEY = "_pyscan_key"

_probes: dict[int, Callable[[Tensor], None]] = {}  # address of a key tensor -> what an observed tensor is given to

# A copy of a model has copies of its key tensors, at other addresses: it is not scanned.
_library = torch.library.Library("pyscan", "DEF")
_library.define("observe(Tensor x, Tensor(a!) key) -> ()")


def _observe(x: Tensor, key: Tensor) -> None:
    probe = _probes.get(key.data_ptr())
    if probe is not None:
        probe(x)


_library.impl("observe", _observe, "CompositeExplicitAutograd")
torch.library.register_fake("pyscan::observe", lambda x, key: None, lib=_library)


class Probe:
    """What a module hands its tensors to. `see` must not raise."""

    __slots__ = ("key", "see")

    def __init__(self, see: Callable[[Any], None], see_compiled: Callable[[Tensor], None]) -> None:
        self.see = see
        self.key = torch.zeros(1)
        _probes[self.key.data_ptr()] = see_compiled

    def close(self) -> None:
        _probes.pop(self.key.data_ptr(), None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Probe:
        return _NOBODY

    def __reduce__(self) -> tuple[Callable[[], Probe], tuple[()]]:
        return _nobody, ()


def _nobody() -> Probe:
    return _NOBODY


_NOBODY = Probe(nothing, nothing)


def watch_input(
    module: nn.Module, see: Callable[[Any], None], see_compiled: Callable[[Tensor], None]
) -> Callable[[], None]:
    """Call `see` with the first argument of every forward of `module`; returns what ends it."""
    return _watch(module, Probe(see, see_compiled), module.register_forward_pre_hook(before_forward, with_kwargs=True))


def watch_output(
    module: nn.Module, see: Callable[[Any], None], see_compiled: Callable[[Tensor], None]
) -> Callable[[], None]:
    """Call `see` with the output of every forward of `module`; returns what ends it."""
    return _watch(module, Probe(see, see_compiled), module.register_forward_hook(after_forward))


def is_watched(module: nn.Module) -> bool:
    return PROBE in module.__dict__ and module.__dict__[PROBE] is not _NOBODY


def before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x = args[0] if args else next(iter(kwargs.values()), None)
    if torch.compiler.is_compiling():
        if torch.is_grad_enabled() and isinstance(x, Tensor):
            torch.ops.pyscan.observe(x.detach(), module._pyscan_key)
        return
    module.__dict__[PROBE].see(x)


def after_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if torch.compiler.is_compiling():
        if torch.is_grad_enabled() and isinstance(output, Tensor):
            torch.ops.pyscan.observe(output.detach(), module._pyscan_key)
        return
    module.__dict__[PROBE].see(output)


def _watch(module: nn.Module, probe: Probe, handle: Any) -> Callable[[], None]:
    module.__dict__[PROBE] = probe
    module.__dict__[KEY] = probe.key

    def end() -> None:
        handle.remove()
        probe.close()
        if module.__dict__.get(PROBE) is probe:
            del module.__dict__[PROBE], module.__dict__[KEY]

    return end
