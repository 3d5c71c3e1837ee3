"""Cells on disk to float32 and back: `log2q8`, `u16` and `f32` of FORMAT.md, in plain numpy.

`ABSENT` is the float32 NaN that means "not observed"; it is neither 0 nor an ordinary NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

ABSENT_BITS = 0x7FC0AB5E
ABSENT = np.uint32(ABSENT_BITS).view(np.float32)

CODE_ZERO = -32768
CODE_ABSENT = -32767
CODE_NAN = 32766
CODE_INFINITY = 32767
CODE_LIMIT = 32765

DTYPES: dict[str, np.dtype[Any]] = {"log2q8": np.dtype("<i2"), "u16": np.dtype("<u2"), "f32": np.dtype("<f4")}


def _decode_table() -> Floats:
    """The value of every log2q8 code, at the place of the code's bits as a uint16."""
    codes = np.arange(65536, dtype=np.uint16).view(np.int16)
    table = np.exp2(codes.astype(np.float64) / 256).astype(np.float32)
    for code, value in ((CODE_ZERO, 0.0), (CODE_NAN, np.nan), (CODE_INFINITY, np.inf)):
        table[code & 0xFFFF] = value
    table.view(np.uint32)[CODE_ABSENT & 0xFFFF] = ABSENT_BITS
    return table


_LOG2Q8 = _decode_table()


def is_absent(values: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """True where a value read from a scan means "not observed"."""
    with np.errstate(over="ignore"):
        floats = np.asarray(values, dtype=np.float32)
    return np.asarray(floats.view(np.uint32) == ABSENT_BITS)


def decode(codes: Array, codec: str) -> Floats:
    """Stored cells to float32."""
    if codec == "log2q8":
        return _LOG2Q8[codes.view(np.uint16)]
    return codes.astype(np.float32)


def encode(values: npt.ArrayLike, codec: str) -> Array:
    """Values to cells as stored. Negative values are no norms and become NaN; u16 has no absent: it becomes 0."""
    given = np.asarray(values)
    if codec == "f32":
        return given.astype("<f4")
    if codec == "u16":
        filled = np.nan_to_num(given, nan=0.0, posinf=65535.0)
        return np.asarray(np.clip(np.rint(filled), 0, 65535), "<u2")
    return encode_log2(given)


def encode_log2(values: Array) -> Array:
    exact = np.atleast_1d(values).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        scaled = np.rint(256 * np.log2(exact))
    codes = np.clip(np.nan_to_num(scaled), -CODE_LIMIT, CODE_LIMIT).astype("<i2")
    codes[exact == 0] = CODE_ZERO
    codes[exact == np.inf] = CODE_INFINITY
    codes[np.isnan(exact) | (exact < 0)] = CODE_NAN
    codes[np.atleast_1d(is_absent(values))] = CODE_ABSENT
    return np.asarray(codes.reshape(values.shape))


def absent_codes(shape: tuple[int, ...], codec: str) -> Array:
    """Cells that say "not observed"; u16 cannot say it and gets 0."""
    if codec == "f32":
        return np.full(shape, ABSENT, dtype="<f4")
    return np.full(shape, CODE_ABSENT if codec == "log2q8" else 0, dtype=DTYPES[codec])


def combine(values: Array, op: str, axis: int) -> Floats:
    """Many cells to one, in float64: absent ones are left out, all absent give absent, any other NaN gives NaN."""
    absent = is_absent(values)
    wide = np.where(absent, -np.inf if op == "max" else 0.0, values).astype(np.float64)
    if op == "sumsq":
        merged = np.sqrt(np.square(wide).sum(axis=axis))
    elif op == "add":
        merged = wide.sum(axis=axis)
    else:
        merged = wide.max(axis=axis, initial=-np.inf)
    with np.errstate(over="ignore"):
        result = np.asarray(merged, dtype=np.float32)
    result[absent.all(axis=axis)] = ABSENT
    return result
