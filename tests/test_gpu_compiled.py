"""The check of compiled kernels passes for these kernels and fails for worse ones. `make check-gpu` runs it for all."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are compiled here, not interpreted", allow_module_level=True)

from pyscan.kernels import launch, tiles
from tests.gpu import check_compiled
from tests.gpu.disassembly import disassemble

BF16 = check_compiled.tile_case("bf16")


def test_bf16_on_sm_90_is_lean() -> None:
    code = disassemble(check_compiled.compile_for(BF16, check_compiled.TARGETS["sm_90"]))
    assert not list(check_compiled.violations(BF16, "sm_90", code))
    hot = code.loops[0]
    assert hot.per_byte <= 2.0, "the limit that may never be raised"
    assert (hot.num_wide_loads, hot.num_narrow_loads, hot.num_spills, hot.num_barriers) == (8, 0, 0, 0)
    assert code.num_registers <= 96


# What was lost in each case is named; the check must see it in the compiled code.
WORSE = {
    "the address is not promised to be aligned": (
        "tl.multiple_of(tl.load(addresses + tl.load(record + ADDRESS)).to(tl.pointer_type(tl.int32)), 16)",
        "tl.load(addresses + tl.load(record + ADDRESS)).to(tl.pointer_type(tl.int32))",
        "loops with 128-bit loads",
    ),
    "the stride is not known to be whole vectors": (
        "row_stride = tl.load(record + ROW_STRIDE) * 4",
        "row_stride = tl.load(record + ROW_STRIDE)",
        "loops with 128-bit loads",
    ),
    "every tile is masked": (
        "words = tl.load(x_ptrs)\n",
        "words = tl.load(x_ptrs, mask=(col < cols) & (row_begin + i + row_index < row_end), other=0)\n",
        "instructions per byte",
    ),
    "magnitudes take the long way": (
        "return tl.fma(x, x, sumsq), tl.maximum(absmax, tl.abs(x))",
        "return tl.fma(x, x, sumsq), tl.where(tl.abs(x) > absmax, tl.abs(x), absmax)",
        "instructions per byte",
    ),
}


def imported(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"worse_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", WORSE)
def test_a_kernel_made_worse_is_refused(name: str, tmp_path: Path) -> None:
    before, after, problem = WORSE[name]
    source = Path(tiles.__file__).read_text()
    assert source.count(before) == 1
    file = tmp_path / f"tiles_{len(before)}.py"
    file.write_text(source.replace(before, after))
    case = BF16._replace(kernel=imported(file).tile_stats)
    assert any(problem in found for found in check_compiled.check(case, "sm_90"))


@pytest.mark.slow
def test_more_rows_than_registers_can_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "rows_at_once", lambda dtype: 64)
    assert any("registers" in found for found in check_compiled.check(check_compiled.tile_case("bf16"), "sm_90"))
