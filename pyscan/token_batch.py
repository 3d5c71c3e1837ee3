"""What a forward was given, token by token: ids, padding, and where sequences begin.

Receives the arguments of the model's forward and hands on a Batch. A sequence is a row of the batch; where
`position_ids` start again at 0 inside a row, or cumulative lengths are given, the row is packed, and each part is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_LENGTHS = ("cu_seq_lens_q", "cu_seqlens", "cu_seq_lens")  # keywords that flash attention's callers use


class Batch(NamedTuple):
    """One forward. `sequences` has, for each, its first token and how many there are, padding included."""

    shape: tuple[int, ...]  # of the tokens, (B, T); (B,) where there are no tokens to speak of
    ids: Ints | None
    mask: Bools | None  # the attention mask
    counted: Bools | None  # flat: tokens whose inputs count, where the user named a mask
    sequences: Ints

    @property
    def num_tokens(self) -> int:
        return int(np.prod(self.shape))


def read_batch(args: tuple[Any, ...], kwargs: Mapping[str, Any], mask_name: str | None = None) -> Batch:
    """The batch in the arguments of a forward; `mask_name` is the keyword whose zeros do not count."""
    ids = _first_ids(args, kwargs)
    shape = tuple(ids.shape) if ids is not None else _shape_without_ids(args, kwargs)
    mask = _like(kwargs.get("attention_mask"), shape)
    counted = _like(kwargs.get(mask_name), shape) if mask_name else None
    real = None if mask is None else _values(mask) != 0
    starts = _row_starts(shape)
    if len(shape) == 2:
        starts = np.union1d(starts, _packed_starts(kwargs, shape, real))
    ends = np.append(starts[1:], int(np.prod(shape)))
    return Batch(
        shape=shape,
        ids=None if ids is None else _values(ids),
        mask=real,
        counted=None if counted is None else _values(counted).ravel() != 0,
        sequences=np.stack([starts, ends - starts], 1),
    )


def _first_ids(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    ids = kwargs.get("input_ids", args[0] if args else None)
    if not isinstance(ids, Tensor) or ids.ndim not in (1, 2) or ids.is_floating_point() or not _has_values(ids):
        return None
    return ids if ids.ndim == 2 else ids[None]


def _shape_without_ids(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    embedded = kwargs.get("inputs_embeds")
    if isinstance(embedded, Tensor) and embedded.ndim == 3:
        return tuple(embedded.shape[:2])
    first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim), None)
    return (0,) if first is None else (first.shape[0],)


def _row_starts(shape: tuple[int, ...]) -> Ints:
    each = shape[1] if len(shape) == 2 else 1
    return np.arange(shape[0] if each else 0, dtype=np.int64) * each


def _packed_starts(kwargs: Mapping[str, Any], shape: tuple[int, ...], mask: Bools | None) -> Ints:
    """Where packed sequences begin, counted over the flattened tokens."""
    for name in _LENGTHS:
        ends = kwargs.get(name)
        if isinstance(ends, Tensor) and ends.ndim == 1 and ends.numel() and int(ends[-1]) == np.prod(shape):
            return np.unique(_values(ends)[:-1])
    positions = _like(kwargs.get("position_ids"), shape)
    if positions is None:
        return np.zeros(0, np.int64)
    restarts = _values(positions) == 0
    if mask is not None:  # padding has positions too, and what it has before the first token starts nothing
        restarts &= mask & (np.cumsum(mask, axis=1) > 1)
    restarts[:, 0] = False
    return np.flatnonzero(restarts).astype(np.int64)


def _like(value: Any, shape: tuple[int, ...]) -> Tensor | None:
    """A tensor of this shape, or of one row that counts for all."""
    if not isinstance(value, Tensor) or not _has_values(value):
        return None
    if len(shape) == 2 and value.ndim == 2 and value.shape[1] == shape[1] and value.shape[0] in (1, shape[0]):
        return value.expand(*shape)
    return None


def _values(x: Tensor) -> Ints:
    values: Ints = x.detach().to("cpu", torch.int64).numpy()
    return np.array(values)  # the loop may fill its tensor anew


def _has_values(x: Tensor) -> bool:
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(x)
    return not (x.is_meta or is_wrapped or isinstance(x, torch._subclasses.FakeTensor))
