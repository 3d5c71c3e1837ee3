"""The model's forward as a whole: which rows count, how many tokens there are, and what loss came out.

Receives the calls of the outermost module and hands on, per step, the losses and the number of tokens of its
grad-enabled forwards; during a forward, the mask named by the user. Nothing here waits for a tensor's value: it is
taken where it is at hand. The plain case takes a quick way through compiled code, bindings_forward.cpp.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pyscan import _C, hooks
from pyscan.closing import Seen
from pyscan.gradients import make_nothing, nothing
from pyscan.graph import Graph, Target
from pyscan.shards import is_unreduced, to_local

_clock = time.perf_counter
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


class ForwardWatch:
    """Hooks on the model itself; what goes wrong in them is given to `on_error`."""

    def __init__(
        self,
        model: nn.Module,
        mask: str | None,
        *,
        on_begin: Callable[[Tensor | None], None],
        on_batch: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None,
        on_end: Callable[[], None],
        on_error: Callable[[Exception], None],
        plain: _C.CaptureState | None = None,
    ) -> None:
        """With `plain`, beginning and end of a forward without peculiarities are told to it, and to nobody else."""
        self.state = _C.ForwardState(plain)  # `active`: losses and tokens count; `seconds` spent since the last row
        self._is_plain = plain is not None
        self._model = model
        self._mask = mask
        self._on_begin = on_begin
        self._on_batch = on_batch
        self._on_end = on_end
        self._losses: list[Tensor] = []  # beside those of the state, whose values are at hand
        self._are_shares = False  # the losses of the micro-batches add up to that of the step
        self._noted: list[Tensor] = []
        self._noted_tokens: int | None = None
        self._masked_counts: list[Tensor] = []
        self.on_error = on_error
        self.targets: list[Target] | None = None  # the classification losses of the first forward with a loss
        before, after = _Hook(self, self._before), _Hook(self, self._after)
        self._handles = [
            model.register_forward_pre_hook(before, with_kwargs=True),
            model.register_forward_hook(after),
        ]
        hooks.take_shortcut(model, before, after, self.state)

    def remove(self) -> None:
        hooks.leave_shortcut(self._model)
        for handle in self._handles:
            handle.remove()

    def note(self, loss: Tensor | float | None, tokens: int | None) -> None:
        """What the loop says of a micro-batch; it goes before what the model says."""
        if loss is not None:
            self._noted.append(to_local(loss.detach()) if isinstance(loss, Tensor) else _as_tensor(loss))
        if tokens is not None:
            self._noted_tokens = (self._noted_tokens or 0) + tokens
        self.state.has_more = True

    def take(self) -> Seen:
        """The losses and the number of tokens since the last call, as far as the loop or the model says them."""
        are_shares = self._are_shares and not self._noted
        losses = (*map(_as_tensor, self.state.take_losses()), *self._losses)
        losses = tuple(self._noted) or losses
        num_tokens = self.state.take_tokens()
        if self._noted_tokens is None:
            seen = Seen(losses, num_tokens, tuple(self._masked_counts), are_shares)
        else:
            seen = Seen(losses, self._noted_tokens, (), are_shares)
        self._losses, self._noted, self._are_shares = [], [], False
        self._noted_tokens, self._masked_counts = None, []
        self.state.has_more = False
        return seen

    def take_cost(self) -> tuple[int, float]:
        """How many grad-enabled forwards there were since the last call, and the seconds spent here."""
        state = self.state
        cost = state.num_forwards, state.seconds
        state.num_forwards, state.seconds = 0, 0.0
        return cost

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = self.state
        if not state.counts():
            return
        state.num_forwards += 1
        mask = kwargs.get(self._mask) if self._mask else None
        mask = mask.bool() if isinstance(mask, Tensor) else None
        ids = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(ids, Tensor) and ids.ndim >= 1 and not ids.is_floating_point():
            if mask is not None and mask.shape == ids.shape and _has_value(mask):
                self._masked_counts.append(mask.sum())
                state.has_more = True
            else:
                state.add_tokens(ids.numel())
        # Models of transformers that are told the items of the whole step divide each loss by them.
        if kwargs.get("num_items_in_batch") is not None:
            self._are_shares = state.has_more = True
        self._on_begin(mask)
        if self._on_batch is not None:
            self._on_batch(args, kwargs)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        state = self.state
        if not state.counts():
            return
        loss: Any = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if (value := _single_value(loss)) is not None:
            if self._is_plain and value.is_cpu:
                state.add_loss(float(value))
            else:
                self._losses.append(value)
                state.has_more = True
            if self.targets is None:
                self.targets = []
                state.has_targets = True
                with contextlib.suppress(RuntimeError):  # what is saved may be offloaded, or not be kept at all
                    self.targets = Graph(loss).targets
        self._on_end()


def _as_tensor(loss: Tensor | float) -> Tensor:
    return loss if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64)


def _has_value(x: Tensor) -> bool:
    """Not so for what stands in for a tensor inside a transform, or while only shapes are computed."""
    if type(x) is not Tensor and isinstance(x, torch._subclasses.FakeTensor):
        return False
    return not (x.is_meta or _is_wrapped(x))


def _single_value(loss: Any) -> Tensor | None:
    """The loss as it can be read later; None for what is no single number, or not a complete one on this rank."""
    if type(loss) is Tensor:
        return None if loss.numel() != 1 or loss.is_meta or _is_wrapped(loss) else loss.detach()
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not _has_value(loss) or is_unreduced(loss):
        return None
    return to_local(loss.detach())


class _Hook:
    """Calls a method of the watch; in copies of the model, nothing; while the model is compiled, nothing either."""

    def __init__(self, watch: ForwardWatch, call: Callable[..., None]) -> None:
        self._watch = watch
        self._call = call

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        start = _clock()
        try:
            self._call(*args)
        except Exception as error:
            self._watch.on_error(error)
        self._watch.state.seconds += _clock() - start

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return make_nothing, ()
