"""A Triton driver that records launches instead of making them, for tests of launch sites without a GPU.

Kernels go the real way: arguments are bound and specialised, the kernel is compiled for a real target and its needs are
held against the device's. Only the last call, into CUDA, is a note. Not for a process with TRITON_INTERPRET=1.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from pyscan.kernels import launch, merge, tiles

H100 = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True)
class Recorded:
    """One launch as the device would have seen it."""

    name: str
    grid: tuple[int, int, int]
    stream: int
    num_warps: int
    arguments: dict[str, Any]
    divisible: frozenset[str]  # pointers that the compiled code takes to be multiples of 16


class _Utils:
    def load_binary(self, name: str, _kernel: bytes, _shared: int, _device: int) -> tuple[None, str, int, int, int]:
        return None, name, 0, 0, 1024

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


@dataclass
class FakeDriver:
    """`with FakeDriver() as fake:` replaces the active driver; `fake.launches` is what was launched."""

    target: GPUTarget = H100
    launches: list[Recorded] = field(default_factory=list)
    is_recording: bool = True
    stream: int = 0
    utils: _Utils = field(default_factory=_Utils)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        names, signature = source.fn.arg_names, source.signature
        promises = {names[path[0]]: [list(attr) for attr in attrs] for path, attrs in source.attrs.items()}
        divisible = frozenset(name for name, attrs in promises.items() if ["tt.divisibility", 16] in attrs)

        def launch(gx: int, gy: int, gz: int, stream: int, function: Any, *rest: Any) -> None:
            if not self.is_recording:
                return
            _metadata, _launch_metadata, _enter, _exit, *arguments = rest
            assert function == metadata.name, "the function must be that of the kernel"
            assert len(arguments) == len(names), f"{metadata.name} takes {names}, got {len(arguments)} arguments"
            bound = dict(zip(names, arguments, strict=True))
            for name, value in bound.items():
                _check(name, value, signature[name], name in divisible)
            self.launches.append(Recorded(metadata.name, (gx, gy, gz), stream, metadata.num_warps, bound, divisible))

        return launch

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def __enter__(self) -> "FakeDriver":
        self._before = driver._active
        driver.set_active(self)
        _forget_compiled()
        return self

    def __exit__(self, *_: object) -> None:
        _forget_compiled()
        driver._active = self._before


def _forget_compiled() -> None:
    """A compiled kernel keeps the launcher of the driver it was made under."""
    launch._compiled.clear()
    for kernel in [*vars(tiles).values(), *vars(merge).values()]:
        if isinstance(kernel, JITFunction):
            kernel.device_caches.clear()


POINTERS = {torch.int32: "*i32", torch.int64: "*i64", torch.float32: "*fp32", torch.float64: "*fp64"}


def _check(name: str, value: Any, declared: str, is_divisible: bool) -> None:
    """Hold an argument against what the kernel was compiled for: a cached kernel trusts its caller."""
    if isinstance(value, torch.Tensor):
        assert POINTERS[value.dtype] == declared, f"{name} was compiled as {declared}, got {value.dtype}"
        assert not is_divisible or value.data_ptr() % 16 == 0, f"{name} was compiled as a multiple of 16 bytes"
    else:
        assert declared == "constexpr", f"{name} was compiled as {declared}, got {value!r}"
