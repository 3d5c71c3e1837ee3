"""What a diagnosis may do with a model that several ranks train together.

Receives a model, perhaps wrapped; hands on a way to run it that touches no other rank, or an error that says why there
is none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

_SHARDED = {"FSDPModule", "FullyShardedDataParallel", "DeepSpeedEngine"}


def refuse_synchronised(model: nn.Module) -> None:
    """A loss that DDP waits for can be backpropagated once only: a second time its gradients would stay local."""
    _refuse_sharded(model)
    for module in _data_parallel(model):
        if module.require_forward_param_sync:
            raise ValueError(
                "this loss comes from a DistributedDataParallel forward, whose gradients are averaged by the first "
                "backward only. On every rank: pass batch= between two steps, or a loss computed under "
                "model.no_sync(), or call this after loss.backward() without loss"
            )


@contextlib.contextmanager
def without_sync(model: nn.Module) -> Iterator[None]:
    """Forward and backward of this rank alone. Not to be used between a forward of DDP and its backward."""
    _refuse_sharded(model)
    with contextlib.ExitStack() as stack:
        for module in _data_parallel(model):
            stack.enter_context(module.no_sync())
            # Whether the next forward broadcasts the buffers: not this one, and the one after as it would have.
            stack.callback(setattr, module, "require_forward_param_sync", module.require_forward_param_sync)
            module.require_forward_param_sync = False
        yield


def _data_parallel(model: nn.Module) -> list[nn.parallel.DistributedDataParallel]:
    return [module for module in model.modules() if isinstance(module, nn.parallel.DistributedDataParallel)]


def _refuse_sharded(model: nn.Module) -> None:
    for module in model.modules():
        kind = next((c.__name__ for c in type(module).__mro__ if c.__name__ in _SHARDED), None)
        if kind is not None:
            raise ValueError(
                f"the gradients of {kind} live in shards that only its own backward can fill: on every rank, call "
                "pyscan.check_grad_flow(model) after loss.backward(), without loss and batch"
            )
