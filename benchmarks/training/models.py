"""The models of the training-step benchmark: Qwen3 decoders with random weights, an optimizer and one batch.

Receives the name of a shape and hands on a `Training`, the same weights and data every time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Shape(NamedTuple):
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    batch: int
    tokens: int
    steps_per_turn: int  # some slices long


MODELS = {
    "tiny": Shape(64, 4, 176, 4, 2, 16, 512, 2, 64, steps_per_turn=10),
    "small": Shape(256, 4, 704, 4, 2, 64, 2048, 2, 256, steps_per_turn=3),
    "minimind": Shape(512, 8, 1408, 8, 2, 64, 6400, 1, 340, steps_per_turn=1),
    "wide": Shape(1024, 4, 2816, 16, 4, 64, 6400, 1, 256, steps_per_turn=1),
}


@dataclass
class Training:
    """`model` is what is called; `network` the module inside, which torch.compile may have wrapped."""

    network: nn.Module
    model: Any
    optimizer: torch.optim.Optimizer
    ids: Tensor


def make(shape: Shape, *, compiled: bool = False) -> Training:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        vocab_size=shape.vocabulary, tie_word_embeddings=False,
    )  # fmt: skip
    network = Qwen3ForCausalLM(config).train()
    optimizer = torch.optim.AdamW(network.parameters(), 1e-4)
    ids = torch.randint(0, shape.vocabulary, (shape.batch, shape.tokens))
    return Training(network, torch.compile(network) if compiled else network, optimizer, ids)
