from typing import Any

import numpy as np
from numpy.typing import NDArray

version: str

_Layout = list[tuple[str, str, int]]

class Writer:
    def __init__(
        self,
        path: str,
        schema: bytes,
        layout: _Layout,
        run_id: bytes,
        *,
        flush_seconds: float = 2.0,
        fsync: str = "close",
        queue_rows: int = 16,
        resume: bool = False,
        previous_layout: _Layout = ...,
    ) -> None: ...
    def write(
        self,
        step: int,
        time_ns: int,
        cells: NDArray[np.float64],
        tokens: int | None = None,
        loss: float | None = None,
        lr: float | None = None,
        grad_scale: float | None = None,
        total_norm: float | None = None,
        flags: int = 0,
    ) -> bool: ...
    def event(self, json: bytes) -> bool: ...
    def tokens(self, step: int, payload: bytes) -> bool: ...
    def schema(self, schema: bytes, layout: _Layout) -> bool: ...
    def flush(self, wait: bool = True) -> bool: ...
    def close(self) -> bool: ...
    @property
    def rows_accepted(self) -> int: ...
    @property
    def rows_flushed(self) -> int: ...
    @property
    def rows_dropped(self) -> int: ...
    @property
    def first_row(self) -> int: ...
    @property
    def last_step(self) -> int: ...
    @property
    def run_id(self) -> bytes: ...
    @property
    def error(self) -> str | None: ...

def last_schema(path: str) -> bytes: ...
def pack(cells: NDArray[np.float64], codec: str, transform: str, isa: str | None = None) -> NDArray[Any]: ...
def unpack(codes: bytes, codec: str) -> NDArray[np.float64]: ...
