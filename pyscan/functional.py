"""See the inputs of weights that no module call shows: attention projections, fused experts, `weight @ x`.

Receives the sites with observe="functional" and hands each use of one to a sink while the module that consumes it (its
owner) runs with gradients enabled. How an owner calls torch is learned from its first forward; intercept.py does the
listening, uses.py tells which weight a call uses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from pyscan.intercept import PATCHES, Args, Kwargs, listen, listeners, unlisten
from pyscan.sites import Site
from pyscan.uses import Frame, Sink, Slot, Use


class FunctionalCapture:
    """Hooks on the modules that consume functional sites, calling `sink(site, x, offsets)` at each use.

    `site` indexes the list of sites; the last dimension of `x` is the input axis. With `offsets` (on the device of x),
    rows offsets[e-1] to offsets[e] of `x` met site + e, and an empty range met nothing. The first error goes to
    `on_error` and ends the capture; the forward goes on. `problems` says, by site, what could not be linked.
    `products` is called with each use and the result of the product.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        sink: Sink,
        *,
        on_error: Callable[[Exception], None],
        products: Callable[[Use, object], None] | None = None,
    ) -> None:
        self.problems: dict[int, str] = {}
        self.active = True
        self.sink = sink
        self.products = products
        self._on_error = on_error
        self._owners = _owners(sites)
        self._handles = []
        for owner in self._owners:
            self._handles.append(owner.module.register_forward_pre_hook(_Enter(self, owner)))
            self._handles.append(owner.module.register_forward_hook(_Leave(self, owner), always_call=True))

    def remove(self) -> None:
        """Take the hooks away, and leave what this thread may be in the middle of."""
        self.active = False
        for handle in self._handles:
            handle.remove()
        for owner in self._owners:
            self.leave(owner)

    def enter(self, owner: _Owner) -> None:
        if listeners():
            self.leave(owner)  # what still runs was cut by a KeyboardInterrupt, which skips the forward hooks
        if not self.active or not torch.is_grad_enabled():
            return
        try:
            forward = owner.idle.pop() if owner.idle else _Forward(self, owner)
            forward.begin()
        except Exception as error:
            self.fail(error)

    def leave(self, owner: _Owner) -> None:
        forward = next((f for f in listeners() if f.owner is owner), None)
        if isinstance(forward, _Forward):
            forward.end()

    def fail(self, error: Exception) -> None:
        self.active = False
        self._on_error(error)


class _Owner:
    """A module that consumes weights, and what is known of the way it calls torch.

    `learned` maps the implementation its experts run in to the patch through which all its products go, or to "".
    Inside nn.MultiheadAttention no mode sees anything, and F.linear is all there is.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.slots: list[Slot] = []
        self.is_attention = isinstance(module, nn.MultiheadAttention)
        self.learned: dict[str | None, str] = {None: "linear"} if self.is_attention else {}
        self.idle: list[_Forward] = []  # finished ones, used again: as many as ran at the same time

    def implementation(self) -> str | None:
        config = self.module.__dict__.get("config")  # a failing getattr on a module costs 5 us
        return None if self.is_attention else getattr(config, "_experts_implementation", None)


def _owners(sites: Sequence[Site]) -> list[_Owner]:
    owners: dict[nn.Module, _Owner] = {}
    for index, site in enumerate(sites):
        if site.observe != "functional" or site.expert:  # the first expert stands for its parameter
            continue
        others = itertools.takewhile(lambda s: s.expert, itertools.islice(sites, index + 1, None))
        num_experts = None if site.expert is None else 1 + sum(1 for _ in others)
        start, num_here = site.held.experts or (0, num_experts)  # others may be on other ranks
        slot = Slot(index + start, site.name, site.holder, site.attribute, site.in_axis, site.shape[1], num_here)
        owners.setdefault(site.module, _Owner(site.module)).slots.append(slot)
    return list(owners.values())


class _Forward:
    """One forward of an owner on one thread. While it learns it hears every call twice, and takes the watch's word."""

    def __init__(self, capture: FunctionalCapture, owner: _Owner) -> None:
        self.owner = owner
        self.patches: tuple[str, ...] = ()
        self.watches = False
        self._capture = capture
        self._frame = Frame(owner.slots, capture.problems)

    def begin(self) -> None:
        self._implementation = self.owner.implementation()
        route = self.owner.learned.get(self._implementation)
        self._learns = route is None
        self.watches = not route
        self.patches = tuple(PATCHES) if route is None else (route,) if route else ()
        self._num_uses = 0
        self._num_patched: dict[str, int] = {}
        self._frame.refresh()
        listen(self)

    def patched(self, name: str, args: Args, kwargs: Kwargs, out: object) -> None:
        self._heard(name, args, kwargs, out, counts_only=self._learns)

    def watched(self, name: str, args: Args, kwargs: Kwargs, out: object) -> None:
        self._heard(name, args, kwargs, out, counts_only=False)

    def _heard(self, name: str, args: Args, kwargs: Kwargs, out: object, *, counts_only: bool) -> None:
        """Runs in the middle of a forward, where nothing may be raised."""
        capture = self._capture
        if not capture.active or not torch.is_grad_enabled():
            return
        try:
            use = self._frame.use(name, args, kwargs)
            if use is None:
                return
            if counts_only:
                self._num_patched[name] = self._num_patched.get(name, 0) + 1
            else:
                self._num_uses += 1
                capture.sink(use.site, use.x, use.ends)
                if capture.products is not None:
                    capture.products(use, out)
        except Exception as error:
            capture.fail(error)

    def copied(self, name: str, args: Args, out: object) -> None:
        try:
            self._frame.follow(name, args, out)
        except Exception as error:
            self._capture.fail(error)

    def end(self) -> None:
        unlisten(self)
        self._frame.close()
        owner = self.owner
        if self._learns and self._num_uses:
            owner.learned[self._implementation] = self._sole_patch()
        elif self._num_uses == 0 and not owner.is_attention:
            owner.learned.pop(self._implementation, None)  # it may have begun to call torch in another way
        owner.idle.append(self)

    def _sole_patch(self) -> str:
        """The patch that heard all that the watch heard; none when a copy of a weight had to be followed to know it."""
        names = [name for name, count in self._num_patched.items() if count == self._num_uses]
        return names[0] if len(self._num_patched) == len(names) == 1 and not self._frame.used_copy else ""


def _nothing(*args: object) -> None:
    """What a hook becomes in a copy of the model: a copy is not scanned."""


def _make_nothing() -> Callable[..., None]:
    return _nothing


class _Hook:
    def __init__(self, capture: FunctionalCapture, owner: _Owner) -> None:
        self._capture = capture
        self._owner = owner

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _make_nothing, ()


class _Enter(_Hook):
    def __call__(self, module: nn.Module, args: object) -> None:
        if not torch.compiler.is_compiling():
            self._capture.enter(self._owner)


class _Leave(_Hook):
    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        if not torch.compiler.is_compiling():
            self._capture.leave(self._owner)
