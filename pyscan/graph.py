"""Read what the autograd graph of a loss says about itself, without running it.

Receives a loss; hands on the leaves its gradient will reach, the dtypes it passes through, and the classification
losses in it (Target) with their probabilities and labels, which autograd has saved.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class Graph:
    """The nodes behind a loss, walked through when they are first asked for."""

    def __init__(self, loss: Tensor) -> None:
        self._loss = loss

    @functools.cached_property
    def _nodes(self) -> dict[str, list[Any]]:
        """By name, each once."""
        found: dict[str, list[Any]] = {}
        for node in _nodes(self._loss.grad_fn):
            found.setdefault(node.name(), []).append(node)
        return found

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors whose .grad a backward would fill, as far as they are known before reentrant checkpoints run."""
        if self._loss.grad_fn is None:
            return [self._loss] if self._loss.requires_grad else []
        return [node.variable for node in self._nodes.get("torch::autograd::AccumulateGrad", [])]

    @property
    def num_checkpoints(self) -> int:
        """How often the reentrant kind of checkpointing was used."""
        return len(self._nodes.get("CheckpointFunctionBackward", []))

    @property
    def has_half(self) -> bool:
        """Whether anything passes through fp16."""
        nodes = (node for name, group in self._nodes.items() if "Accumulate" not in name for node in group)
        return any(meta.dtype is torch.float16 for node in nodes for meta in node._input_metadata)

    @functools.cached_property
    def targets(self) -> list[Target]:
        """The classification losses; to be read while the graph is there."""
        return [read(node) for name, read in _TARGETS.items() for node in self._nodes.get(name, [])]


@dataclass(frozen=True)
class Target:
    """One classification loss: its mean over the counted rows, and how sure the model was of each of them."""

    num_classes: int
    num_rows: int
    num_masked: int
    loss: float  # mean over the rows that count; NaN if none does
    certain: float = field(default=0.0)  # share of these rows with all probability on one class

    @property
    def chance(self) -> float:
        """The loss of a model that knows nothing."""
        return math.log(self.num_classes)


def _nodes(first: Any) -> Iterator[Any]:
    stack, seen = [first] if first is not None else [], {first}
    while stack:
        node = stack.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


# A probability this close to 1 leaves nothing to learn from.
_CERTAIN = 1e-3


def _likelihood(node: Any) -> Target:
    """Cross entropy and negative log likelihood: log probabilities [N, C, ...] with labels. Copies none of them."""
    log_p, labels = node._saved_self.detach(), node._saved_target
    if log_p.ndim == 1:
        log_p, labels = log_p[None], labels[None]
    num_classes = log_p.shape[1]
    ignored = node._saved_ignore_index
    counted = labels != (ignored - 2**64 if ignored >= 2**63 else ignored)
    num_counted = int(counted.sum())
    if num_counted == 0:
        return Target(num_classes, labels.numel(), labels.numel(), math.nan)
    right = log_p.gather(1, labels.clamp(0, num_classes - 1).unsqueeze(1)).squeeze(1)[counted]
    certain = log_p.amax(1)[counted] > math.log1p(-_CERTAIN)
    return Target(
        num_classes,
        labels.numel(),
        labels.numel() - num_counted,
        -float(right.double().mean()),
        float(certain.double().mean()),
    )


def _binary(node: Any) -> Target:
    """Binary cross entropy of logits: every element is a row of two classes."""
    logits, labels = node._saved_self.detach().float(), node._saved_target.float()
    certain = logits.abs() > math.log(1 / _CERTAIN)
    mean = F.binary_cross_entropy_with_logits(logits, labels)
    return Target(2, logits.numel(), 0, float(mean), float(certain.float().mean()))


_TARGETS = {
    "NllLossBackward0": _likelihood,
    "NllLoss2DBackward0": _likelihood,
    "BinaryCrossEntropyWithLogitsBackward0": _binary,
}
