"""The capture of the scanner written in plain torch: what a careful engineer writes to get the same numbers.

Receives a model and hands on a `PlainCapture` whose rows hold, per Linear, the sum of squares per block of 64 features,
the largest magnitude and the number of non-finite values, of its input and of its weight gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

BLOCK = 64


def statistics(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of one read tensor [..., features], in the fewest calls known: a norm in float32 needs no copy to float64."""
    blocks = x.reshape(-1, x.shape[-1] // BLOCK, BLOCK)
    norms = torch.linalg.vector_norm(blocks, dim=(0, 2), dtype=torch.float32)
    return norms, x.abs().amax(), torch.isfinite(x).logical_not_().sum()


@dataclass
class PlainCapture:
    """Hooks on every Linear of a model; `rows` holds a tuple of tensors per step."""

    linears: list[nn.Linear]
    inputs: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)
    rows: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def hook(self, index: int) -> Any:
        def see(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if torch.is_grad_enabled():
                self.inputs[index] = statistics(args[0].detach())

        return see

    @torch.no_grad()
    def after_backward(self) -> None:
        grads = [statistics(linear.weight.grad) for linear in self.linears if linear.weight.grad is not None]
        found = [*self.inputs.values(), *grads]
        norms, maxima, bad = (list(each) for each in zip(*found, strict=True))
        self.rows.append((torch.cat(norms), torch.stack(maxima), torch.stack(bad)))


def plain_capture(model: nn.Module) -> PlainCapture:
    capture = PlainCapture([module for module in model.modules() if isinstance(module, nn.Linear)])
    for index, linear in enumerate(capture.linears):
        linear.register_forward_pre_hook(capture.hook(index))
    return capture
