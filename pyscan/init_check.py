"""Step 1: are the weights that a model starts with such that it can be trained.

Receives a model and a batch, or what a scanner has of its first step, and hands on Findings: sites that amplify far
more than the others, weights far larger than the rest, a first loss far above chance, probabilities of 0 and 1 only.
A healthy model has none, whether its weights are random or trained.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pyscan.graph import Graph, Target
from pyscan.parallel import without_sync
from pyscan.preserve import Batch, find_loss, run, running, untouched
from pyscan.shards import to_local
from pyscan.sites import Site, find_sites

MAX_RATIO = 20.0  # of a gain to the median gain of the model
MIN_GAIN = 4.0  # below this, no gain is called large: the others may be small on purpose
MAX_LOSS = 3.0  # times the loss of a model that knows nothing
MAX_CERTAIN = 0.25  # share of rows with all probability on one class, while most of them are wrong


@dataclass(frozen=True)
class Finding:
    """One thing wrong with the first step; `limit` is what `value` should have stayed below."""

    kind: str  # "gain", "weight", "loss" or "saturation"
    site: str | None
    value: float
    limit: float
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass
class InitReport:
    """What the first step looked like. True if something is wrong with it; printed, one line for each finding."""

    findings: list[Finding]
    gains: dict[str, float] = field(default_factory=dict)  # rms of output / rms of input of each site
    weights: dict[str, float] = field(default_factory=dict)  # the gain its random weights would have: rms * sqrt(in)
    loss: float | None = None
    chance: float | None = None  # loss of a model that knows nothing: ln(classes)

    def __bool__(self) -> bool:
        return bool(self.findings)

    def __str__(self) -> str:
        return (
            "\n".join(map(str, self.findings)) or f"nothing to object to in the first step of {len(self.gains)} sites"
        )


def check_init(model: nn.Module, batch: Batch, *, verbose: bool = True) -> InitReport:
    """Run one forward on `batch` and say what is wrong with the weights the model starts with.

    batch   what the model is called with (keywords, arguments or one tensor), or a function that returns the loss

    State is left as `pyscan.check_grad_flow` leaves it.
    """
    sites = find_sites(model).sites
    meter = _Meter()
    with untouched(model), running(model), without_sync(model), ExitStack() as stack:
        for module in {site.module for site in sites}:
            stack.callback(module.register_forward_hook(meter.measure, with_kwargs=True).remove)
        loss = find_loss(run(model, batch))
        targets = Graph(loss).targets if loss is not None else []
    gains = {s.name: gain for s in sites if _is_matrix(s) and (gain := meter.gain(s.module)) is not None}
    report = judge_init(weight_gains(sites), targets, gains=gains)
    report.loss = None if loss is None else float(loss.detach())
    if verbose:
        print(report)
    return report


def judge_init(
    weights: Mapping[str, float], targets: list[Target], *, gains: Mapping[str, float] | None = None
) -> InitReport:
    """Findings from the gains of the weights, the classification losses and, where measured, the gains of the sites."""
    findings = [_too_large("gain", name, *pair) for name, pair in _outliers(gains or {}).items()]
    seen = {finding.site for finding in findings}
    findings += [_too_large("weight", n, *pair) for n, pair in _outliers(weights).items() if n not in seen]
    for target in targets:
        findings += _judge_target(target)
    chance = max((target.chance for target in targets), default=None)
    return InitReport(findings, dict(gains or {}), dict(weights), chance=chance)


def weight_gains(sites: list[Site]) -> dict[str, float]:
    """What each weight would multiply the rms of a random input by."""
    found = {}
    for site in sites:
        if site.parameter is None or site.originals or not _is_matrix(site):
            continue
        matrix = site.matrix(to_local(site.parameter.detach()))
        if matrix is not None and not matrix.is_meta and matrix.numel() and matrix.is_floating_point():
            wide = torch.promote_types(matrix.dtype, torch.float32)
            # Of a weight in parts this rank knows its own; they are alike.
            share = math.prod(site.shape) / matrix.numel()
            found[site.name] = float(torch.linalg.vector_norm(matrix, dtype=wide)) * math.sqrt(share / site.shape[0])
    return found


def _is_matrix(site: Site) -> bool:
    """Not an embedding, whose rows are looked up, nor what is tied to one: its scale is undone elsewhere (T5)."""
    return site.observe != "lookup" and site.kind != "embedding" and site.tied_to is None


def _outliers(gains: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """The gains far above the median, each with it. Sites that share a module have one gain, which counts once."""
    distinct = {gain for gain in gains.values() if 0 < gain < math.inf}
    middle = statistics.median_low(distinct) if len(distinct) > 1 else 1.0
    limit = max(MAX_RATIO * middle, MIN_GAIN)
    return {name: (gain, middle) for name, gain in gains.items() if not gain <= limit}


def _too_large(kind: str, name: str, gain: float, middle: float) -> Finding:
    limit = max(MAX_RATIO * middle, MIN_GAIN)
    what = "amplifies its input" if kind == "gain" else "is so large that it amplifies a random input"
    text = f"{name!r} {what} {gain:.3g} times, {gain / middle:.3g} times the median of the other weights"
    return Finding(kind, name, gain, limit, f"{text}: initialise it smaller (std 0.02, or xavier with gain 0.1)")


def _judge_target(target: Target) -> list[Finding]:
    findings = []
    chance = f"ln({target.num_classes}) = {target.chance:.3g}, the loss of a model that knows nothing"
    if target.loss > MAX_LOSS * target.chance:
        text = f"the first loss is {target.loss:.3g}, {target.loss / target.chance:.3g} times {chance}"
        findings.append(Finding("loss", None, target.loss, MAX_LOSS * target.chance, text))
    if target.certain > MAX_CERTAIN and target.loss > target.chance:
        text = (
            f"saturated: {target.certain:.0%} of the predictions put all probability on one class, and the loss "
            f"({target.loss:.3g}) is above {chance}: the logits are too large"
        )
        findings.append(Finding("saturation", None, target.certain, MAX_CERTAIN, text))
    return findings


class _Meter:
    """The rms of what goes into each module and of what comes out, over all its calls."""

    def __init__(self) -> None:
        self._squares: dict[nn.Module, tuple[list[float], list[float]]] = {}

    def measure(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        x, y = _first((*args, *kwargs.values())), _first(output if isinstance(output, tuple) else (output,))
        if x is not None and y is not None:
            into, out = self._squares.setdefault(module, ([], []))
            into.append(_mean_square(x))
            out.append(_mean_square(y))

    def gain(self, module: nn.Module) -> float | None:
        into, out = map(sum, self._squares.get(module, ((), ())))
        return math.sqrt(out / into) if into > 0 else None


def _first(values: tuple[Any, ...]) -> Tensor | None:
    return next((v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.numel()), None)


def _mean_square(x: Tensor) -> float:
    return float(x.detach().double().square().mean())
