"""Types of the compiled core."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

version: str
compiler: str
isa: str
isas: tuple[str, ...]  # all that this machine can execute, the best one last

def reduce_into(
    address: int,
    dtype: int,
    rows: int,
    cols: int,
    row_stride: int,
    col_stride: int,
    sumsq: NDArray[np.float64],
    absmax: NDArray[np.float64],
    bad: NDArray[np.float64],
    *,
    block: int,
    first: int = 0,
    by_rows: bool = False,
    row_sumsq: NDArray[np.float64] | None = None,
    num_threads: int = 1,
    isa: str | None = None,
) -> None: ...

# (block, first, by_rows, num_blocks, sumsq_cell, absmax_cell, bad_cell, is_gradient)
SlotTuple = tuple[int, int, bool, int, int, int, int, bool]

class StepBuffer:
    def __init__(self, num_cells: int, slots: list[SlotTuple]) -> None: ...
    @property
    def num_cells(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    def add(
        self,
        slot: int,
        address: int,
        dtype: int,
        rows: int,
        cols: int,
        row_stride: int,
        col_stride: int,
        num_threads: int,
        /,
    ) -> None: ...
    def set(
        self,
        slot: int,
        address: int,
        dtype: int,
        rows: int,
        cols: int,
        row_stride: int,
        col_stride: int,
        num_threads: int,
        /,
    ) -> None: ...
    def add_ranges(
        self,
        first_slot: int,
        address: int,
        dtype: int,
        rows: int,
        cols: int,
        row_stride: int,
        col_stride: int,
        ends: NDArray[np.int32],
        num_threads: int,
        /,
    ) -> None: ...
    def take(self, grad_scale: float, row: NDArray[np.float64]) -> None: ...

class CaptureState:
    active: bool
    has_mask: bool
    keeps_rows: bool
    num_threads: int
    seconds: float
    def __init__(self, num_sites: int) -> None: ...
    @property
    def direct(self) -> bytearray: ...
    @property
    def order(self) -> list[int]: ...
    def meet(self, first: int, num_sites: int, /) -> None: ...
    def forward_begins(self) -> None: ...
    def end_step(self) -> float: ...
    def forget(self) -> None: ...

def make_observer(
    buffer: StepBuffer, state: CaptureState, site: int, num_features: int, careful: Callable[[Any], None], /
) -> Callable[[Any], None]: ...
def make_call_alone(global_hooks: list[dict[int, Any]], /) -> Callable[..., Any]: ...
def make_watched(
    before: Callable[..., None] | None,
    after: Callable[..., None] | None,
    see: Callable[[Any], None] | ForwardState,
    /,
) -> object: ...

class ForwardState:
    active: bool
    has_targets: bool
    has_more: bool
    num_forwards: int
    seconds: float
    def __init__(self, capture: CaptureState | None) -> None: ...
    def counts(self) -> bool: ...
    def add_tokens(self, number: int, /) -> None: ...
    def add_loss(self, loss: float, /) -> None: ...
    def take_tokens(self) -> int | None: ...
    def take_losses(self) -> list[float]: ...
    def take_loss(self) -> float | None: ...

def use_torch(
    tensor_type: type,
    is_grad_enabled: Callable[[], bool],
    graph_task_id: Callable[[], int],
    tracing_state: Callable[[], Any],
    dtypes: tuple[Any, ...],
    exchange_api: Any,
    is_native: bool,
    /,
) -> None: ...
def use_handles(parameter: Any, make_handle: Callable[[Any], Any] | None, /) -> bool: ...
def torch_state() -> tuple[bool, int, bool]: ...  # (grad is enabled, graph task, is tracing), as the hooks see it

class GradientWatch:
    active: bool
    num_threads: int
    seconds: float
    def __init__(
        self,
        buffer: StepBuffer,
        weights: list[tuple[Any, list[int], int, int, bool]],
        early: bool,
        queue: Callable[[Callable[[], None]], None],
        ended: Callable[[], None] | None,
        begins: Callable[[int], None],
        careful: Callable[[int, Any, int, int], tuple[int, int]],
        gone: Callable[[int], None],
        failed: Callable[[Exception], None],
        /,
    ) -> None: ...
    @property
    def num_reads(self) -> int: ...
    @property
    def num_row_reads(self) -> int: ...
    @property
    def order(self) -> list[int]: ...
    def hook(self, weight: int, /) -> Callable[[Any], None]: ...
    def lookup_hook(self, weight: int, rows: NDArray[np.int64], /) -> Callable[[Any, Any], None]: ...
    def settle(self, task: int, /) -> None: ...
    def read_rest(self) -> list[int]: ...
    def read_all(self) -> None: ...
    def next_step(self) -> float: ...
    def close(self) -> None: ...

class TokenCalls:
    def __init__(
        self, state: CaptureState, calls: list[Any], make_call: Callable[..., Any], maker: Callable[[Any], Any], /
    ) -> None: ...
    def begin(self, batch: int, shape: tuple[int, ...] | None, /) -> None: ...

def make_tap(
    calls: TokenCalls, site: int, careful: Callable[[Any, Any], None], arrived: Callable[[Any, Any], None], /
) -> Callable[[Any, Any], None]: ...
def row_sums(
    x: Any, num_features: int, block: int, per_block: bool, num_threads: int, /
) -> NDArray[np.float64] | None: ...
def row_sums_of(
    address: int,
    dtype: int,
    rows: int,
    cols: int,
    row_stride: int,
    col_stride: int,
    block: int,
    per_block: bool,
    num_threads: int,
    /,
) -> NDArray[np.float64]: ...

class ModelPlaces:
    def __init__(
        self,
        families: list[dict[str, Any]],
        entries: list[tuple[dict[str, Any], str, Any]],
        attributes: list[tuple[Any, str, Any]],
        /,
    ) -> None: ...
    def changed(self) -> bool: ...

class Glance:
    def __init__(
        self, starts: NDArray[np.int64], num_blocks: int, num_bad: int, num_rows: int, first_rows: int, /
    ) -> None: ...
    @property
    def window(self) -> NDArray[np.float64]: ...
    @property
    def tops(self) -> NDArray[np.float64]: ...
    limits: NDArray[np.float64]
    @property
    def num_rows(self) -> int: ...
    @property
    def window_step(self) -> int: ...
    def follow(
        self,
        reference: NDArray[np.float64],
        explode: NDArray[np.float64],
        mean: NDArray[np.float64],
        variance: NDArray[np.float64],
        spike: NDArray[np.float64],
        sizes: NDArray[np.float64],
        own: NDArray[np.bool_],
        deviations: float,
        spike_by: float,
        fade_by: float,
    ) -> bool: ...
    def look(self, cells: NDArray[np.float64], step: int, /) -> tuple[float, float, bool, bool]: ...

def borrow_threads(gomp_parallel: int, omp_get_thread_num: int, /) -> None: ...

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
        queue_rows: int | None = None,
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
    def tokens(self, step: int, bytes: bytes, sums: list[NDArray[np.float64]] = ...) -> bool: ...
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

class PlainStep:
    def __init__(
        self,
        buffer: StepBuffer,
        capture: CaptureState,
        gradients: GradientWatch,
        places: ModelPlaces,
        writer: Writer | None,
        glance: Glance | None,
        pass_by: Callable[[tuple[Any, ...]], None] | None,
        ties: list[tuple[int, int, int]],
        /,
    ) -> None: ...
    def end(self) -> bool: ...
    def take_last(self) -> tuple[int, bytearray, int | None, float | None, float | None] | None: ...
    def take_figures(self) -> tuple[float, float, int]: ...

class StepState:
    in_scaler: bool
    has_late: bool
    is_plain: bool
    step: int
    next_row: int
    seconds: float
    def __init__(
        self,
        first: Any,
        last: Any,
        begins: Callable[..., None],
        ends: Callable[..., None],
        late: Callable[[list[int]], None],
        tell: Callable[[float, bool, tuple[float, float, bool, bool] | None], None],
        failed: Callable[[Exception], None],
        /,
    ) -> None: ...
    def use(self, forward: ForwardState, gradients: object, plain: PlainStep | None, /) -> None: ...
    def close(self) -> None: ...
    def begin_row(self) -> None: ...
    @property
    def row_seconds(self) -> float: ...
    def begins_hook(self) -> Callable[..., None]: ...
    def ends_hook(self) -> Callable[..., None]: ...
