"""Bounds and races of kernels run by Triton's interpreter, which checks neither.

    with Sanitizer(reads=[x, table], writes=[out]):
        kernel[grid](...)

Every load must fall on an element of a listed tensor, by its own strides: padding between rows is out of bounds. Every
store must fall on a tensor of `writes`. That covers addresses that come out of a table, which nothing else can check.
The programs of a launch run at the same time on a device, so what one program stores no other may load or store; the
interpreter runs them one after the other and gives the right result in spite of a race. Loads that find memory which no
launch has written yet are found as well if it is listed in `scratch`. Relies on private names of
triton.runtime.interpreter (3.9.0).
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from triton.runtime import interpreter

Addresses = NDArray[np.uint64]
GRANULE = 2  # bytes: no element is smaller


class FaultError(AssertionError):
    """An access out of bounds, a race, or a load of scratch that nobody wrote."""


class Sanitizer:
    """Checks every launch inside the context."""

    def __init__(
        self,
        *,
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        scratch: Sequence[torch.Tensor] = (),
    ) -> None:
        self._writable = _spans([*writes, *scratch])
        self._readable = _spans([*reads, *writes, *scratch])
        self._scratch = _spans(scratch)
        self._written: set[int] = set()  # granules of scratch
        self.num_launches = 0
        self.num_accesses = 0

    def __enter__(self) -> "Sanitizer":
        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        self._original = (builder.create_masked_load, builder.create_masked_store, executor.__call__)
        load, store, launch = self._original

        def checked_load(this: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
            self._access("load", ptrs, mask)
            return load(this, ptrs, mask, *rest)

        def checked_store(this: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self._access("store", ptrs, mask)
            return store(this, ptrs, value, mask, *rest)

        def checked_launch(this: Any, *args: Any, **kwargs: Any) -> Any:
            self._log: list[tuple[bool, int, Addresses]] = []
            result = launch(this, *args, **kwargs)
            self._find_races()
            self.num_launches += 1
            return result

        self._install(checked_load, checked_store, checked_launch)
        return self

    def __exit__(self, *_: object) -> None:
        self._install(*self._original)

    @staticmethod
    def _install(load: Callable[..., Any], store: Callable[..., Any], launch: Callable[..., Any]) -> None:
        interpreter.InterpreterBuilder.create_masked_load = load
        interpreter.InterpreterBuilder.create_masked_store = store
        interpreter.GridExecutor.__call__ = launch

    def _access(self, what: str, ptrs: Any, mask: Any) -> None:
        """Check one load or store of a program and note which granules it touches."""
        addresses, wanted = np.broadcast_arrays(ptrs.data, mask.data)
        addresses = np.unique(addresses[wanted.astype(bool)])
        if not addresses.size:
            return
        num_bytes = ptrs.get_element_ty().primitive_bitwidth // 8
        self.num_accesses += addresses.size
        spans = self._readable if what == "load" else self._writable
        outside = addresses[~_inside(spans, addresses, num_bytes)]
        if outside.size:
            raise FaultError(
                f"{what} out of bounds: {outside.size} addresses, first {int(outside[0]):#x}, {self._place()}"
            )
        granules = np.unique(np.concatenate([addresses + np.uint64(k) for k in range(0, num_bytes, GRANULE)]))
        self._check_scratch(what, granules)
        self._log.append((what == "store", interpreter.interpreter_builder.grid_idx[0], granules))

    def _check_scratch(self, what: str, granules: Addresses) -> None:
        mine = granules[_inside(self._scratch, granules, GRANULE)].tolist()
        if what == "store":
            self._written.update(mine)
        elif not self._written.issuperset(mine):
            raise FaultError(f"load of scratch that no launch wrote, {self._place()}")

    def _place(self) -> str:
        return f"program {interpreter.interpreter_builder.grid_idx[0]} of launch {self.num_launches}"

    def _find_races(self) -> None:
        stores = [(program, granules) for is_store, program, granules in self._log if is_store]
        if not stores:
            return
        address = np.concatenate([granules for _, granules in stores])
        owner = np.concatenate([np.full(granules.size, program) for program, granules in stores])
        order = np.argsort(address, kind="stable")
        address, owner = address[order], owner[order]
        for _, program, granules in self._log:
            first = np.searchsorted(address, granules, "left")
            last = np.searchsorted(address, granules, "right")
            for granule in np.flatnonzero(last > first):
                others = set(owner[first[granule] : last[granule]].tolist()) - {program}
                if others:
                    raise FaultError(
                        f"race at {int(granules[granule]):#x} between program {program} and {min(others)} "
                        f"of launch {self.num_launches}"
                    )


def _spans(tensors: Sequence[torch.Tensor]) -> Addresses:
    """[begin, end) of every contiguous run of elements, sorted."""
    spans = [_spans_of(tensor) for tensor in tensors if tensor.numel()]
    if not spans:
        return np.zeros((0, 2), np.uint64)
    joined = np.concatenate(spans)
    return joined[np.argsort(joined[:, 0])]


def _spans_of(tensor: torch.Tensor) -> Addresses:
    size = tensor.element_size()
    dims = sorted((d for d in range(tensor.ndim) if tensor.shape[d] > 1), key=lambda d: -tensor.stride(d))
    run = size
    while dims and tensor.stride(dims[-1]) * size == run:
        run *= tensor.shape[dims.pop()]
    offsets = np.zeros(1, np.int64)
    for d in dims:
        offsets = (offsets[:, None] + np.arange(tensor.shape[d]) * tensor.stride(d) * size).ravel()
    begins = np.unique(offsets).astype(np.uint64) + np.uint64(tensor.data_ptr())
    return np.stack([begins, begins + np.uint64(run)], 1)


def _inside(spans: Addresses, addresses: Addresses, num_bytes: int) -> NDArray[np.bool_]:
    """Which addresses begin an element that lies inside a span."""
    if not len(spans):
        return np.zeros(addresses.shape, bool)
    index = np.searchsorted(spans[:, 0], addresses, "right").astype(np.int64) - 1
    end = spans[np.maximum(index, 0), 1]
    inside: NDArray[np.bool_] = (index >= 0) & (addresses + np.uint64(num_bytes) <= end)
    return inside
