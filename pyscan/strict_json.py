"""JSON that nobody vouches for: every way it can fail is a ScanFormatError, and values are checked one by one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, NoReturn

from pyscan.errors import ScanFormatError

# No tensor has more blocks, rows or columns than this; sums of a schema's numbers then stay exact everywhere.
LARGEST = 2**48


def loads(data: bytes) -> Any:
    """JSON from a file, every way it can fail turned into a ScanFormatError."""
    return _parse(data, json.loads)


def loads_strict(data: bytes) -> Any:
    """`loads` without NaN, infinite numbers and repeated keys, which JSON itself does not have."""
    return _parse(data, _STRICT.decode)


def _parse(data: bytes, parse: Any) -> Any:
    try:
        value = parse(data.decode("utf-8"))
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # a lone surrogate has no bytes and would fail later
    except (ValueError, RecursionError) as error:
        raise ScanFormatError(f"not valid JSON: {str(error)[:120]}") from None
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large")
    return value


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return result


_STRICT = json.JSONDecoder(object_pairs_hook=_no_repeats, parse_constant=_refuse_constant, parse_float=_finite)


def text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ScanFormatError(f"{what} must be text, got {type(value).__name__}")
    return value


def count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise ScanFormatError(f"{what} must be an integer from 0 to 2**48, got {_short(value)}")
    return value


def choice(value: Any, allowed: tuple[str, ...], what: str) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ScanFormatError(f"{what} must be one of {', '.join(allowed)}, got {_short(value)}")


def _short(value: Any) -> str:
    return repr(value)[:40] if isinstance(value, (str, int, float)) else type(value).__name__


def json_object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ScanFormatError(f"{what} must be a JSON object, got {type(value).__name__}")
    return value


def json_list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ScanFormatError(f"{what} must be a JSON list, got {type(value).__name__}")
    return value


def names(value: Any, what: str) -> tuple[str, ...]:
    return tuple(text(name, what) for name in json_list(value, what))


def unique(names: Iterable[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ScanFormatError(f"two {what}s are named {name[:80]!r}")
        seen.add(name)
