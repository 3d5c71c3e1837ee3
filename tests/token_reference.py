"""What tokens mode must give, from autograd itself: one forward and backward with a copy of every weight per token.

`gradients(model, loss)` runs the loss with the forward of every Linear, Conv1D, embedding and fused expert replaced by
one that multiplies each row with a weight of its own, and returns the gradients of those copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Copies:
    """The copies of one weight: `grad` is [rows, out, in] (of an embedding: [rows, in]), `tokens` the token of each."""

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self.tokens: list[Tensor] = []

    def add(self, values: Tensor, tokens: Tensor) -> Tensor:
        leaf = values.detach().clone().requires_grad_()
        self.leaves.append(leaf)
        self.tokens.append(tokens)
        return leaf

    @property
    def grad(self) -> Tensor:
        return torch.cat([leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in self.leaves])

    @property
    def token(self) -> np.ndarray[Any, Any]:
        return torch.cat(self.tokens).numpy()


def gradients(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, Copies]:
    """By site: the gradient of each row's own copy of the weight."""
    found: dict[str, Copies] = {}
    with _copying(model, found):
        loss().backward()
    return found


def _rows(count: int) -> Tensor:
    return torch.arange(count)


def _linear(copies: Copies, module: nn.Module, is_turned: bool) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weight = module.weight.T if is_turned else module.weight
        own = copies.add(weight.expand(len(rows), *weight.shape), _rows(len(rows)))
        out = torch.einsum("ri,roi->ro", rows, own)
        out = out if module.bias is None else out + module.bias
        return out.reshape(*x.shape[:-1], -1)

    return forward


def _embedding(copies: Copies, module: nn.Embedding) -> Callable[[Tensor], Tensor]:
    def forward(ids: Tensor) -> Tensor:
        own = copies.add(module.weight[ids.reshape(-1)], _rows(ids.numel()))
        if module.padding_idx is not None:
            keep = (ids.reshape(-1, 1) != module.padding_idx).to(own.dtype)
            own = own * keep + own.detach() * (1 - keep)
        return own.reshape(*ids.shape, -1)

    return forward


def _experts(name: str, found: dict[str, Copies], module: Any) -> Callable[..., Tensor]:
    """The experts of Mixtral and Qwen, each token with copies of its own."""

    def copies(weight: str, expert: int, tokens: Tensor) -> Tensor:
        home = found.setdefault(f"{name}.{weight}[{expert}]", Copies())
        values = getattr(module, weight)[expert]
        return home.add(values.expand(len(tokens), *values.shape), tokens)

    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(module.num_experts):
            tokens, rank = (chosen == expert).nonzero(as_tuple=True)
            if not len(tokens):
                continue
            gate, up = torch.einsum("ri,roi->ro", hidden[tokens], copies("gate_up_proj", expert, tokens)).chunk(2, -1)
            product = torch.einsum("ri,roi->ro", module.act_fn(gate) * up, copies("down_proj", expert, tokens))
            out = out.index_add(0, tokens, product * weights[tokens, rank, None])
        return out

    return forward


@contextmanager
def _copying(model: nn.Module, found: dict[str, Copies]) -> Iterator[None]:
    replaced = []
    for name, module in model.named_modules():
        key = f"{name}.weight"
        if hasattr(module, "gate_up_proj"):
            forward = _experts(name, found, module)
        elif isinstance(module, nn.Embedding):
            forward = _embedding(found.setdefault(key, Copies()), module)
        elif isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            forward = _linear(found.setdefault(key, Copies()), module, not isinstance(module, nn.Linear))
        else:
            continue
        module.forward = forward
        replaced.append(module)
    try:
        yield
    finally:
        for module in replaced:
            del module.forward


def block_norms(grads: Tensor, block: int) -> Tensor:
    """[rows, out, in] to the norms of its blocks, [rows, out_blocks, in_blocks]."""
    columns = [part.square().sum(2) for part in grads.split(block, 2)]
    return torch.stack([torch.stack([p.sum(1) for p in c.split(block, 1)], 1) for c in columns], 2).sqrt()
