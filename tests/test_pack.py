"""Packing: every code is the exact one, for every instruction set."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pyscan import _C

BOUND = 0.001356
MAX_CODE = 32765


ISAS = [isa for isa in _C.isas if isa != "avx512"]  # which packs with the loop of avx2
TRANSFORMS = ("plain", "root")


def reference(values: np.ndarray, transform: str) -> np.ndarray:
    factor = 256 if transform == "plain" else 128
    with np.errstate(all="ignore"):
        codes = np.clip(np.rint(factor * np.log2(values)), -MAX_CODE, MAX_CODE)
    codes[values == 0] = -32768
    codes[values < 0] = -32767
    codes[np.isposinf(values)] = 32767
    codes[np.isnan(values)] = 32766
    return codes.astype(np.int16)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 8, 63, 64, 65, 1000])
def test_codes_match_the_formula_for_every_length(isa: str, transform: str, count: int) -> None:
    values = np.exp(np.random.default_rng(count).normal(0, 20, count))
    codes = _C.pack(values, "log2q8", transform, isa)
    assert codes.dtype == np.int16
    assert (codes == reference(values, transform)).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_special_values_keep_their_meaning_at_every_lane(isa: str, transform: str) -> None:
    cases = {
        0.0: -32768,
        -1.0: -32767,
        -math.inf: -32767,
        -5e-324: -32767,
        math.inf: 32767,
        math.nan: 32766,
        -math.nan: 32766,
        1.0: 0,
        5e-324: -MAX_CODE,
        1.7976931348623157e308: MAX_CODE,
    }
    for shift in range(8):
        values = np.concatenate([np.ones(shift), list(cases), [-0.0], np.ones(5)])
        codes = _C.pack(values, "log2q8", transform, isa)
        assert codes[shift:-5].tolist() == [*cases.values(), -32768]
        assert not codes[:shift].any()
        assert not codes[-5:].any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_every_threshold_between_two_codes_is_where_it_belongs(isa: str, transform: str) -> None:
    """At each of the 65,530 thresholds the double below takes the lower code and the double above the upper one."""
    factor = 256 if transform == "plain" else 128
    exponent = (np.arange(-MAX_CODE, MAX_CODE) + 0.5) / factor
    threshold = np.exp2(exponent)
    below, above = threshold * (1 - 1e-14), threshold * (1 + 1e-14)
    low = _C.pack(below, "log2q8", transform, isa)
    high = _C.pack(above, "log2q8", transform, isa)
    assert (low == np.arange(-MAX_CODE, MAX_CODE)).all()
    assert (high == np.arange(-MAX_CODE + 1, MAX_CODE + 1)).all()
    for values, codes in ((below, low), (above, high)):
        true = values if transform == "plain" else np.sqrt(values)
        unpacked = _C.unpack(codes.tobytes(), "log2q8")
        assert np.abs(unpacked / true - 1).max() <= BOUND


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_codes_are_the_same_on_every_instruction_set(transform: str) -> None:
    bits = np.random.default_rng(1).integers(0, 2**64, 200_000, np.uint64)
    values = bits.view(np.float64)
    packed = [_C.pack(values, "log2q8", transform, isa) for isa in ISAS]
    assert all((codes == packed[0]).all() for codes in packed)
    assert (packed[0] == reference(values, transform)).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_codes_sort_like_the_values(isa: str, transform: str) -> None:
    values = np.sort(np.exp(np.random.default_rng(2).uniform(-400, 400, 300_000)))
    codes = _C.pack(values, "log2q8", transform, isa).astype(np.int32)
    assert (np.diff(codes) >= 0).all()


@pytest.mark.parametrize("isa", ISAS)
def test_f32_keeps_values_and_marks_absent(isa: str) -> None:
    values = np.array([0.0, -1.0, math.nan, math.inf, 4.0, 1e300, 1.5])
    plain = _C.pack(values, "f32", "plain", isa)
    root = _C.pack(values, "f32", "root", isa)
    bits = [0, 0x7FC0AB5E, 0x7FC00000, 0x7F800000]
    assert plain.view(np.uint32)[:4].tolist() == bits
    assert root.view(np.uint32)[:4].tolist() == bits
    assert plain[4:].tolist() == [4.0, math.inf, 1.5]
    assert root[4] == 2.0
    assert root[6] == np.float32(math.sqrt(1.5))


@pytest.mark.parametrize("isa", ISAS)
def test_f32_never_writes_a_nan_that_means_absent(isa: str) -> None:
    nan = np.array([0x7FF815D3C0000000 | 0x56BC0000], np.uint64).view(np.float64)
    as_float = np.array([0x7FC0AB5E], np.uint32).view(np.float32).astype(np.float64)
    for value in (nan, as_float):
        assert _C.pack(value, "f32", "plain", isa).view(np.uint32).tolist() == [0x7FC00000]


@pytest.mark.parametrize("isa", ISAS)
def test_u16_keeps_all_65536_codes(isa: str) -> None:
    values = np.arange(65536, dtype=np.float64)
    assert (_C.pack(values, "u16", "plain", isa) == values).all()
    assert _C.pack(np.array([-1.0, math.nan, 1e9, math.inf, 2.4, 2.6]), "u16", "plain", isa).tolist() == [
        *(0, 0, 65535, 65535, 2, 3)
    ]
    assert (_C.pack(values**2, "u16", "root", isa) == values).all()


@pytest.mark.parametrize("codec", ["log2q8", "u16", "f32"])
def test_unpack_inverts_pack_of_the_values_it_gives(codec: str) -> None:
    codes = np.arange(65536, dtype=np.uint16)
    codes = codes[codes != 0x8002]  # -32766 is the one code of log2q8 that nothing packs to
    stored = codes.view(np.int16) if codec == "log2q8" else codes.astype("<f4") if codec == "f32" else codes
    values = _C.unpack(stored.tobytes(), codec)
    assert (_C.pack(values, codec, "plain") == stored).all()


@pytest.mark.parametrize(
    ("codec", "transform", "isa", "message"),
    [
        ("log2", "plain", None, "codec must be log2q8, u16 or f32, got log2"),
        ("u16", "square", None, "transform must be plain or root, got square"),
        ("u16", "plain", "avx1024", "instruction set must be baseline, avx2 or avx512, got avx1024"),
    ],
)
def test_unknown_names_are_refused(codec: str, transform: str, isa: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _C.pack(np.zeros(1), codec, transform, isa)


@pytest.mark.slow
def test_all_positive_float32_are_monotone_and_within_the_bound() -> None:
    """Natively, for every instruction set and transform: 2^31 values are too many for Python."""
    tools = Path(sys.executable).parent
    env = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    script = Path(__file__).parent / "native" / "run_float32.sh"
    result = subprocess.run([script], env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("ok: 2139095040 values") == 2 * len(ISAS)
