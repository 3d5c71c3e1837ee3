"""Is gradient flowing: sort every parameter by the gradient it gets, and say why where it gets none.

Receives a model with a loss, a batch, or gradients that are already there; runs at most one backward of its own for the
lists and leaves everything as it was. Hands back a FlowReport; causes.py finds the reasons.
"""

from __future__ import annotations

from torch import Tensor, nn

from pyscan.case import Case, Cause
from pyscan.causes import explain
from pyscan.flow_table import table
from pyscan.grad_stats import GradStats, gradient_stats
from pyscan.graph import Graph
from pyscan.parallel import refuse_synchronised, without_sync
from pyscan.preserve import Batch, backward, run_loss, running, untouched
from pyscan.sites import parameters_of

STATUSES = ("ok", "zero", "none", "nan", "inf")


class FlowReport(dict[str, list[str]]):
    """Names of parameters by status: "ok", "zero", "none", "nan", "inf". Printed, it is the table.

    causes   why, for each name that is not ok, and for each fused expert (`name[3]`) that got nothing
    stats    smallest and largest element and norm of the gradient of every parameter; None where there is none
    loss     the value of the loss, where there was one
    """

    def __init__(self, stats: dict[str, GradStats | None], loss: float | None) -> None:
        super().__init__({status: [] for status in STATUSES})
        self.loss = loss
        self.stats = stats
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

    Gradients (also half accumulated), buffers, random generators, hooks and the row of an attached scanner are as they
    were; only a tensor with `retain_grad()` sees this backward too. Needs memory for one more set of gradients. With
    data parallelism a batch is run between two steps, by each rank for itself: no other is waited for.
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
    report = FlowReport(gradient_stats(case.parameters), loss)
    case.statuses = {name: status for status, names in report.items() for name in names}
    report.causes = explain(case)
    return report


def _check_loss(loss: Tensor) -> None:
    if not isinstance(loss, Tensor):
        raise TypeError(f"loss must be a tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(f"loss must be a scalar, got shape {tuple(loss.shape)}: take its mean()")
