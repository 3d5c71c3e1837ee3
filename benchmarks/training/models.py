"""The models of the training-step benchmark: Qwen3 decoders with random weights, an optimizer and one batch.

Receives a shape and hands on a `Training`, the same weights and data every time, and twins of it: other modules and
another optimizer that work in the same memory. The learning rate is 0: weights stay as they are, gradients never fade,
and every step of every twin must come to the same loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
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
    # A shared machine soon changes its speed, but the first step after the turn of another finds its caches cold.
    steps_per_turn: int


MODELS = {
    "tiny": Shape(64, 4, 176, 4, 2, 16, 512, 2, 64, steps_per_turn=8),
    "small": Shape(256, 4, 704, 4, 2, 64, 2048, 2, 256, steps_per_turn=1),
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


def nothing() -> None:
    pass


def make(shape: Shape) -> Training:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        vocab_size=shape.vocabulary, tie_word_embeddings=False,
    )  # fmt: skip
    network = Qwen3ForCausalLM(config).train()
    ids = torch.randint(0, shape.vocabulary, (shape.batch, shape.tokens))
    return Training(network, network, torch.optim.AdamW(network.parameters(), 0.0), ids)


def twin(training: Training, *, compiled: bool = False) -> Training:
    """Modules and an optimizer of its own, weights and optimizer state of `training`, which has taken a step.

    Where its memory comes to lie makes a training some per cent faster or slower for all its life: twins have that in
    common.
    """
    if not training.optimizer.state:
        raise ValueError("a training must have taken a step before it gets twins: the optimizer has no state to share")
    network = copy.deepcopy(training.network)
    optimizer = torch.optim.AdamW(network.parameters(), 0.0)
    for mine, common in zip(_tensors(network), _tensors(training.network), strict=True):
        mine.data = common.data
    for parameter, common in zip(network.parameters(), training.network.parameters(), strict=True):
        optimizer.state[parameter] = training.optimizer.state[common]
    return Training(network, torch.compile(network) if compiled else network, optimizer, training.ids)


def _tensors(network: nn.Module) -> list[Tensor]:
    return [*network.parameters(), *network.buffers()]


def mark_layers(network: nn.Module, mark: Callable[[], None]) -> None:
    """Have `mark` called whenever the hidden states come to another layer, and when their gradients come back."""

    def comes(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mark()
        hidden = args[0] if args else kwargs["hidden_states"]
        hidden.register_hook(lambda gradient: mark())

    decoder: Any = network.model
    for module in (*decoder.layers, decoder.norm):
        module.register_forward_pre_hook(comes, with_kwargs=True)


def step(
    training: Training,
    *,
    accumulate: int = 1,
    after_step: Callable[[], None] = nothing,
    mark: Callable[[], None] = nothing,
) -> Tensor:
    """The loss. `after_step` is called between the optimizer's step and zero_grad, `mark` between any two parts."""
    mark()
    for _ in range(accumulate):
        loss: Tensor = training.model(input_ids=training.ids, labels=training.ids).loss
        mark()
        loss.backward()
        mark()
    training.optimizer.step()
    after_step()
    mark()
    training.optimizer.zero_grad(set_to_none=True)
    mark()
    return loss.detach()
