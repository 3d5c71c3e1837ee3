"""What the compiler makes of the kernels for every target and dtype; no GPU: `python -m tests.gpu.check_compiled`.

Compiles ahead of time for sm_80, sm_90, sm_100 and gfx942 with the settings of real launches, disassembles, prints a
table, and exits with 1 if a kernel has become worse than its limits: loads of 128 bits only and no spills in the loops
that read tensors, registers, and instructions per byte. The limits stand a few per cent above what the kernels need.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pyscan.kernels import launch, merge
from pyscan.kernels.layout import BFLOAT16, FLOAT16, FLOAT32, MERGE_BLOCKS, MERGE_ROWS, TILE_ROWS
from pyscan.kernels.plan import GENERAL, TileLaunch
from tests.gpu.disassembly import Disassembly, disassemble

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
DTYPES = {"bf16": BFLOAT16, "f16": FLOAT16, "f32": FLOAT32}

# Instructions per byte of the loop over whole tiles, and with sums of rows. An instruction of gfx942 serves 64 lanes.
PER_BYTE = {
    "sm_80": {"bf16": (1.7, 2.35), "f16": (1.7, 2.35), "f32": (0.7, 1.35)},
    "sm_90": {"bf16": (1.7, 2.35), "f16": (1.95, 2.6), "f32": (0.7, 1.4)},
    "sm_100": {"bf16": (1.3, 1.85), "f16": (1.45, 2.05), "f32": (0.9, 1.5)},
    "gfx942": {"bf16": (1.3, 2.3), "f16": (1.3, 2.3), "f32": (0.7, 1.8)},
}
MAX_REGISTERS = 128  # 4 blocks of 128 threads stay on a multiprocessor, with 64 KiB of loads in flight
MAX_GENERAL_REGISTERS = 200
MAX_SHARED_BYTES = 4096

POINTERS = {
    "records": "*i64", "tiles": "*i32", "addresses": "*i64", "partials": "*fp64", "row_partials": "*fp64",
    "jobs": "*i64", "programs": "*i32", "segments": "*i64", "sums": "*fp64", "row_jobs": "*i64",
    "slots": "*i64", "row": "*fp64", "inv_scale": "*fp32",
}  # fmt: skip
UNALIGNED = {"addresses", "row", "inv_scale"}


class Case(NamedTuple):
    name: str
    kernel: Any
    constants: dict[str, Any]  # and compiler options
    dtype: str | None = None  # of an aligned kernel
    per_row: bool = False
    max_registers: int = MAX_REGISTERS


def tile_case(dtype: str, *, per_row: bool = False, ranges: int = 0) -> Case:
    tiles = TileLaunch(DTYPES[dtype], per_row, np.zeros(0, np.int32))
    suffix = ("+rows" if per_row else "") + ("+ranges" if ranges else "")
    return Case(f"tile_stats {dtype}{suffix}", *launch.tile_settings(tiles, ranges), dtype, per_row)


def cases() -> Iterator[Case]:
    for dtype in DTYPES:
        yield tile_case(dtype)
        yield tile_case(dtype, per_row=True)
    yield tile_case("bf16", ranges=128)
    for per_row in (False, True):
        settings = launch.tile_settings(TileLaunch(GENERAL, per_row, np.zeros(0, np.int32)), 128)
        name = "tile_stats_general" + ("+rows" if per_row else "")
        yield Case(name, *settings, max_registers=MAX_GENERAL_REGISTERS)
    options = {"num_warps": launch.NUM_WARPS, "enable_fp_fusion": True}
    shape = {"RANGES": 128, "TILE_ROWS": TILE_ROWS, "BLOCKS": MERGE_BLOCKS, "TERMS_AT_ONCE": launch.TERMS_AT_ONCE}
    for replace in (False, True):
        yield Case("merge_tiles" + "+replace" * replace, merge.merge_tiles, shape | options | {"REPLACE": replace})
    yield Case("merge_rows", merge.merge_rows, options | {"RANGES": 128, "ROWS_AT_ONCE": MERGE_ROWS})
    yield Case("finish_row", merge.finish_row, options | {"BLOCKS": launch.FINISH_BLOCKS})


def compile_for(case: Case, target: GPUTarget) -> Any:
    """Compile as a launch would, with the same promises about pointers."""
    names = case.kernel.arg_names
    constants = {name: value for name, value in case.constants.items() if name in names}
    options = {name: value for name, value in case.constants.items() if name not in names}
    source = ASTSource(
        fn=case.kernel,
        signature={name: "constexpr" if name in constants else POINTERS[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in POINTERS and n not in UNALIGNED},
    )
    return triton.compile(source, target=target, options=options)


def violations(case: Case, target: str, code: Disassembly) -> Iterator[str]:
    """In what a compiled kernel is worse than it may be."""
    if code.num_registers > case.max_registers:
        yield f"{code.num_registers} registers > {case.max_registers}"
    if code.shared_bytes > MAX_SHARED_BYTES:
        yield f"{code.shared_bytes} bytes of shared memory > {MAX_SHARED_BYTES}"
    if case.dtype is None:
        if code.num_spills:
            yield f"{code.num_spills} spills"
        return
    # The loop over whole tiles and the one over their edges. The careful one, of few rows, may have narrow loads.
    if len(code.loops) < 2:
        yield f"{len(code.loops)} loops with 128-bit loads, 2 expected"
    for loop in code.loops[:2]:
        if loop.num_narrow_loads:
            yield f"{loop.num_narrow_loads} narrow loads in a loop"
        if loop.num_spills:
            yield f"{loop.num_spills} spills in a loop"
        if loop.num_barriers and not case.per_row:
            yield f"{loop.num_barriers} barriers in a loop"
    limit = PER_BYTE[target][case.dtype][case.per_row]
    if code.loops and code.loops[0].per_byte > limit:
        yield f"{code.loops[0].per_byte:.2f} instructions per byte > {limit}"


def check(case: Case, target: str) -> list[str]:
    """Compile, print a line of the table, and return what is wrong."""
    code = disassemble(compile_for(case, TARGETS[target]))
    found = list(violations(case, target, code))
    hot = code.loops[0] if case.dtype and code.loops else None
    loop = (
        f"{hot.num_instructions:5d} {hot.num_wide_loads:5d} {hot.per_byte:6.2f}"
        if hot
        else f"{'-':>5} {'-':>5} {'-':>6}"
    )
    print(
        f"{target:7} {case.name:24} {code.num_registers:9d} {code.num_spills:6d} {code.shared_bytes:6d} {loop}  "
        + ("; ".join(found) if found else "ok"),
        flush=True,
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="target", help=f"of {', '.join(TARGETS)}; all by default")
    targets = parser.parse_args().targets or list(TARGETS)
    print(f"{'target':7} {'kernel':24} registers spills shared  loop loads  i/byte")
    failures = [problem for target in targets for case in cases() for problem in check(case, target)]
    print(f"{len(failures)} violations" if failures else "all within limits")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
