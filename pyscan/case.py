"""What the search for causes works on: the model right after a backward (Case), and what it finds (Cause)."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from torch import Tensor, nn

from pyscan.graph import Graph
from pyscan.preserve import Batch
from pyscan.sites import named_modules


@dataclass(frozen=True)
class Cause:
    """Why a parameter is not ok; `expected`: a healthy model may have it. As a string, the text."""

    kind: str
    text: str
    expected: bool = False

    def __str__(self) -> str:
        return self.text


@dataclass
class Case:
    """What is known when causes are looked for; gradients of the parameters are in place."""

    model: nn.Module
    parameters: dict[str, nn.Parameter]
    batch: Batch | None = None
    loss: Tensor | None = None
    graph: Graph | None = None
    statuses: dict[str, str] = field(default_factory=dict)

    def names(self, *statuses: str) -> list[str]:
        return [name for name, status in self.statuses.items() if status in statuses]

    @functools.cached_property
    def modules(self) -> dict[str, nn.Module]:
        return {name: module for module, name in named_modules(self.model).items()}


BLIND_CHECKPOINT = Cause(
    "checkpoint_without_input_grads",
    "reentrant checkpointing, and no input of the checkpointed block needs a gradient: call "
    "model.enable_input_require_grads(), or checkpoint with use_reentrant=False",
)
