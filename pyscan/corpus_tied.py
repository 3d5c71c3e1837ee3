"""What the two uses of a tied weight have in common: their gradients add up, and the norm of a sum needs their product.

Receives a model whose output layer has the weight of its input embedding; watches both in a forward and backward and
hands on, per sequence and block, the sum of the products of the two gradients. With e_t the gradient of the looked-up
row of token t, and x_s and g_s input and output gradient of the output layer, it is sum_ts g_s[id_t] (e_t . x_s).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pyscan.token_sums import num_blocks


class TiedProduct:
    """Hooks on both uses; `take` after each backward."""

    def __init__(self, embedding: nn.Embedding, head: nn.Linear, *, block: int) -> None:
        self._block = block
        self._padding = embedding.padding_idx
        self._ids = self._mixed = self._product = torch.empty(0)
        watched = (embedding, self._looked_up), (head, self._multiplied)
        self._handles = [module.register_forward_hook(hook) for module, hook in watched]

    def take(self) -> NDArray[np.float64]:
        """[sequences, blocks] of the last backward."""
        products = torch.nn.functional.pad(self._product, (0, -self._product.shape[-1] % (self._block or 1)))
        blocks = products.reshape(len(products), num_blocks(self._product.shape[-1], self._block), -1)
        sums: NDArray[np.float64] = blocks.sum(-1).numpy()
        return sums

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _looked_up(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        if out.requires_grad:
            self._ids = args[0]
            _watch(out, self._finish)

    def _multiplied(self, module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        if out.requires_grad:
            x = args[0].detach()
            _watch(out, lambda g: self._mix(x, g))

    def _mix(self, x: Tensor, g: Tensor) -> None:
        """For each token t the inputs of the output layer, weighted by how the loss pulls there at t's logit."""
        pulls = g.gather(2, self._ids[:, None, :].expand(-1, g.shape[1], -1))
        self._mixed = pulls.mT.double() @ x.double()

    def _finish(self, e: Tensor) -> None:
        if self._padding is not None:
            e = e.masked_fill((self._ids == self._padding)[..., None], 0)  # a lookup of padding has no gradient
        self._product = (e.double() * self._mixed).sum(1)


def _watch(out: Tensor, see: Callable[[Tensor], None]) -> None:
    """Look at the gradient of `out` when it arrives, and leave it as it is."""

    def hook(grad: Tensor) -> None:
        see(grad.detach())

    out.register_hook(hook)  # type: ignore[no-untyped-call]


def tied_uses(model: Any) -> tuple[Any, Any] | None:
    """Input embedding and output layer of a model, if they share their weight."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    shared = embedding is not None and head is not None and head.weight is embedding.weight
    return (embedding, head) if shared else None


def are_plain(uses: tuple[Any, Any]) -> bool:
    """Whether both do no more than their kind of module does: then their products can be told."""
    embedding, head = uses
    return (
        type(embedding).forward is nn.Embedding.forward
        and type(head).forward is nn.Linear.forward
        and embedding.max_norm is None
        and not embedding.scale_grad_by_freq
    )
