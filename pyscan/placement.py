"""Where this rank stands among the others, and how their cells become those of the whole model.

Receives a model after it was wrapped (DDP, fully_shard, parallelize_module, a stage of a pipeline), hands on the mesh
of all ranks and, per site and channel, the dimensions to combine over and those that are replicas. Groups and meshes
are asked for their ranks; nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pyscan.process import rank_and_world
from pyscan.schema import Merge, Mesh
from pyscan.shards import held_part, is_shard, is_sharded
from pyscan.sites import Site

_OF_INPUT = ("act", "act_max", "act_bad")
_OF_GRADIENT = ("grad", "grad_out", "grad_max", "grad_bad")
Dims = frozenset[str]


@dataclass(frozen=True)
class Grid:
    """All ranks as an array with named dimensions, and this rank's place in it."""

    ranks: NDArray[np.int64]
    dims: tuple[str, ...]
    rank: int

    @property
    def coords(self) -> tuple[int, ...]:
        return tuple(int(c[0]) for c in np.nonzero(self.ranks == self.rank))

    def along(self, group: Iterable[int]) -> Dims:
        """The dimensions in which the ranks of a group that this rank is in differ; all of them if it fits none."""
        wanted, coords = set(group), self.coords
        for chosen in chain.from_iterable(combinations(range(self.ranks.ndim), n) for n in range(self.ranks.ndim + 1)):
            place = tuple(slice(None) if i in chosen else coords[i] for i in range(self.ranks.ndim))
            if set(np.asarray(self.ranks[place]).ravel().tolist()) == wanted:
                return frozenset(self.dims[i] for i in chosen)
        return frozenset(self.dims)


@dataclass
class Placements:
    """What is known about the ranks of one model. `over` learns from the inputs that are seen how they are laid out."""

    grid: Grid
    data: Dims = frozenset()  # dimensions whose ranks see other rows
    model: Dims = frozenset()  # dimensions whose ranks compute one result together
    seen: dict[str, Dims] = field(default_factory=dict)  # site -> model dimensions over which its input is cut
    _layouts: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # of the last input of each site
    is_news: bool = False  # something was seen that the schema does not say yet

    @property
    def mesh(self) -> Mesh:
        grid = self.grid
        data = tuple(dim for dim in grid.dims if dim in self.data)
        return Mesh(grid.dims, grid.ranks.shape, grid.coords, data)

    def merge(self, site: Site) -> dict[str, Merge]:
        """The merge rule of every channel of a site."""
        of_input, of_gradient = self._rule(self._over_input(site)), self._rule(self._over_gradient(site))
        return dict.fromkeys(_OF_INPUT, of_input) | dict.fromkeys(_OF_GRADIENT, of_gradient)

    def learn(self, site: Site, x: Tensor) -> None:
        """An input of `site` came with its layout: ranks that hold other parts of it are added, copies are not."""
        layout = tuple(_placements(x))
        if not layout or self._layouts.get(site.name) == layout:
            return
        self._layouts[site.name] = layout
        cut = frozenset(
            chain.from_iterable(self._dims_of(x, i) for i, placement in enumerate(layout) if is_shard(placement))
        )
        before = self._over_input(site)
        self.seen[site.name] = cut
        self.is_news |= self._over_input(site) != before

    def _rule(self, over: Dims) -> Merge:
        dims = self.grid.dims
        return Merge(tuple(d for d in dims if d in over), tuple(d for d in dims if d not in over))

    def _over_input(self, site: Site) -> Dims:
        rest = frozenset(self.grid.dims) - self.model
        return rest | self._cut(site.parameter, site.in_axis) & self.model | self.seen.get(site.name, frozenset())

    def _over_gradient(self, site: Site) -> Dims:
        return self._cut(site.parameter, None)

    def _cut(self, parameter: Tensor | None, axis: int | None) -> Dims:
        """The dimensions over which a parameter is cut, along one axis of its matrix or at all."""
        if parameter is None:
            return frozenset()
        found: set[str] = set()
        for i, placement in enumerate(_placements(parameter)):
            if is_shard(placement) and axis in (None, matrix_axis(parameter, placement.dim)):
                found |= self._dims_of(parameter, i)
        return frozenset(found)

    def _dims_of(self, x: Any, mesh_dim: int) -> Dims:
        return self.grid.along(torch.distributed.get_process_group_ranks(x.device_mesh.get_group(mesh_dim)))

    def input_dims(self, parameter: Any) -> set[int]:
        """The dimensions of a parameter's own mesh along which its input is cut where the weight is."""
        if not is_sharded(parameter):
            return set()
        return {i for i in range(parameter.device_mesh.ndim) if self._dims_of(parameter, i) <= self.model}

    def place(self, site: Site) -> Site:
        """The site with the part of its weight that is here, and the cells of that part."""
        if site.parameter is None or not is_sharded(site.parameter):
            return site
        held = held_part(site.parameter, site.shape, site.in_axis, self.input_dims(site.parameter))
        num_rows = held.rows.num_blocks(site.block) if site.num_row_blocks else 0
        return replace(site, held=held, num_blocks=held.cells.num_blocks(site.block), num_row_blocks=num_rows)


def matrix_axis(parameter: Tensor, dim: int) -> int | None:
    """The axis of a site's matrix that dimension `dim` of its parameter belongs to; None: that of the experts."""
    dim %= parameter.ndim
    if parameter.ndim == 3:
        return dim - 1 if dim else None
    return min(dim, 1)


def find_placements(model: nn.Module) -> Placements | None:
    """How the ranks share the model; None if there is one rank."""
    rank, world = rank_and_world()
    if world == 1:
        return None
    sharded: list[Any] = [parameter for parameter in model.parameters() if is_sharded(parameter)]
    meshes = {id(mesh): mesh for mesh in (_root(parameter.device_mesh) for parameter in sharded)}
    groups = [list(group) for group in _data_groups(model)]
    grid = _grid(max(meshes.values(), key=lambda mesh: mesh.size(), default=None), groups, rank, world)
    data = frozenset().union(*map(grid.along, groups))
    described = {
        dim
        for parameter in sharded
        for i in range(parameter.device_mesh.ndim)
        for dim in grid.along(torch.distributed.get_process_group_ranks(parameter.device_mesh.get_group(i)))
    }
    return Placements(grid, data, frozenset(described) - data)


def _placements(x: Any) -> Sequence[Any]:
    return x.placements if is_sharded(x) else ()


def _root(mesh: Any) -> Any:
    return mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh


def _grid(mesh: Any, groups: list[list[int]], rank: int, world: int) -> Grid:
    """The largest mesh of the parameters; around a smaller one, or a group of data parallelism, all ranks there are."""
    if mesh is not None:
        ranks = mesh.mesh.cpu().numpy().astype(np.int64)
        names = tuple(mesh.mesh_dim_names or (f"mesh{i}" for i in range(ranks.ndim)))
        if ranks.size == world:
            return Grid(ranks, names, rank)
        if world % ranks.size == 0 and np.array_equal(ranks.ravel(), ranks.min() + np.arange(ranks.size)):
            return Grid(np.arange(world).reshape(-1, *ranks.shape), ("outer", *names), rank)
    group = min(groups, key=len, default=list(range(world)))
    return _grid_of_group(sorted(group), rank, world, "dp" if groups else "rank")


def _grid_of_group(group: list[int], rank: int, world: int, name: str) -> Grid:
    size, stride = len(group), group[1] - group[0] if len(group) > 1 else 1
    is_even = group == list(range(group[0], group[0] + size * stride, stride)) and world % (size * stride) == 0
    shape = {"outer": world // (size * stride), name: size, "inner": stride} if is_even else {name: world}
    kept = {dim: length for dim, length in shape.items() if length > 1 or dim == name}
    return Grid(np.arange(world).reshape(tuple(kept.values())), tuple(kept), rank)


def _data_groups(model: nn.Module) -> Iterator[list[int]]:
    """The ranks this one shares each wrapper of data parallelism with."""
    ranks_of = torch.distributed.get_process_group_ranks
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            yield ranks_of(module.process_group)
        state = getattr(module, "_get_fsdp_state", None)
        groups = getattr(state(), "_fsdp_param_groups", None) or [] if callable(state) else []
        for info in (group.mesh_info for group in groups):
            for dim in (info.shard_mesh_dim, info.replicate_mesh_dim):
                if dim is not None:
                    yield ranks_of(info.mesh.get_group(dim))
