"""Reductions of many tensors on a device, a few launches for all of them.

Receives views and the addresses of their tensors, keeps the accumulators of every slot on the device, and hands on
finished rows. Kernels are compiled and tables uploaded when a plan is made; a launch then allocates nothing, waits for
nothing and costs microseconds. Every launch goes to the current stream of the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pyscan.kernels import merge, tiles
from pyscan.kernels.layout import FLOAT32, MERGE_BLOCKS, MERGE_ROWS, TILE_GRANULES, TILE_ROWS
from pyscan.kernels.plan import GENERAL, Slots, SlotTuple, Tables, TileLaunch, View, make_tables

# Settings follow from what a thread can hold: 4 warps x 8 loads of 16 bytes have 16 KiB in flight with 90 registers.
# The general kernel, whose lanes are float64, needs twice the warps for that.
NUM_WARPS = 4
GENERAL_WARPS = 8
TERMS_AT_ONCE = 64  # terms that merge_tiles adds side by side
FINISH_BLOCKS = 256
CAREFUL_ROWS = 2
GENERAL_ROWS = 4

# Kernels by function, device, dtypes and constants. Pointers are specialised as multiples of 16, which every allocation
# of a device is; those that a caller chooses are left out of that in the kernels' decorators.
_compiled: dict[tuple[Any, ...], Callable[[int, list[Any]], None]] = {}


def _options(num_warps: int) -> dict[str, Any]:
    """Compiler options. Fusion is named because its default differs between versions of Triton."""
    return {"num_warps": num_warps, "enable_fp_fusion": True}


def rows_at_once(dtype: int) -> int:
    """Rows of a tile that one load of the aligned kernel covers: 16 KiB of 512 columns."""
    return 8 if dtype == FLOAT32 else 16


def tile_settings(launch: TileLaunch, max_ranges: int) -> tuple[Any, dict[str, Any]]:
    """The kernel of a launch, its compile-time arguments and compiler options."""
    shape = {"TILE_ROWS": TILE_ROWS, "GRANULES": TILE_GRANULES, "RANGES": max_ranges, "PER_ROW": launch.per_row}
    if launch.dtype == GENERAL:
        return tiles.tile_stats_general, shape | {"ROWS_AT_ONCE": GENERAL_ROWS, **_options(GENERAL_WARPS)}
    rows = {"ROWS_AT_ONCE": rows_at_once(launch.dtype), "CAREFUL_ROWS": CAREFUL_ROWS, **_options(NUM_WARPS)}
    return tiles.tile_stats, shape | rows | {"DTYPE": launch.dtype}


class Launch:
    """A kernel with its grid and all its arguments but those that change from launch to launch."""

    def __init__(self, kernel: Any, num_programs: int, constants: dict[str, Any], arguments: Sequence[Any]) -> None:
        self._num_programs = num_programs
        self._run = _runner(kernel, constants, arguments)
        self._arguments = list(arguments)

    def __call__(self, changes: dict[int, torch.Tensor]) -> None:
        """Launch on the current stream, with arguments changed by position."""
        arguments = self._arguments.copy()
        for position, argument in changes.items():
            arguments[position] = argument
        self._run(self._num_programs, arguments)


def _runner(kernel: Any, constants: dict[str, Any], arguments: Sequence[Any]) -> Callable[[int, list[Any]], None]:
    """What launches the kernel, compiled for the current device; arguments must keep their dtypes."""
    if not isinstance(kernel, JITFunction):

        def interpret(num_programs: int, arguments: list[Any]) -> None:
            kernel[(num_programs,)](*arguments, **constants)

        return interpret
    dtypes = tuple(argument.dtype for argument in arguments)
    device = driver.active.get_current_device()
    key = (kernel, device, dtypes, *sorted(constants.items()))
    if key not in _compiled:
        compiled = kernel.warmup(*arguments, grid=(1,), **constants)
        _compiled[key] = _direct(kernel, compiled, device, constants)
    return _compiled[key]


def _direct(kernel: Any, compiled: Any, device: int, constants: dict[str, Any]) -> Callable[[int, list[Any]], None]:
    """Launches without the JIT's way through binding and cache look-up: 20 us become 1."""
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    # Until 3.3 a launcher took only what is not known at compile time.
    takes_constants = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 3)
    tail = [constants[name] for name in kernel.arg_names if name in constants and takes_constants]
    stream_of = driver.active.get_current_stream

    def launch(num_programs: int, arguments: list[Any]) -> None:
        run(num_programs, 1, 1, stream_of(device), function, metadata, None, None, None, *arguments, *tail)

    return launch


class Plan:
    """Tables on the device and launches ready to go, for one sequence of views."""

    def __init__(self, tables: Tables, sums: torch.Tensor, *, replace: bool) -> None:
        device = sums.device
        self.num_addresses = tables.num_addresses
        # Scratch is written before it is read in every launch; it belongs to the plan alone.
        partials = torch.empty(max(tables.num_partials, 1) * 3, dtype=torch.float64, device=device)
        row_partials = torch.empty(max(tables.num_row_partials, 1), dtype=torch.float64, device=device)
        records, segments, jobs, row_jobs = (
            _upload(table, device) for table in (tables.records, tables.segments, tables.jobs, tables.row_jobs)
        )
        self.scratch = (partials, row_partials)
        addresses = torch.zeros(1, dtype=torch.int64, device=device)
        self._launches: list[tuple[Launch, int]] = []  # and the position of `addresses`
        for tile_launch in tables.launches:
            kernel, constants = tile_settings(tile_launch, tables.max_ranges)
            arguments = [records, _upload(tile_launch.tiles, device), addresses, partials, row_partials]
            self._launches.append((Launch(kernel, len(tile_launch.tiles), constants, arguments), 2))
        if len(tables.job_programs):
            constants = {"RANGES": tables.max_ranges, "TILE_ROWS": TILE_ROWS, "BLOCKS": MERGE_BLOCKS}
            constants |= {"TERMS_AT_ONCE": TERMS_AT_ONCE, "REPLACE": replace, **_options(NUM_WARPS)}
            arguments = [jobs, _upload(tables.job_programs, device), segments, addresses, partials, sums]
            launch = Launch(merge.merge_tiles, len(tables.job_programs), constants, arguments)
            self._launches.append((launch, 3))
        if len(tables.row_programs):
            constants = {"RANGES": tables.max_ranges, "ROWS_AT_ONCE": MERGE_ROWS, **_options(NUM_WARPS)}
            arguments = [row_jobs, _upload(tables.row_programs, device), addresses, row_partials]
            self._launches.append((Launch(merge.merge_rows, len(tables.row_programs), constants, arguments), 2))

    @property
    def num_launches(self) -> int:
        return len(self._launches)

    def launch(self, addresses: torch.Tensor) -> None:
        for launch, position in self._launches:
            launch({position: addresses})


class Reducer:
    """The accumulators of every slot on one device. The caller orders launches that touch the same slots."""

    def __init__(self, slots: Sequence[SlotTuple], num_cells: int, device: torch.device) -> None:
        self.device = torch.device(device)
        self.slots = Slots(slots, num_cells)
        self._guard = torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()
        self.sums = torch.full((self.slots.num_sums_in_all, 3), -1.0, dtype=torch.float64, device=self.device)
        self._inv_scale = torch.ones(1, dtype=torch.float64, device=self.device)
        self._inv_scale_value = 1.0
        self._finish_table = _upload(self.slots.finish_table, self.device)
        self._finish: dict[torch.dtype, Launch] = {}

    def plan(self, views: Sequence[View], *, replace: bool) -> Plan:
        """What reduces these views together. They are added to their slots, or with `replace` put in their place."""
        with self._guard:
            return Plan(make_tables(views, self.slots, replace=replace), self.sums, replace=replace)

    def launch(self, plan: Plan, addresses: torch.Tensor) -> None:
        """Reduce tensors at `addresses` (int64, on the device, in the order of the plan's views)."""
        if addresses.dtype != torch.int64 or addresses.numel() != plan.num_addresses:
            raise ValueError(
                f"addresses must be int64 [{plan.num_addresses}], got {addresses.dtype} [{addresses.numel()}]"
            )
        with self._guard:
            plan.launch(addresses)

    def finish(self, row: torch.Tensor, inv_scale: float | torch.Tensor) -> None:
        """Write the finished row (float64, contiguous): -1 absent, NaN where values were not finite, gradients times
        `inv_scale`. Every slot is absent afterwards."""
        if row.dtype != torch.float64 or row.numel() != self.slots.num_cells or not row.is_contiguous():
            raise ValueError(
                f"row must be contiguous float64 [{self.slots.num_cells}], got {row.dtype} {list(row.shape)}"
            )
        with self._guard:
            scale = inv_scale if isinstance(inv_scale, torch.Tensor) else self._fill_scale(inv_scale)
            if scale.dtype not in self._finish:
                arguments = [self._finish_table, self.sums, row, scale]
                num_slots = len(self._finish_table)
                constants = {"BLOCKS": FINISH_BLOCKS, **_options(NUM_WARPS)}
                self._finish[scale.dtype] = Launch(merge.finish_row, num_slots, constants, arguments)
            self._finish[scale.dtype]({2: row, 3: scale})

    def _fill_scale(self, inv_scale: float) -> torch.Tensor:
        """The scale on the device; a value that stays the same is not written again."""
        if inv_scale != self._inv_scale_value:
            self._inv_scale.fill_(inv_scale)
            self._inv_scale_value = inv_scale
        return self._inv_scale


def _upload(table: NDArray[np.integer[Any]], device: torch.device) -> torch.Tensor:
    """A table on the device, in the order of the current stream. A copy from memory that is not pinned would wait for
    the device; torch keeps pinned memory until its copy is done."""
    source = torch.from_numpy(table)
    return source.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else source
