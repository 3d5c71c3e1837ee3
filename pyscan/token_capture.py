"""Tokens mode: see every row of every site's input, and the gradient of every row of its output.

Receives the forwards of the sites' modules, and puts a hook on the node of autograd that made each output: there the
gradient passes on its way to the weight, after whatever else changes it. Hands on, per step, the calls of its sites
and the batches they belong to; token_calls.py adds up what a call brings. The plain call of tokens=True takes a quick
way through compiled code, bindings_tokens.cpp, and its rows are summed by the read that the row of the step needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pyscan import _C
from pyscan.capture import Capture, to_plain
from pyscan.functional import FunctionalCapture
from pyscan.gradients import make_nothing, nothing
from pyscan.sites import Site
from pyscan.token_batch import Batch, read_batch
from pyscan.token_calls import NO_INPUT, TWICE, Adder, Call, RowAdder, SequenceAdder
from pyscan.token_hooks import watch_call
from pyscan.token_routing import Routing
from pyscan.token_step import TokenStep
from pyscan.uses import Use

_clock = time.perf_counter
_is_grad_enabled = torch.is_grad_enabled
_graph_task = torch._C._current_graph_task_id

COMPILED = "it runs in a compiled region, where output gradients cannot be seen; leave torch.compile out to see them"
_NEAR = 8  # nodes between an embedding's output and its lookup, at most: some models scale it
Rows = Callable[[Tensor], Tensor]  # from the gradient at a node to the rows that belong to a call's


class TokenCapture:
    """The hooks of one scanner's tokens mode: `mode` is True, "blocks" or "sequences"."""

    def __init__(
        self,
        sites: Sequence[Site],
        capture: Capture,
        *,
        mode: bool | str,
        block: int,
        mask: str | None,
        on_error: Callable[[Exception], None],
    ) -> None:
        self.calls: list[Call] = []
        self.batches: list[Batch] = []
        self.adder: Adder = SequenceAdder(sites, block) if mode == "sequences" else RowAdder(_row_block(mode, block))
        self._keeps_inputs = mode == "sequences"
        self._sites = sites
        self._capture = capture
        self._quick = _C.TokenCalls(capture.state, self.calls, Call, _maker)
        capture.state.keeps_rows = mode is True
        self._mask = mask
        self._on_error = on_error
        self._waiting: dict[int, list[Call]] = {}  # calls whose input comes with a recompute
        self._first_passes: dict[int, list[int]] = {}  # forwards that a reentrant checkpoint is to run again
        self._is_inside = False  # a forward of the model with gradients
        self._routings: dict[nn.Module, Routing] = {}
        self._endings: list[Callable[[], None]] = []
        self._watch()

    def _watch(self) -> None:
        is_tapped = [site.observe == "functional" or _is_odd(site) for site in self._sites]
        for index, site in enumerate(self._sites):
            if site.observe in ("module_input", "lookup") and not is_tapped[index]:
                see = self._looked_up if site.observe == "lookup" else self._multiplied
                before = self._recomputing(index) if self._keeps_inputs else None
                after = self._guarded(index, see)
                if site.observe == "module_input" and _keeps_order(site):
                    after = _C.make_tap(self._quick, index, after, self._arrived_guarded)
                self._endings.append(watch_call(site.module, before, after))
        for owner in {site.module: None for site in self._sites if site.expert is not None}:
            handle = owner.register_forward_pre_hook(_Route(self._routings), with_kwargs=True)
            self._endings.append(handle.remove)
        pairs = zip(self._sites, is_tapped, strict=True)
        tapped = [replace(site, observe="functional" if is_it else "none") for site, is_it in pairs]
        self._functional = FunctionalCapture(tapped, nothing, on_error=self._on_error, products=self._used)
        self._endings.append(self._functional.remove)

    def remove(self) -> None:
        while self._endings:
            self._endings.pop()()
        self.take()

    def take(self) -> tuple[list[Call], list[Batch]]:
        """The calls and the batches of the step that ends."""
        taken = self.calls[:], self.batches
        for call in self.calls:
            if call.g is not None:
                call.problem, call.g = call.problem or NO_INPUT, None
        self.calls.clear()
        self.batches = []
        self._quick.begin(-1, None)
        self._waiting.clear()
        self._first_passes.clear()
        self.forward_ends()
        return taken

    def missing(self, made: TokenStep) -> dict[int, str]:
        """Why sites have no token rows, or no gradients in them."""
        texts = dict(made.problems)
        for index, site in enumerate(self._sites):
            if index in made.sites or index in texts or (site.expert is not None and site.observe == "functional"):
                continue
            texts[index] = self._why(index, site)
        return texts

    def _why(self, index: int, site: Site) -> str:
        if index in self._capture.compiled:
            return COMPILED
        if site.observe == "none":
            return "its input is not observed"
        return self._functional.problems.get(index, "it was not met in a forward with gradients")

    def forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._capture.state.active:
            self.batches.append(read_batch(args, kwargs, self._mask))
            self._quick.begin(len(self.batches) - 1, self.batches[-1].shape)
            self._is_inside = True

    def forward_ends(self) -> None:
        self._is_inside = False
        self._routings.clear()
        self.adder.forget()

    # Called from hooks

    def _guarded(self, site: int, see: Callable[[int, Tensor, Tensor], None]) -> Callable[[Any, Any], None]:
        state = self._capture.state

        def after(x: Any, out: Any) -> None:
            if not state.active:
                return
            start = _clock()
            try:
                if self._counts(site) and isinstance(x, Tensor) and isinstance(out, Tensor):
                    see(site, x, out)
            except Exception as error:
                self._on_error(error)
            state.seconds += _clock() - start

        return after

    def _counts(self, site: int) -> bool:
        """Whether a call that runs now is to be recorded."""
        if _is_grad_enabled():
            return not self._capture.is_recompute(site)
        if self._is_inside and _graph_task() == -1:
            self._first_passes.setdefault(site, []).append(len(self.batches) - 1)
        return False

    def _recomputing(self, site: int) -> Callable[[Any], None]:
        """Gives a waiting call its input, before the forward: the recompute may end inside it."""

        def before(x: Any) -> None:
            if self._waiting.get(site) and _graph_task() != -1 and _is_grad_enabled():
                try:
                    self._recomputed(site, x)
                except Exception as error:
                    self._on_error(error)

        return before

    def _recomputed(self, site: int, x: Any) -> None:
        """The last forward is run again first, and in it the calls come in their order."""
        waiting = self._waiting.get(site)
        plain = to_plain(x)
        if waiting and plain is not None and self._capture.is_recompute(site):
            newest = max(call.batch for call in waiting)
            call = next(call for call in waiting if call.batch == newest)
            waiting.remove(call)
            self.adder.again(call, _matrix(plain), self._batch(call))

    def _multiplied(self, site: int, x: Tensor, out: Tensor) -> None:
        plain = to_plain(x)
        if plain is not None:
            call = self._call(site, plain)
            self._meet(call, _matrix(plain), x)
            made = _maker(out)
            self._await(call, made.grad_fn, made.output_nr, _matrix)

    def _looked_up(self, site: int, ids: Tensor, out: Tensor) -> None:
        rows = to_plain(out)
        if rows is None:
            return
        call, flat = self._call(site, rows), ids.detach().reshape(-1)
        if self._keeps_inputs:
            call.ids = flat
        self._meet(call, _matrix(rows), out)
        padding = getattr(self._sites[site].module, "padding_idx", None)
        left_out = None if padding is None else flat == padding

        def rows_of(g: Tensor) -> Tensor:
            g = _matrix(g)
            return g if left_out is None else g.masked_fill(left_out[:, None], 0)  # autograd leaves them out too

        self._await(call, _lookup_node(out.grad_fn), 0, rows_of)

    def _used(self, use: Use, out: object) -> None:
        """A weight was used functionally. What is raised here ends the functional capture."""
        state, start = self._capture.state, _clock()
        if not state.active or not isinstance(out, Tensor) or (plain := to_plain(use.x)) is None:
            return
        if self._counts(use.site):
            call = self._call(use.site, plain)
            rows = _matrix(plain)
            self._route(call, use, rows)
            self._meet(call, rows, use.x)
            made = out if use.turned else _maker(out)
            self._await(call, made.grad_fn, made.output_nr, lambda g: _use_rows(use, g))
        elif _is_grad_enabled():
            self._recomputed(use.site, plain)
        state.seconds += _clock() - start

    # What becomes of a call

    def _call(self, site: int, x: Tensor) -> Call:
        batch = len(self.batches) - 1
        if _graph_task() != -1 and (passes := self._first_passes.get(site)):
            batch = passes.pop()
        call = Call(site, batch, tuple(x.shape[:-1]), self._is_in_order(self._sites[site], x, batch))
        self.calls.append(call)
        return call

    def _is_in_order(self, site: Site, x: Tensor, index: int) -> bool:
        if index < 0 or not _keeps_order(site):
            return False
        batch = self.batches[index]
        return x.shape[:-1] == batch.shape or (x.ndim == 2 and x.shape[0] == batch.num_tokens)

    def _batch(self, call: Call) -> Batch | None:
        return self.batches[call.batch] if 0 <= call.batch < len(self.batches) else None

    def _meet(self, call: Call, rows: Tensor, whole: Tensor) -> None:
        self.adder.num_threads = self._capture.state.num_threads
        self.adder.meet(call, rows, self._batch(call), whole)
        if self._keeps_inputs and call.x is None and not call.problem:
            self._waiting.setdefault(call.site, []).append(call)

    def _await(self, call: Call, node: Any, number: int, rows_of: Rows) -> None:
        """Have the gradient that arrives at a node of autograd, for its output `number`, added up."""
        if node is not None:
            batch, state = self._batch(call), self._capture.state

            def arrive(grads: tuple[Tensor | None, ...]) -> None:
                if not state.active:
                    return
                start = _clock()
                try:
                    self._arrived(call, batch, grads[number], rows_of)
                except Exception as error:
                    self._on_error(error)
                state.seconds += _clock() - start

            node.register_prehook(arrive)

    def _arrived_guarded(self, call: Call, g: Tensor | None) -> None:
        """The gradient of a call that took the quick way, and is not plain."""
        try:
            self._arrived(call, None, g, _matrix)
        except Exception as error:
            self._on_error(error)

    def _arrived(self, call: Call, batch: Batch | None, g: Tensor | None, rows_of: Rows) -> None:
        if call.grad is not None or call.g is not None:
            call.problem, call.grad = TWICE, None
        if g is None or call.problem or (plain := to_plain(g)) is None:
            return
        self.adder.num_threads = self._capture.state.num_threads
        self.adder.arrive(call, rows_of(plain), batch)

    def _route(self, call: Call, use: Use, rows: Tensor) -> None:
        """Which tokens the rows of experts are."""
        site = self._sites[use.site]
        call.ends = None if use.ends is None else use.ends.to(torch.int64).numpy()
        routing, batch = self._routings.get(site.module), self._batch(call)
        if site.expert is None or routing is None or batch is None or routing.num_tokens != batch.num_tokens:
            return
        if use.order is not None:
            call.places = routing.all_places(use.order, len(rows) // max(len(use.order), 1))
            return
        call.places = np.full(len(rows), -1, np.int64)
        for expert, (begin, end) in enumerate(call.ranges, site.expert):
            places = routing.places(expert, rows[begin:end], is_grouped=use.ends is not None)
            if places is not None:
                call.places[begin:end] = places


class _Route:
    """Before the forward of a module that holds experts: remember what it was given."""

    def __init__(self, routings: dict[nn.Module, Routing]) -> None:
        self._routings = routings

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _is_grad_enabled() and not torch.compiler.is_compiling():
            self._routings[module] = Routing(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return make_nothing, ()


def _row_block(mode: bool | str, block: int) -> int | None:
    return block if mode == "blocks" else None


def _keeps_order(site: Site) -> bool:
    """Whether rows may come as the batch has them: a router chooses some, attention turns batch and length round."""
    return site.expert is None and not site.kind.startswith("mha")


def _is_odd(site: Site) -> bool:
    """Whether the output of the module may be something else than the product of its input and the weight."""
    if site.observe != "module_input" or site.kind == "conv1d":
        return False
    return getattr(type(site.module), "forward", None) is not nn.Linear.forward


def _matrix(x: Tensor) -> Tensor:
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def _maker(out: Tensor) -> Tensor:
    """Whose node to watch for the gradient of a product. In-place changes replace the node of a view, so: its base."""
    base = out._base
    is_same = base is not None and base.numel() == out.numel() and base.shape[-1] == out.shape[-1]
    return base if base is not None and is_same and base.is_contiguous() and out.is_contiguous() else out


def _lookup_node(node: Any) -> Any:
    """The lookup behind an embedding's output; None if there is none near, or more than one way to it."""
    for _ in range(_NEAR):
        if node is None or node.name().startswith("EmbeddingBackward"):
            return node
        behind = [found for found, _ in node.next_functions if found is not None]
        node = behind[0] if len(behind) == 1 else None
    return None


def _use_rows(use: Use, g: Tensor) -> Tensor:
    """Rows of the gradient of a product in the order of the rows of its input."""
    g = g.mT if use.turned else g
    if use.order is not None:
        g = g.reshape(len(use.order), -1, g.shape[-1])[use.order]
    return _matrix(g)
