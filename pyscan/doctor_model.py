"""A small decoder to examine a machine with, of any size, without other libraries.

Receives sizes and hands on a model whose forward returns a loss, and a way to train it for some steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Sizes(NamedTuple):
    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int
    sequences: int
    length: int


SMALL = Sizes("small", 512, 1408, 8, 8, 6400, 4, 512)
LARGE = Sizes("1B", 2048, 5632, 22, 32, 32000, 2, 2048)


class Block(nn.Module):
    """Attention and a gated MLP, as in every Llama."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        hidden, intermediate = sizes.hidden, sizes.intermediate
        self.heads = sizes.heads
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (weight(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for weight in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        y = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Decoder(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.blocks = nn.Sequential(*(Block(sizes) for _ in range(sizes.layers)))
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.blocks(self.embed(ids)))
        return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


class Training:
    """A model of these sizes in bfloat16 with its optimizer and one batch."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model = Decoder(sizes).bfloat16()
            self.ids = torch.randint(sizes.vocabulary, (sizes.sequences, sizes.length))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self) -> None:
        loss: Tensor = self.model(self.ids)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
