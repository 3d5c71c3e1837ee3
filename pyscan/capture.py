"""What a hook delivers: which tensor counts, and whether now.

Receives module inputs, looked-up rows and functional uses as they happen, and hands those of a grad-enabled forward to
the step buffer, once each: not again when gradient checkpointing computes them a second time, and with one read where
several weights meet the same tensor. The plain case takes a quick way through compiled code, bindings_observe.cpp.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyscan import _C, torch_access  # noqa: F401  compiled code asks torch
from pyscan.engines import Buffer
from pyscan.placement import Placements
from pyscan.shards import fitted, to_local
from pyscan.sites import Site

_clock = time.perf_counter
_is_grad_enabled = torch.is_grad_enabled
_graph_task = torch._C._current_graph_task_id
_saved_tensor_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_is_tracing = torch._C._get_tracing_state
_PLAIN = (Tensor, torch.nn.Parameter)


class Capture:
    """Decides about each input of one scanner's sites."""

    def __init__(
        self,
        buffer: Buffer,
        sites: Sequence[Site],
        on_error: Callable[[Exception], None],
        placements: Placements | None = None,
    ) -> None:
        self.state = _C.CaptureState(len(sites))  # `active`: this step is scanned; `seconds` spent since the last row
        self._buffer = buffer
        self._sites = sites
        self._placements = placements
        self._on_error = on_error
        self._direct = self.state.direct  # sites that were ever recorded outside a backward
        self._mask: Tensor | None = None
        self.compiled: set[int] = set()  # sites that were seen inside a compiled region

    def set_mask(self, mask: Tensor | None) -> None:
        """Rows of the forward that runs now count where the mask is true."""
        self._mask = mask
        self.state.has_mask = mask is not None

    def observer(self, site: int) -> Callable[[Any], None]:
        """What to call with every tensor that is about to meet the weight of `site`; it never raises."""
        if self._is_cut(site):
            return self._careful_observer(site)
        return self._buffer.observer(self.state, site, lambda x: self._careful(site, x))

    def _is_cut(self, site: int) -> bool:
        """Whether a rank computes with a part of the weight, so that an input must be looked at before it is read."""
        return self._sites[site].held.inputs.length != self._sites[site].shape[1]

    def _careful_observer(self, site: int) -> Callable[[Any], None]:
        def see(x: Any) -> None:
            if not self.state.active:
                return
            self.state.meet(site, 1)
            if _is_grad_enabled():
                start = _clock()
                self._careful(site, x)
                self.state.seconds += _clock() - start

        return see

    def compiled_observer(self, site: int) -> Callable[[Tensor], None]:
        """The same inside a compiled region, where gradients are off although it was traced with them on."""

        def see(x: Tensor) -> None:
            if self.state.active:
                start = _clock()
                self.compiled.add(site)
                self.state.meet(site, 1)
                self._careful(site, x, at_once=True)  # its memory is used again right after
                self.state.seconds += _clock() - start

        return see

    def _careful(self, site: int, x: Any, *, at_once: bool = False) -> None:
        """An input that is not plain, of a grad-enabled forward."""
        try:
            plain = None if self.is_recompute(site) else self._here(site, x)
            if plain is not None:
                self.forget()
                self._buffer.add_input(site, self._masked(plain), at_once=at_once)
        except Exception as error:
            self._on_error(error)

    def _here(self, site: int, x: Any) -> Tensor | None:
        """What this rank has to read of x."""
        plain = to_plain(x)
        if plain is None or self._placements is None:
            return plain
        where = self._sites[site]
        self._placements.learn(where, x)
        return fitted(x, plain, where.held.inputs, where.shape[1])

    def rows(self, site: int, x: Tensor, ends: Tensor | None) -> None:
        """Rows of `x` met `site`, or with `ends` range e of them met site + e."""
        if not self.state.active:
            return
        if _graph_task() == -1:
            self.state.meet(site, 1 if ends is None else len(ends))
        if not _is_grad_enabled() or self.is_recompute(site):
            return
        start = _clock()
        plain = to_plain(x)
        if plain is not None:
            self.forget()
            if ends is None:
                self._buffer.add_input(site, self._masked(plain))
            else:
                self._buffer.add_ranges(site, plain, ends)
        self.state.seconds += _clock() - start

    def forget(self) -> None:
        """Let go of the last input: the forward is over, or the engine's memory of it is."""
        self.state.forget()

    def is_recompute(self, site: int) -> bool:
        """Whether this input was recorded before.

        Inside a backward, checkpointing runs a forward again. If the first run had gradients enabled, it was recorded
        then, and this one saves its tensors through hooks; if it had not, this one is the first that counts.
        """
        if _graph_task() == -1:
            self._direct[site] = 1
            return _is_tracing() is not None
        return bool(self._direct[site]) and _saved_tensor_hooks(False) is not None

    def _masked(self, x: Tensor) -> Tensor:
        mask = self._mask
        if mask is None or x.ndim <= mask.ndim or x.shape[: mask.ndim] != mask.shape:
            return x
        return self._buffer.masked(x, mask)


def to_plain(value: Any) -> Tensor | None:
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
