"""Read each weight's gradient at the right moment: complete, synchronised, before clipping.

Receives the parameters of the sites, notes when autograd has added to a gradient, and reads it into the step buffer: at
once, while it is hot in the cache, if nothing changes it afterwards (small ones some at a time); else at the end of the
backward, all together. With several backwards per step only the last one is read; how many there are is known from
the step before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from pyscan import torch_access  # noqa: F401  compiled code asks torch
from pyscan.engine import DTYPES
from pyscan.engines import Buffer
from pyscan.shards import is_sharded, is_unreduced, part_like, to_local
from pyscan.sites import Site

# A gradient up to this costs more to call for than to read: such are read some at a time.
SMALL_BYTES = 1 << 18


class Weight:
    """A parameter with the sites it fills."""

    __slots__ = ("members", "parameter", "stolen")

    def __init__(self, parameter: nn.Parameter, members: list[tuple[int, Site]]) -> None:
        self.parameter = parameter
        self.members = members
        self.stolen = False  # something takes the gradient away inside the backward

    @property
    def is_simple(self) -> bool:
        """One site that is the whole parameter: a contiguous gradient needs nothing but an address."""
        is_one = len(self.members) == 1 and self.parameter.ndim == 2
        return is_one and self.parameter.dtype in DTYPES and not is_sharded(self.parameter)


class GradientReader:
    """Post-accumulate hooks on every trainable weight, and the callback at the end of a backward.

    What is plain is decided and read in compiled code, bindings_gradients.cpp; here is the rest.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        buffer: Buffer,
        *,
        early: bool,
        waits: bool = False,
        on_backward: Callable[[], None],
        on_error: Callable[[Exception], None],
        on_unreduced: Callable[[Site], None] = lambda site: None,
    ) -> None:
        self._buffer = buffer
        self._on_unreduced = on_unreduced
        self._early = early
        self._waits = waits  # whoever reduces the gradients does it after the backward
        self._on_backward = on_backward
        self._on_error = on_error
        self.weights = [Weight(parameter, members) for parameter, members in _by_parameter(sites)]
        described = [self._describe(weight) for weight in self.weights]
        ended = on_backward if early and not waits else None
        self.state = buffer.watch_gradients(described, early, ended, self._begins, self._careful, self._gone, on_error)
        self._handles = [
            weight.parameter.register_post_accumulate_grad_hook(self.state.hook(index))  # type: ignore[no-untyped-call]
            for index, weight in enumerate(self.weights)
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.state.close()

    @property
    def reads_early(self) -> bool:
        """Whether nothing changes a gradient after autograd has added to it."""
        return self._early and not self._waits

    def simple_weight(self, site: int) -> int | None:
        """The weight that is this site and nothing else."""
        return next((i for i, one in enumerate(self.weights) if one.is_simple and one.members[0][0] == site), None)

    def sites_of(self, weights: Sequence[int]) -> list[int]:
        """The sites that are filled by weights, which the state knows by their number."""
        return [site for weight in weights for site, _ in self.weights[weight].members]

    def order(self) -> list[int]:
        """The sites in the order in which their gradients first came in this step, the loss's neighbours first."""
        return self.sites_of(self.state.order)

    def _describe(self, weight: Weight) -> tuple[nn.Parameter, list[int], int, int, bool]:
        """(parameter, slots of a plain gradient, rows, columns, whether to read it at once)"""
        if not weight.is_simple:
            return weight.parameter, [], 0, 0, self._early
        rows, cols = weight.parameter.shape
        slots = self._buffer.grad_slots(weight.members[0][0])
        return weight.parameter, slots, rows, cols, self._early and weight.parameter.nbytes > SMALL_BYTES

    def _begins(self, task: int) -> None:
        if task != -1:  # a pipeline has its last gradients reduced after the backward
            _queue(functools.partial(self._ends, task))

    def _ends(self, task: int) -> None:
        self._on_backward()
        if self._waits:
            return
        if self._early:
            self.state.settle(task)
        else:
            # Data parallelism finishes its gradients in a callback of its own, which with a static graph comes from
            # another one: what is queued twice from here runs after both.
            _queue(lambda: _queue(lambda: self.state.settle(task)))

    def read_again(self) -> None:
        """A pipeline has changed the gradients after its last backward: from now on they are read after that."""
        self._waits = True
        self.state.read_all()

    def _careful(self, index: int, grad: Tensor, address: int, version: int) -> tuple[int, int]:
        """Read a gradient that is not plain, unless it is the one with this address and version."""
        state = _state(grad)
        if state != (address, version):
            self._store(self.weights[index], grad)
        return state

    def _store(self, weight: Weight, grad: Tensor) -> None:
        here = None if is_unreduced(grad) else part_like(grad.detach(), weight.parameter)
        if here is None:
            self._on_unreduced(weight.members[0][1])
            return
        grad = _dense(here)
        for index, site in weight.members if self._buffer.reads(grad) else ():
            matrix = site.matrix(grad)
            if matrix is not None:
                self._buffer.set_grad(index, matrix)

    def _gone(self, index: int) -> None:
        """The optimizer steps inside the backward and leaves no gradient: from now on see it before that."""
        weight = self.weights[index]
        if weight.stolen:
            return
        weight.stolen = True

        def arriving(grad: Tensor) -> None:
            if not self.state.active or torch.compiler.is_compiling():
                return
            try:
                self._store(weight, grad)
            except Exception as error:
                self._on_error(error)

        self._handles.append(weight.parameter.register_hook(arriving))  # type: ignore[no-untyped-call]


def _queue(work: Callable[[], None]) -> None:
    Variable._execution_engine.queue_callback(work)


def _by_parameter(sites: Sequence[Site]) -> list[tuple[nn.Parameter, list[tuple[int, Site]]]]:
    """The trainable parameters in the order of the model, each with its sites; a tied weight belongs to its first."""
    found: dict[int, tuple[nn.Parameter, list[tuple[int, Site]]]] = {}
    for index, site in enumerate(sites):
        parameter = site.parameter
        if parameter is not None and parameter.requires_grad and site.tied_to is None:
            found.setdefault(id(parameter), (parameter, []))[1].append((index, site))
    return list(found.values())


def _state(grad: Tensor) -> tuple[int, int]:
    """Changes when the gradient is another tensor or was written to."""
    if grad.is_sparse:
        return grad._values().data_ptr(), grad._version
    return to_local(grad).data_ptr(), grad._version


def _dense(grad: Tensor) -> Tensor:
    """The values to reduce: of a sparse gradient its rows, each once."""
    return grad.coalesce()._values() if grad.is_sparse else grad


def nothing(*args: object) -> None:
    """What a hook becomes in a copy of the model."""


def make_nothing() -> Callable[..., None]:
    return nothing
