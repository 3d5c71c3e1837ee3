"""Tell which weight a matrix product uses and which rows it meets.

Receives the weights of one running module and the calls made in it, by name and arguments, and hands on uses: (site, x,
offsets). A weight is known by identity, as a view of it, or as a copy that was followed (a cast, or experts gathered by
index). Pure bookkeeping: who calls it, and when, is decided in functional.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from pyscan.shards import is_sharded

Sink = Callable[[int, Tensor, Tensor | None], None]


class Use(NamedTuple):
    """One use of a weight: rows of x met `site`, or with `ends` range e of them met site + e.

    `order` is how rows of the product were sorted to become those of x; a `turned` product has its rows as columns.
    """

    site: int
    x: Tensor
    ends: Tensor | None
    order: Tensor | None = None
    turned: bool = False


@dataclass(frozen=True)
class Slot:
    """One parameter of an owner and the sites it holds: site `first`, or `first` + e for its expert e."""

    first: int
    name: str
    holder: nn.Module
    attribute: str
    in_axis: int
    num_features: int
    num_experts: int | None

    def tensor(self) -> Tensor | None:
        """The weight as the module will read it now: it may have been replaced, unsharded or given an adapter."""
        holder, attribute = self.holder, self.attribute
        parameter = holder._parameters.get(attribute)
        # Reading a parametrised weight may change its state, unless its value is kept for the whole forward anyway.
        if parameter is None and parametrize._cache_enabled and parametrize.is_parametrized(holder, attribute):
            return getattr(holder, attribute)  # type: ignore[no-any-return]
        return parameter


class _Known(NamedTuple):
    """A tensor whose last two axes are those of the slot's weight; `picks` are the experts its first axis runs over.

    One that `passes` is known in this forward alone.
    """

    tensor: Callable[[], Tensor | None]
    slot: Slot
    expert: int | None = None
    picks: Tensor | None = None
    is_copy: bool = False
    passes: bool = False


class Frame:
    """The weights of one module during one forward of it; `refresh` begins another."""

    def __init__(self, slots: list[Slot], problems: dict[int, str]) -> None:
        self.used_copy = False  # whether a weight was known only because follow() had seen a copy made
        self._slots = slots
        self._problems = problems
        self._sharded: list[Slot] = []  # whose weight a forward may replace by the part of it that is here
        self._verified: set[tuple[int, int, int]] = set()  # (slot, axis, its stride) found to be the input axis
        self._known: dict[int, _Known] = {}

    def refresh(self) -> None:
        """Look up the weights; most often they are the tensors they were."""
        self.used_copy = False
        tensors = [slot.tensor() for slot in self._slots]
        if len(tensors) == len(self._known) and all(map(self._is_known, tensors)):
            return
        self._verified.clear()
        pairs = [(t, slot) for t, slot in zip(tensors, self._slots, strict=True) if t is not None]
        self._known = {id(t): _Known(weakref.ref(t), slot) for t, slot in pairs}
        self._sharded = [slot for t, slot in pairs if is_sharded(t)]

    def close(self) -> None:
        """Let go of what was followed."""
        if len(self._known) > len(self._slots):
            self._known = {key: known for key, known in self._known.items() if not known.passes}

    def use(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Use | None:
        """The use that a call of the matrix product `name` makes of a weight; None when it uses none of ours."""
        skip = MATMULS[name]
        first, second = args[skip : skip + 2] if len(args) > skip + 1 else _operands(skip, args, kwargs)
        transposed = name == "linear"  # its second operand is [out, in]
        if (known := self._find(second)) is not None:
            x, weight, axis, turned = first, second, -1 if transposed else -2, False
        elif not transposed and (known := self._find(first)) is not None:
            x, weight, axis, turned = second.mT if second.ndim > 1 else second, first, -1, second.ndim > 1
        else:
            return None
        self.used_copy |= known.is_copy
        if not self._fits(known, x, weight, axis) or x.numel() == 0:
            return None
        if known.slot.num_experts is None:
            return Use(known.slot.first, x, None, turned=turned)
        return _rows_of_experts(known, x, _argument(args, kwargs, 2, "offs"))._replace(turned=turned)

    def _fits(self, known: _Known, x: Tensor, weight: Tensor, axis: int) -> bool:
        slot = known.slot
        key = (slot.first, axis, weight.stride(axis))
        if key in self._verified and x.size(-1) == slot.num_features:
            return True
        if problem := _mismatch(known, x, weight, axis):
            self._problems[slot.first] = f"{slot.name!r}: {problem}; {_REMEDY}"
            return False
        self._verified.add(key)
        return True

    def follow(self, name: str, args: tuple[Any, ...], out: object) -> None:
        """Remember `out` if the call made a copy of a weight: a cast, or the experts chosen by an index."""
        if not args or not isinstance(out, Tensor) or out is args[0]:
            return
        source = self._find(args[0])
        if source is None or out._base is source.tensor():
            return
        picks = source.picks
        if name in _GATHERS:
            index = args[-1]
            if source.slot.num_experts is None or picks is not None or not _is_index(index):
                return
            picks = index
        self._known[id(out)] = _Known(weakref.ref(out), source.slot, source.expert, picks, is_copy=True, passes=True)

    def _meet_parts(self) -> None:
        """Expert parallelism puts plain local tensors in the place of DTensors while its module runs."""
        for slot in self._sharded:
            part = slot.tensor()
            if part is None or is_sharded(part) or id(part) in self._known:
                continue
            for tensor in (part, part._base):  # a view of a view has the first of all as its base
                if tensor is not None:
                    self._known[id(tensor)] = _Known(weakref.ref(tensor), slot, passes=True)

    def _is_known(self, tensor: Tensor | None) -> bool:
        known = self._known.get(id(tensor))
        return known is not None and known.tensor() is tensor

    def _find(self, tensor: object) -> _Known | None:
        if not isinstance(tensor, Tensor):
            return None
        if self._sharded:
            self._meet_parts()
        known = self._known.get(id(tensor))
        if known is not None and known.tensor() is tensor:
            return known
        base = tensor._base
        if base is None or (known := self._known.get(id(base))) is None or known.tensor() is not base:
            return None
        if base.ndim == 3 and tensor.ndim == 2 and known.slot.num_experts is not None and known.picks is None:
            expert = (tensor.storage_offset() - base.storage_offset()) // base.stride(0)
            return _Known(known.tensor, known.slot, expert, None, known.is_copy)
        return known


def _operands(skip: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    first = _argument(args, kwargs, skip, "input", "mat1", "batch1", "mat_a", "self")
    return first, _argument(args, kwargs, skip + 1, "weight", "other", "mat2", "batch2", "mat_b")


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, *names: str) -> Any:
    if position < len(args):
        return args[position]
    return next((kwargs[name] for name in names if name in kwargs), None)


def _mismatch(known: _Known, x: Tensor, weight: Tensor, axis: int) -> str:
    """Why the product does not run over the input axis the site was found with; empty when it does."""
    slot, whole = known.slot, known.tensor()
    if weight.size(axis) != slot.num_features or x.size(-1) != slot.num_features:
        return f"met along an axis of {weight.size(axis)} features, found with {slot.num_features}"
    if whole is None or weight.stride(axis) == whole.stride(slot.in_axis - 2) or min(whole.shape[-2:]) == 1:
        return ""
    return "met along the axis taken for its output"


def _rows_of_experts(known: _Known, x: Tensor, offsets: Tensor | None) -> Use:
    slot = known.slot
    assert slot.num_experts is not None
    if known.expert is not None:
        return Use(slot.first + known.expert, x, None)
    if isinstance(offsets, Tensor):
        return Use(slot.first, x, offsets)
    if known.picks is not None:
        return Use(slot.first, *_sorted_by_expert(x.detach(), known.picks, slot.num_experts))
    rows = x.detach().reshape(slot.num_experts, -1, x.shape[-1])  # a batched product: one matrix of rows per expert
    ends = torch.arange(1, slot.num_experts + 1, dtype=torch.int32, device=x.device) * rows.shape[1]
    return Use(slot.first, rows.flatten(0, 1), ends)


def _sorted_by_expert(x: Tensor, picks: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.reshape(picks.numel(), -1, x.shape[-1])
    counts = torch.zeros(num_experts, dtype=torch.int64, device=x.device)  # bincount would make the host wait
    counts.index_add_(0, picks.long(), torch.full_like(picks, rows.shape[1], dtype=torch.int64))
    order = torch.argsort(picks, stable=True)
    return rows[order].flatten(0, 1), counts.cumsum(0, dtype=torch.int32), order


def _is_index(index: object) -> bool:
    return isinstance(index, Tensor) and index.ndim == 1 and not index.is_floating_point() and index.dtype != torch.bool


_REMEDY = "its input is not recorded (a weight stored [in, out] needs `is_transposed = True` on its module)"

# name of a torch function -> position of the first of its two factors
MATMULS = {
    "linear": 0,
    "matmul": 0,
    "__matmul__": 0,
    "mm": 0,
    "bmm": 0,
    "addmm": 1,
    "baddbmm": 1,
    "_grouped_mm": 0,
    "grouped_mm": 0,
    "grouped_mm_fallback": 0,
}
_GATHERS = {"__getitem__", "index_select"}
COPIES = {*_GATHERS, "to", "type", "type_as", "float", "double", "half", "bfloat16", "clone", "contiguous"}
