"""What this rank holds of a weight whose parts lie on several ranks, and of the tensors that meet it.

Receives DTensors (of a module that need not be imported) and hands on plain local tensors, and per weight the ranges of
outputs and inputs that the local part covers. Blocks are counted over the whole weight: a part may begin and end inside
one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Range(NamedTuple):
    """Neighbouring rows or columns of the whole weight."""

    start: int
    length: int

    def first_block(self, block: int) -> int:
        return self.start // block if block else 0

    def num_blocks(self, block: int) -> int:
        """The blocks of the whole weight it touches; without blocks, one cell."""
        if not block:
            return 1
        return -(-(self.start + self.length) // block) - self.start // block if self.length else 0


@dataclass(frozen=True)
class Held:
    """The part of a weight that is here, as ranges of (out, in).

    `rows` and `cols` are those of the gradient; `inputs` are the features of the input that come here. They differ
    where data parallelism cuts the weight along its inputs: the weight is gathered before it meets the input.
    """

    rows: Range
    cols: Range
    inputs: Range
    experts: Range | None = None

    @property
    def cells(self) -> Range:
        """The input features that have cells here."""
        start = min(self.cols.start, self.inputs.start)
        stop = max(r.start + r.length for r in (self.cols, self.inputs))
        return Range(start, stop - start)


def whole(shape: tuple[int, int]) -> Held:
    """The weight of a model that is all here."""
    return Held(Range(0, shape[0]), Range(0, shape[1]), Range(0, shape[1]))


def is_sharded(x: Any) -> bool:
    """Whether x is a DTensor, be it in parts or in copies."""
    return hasattr(x, "placements") and hasattr(x, "device_mesh")


def is_shard(placement: Any) -> bool:
    return getattr(placement, "dim", None) is not None and not placement.is_partial()


def is_unreduced(x: Any) -> bool:
    """Whether the ranks hold terms of a sum that nobody has added up."""
    return is_sharded(x) and any(placement.is_partial() for placement in x.placements)


def to_local(x: Tensor) -> Tensor:
    """What this rank holds of a tensor; a result that is still on its way is waited for."""
    local: Tensor = x.to_local() if hasattr(x, "to_local") else x
    if type(local).__name__ == "AsyncCollectiveTensor":
        local = local.wait()  # type: ignore[attr-defined]
    return local


def local_range(x: Any, dim: int) -> Range:
    """Which part of dimension `dim` of a DTensor is here."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return Range(int(offset[dim]) if shape[dim] else 0, int(shape[dim]))


def held_part(parameter: Any, shape: tuple[int, int], in_axis: int, input_dims: set[int]) -> Held:
    """The part of a weight of `shape` (out, in) that is here.

    `input_dims` are the mesh dimensions along which also the input is cut where the weight is: those of tensor
    parallelism. Along the others the weight is gathered before it is used.
    """
    if not is_sharded(parameter) or not any(is_shard(placement) for placement in parameter.placements):
        return whole(shape)
    first = 1 if parameter.ndim == 3 else 0
    ranges = [local_range(parameter, first), _flat_range(parameter, first + 1)]
    rows, cols = ranges if in_axis == 1 else ranges[::-1]
    experts = local_range(parameter, 0) if first else None
    return Held(rows, cols, _input_range(parameter, shape[1], first + in_axis, input_dims), experts)


def _flat_range(parameter: Any, dim: int) -> Range:
    """The part of dimension `dim` and all behind it, flattened; convolutions have more than two."""
    rest = parameter.shape[dim + 1 :].numel()
    part = local_range(parameter, dim)
    return Range(part.start * rest, part.length * rest)


def _input_range(parameter: Any, length: int, dim: int, input_dims: set[int]) -> Range:
    start = 0
    for mesh_dim, placement in enumerate(parameter.placements):
        if mesh_dim in input_dims and is_shard(placement) and placement.dim % parameter.ndim == dim:
            size, index = parameter.device_mesh.size(mesh_dim), parameter.device_mesh.get_local_rank(mesh_dim)
            chunk = -(-length // size)
            begin = min(index * chunk, length)
            start, length = start + begin, min(chunk, length - begin)
    return Range(start, length)


def part_like(x: Any, parameter: Any) -> Tensor | None:
    """What this rank holds of x, a tensor of the parameter's shape, where it holds the parameter; None: not all of it.

    Autograd may leave a whole gradient on every rank for a weight of which each has a part.
    """
    local = to_local(x)
    if not is_sharded(x) or tuple(x.placements) == tuple(parameter.placements):
        return local
    for dim in range(x.ndim):
        there, wanted = local_range(x, dim), local_range(parameter, dim)
        if not there.start <= wanted.start <= wanted.start + wanted.length <= there.start + there.length:
            return None
        local = local.narrow(dim, wanted.start - there.start, wanted.length)
    return local


def fitted(x: Tensor, local: Tensor, inputs: Range, num_features: int) -> Tensor | None:
    """The features `inputs` of what is here of x; zeros, which add nothing, where another rank has them.

    None if it cannot be told which features are here.
    """
    if local.shape[-1] == inputs.length:
        return local
    if not is_sharded(x) and local.shape[-1] != num_features:
        return None
    there = local_range(x, x.ndim - 1) if is_sharded(x) else Range(0, num_features)
    if there.start <= inputs.start and inputs.start + inputs.length <= there.start + there.length:
        begin = inputs.start - there.start
        return local[..., begin : begin + inputs.length]
    if inputs.start <= there.start and there.start + there.length <= inputs.start + inputs.length:
        before = there.start - inputs.start
        return torch.nn.functional.pad(local, (before, inputs.length - before - there.length))
    return None
