"""When a step ends: after the optimizer's step, or when the GradScaler has decided to skip it.

Receives the optimizers of a run and calls back before the first of them steps (gradients are still there, but may
be clipped) and after the last one has: with the loss scale in use and what says whether the step was skipped. The
plain case takes a quick way through compiled code, bindings_optimizer.cpp.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pyscan import _C
from pyscan.closing import Scaling
from pyscan.levels import Seen

OptimizerLike = Any  # an Optimizer, or a wrapper with one in `.optimizer`


class StepWatch:
    """Follows the optimizers of one scanner from `start` on. The callbacks must not raise.

    `on_late` and `on_row` are those of a plain step: the weights whose gradient was read only now, and what there is to
    say of a row that was closed (seconds it took, whether the writer took it, what a glance has shown).
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        on_begin: Callable[[bool], None],
        on_end: Callable[[Scaling | None], None],
        on_late: Callable[[list[int]], None],
        on_row: Callable[[float, bool, Seen | None], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self.optimizers = optimizers
        self._on_begin = on_begin
        self._on_end = on_end
        self._on_error = on_error
        self._scale: Tensor | None = None
        self._found_inf: tuple[Tensor, ...] = ()  # by the optimizers of this step
        self._handles: list[RemovableHandle] = []
        first, last = (optimizers[0], optimizers[-1]) if optimizers else (None, None)
        self.state = _C.StepState(first, last, self._before, self._after, on_late, on_row, on_error)

    def start(self) -> None:
        for optimizer in self.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self.state.begins_hook()))
            self._handles.append(optimizer.register_step_post_hook(self.state.ends_hook()))
        _watches.add(self)
        _wrap_scalers()

    def remove(self) -> None:
        _watches.discard(self)
        for handle in self._handles:
            handle.remove()
        self.state.close()

    def learning_rate(self) -> float | None:
        groups = self.optimizers[0].param_groups if self.optimizers else []
        rate = groups[0].get("lr") if groups else None
        if isinstance(rate, torch.Tensor):
            return float(rate) if rate.device.type == "cpu" else None
        return rate

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A closure has its own backward inside the step: whatever is in .grad now is stale.
        if (len(args) > 1 or kwargs) and _has_closure(args, kwargs):
            return
        # A fused optimizer is given the scale and unscales by itself.
        self._on_begin(self.state.in_scaler and getattr(optimizer, "grad_scale", None) is None)

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (len(args) > 1 or kwargs) and _has_closure(args, kwargs):
            self._on_begin(False)  # it may have been called less often than in the step before
        if optimizer is self.optimizers[-1] and not self.state.in_scaler:
            self._on_end(None)

    def scaler_begins(self, scaler: GradScaler) -> None:
        self.state.in_scaler = True
        try:
            self._scale = scaler._scale
        except Exception as error:
            self._on_error(error)

    def scaler_ends(self, scaler: GradScaler, optimizer: OptimizerLike) -> None:
        self.state.in_scaler = False
        try:
            self._found_inf += _found_inf(scaler, optimizer)
        except Exception as error:
            self._on_error(error)
        if _inner(optimizer) is self.optimizers[-1]:
            found_inf, self._found_inf = self._found_inf, ()
            self._on_end(None if self._scale is None else Scaling(self._scale, found_inf))

    def scaler_failed(self) -> None:
        self.state.in_scaler = False


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Of a step that was given more than the optimizer itself."""
    return any(map(callable, args)) or callable(kwargs.get("closure"))


def unwrap(optimizer: OptimizerLike) -> Optimizer:
    """The torch optimizer inside what trainers wrap around it."""
    inner = _inner(optimizer)
    if not isinstance(inner, Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer or a sequence of them, got {type(optimizer).__name__}; "
            "without one, call scan.step() in the loop"
        )
    return inner


def _inner(optimizer: OptimizerLike) -> Any:
    while not _takes_hooks(optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _takes_hooks(optimizer: OptimizerLike) -> bool:
    """Accelerate's wrapper calls itself an Optimizer without ever having been made one."""
    return isinstance(optimizer, Optimizer) and hasattr(optimizer, "_optimizer_step_pre_hooks")


def unwrap_all(optimizer: OptimizerLike | Iterable[OptimizerLike] | None) -> list[Optimizer]:
    if optimizer is None:
        return []
    if isinstance(optimizer, Optimizer) or hasattr(optimizer, "optimizer"):
        return [unwrap(optimizer)]
    if not isinstance(optimizer, Iterable):
        return [unwrap(optimizer)]  # raises with the remedy
    return [unwrap(one) for one in optimizer]


_watches: weakref.WeakSet[StepWatch] = weakref.WeakSet()


def _found_inf(scaler: GradScaler, optimizer: OptimizerLike) -> tuple[Tensor, ...]:
    """What says, per device, whether the scaler saw a non-finite gradient; its own record, kept until update()."""
    return tuple(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())


def _wrap_scalers() -> None:
    """A skipped step calls no optimizer hook, so the scaler's own step is watched; once for the process."""
    if getattr(GradScaler.step, "_pyscan", False):
        return
    original = GradScaler.step

    @functools.wraps(original)
    def step(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        inner = _inner(optimizer)
        watches = [watch for watch in list(_watches) if self.is_enabled() and inner in watch.optimizers]
        for watch in watches:
            watch.scaler_begins(self)
        try:
            result = original(self, optimizer, *args, **kwargs)
        except BaseException:
            for watch in watches:
                watch.scaler_failed()
            raise
        for watch in watches:
            watch.scaler_ends(self, optimizer)
        return result

    step._pyscan = True  # type: ignore[attr-defined]
    GradScaler.step = step  # type: ignore[method-assign]
