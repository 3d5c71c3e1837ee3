"""When the gradients of a pipeline stage are complete: its schedule scales and reduces them after the last backward.

Receives a model and calls back each time a stage that runs any of its modules is through with its gradients.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

_MODULE = "torch.distributed.pipelining.stage"
_ENDS = ("scale_grads", "perform_reduce_grad")
_REHEARSALS = ("_shape_inference", "_forward_metadata_inference", "_backward_metadata_inference")
Ended = Callable[[], None]
Paused = Callable[[], contextlib.AbstractContextManager[None]]


class _Watch:
    """One scanner's interest in the stages of its model."""

    def __init__(self, model: nn.Module, ended: Ended, paused: Paused) -> None:
        self.modules = weakref.WeakSet(model.modules())
        self.ended = ended
        self.paused = paused


_watches: list[_Watch] = []
_wrapped_stages: list[Any] = []


def watch_stages(model: nn.Module, ended: Ended, paused: Paused) -> Callable[[], None]:
    """Call `ended`, which must not raise, when a stage of `model` is through; returns what ends that.

    Before its first step a stage runs on made-up tensors to learn shapes: inside `paused`.
    """
    wrap_stages()
    watch = _Watch(model, ended, paused)
    _watches.append(watch)

    def end() -> None:
        if watch in _watches:
            _watches.remove(watch)

    return end


def wrap_stages() -> None:
    """None of the methods calls a hook, so they are wrapped; once for the process, when pipelines are in use.

    The import of them takes seconds, which is not ours to spend: this is called again when a forward begins.
    """
    module = sys.modules.get(_MODULE)
    if module is None or _wrapped_stages:
        return
    for owner in (module._PipelineStageBase, module.PipelineStage):
        for names, wrapped in ((_ENDS, _ending), (_REHEARSALS, _rehearsing)):
            for name in names:
                if name in vars(owner):
                    setattr(owner, name, wrapped(vars(owner)[name]))
    _wrapped_stages.append(module)


def _watches_of(stage: Any) -> list[_Watch]:
    return [watch for watch in _watches if stage.submod in watch.modules]


def _rehearsing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def rehearse(stage: Any, *args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for watch in _watches_of(stage):
                stack.enter_context(watch.paused())
            return original(stage, *args, **kwargs)

    return rehearse


def _ending(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def through(stage: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(stage, *args, **kwargs)
        for watch in _watches_of(stage):
            watch.ended()
        return result

    return through
