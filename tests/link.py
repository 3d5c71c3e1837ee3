"""The universal link test: the inputs the product sees and the gradients of outputs must give the gradients of weights.

Inputs come from the mechanism the product uses: pre-hooks on `site.module` and FunctionalCapture. Output gradients come
from an observer of its own, which records every matrix product of the forward with a hook on its result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pyscan.functional import FunctionalCapture
from pyscan.sites import Site

_PRODUCTS = {"linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "_grouped_mm"}


class Product:
    """One matrix product of the forward, and the gradient of its result once backward has run."""

    def __init__(self, name: str, factors: tuple[Tensor, Tensor], out: Tensor) -> None:
        self.name, self.factors = name, factors
        self.grad: Tensor | None = None
        if out.requires_grad:
            out.register_hook(self._keep)

    def _keep(self, grad: Tensor) -> None:
        self.grad = grad.detach().double()


class Observer(TorchFunctionMode):
    """Keeps the last matrix product. Attention calls F.linear where no mode sees it, so that one is wrapped by name."""

    last: Product

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _PRODUCTS:
            first = int(name == "addmm")
            self.last = Product(name, args[first : first + 2], out)
        return out

    @contextmanager
    def watching(self) -> Iterator[None]:
        original = F.linear

        def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            out = original(input, weight, bias)
            self.last = Product("linear", (input, weight), out)
            return out

        F.linear = linear
        try:
            with self:
                yield
        finally:
            F.linear = original


@dataclass
class Use:
    """What the product saw at one use of a weight, with the matrix product it belongs to."""

    x: Tensor
    product: Product
    offsets: Tensor | None = None
    ids: Tensor | None = None  # of an embedding


@dataclass
class Recording:
    """All uses of one forward, by the index of the site; under the first expert for uses that carry offsets."""

    sites: list[Site]
    uses: dict[int, list[Use]] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)

    def add(self, site: int, use: Use) -> None:
        self.uses.setdefault(site, []).append(use)

    def seen(self) -> set[str]:
        """Names of the sites that met at least one row."""
        names = set()
        for index, uses in self.uses.items():
            for use in uses:
                names.update(self.sites[index + e].name for e, rows in segments(use) if rows.numel())
        return names


def record(sites: list[Site], run: Callable[[], Any]) -> Recording:
    """Run a forward and backward, seeing inputs as the product does."""
    recording, observer, handles = Recording(sites), Observer(), []
    errors: list[Exception] = []

    def sink(site: int, x: Tensor, offsets: Tensor | None) -> None:
        recording.add(site, Use(x.detach().clone(), observer.last, offsets))

    for index, site in enumerate(sites):
        if site.observe == "module_input":
            handles += _hook_input(recording, observer, index, site)
        elif site.observe == "lookup":
            handles.append(site.module.register_forward_hook(_lookup_hook(recording, index), with_kwargs=True))
    capture = FunctionalCapture(sites, sink, on_error=errors.append)
    try:
        with observer.watching():
            run()
    finally:
        capture.remove()
        for handle in handles:
            handle.remove()
    assert not errors, errors
    recording.problems = capture.problems
    return recording


def _hook_input(recording: Recording, observer: Observer, index: int, site: Site) -> list[Any]:
    inputs: list[Tensor] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            inputs.append(args[0] if args else next(iter(kwargs.values())))

    def after(module: nn.Module, args: Any, out: Any) -> None:
        if not inputs:
            return
        x = inputs.pop()
        product = observer.last if isinstance(out, tuple) else Product("linear", (x, x), out)
        recording.add(index, Use(x.detach().clone(), product))

    pre = site.module.register_forward_pre_hook(before, with_kwargs=True)
    return [pre, site.module.register_forward_hook(after)]


def _lookup_hook(recording: Recording, index: int) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> None:
        if torch.is_grad_enabled():
            ids = args[0] if args else kwargs["input"]
            recording.add(index, Use(out.detach(), Product("lookup", (ids, out), out), ids=ids))

    return hook


def segments(use: Use) -> Iterator[tuple[int, Tensor]]:
    """The rows that met each site, counted from the site of the use."""
    rows = use.x.reshape(-1, use.x.shape[-1]).double()
    if use.offsets is None:
        yield 0, rows
        return
    ends = [0, *use.offsets.tolist()]
    for expert, (start, end) in enumerate(itertools.pairwise(ends)):
        yield expert, rows[start:end]


def weight_gradients(recording: Recording) -> dict[str, Tensor]:
    """For every trainable site that was seen, the sum of g^T x as [out, in] (of an embedding: of scattered rows)."""
    total: dict[str, Tensor] = {}
    for index, uses in recording.uses.items():
        if recording.sites[index].trainable:
            for use in uses:
                _add_use(total, recording.sites, index, use)
    return total


def _add_use(total: dict[str, Tensor], sites: list[Site], index: int, use: Use) -> None:
    assert use.product.grad is not None, f"{sites[index].name}: the gradient of the output never came"
    for expert, rows in segments(use):
        site = sites[index + expert]
        part = total.setdefault(site.name, torch.zeros(site.shape, dtype=torch.float64))
        if use.ids is not None:
            part.index_add_(0, use.ids.flatten(), use.product.grad.reshape(-1, site.shape[1]))
        elif len(rows):
            start, g = _output_rows(site, use, expert, rows)
            part[start : start + g.shape[1]] += g.T @ rows


def _output_rows(site: Site, use: Use, expert: int, rows: Tensor) -> tuple[int, Tensor]:
    """The output gradients of these rows, and the first output feature they belong to (attention may use a part)."""
    product, (left, right) = use.product, use.product.factors
    g = product.grad
    assert g is not None
    if product.name == "bmm" and site.parameter.shape != right.shape:  # gathered experts: find out which
        weight, x = (left, right.mT) if left.shape[1:] == site.parameter.shape[1:] else (right, left)
        mine = (weight == site.parameter[expert]).flatten(1).all(1)
        assert torch.equal(x[mine].flatten(0, 1).double(), rows), f"{site.name}: rows of another expert"
        return 0, (g if weight is right else g.mT)[mine].flatten(0, 1)
    if product.name != "linear" and left.shape == site.parameter.shape and left.data_ptr() == site.parameter.data_ptr():
        g = g.mT  # weight @ x
    g = g.reshape(-1, g.shape[-1])
    if use.offsets is not None:
        g = g[([0, *use.offsets.tolist()])[expert] :][: len(rows)]
    part = site.kind == "mha_in" and right._base is site.parameter
    return (right.storage_offset() // site.shape[1] if part else 0), g
