"""The hooks of tokens mode: on the modules, before and after their forward; nothing else.

As in hooks.py, one shared function is the hook of every module and finds what to call in the module itself, so that a
copy of the model has nobody behind it. Inside torch.compile nothing is called: what a graph holds has no hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

TAP = "_pyscan_tap"
_is_compiling = torch.compiler.is_compiling


class Tap:
    """What a module hands its input and its output to; both must not raise. In a copy of the model there is none."""

    def __init__(self, before: Callable[[Any], None] | None, after: Callable[[Any, Any], None]) -> None:
        self.before = before
        self.after = after

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return _nobody, ()


def _nobody() -> None:
    return None


def watch_call(
    module: nn.Module, before: Callable[[Any], None] | None, after: Callable[[Any, Any], None]
) -> Callable[[], None]:
    """Call `before` with the first argument of every forward, `after` with it and the output; returns what ends it."""
    tap = Tap(before, after)
    module.__dict__[TAP] = tap
    handles: list[Any] = [module.register_forward_hook(_after, with_kwargs=True)]
    if before is not None:
        handles.append(module.register_forward_pre_hook(_before, with_kwargs=True))

    def end() -> None:
        for handle in handles:
            handle.remove()
        if module.__dict__.get(TAP) is tap:
            del module.__dict__[TAP]

    return end


def _before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    tap = module.__dict__.get(TAP)
    if tap is not None and not _is_compiling():
        tap.before(args[0] if args else next(iter(kwargs.values()), None))


def _after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    tap = module.__dict__.get(TAP)
    if tap is not None and not _is_compiling():
        tap.after(args[0] if args else next(iter(kwargs.values()), None), out)
