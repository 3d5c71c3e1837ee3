"""What a hook delivers: which tensor counts, and whether now.

Receives module inputs, looked-up rows and functional uses as they happen, and hands those of a grad-enabled forward to
the step buffer, once each: not again when gradient checkpointing computes them a second time, and with one read where
several weights meet the same tensor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyscan.accumulate import StepBuffer, to_local

_clock = time.perf_counter
_thread = threading.get_ident
_is_grad_enabled = torch.is_grad_enabled
_graph_task = torch._C._current_graph_task_id
_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_PLAIN = (Tensor, torch.nn.Parameter)
_is_tracing = torch._C._get_tracing_state


class Capture:
    """Decides about each input of one scanner's sites."""

    def __init__(self, buffer: StepBuffer, num_sites: int, on_error: Callable[[Exception], None]) -> None:
        self.active = True  # this step is scanned
        self.mask: Tensor | None = None  # of the forward that runs: rows to count
        self.seconds = 0.0  # spent here since the last row
        self._buffer = buffer
        self._on_error = on_error
        self._direct = bytearray(num_sites)  # sites that were ever recorded outside a backward
        # The last input, kept alive so that its id is not given to another tensor: (thread, tensor, version).
        self._last: tuple[int, Tensor | None, int] = (0, None, 0)

    def observer(self, site: int) -> Callable[[Any], None]:
        """What to call with every tensor that is about to meet the weight of `site`; it never raises."""

        def see(x: Any) -> None:
            if not self.active or not _is_grad_enabled():
                return
            start = _clock()
            try:
                self._input(site, x)
            except Exception as error:
                self._on_error(error)
            self.seconds += _clock() - start

        return see

    def compiled_observer(self, site: int) -> Callable[[Tensor], None]:
        """The same inside a compiled region, where gradients are off although it was traced with them on."""
        see = self.observer(site)

        def see_compiled(x: Tensor) -> None:
            with torch.enable_grad():
                see(x)

        return see_compiled

    def _input(self, site: int, x: Any) -> None:
        if self._is_recompute(site):
            return
        thread, (last_thread, last, version) = _thread(), self._last
        if last is not None and x is last and thread == last_thread and last._version == version:
            self._buffer.repeat_input(site)
            return
        if type(x) is Tensor and self.mask is None and not x.is_meta and not _is_wrapped(x):
            self._buffer.add_input(site, x)
        elif (plain := _plain(x)) is not None:
            self._buffer.add_input(site, self._masked(plain))
        else:
            return
        self._last = thread, x, x._version

    def rows(self, site: int, x: Tensor, ends: Tensor | None) -> None:
        """Rows of `x` met `site`, or with `ends` range e of them met site + e."""
        if not self.active or not _is_grad_enabled() or self._is_recompute(site):
            return
        start = _clock()
        plain = _plain(x)
        if plain is not None:
            self.forget()
            if ends is None:
                self._buffer.add_input(site, self._masked(plain))
            else:
                self._buffer.add_ranges(site, plain, ends)
        self.seconds += _clock() - start

    def forget(self) -> None:
        """Let go of the last input: the forward is over, or the engine's memory of it is."""
        self._last = (0, None, 0)

    def _is_recompute(self, site: int) -> bool:
        """Whether this input was recorded before.

        Inside a backward, checkpointing runs a forward again. If the first run had gradients enabled, it was recorded
        then, and this one saves its tensors through hooks; if it had not, this one is the first that counts.
        """
        if _graph_task() == -1:
            self._direct[site] = 1
            return _is_tracing() is not None
        return bool(self._direct[site]) and _saved_tensor_hooks(False) is not None

    def _masked(self, x: Tensor) -> Tensor:
        mask = self.mask
        if mask is None or x.ndim <= mask.ndim or x.shape[: mask.ndim] != mask.shape:
            return x
        return x[mask]


def _plain(value: Any) -> Tensor | None:
    """The tensor to read, or None where there is nothing to read: fake and meta tensors, tensors inside a transform."""
    if not isinstance(value, Tensor):
        return None
    x = value.detach() if type(value) in _PLAIN else _local(value)
    if x is None or x.is_meta or not x.is_floating_point() or _is_wrapped(x):
        return None
    return x


def _local(x: Tensor) -> Tensor | None:
    """What a tensor subclass holds on this rank."""
    if isinstance(x, torch._subclasses.FakeTensor):
        return None
    return to_local(x.detach())
