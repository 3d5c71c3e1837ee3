"""When the gradients of a pipeline stage are complete: its schedule scales and reduces them after the last backward.

Receives a model and calls back each time a stage that runs any of its modules is through with its gradients.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

_MODULE = "torch.distributed.pipelining.stage"
_METHODS = ("scale_grads", "perform_reduce_grad")


class _Watch:
    """One scanner's interest in the stages of its model."""

    def __init__(self, model: nn.Module, ended: Callable[[], None]) -> None:
        self.modules = weakref.WeakSet(model.modules())
        self.ended = ended


_watches: list[_Watch] = []
_wrapped_stages: list[Any] = []


def watch_stages(model: nn.Module, ended: Callable[[], None]) -> Callable[[], None]:
    """Call `ended`, which must not raise, when a stage of `model` is through; returns what ends that."""
    wrap_stages()
    watch = _Watch(model, ended)
    _watches.append(watch)

    def end() -> None:
        if watch in _watches:
            _watches.remove(watch)

    return end


def wrap_stages() -> None:
    """Neither method calls a hook, so they are wrapped; once for the process, when pipelines are in use.

    The import of them takes seconds, which is not ours to spend: this is called again when a forward begins.
    """
    module = sys.modules.get(_MODULE)
    if module is None or _wrapped_stages:
        return
    for name in _METHODS:
        setattr(module._PipelineStageBase, name, _wrapped(getattr(module._PipelineStageBase, name)))
    _wrapped_stages.append(module)


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def through(stage: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(stage, *args, **kwargs)
        for watch in [watch for watch in _watches if stage.submod in watch.modules]:
            watch.ended()
        return result

    return through
