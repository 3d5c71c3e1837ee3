"""Expert parallelism of transformers, two ranks: experts on one of them each, tokens sent to where theirs is.

torchrun --nproc-per-node 2 -m tests.ranks_experts OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.distributed.expert_parallel import apply_expert_parallelism

import pyscan
from tests.gloo import leave

STEPS = 2
VOCAB = 64


def make(implementation: str) -> nn.Module:
    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        hidden_size=32, num_hidden_layers=2, intermediate_size=48, moe_intermediate_size=24, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, vocab_size=VOCAB, num_experts=4, num_experts_per_tok=2,
        tie_word_embeddings=False, experts_implementation=implementation,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config).train()


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, VOCAB, (4, 9), generator=generator) for _ in range(STEPS)]


def train(model: nn.Module, rank: int, world: int, **attach: Any) -> tuple[Any, list[Tensor]]:
    """The scanner, or None, and the losses."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scan = pyscan.attach(model, optimizer=optimizer, **attach) if attach else None
    losses = []
    for ids in batches():
        mine = ids.chunk(world)[rank]
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if scan is not None:
        scan.close()
    return scan, losses


def share(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    apply_expert_parallelism(model.model, mesh, None, type(model.config).base_model_ep_plan)
    experts = {name: parameter for name, parameter in model.named_parameters() if ".experts." in name}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(experts))
    for parameter in experts.values():  # it gets the sum over the rows of all ranks, the others get the mean
        parameter.register_hook(lambda grad: grad / dist.get_world_size())
    return DistributedDataParallel(model)


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for implementation in ("eager", "grouped_mm"):
        _, bare = train(share(make(implementation)), rank, world)
        scan, losses = train(share(make(implementation)), rank, world, path=out / f"{implementation}.mscan")
        found = {
            "latest": scan.latest()["param_stats"],
            "same_losses": all(map(torch.equal, bare, losses)),
            "events": [event for event in scan.events if event["kind"] in ("off", "note", "model_changed")],
            "coverage": scan.coverage(),
        }
        (out / f"{implementation}-{rank}.json").write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
