"""Is gradient flowing: sort every parameter by the gradient it gets, and say why where it gets none.

Receives a model with a loss, a batch, or gradients that are already there; runs at most one backward of its own for the
lists and leaves everything as it was. Hands back a FlowReport; causes.py finds the reasons.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pyscan.accumulate import to_local
from pyscan.case import Case, Cause
from pyscan.causes import explain
from pyscan.engine import DTYPES, reduce
from pyscan.graph import Graph
from pyscan.flow_table import table
from pyscan.parallel import refuse_synchronised, without_sync
from pyscan.preserve import Batch, backward, run_loss, running, untouched
from pyscan.sites import parameters_of

STATUSES = ("ok", "zero", "none", "nan", "inf")


class GradStats(NamedTuple):
    """The smallest and the largest element of a gradient, and its norm."""

    min: float
    max: float
    norm: float

    @property
    def status(self) -> str:
        if math.isnan(self.min) or math.isnan(self.max):
            return "nan"
        if math.isinf(self.min) or math.isinf(self.max):
            return "inf"
        return "zero" if self.min == self.max == 0 else "ok"


class FlowReport(dict[str, list[str]]):
    """Names of parameters by status: "ok", "zero", "none", "nan", "inf". Printed, it is the table.

    causes   why, for each name that is not ok, and for each fused expert (`name[3]`) that got nothing
    stats    smallest and largest element and norm of each gradient there is
    loss     the value of the loss, where there was one
    """

    def __init__(self, stats: dict[str, GradStats | None], loss: float | None) -> None:
        super().__init__({status: [] for status in STATUSES})
        self.loss = loss
        self.stats = {name: found for name, found in stats.items() if found is not None}
        self.causes: dict[str, Cause] = {}
        for name, found in stats.items():
            self["none" if found is None else found.status].append(name)

    @property
    def unexpected(self) -> list[str]:
        """The names whose cause is not one that a healthy model may have."""
        return [name for name, cause in self.causes.items() if not cause.expected]

    def __str__(self) -> str:
        return table(self, self.stats, self.causes, self.loss)


def check_grad_flow(
    model: nn.Module, loss: Tensor | None = None, *, batch: Batch | None = None, verbose: bool = True
) -> FlowReport:
    """Which parameters of `model` get a gradient, and why the others do not.

    loss    of a forward whose graph is still there: it is backpropagated once, and can be again afterwards
    batch   what the model is called with (keywords, arguments or one tensor), or a function that returns the loss;
            without `loss` it is run, with `loss` it is used to learn why a gradient is missing
    Without either, the gradients that an earlier backward has left are read.

    Gradients (also half accumulated), buffers, random generators, hooks and the row of an attached scanner are as before.
    Only a tensor that was given `retain_grad()` by hand sees this backward too. Needs memory for one more set of
    gradients. With data parallelism it looks at the gradients of its own rank and communicates with nobody.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    parameters = dict(parameters_of(model))
    case = Case(model, parameters, batch=batch)
    if loss is not None:
        _check_loss(loss)
        report = _of_loss(case, loss)
    elif batch is not None:
        report = _of_batch(case, batch)
    else:
        report = _of_grads(case)
    if verbose:
        print(report)
    return report


def _of_grads(case: Case) -> FlowReport:
    if all(parameter.grad is None for parameter in case.parameters.values()):
        raise ValueError("no parameter has a gradient: pass loss= or batch=, or call this after loss.backward()")
    return _report(case, None)


def _of_batch(case: Case, batch: Batch) -> FlowReport:
    with untouched(case.model), running(case.model), without_sync(case.model):
        loss = run_loss(case.model, batch)
        return _of_graph(case, loss, Graph(loss))


def _of_loss(case: Case, loss: Tensor) -> FlowReport:
    refuse_synchronised(case.model)
    graph = Graph(loss)
    with untouched(case.model, graph.leaves):
        return _of_graph(case, loss, graph)


def _of_graph(case: Case, loss: Tensor, graph: Graph) -> FlowReport:
    """Gradients are empty before and full afterwards; the graph stays."""
    case.loss, case.graph = loss, graph
    backward(loss)
    return _report(case, float(loss.detach()))


def _report(case: Case, loss: float | None) -> FlowReport:
    report = FlowReport(gradient_stats(case.parameters.items()), loss)
    case.statuses = {name: status for status, names in report.items() for name in names}
    report.causes = explain(case)
    return report


def gradient_stats(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, GradStats | None]:
    """Per name the numbers of its gradient; None where there is none."""
    return {name: None if p.grad is None else grad_stats(p.grad) for name, p in parameters}


def grad_stats(grad: Tensor) -> GradStats:
    """What this rank holds of a gradient; a sparse one by its rows, a complex one by its parts."""
    values = to_local(grad.detach())
    if values.is_sparse:
        values = values.coalesce()._values()
    if values.is_complex():
        values = torch.view_as_real(values)
    if not values.numel():
        return GradStats(0.0, 0.0, 0.0)
    smallest, largest = values.aminmax()
    return GradStats(float(smallest), float(largest), _norm(values))


def _norm(values: Tensor) -> float:
    """In float64 from one read where there is an engine; NaN or infinite only if an element is."""
    if values.is_cpu and values.dtype in DTYPES:
        squares, _, bad = reduce(values, block=0)
        return math.nan if bad.any() else math.sqrt(float(squares.sum()))
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _check_loss(loss: Tensor) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss must be a tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(f"loss must be a scalar, got shape {tuple(loss.shape)}: take its mean()")
