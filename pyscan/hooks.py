"""Attach to the modules of a model and detach again; nothing else.

Every watched module carries a probe, and one shared function as its forward hook: in eager code the function hands the
call to the probe; inside torch.compile it becomes one opaque operator on a tensor that stands for the probe, so that
neither the number of layers nor the state of the scanner makes a new graph. Where a module has no hooks but ours, a
shortcut calls them and forward, and leaves out torch's way around hooks, which takes longer than they do.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from pyscan import _C
from pyscan.gradients import nothing

PROBE = "_pyscan_probe"
# What torch calls in the place of `_call_impl`, made for modules that are compiled in place; copies do not have it.
CALL = "_compiled_call_impl"
_is_compiling = torch.compiler.is_compiling

_probes: dict[int, Callable[[Tensor], None]] = {}  # value of a key -> what an observed tensor is given to
_numbers = itertools.count(1)

# The key counts as changed by the operator, which keeps it in the graph although it returns nothing.
_library = torch.library.Library("pyscan", "DEF")  # type: ignore[no-untyped-call]
_library.define("observe(Tensor x, Tensor(a!) key) -> ()")  # type: ignore[no-untyped-call]


def _observe(x: Tensor, key: Tensor) -> None:
    probe = _probes.get(int(key))
    if probe is not None:
        probe(x)


_library.impl("observe", _observe, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("pyscan::observe", lambda x, key: None, lib=_library)


class Probe:
    """What a module hands its tensors to; must not raise. In a copy of the model there is nobody behind it."""

    def __init__(self, see: Callable[[Any], None], see_compiled: Callable[[Tensor], None]) -> None:
        self.see = see
        self.key = torch.tensor(next(_numbers))
        _probes[int(self.key)] = see_compiled

    def close(self) -> None:
        _probes.pop(int(self.key), None)

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
    _forget_copied(module._forward_pre_hooks, before_forward)
    handle = module.register_forward_pre_hook(before_forward, with_kwargs=True)
    take_shortcut(module, before_forward, None, see)
    return _watch(module, Probe(see, see_compiled), handle)


def watch_output(
    module: nn.Module, see: Callable[[Any], None], see_compiled: Callable[[Tensor], None]
) -> Callable[[], None]:
    """Call `see` with the output of every forward of `module`; returns what ends it."""
    _forget_copied(module._forward_hooks, after_forward)
    handle = module.register_forward_hook(after_forward)
    take_shortcut(module, None, after_forward, see)
    return _watch(module, Probe(see, see_compiled), handle)


def take_shortcut(
    module: nn.Module,
    before: Callable[..., None] | None,
    after: Callable[..., None] | None,
    see: Callable[[Any], None] | _C.ForwardState,
) -> None:
    """Where `before` (its arguments come with keywords) and `after` are the only hooks of a module, have compiled code
    call `see` in their place: with the input, or where there is only `after`, with the output."""
    if getattr(module, CALL, False) is None and type(module)._call_impl is nn.Module._call_impl:
        _teach_compiler()
        _spare_replicas()
        module.__dict__[CALL] = functools.partial(call_alone, _C.make_watched(before, after, see), module)


def leave_shortcut(module: nn.Module) -> None:
    if getattr(module.__dict__.get(CALL), "func", None) is call_alone:
        del module.__dict__[CALL]


def is_watched(module: nn.Module) -> bool:
    return PROBE in module.__dict__ and module.__dict__[PROBE] is not _NOBODY


def before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x = args[0] if args else next(iter(kwargs.values()), None)
    if _is_compiling():
        if torch.is_grad_enabled() and isinstance(x, Tensor):
            torch.ops.pyscan.observe(x.detach(), module._pyscan_probe.key)  # type: ignore[union-attr]
        return
    module.__dict__[PROBE].see(x)


# (watched, module, *args): the call of a watched module. With any other hook all of it is left to torch.
call_alone = _C.make_call_alone(
    [
        torch_module._global_forward_pre_hooks,
        torch_module._global_forward_hooks,
        torch_module._global_backward_pre_hooks,
        torch_module._global_backward_hooks,
    ]
)


def _call_in_graph(watched: object, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


@functools.cache
def _teach_compiler() -> None:
    """In a graph that is traced all of the call is left to torch, which runs the hook."""
    torch.compiler.substitute_in_graph(call_alone, skip_signature_check=True)(_call_in_graph)


@functools.cache
def _spare_replicas() -> None:
    """A replica of nn.DataParallel begins with all that is in the dict of its module, but has weights of its own: there
    the shortcut would lead to the module's."""
    original = nn.Module._replicate_for_data_parallel

    @functools.wraps(original)
    def replicate(self: nn.Module) -> nn.Module:
        replica: nn.Module = original(self)  # type: ignore[no-untyped-call]
        leave_shortcut(replica)
        return replica

    nn.Module._replicate_for_data_parallel = replicate  # type: ignore[method-assign]


def after_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    if _is_compiling():
        if torch.is_grad_enabled() and isinstance(output, Tensor):
            torch.ops.pyscan.observe(output.detach(), module._pyscan_probe.key)  # type: ignore[union-attr]
        return
    module.__dict__[PROBE].see(output)


def _forget_copied(registered: dict[int, Any], hook: Callable[..., None]) -> None:
    """A copy of a watched module has the hook already, without anyone behind it."""
    for key in [key for key, value in registered.items() if value is hook]:
        del registered[key]


def _watch(module: nn.Module, probe: Probe, handle: Any) -> Callable[[], None]:
    module.__dict__[PROBE] = probe

    def end() -> None:
        handle.remove()
        probe.close()
        if module.__dict__.get(PROBE) is probe:
            del module.__dict__[PROBE]
        leave_shortcut(module)

    return end
