"""Libraries that wrap a model so that its weights or gradients cannot be found, and what to do about each."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def remarks(model: nn.Module) -> Iterator[str]:
    """A sentence for each wrapper that hides something; known by name, so that none has to be installed."""
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    if "FullyShardedDataParallel" in kinds:
        yield (
            "FullyShardedDataParallel (FSDP1) keeps weights and gradients as pieces of one flat parameter, in which no "
            "matrix is found outside of forward and backward: wrap the model with torch.distributed.fsdp.fully_shard"
        )
    if is_deepspeed(model):
        yield (
            "DeepSpeed reduces gradients after the backward, and from ZeRO stage 1 on into buffers of its own: they "
            "are recorded where the optimizer still finds a .grad (stage 0); to ask for them, safe_get_full_grad, is a "
            "collective in which all ranks must take part, and pyscan adds none"
        )


def is_deepspeed(model: nn.Module) -> bool:
    is_engine = any(type(module).__name__ == "DeepSpeedEngine" for module in model.modules())
    return is_engine or any(hasattr(parameter, "ds_id") for parameter in model.parameters())
