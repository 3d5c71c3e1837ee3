"""The payloads of events and tokens frames: bytes to dicts and arrays, and back.

Every offset, shape and type in them is checked against the payload before an array is made of it.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from pyscan import codecs
from pyscan.codecs import Array
from pyscan.errors import ScanFormatError
from pyscan.format import pad64, padded
from pyscan.strict_json import loads, loads_strict

_LENGTH = struct.Struct("<I")
_ID_DTYPES = {name: np.dtype(f"<{name}") for name in ("i4", "i8", "u4", "u1")}
_ID_NAMES = {dtype: name for name, dtype in _ID_DTYPES.items()}
_CELL_DTYPES = {"log2q8": "i2", "u16": "u2", "f32": "f4"}
TOKEN_CHANNELS = ("act", "grad", "contribution")
TOKEN_MODES = ("rows", "blocks", "sequences")
_ENTRY_BYTES = 256  # no entry of a tokens frame's JSON is longer

Event = dict[str, Any]


def decode_events(payload: bytes) -> tuple[list[Event], list[str]]:
    """The events of a frame, and what is wrong with lines that are none."""
    events, reasons = [], []
    for line in payload.split(b"\n"):
        if not line.strip():
            continue
        try:
            events.append(_event(loads(line)))
        except ScanFormatError as error:
            reasons.append(f"bad event: {error}")
    return events, reasons


def encode_events(events: Iterable[Event]) -> bytes:
    return b"".join(json.dumps(event, ensure_ascii=False).encode() + b"\n" for event in events)


def _event(raw: Any) -> Event:
    if not isinstance(raw, dict) or not isinstance(raw.get("kind"), str):
        raise ScanFormatError("an event is an object with a kind")
    if type(raw.get("step")) is not int or not 0 <= raw["step"] < 2**64:
        raise ScanFormatError("the step of an event is an integer from 0 to 2**64 - 1")
    if not isinstance(raw.get("site"), (str, type(None))):
        raise ScanFormatError("the site of an event is a name or null")
    raw.setdefault("site", None)
    return raw


class TokenArray(NamedTuple):
    site: int
    channel: str
    codec: str
    codes: Array
    positions: Array | None = None  # of an expert: the token of each row


class Tokens(NamedTuple):
    """The rows of one step, token by token."""

    step: int
    ids: Array | None
    arrays: list[TokenArray]
    mode: str = "rows"
    mask: Array | None = None
    sequences: Array | None = None


def tokens_head_bytes(start: bytes) -> int:
    """Bytes of length and JSON together, from the first 4 bytes of the payload."""
    if len(start) < _LENGTH.size:
        raise ScanFormatError("a tokens frame begins with the length of its JSON")
    return _LENGTH.size + int(_LENGTH.unpack_from(start)[0])


def decode_tokens_head(data: bytes) -> dict[str, Any]:
    """The JSON object of a tokens frame; `data` begins with its length."""
    end = tokens_head_bytes(data)
    if end > len(data):
        raise ScanFormatError(f"the JSON of a tokens frame ends at byte {end}, the payload at {len(data)}")
    head = loads_strict(data[_LENGTH.size : end])
    if not isinstance(head, dict) or type(head.get("step")) is not int or not 0 <= head["step"] < 2**64:
        raise ScanFormatError("a tokens frame names its step")
    return head


def decode_tokens(payload: bytes, num_sites: int) -> Tokens:
    head = decode_tokens_head(payload)
    entries = head.get("arrays")
    if not isinstance(entries, list):
        raise ScanFormatError("a tokens frame lists its arrays")
    mode = head.get("mode", "rows")
    if not isinstance(mode, str) or mode not in TOKEN_MODES:
        raise ScanFormatError(f"the mode of a tokens frame is one of {', '.join(TOKEN_MODES)}")
    return Tokens(
        step=head["step"],
        ids=_ids(head.get("ids"), payload),
        arrays=[_token_array(entry, payload, num_sites) for entry in entries],
        mode=mode,
        mask=_ids(head.get("mask"), payload),
        sequences=_sequences(head.get("sequences"), payload),
    )


def encode_tokens(
    step: int,
    num_tokens: int,
    ids: Array | None,
    arrays: Iterable[TokenArray],
    extra: Mapping[str, Any] | None = None,
    **rest: Any,
) -> bytes:
    """A payload as FORMAT.md has it; `rest`: mode, mask, sequences."""
    given = list(arrays)
    start = tokens_start(Tokens(step, ids, given, **rest), num_tokens, extra)
    return start + b"".join(padded(array.codes.tobytes()) for array in given)


def tokens_start(tokens: Tokens, num_tokens: int, extra: Mapping[str, Any] | None = None) -> bytes:
    """A payload up to its first array of cells: the JSON, and the arrays of integers. Cells follow, each padded."""
    integers = _Integers(pad64(_LENGTH.size + _ENTRY_BYTES * (len(tokens.arrays) + 2)))
    room = integers.end
    head: dict[str, Any] = {"step": tokens.step, "tokens": num_tokens, **(extra or {})}
    if tokens.mode != TOKEN_MODES[0]:
        head["mode"] = tokens.mode
    for name in ("ids", "mask", "sequences"):
        if (values := getattr(tokens, name)) is not None:
            head[name] = integers.place(values)
    places = [None if array.positions is None else integers.place(array.positions) for array in tokens.arrays]
    entries: list[dict[str, Any]] = []
    end = integers.end
    for array, place in zip(tokens.arrays, places, strict=True):
        entries.append(_entry(array, end) | ({} if place is None else {"positions": place}))
        end += pad64(array.codes.size * codecs.DTYPES[array.codec].itemsize)
    text = json.dumps(head | {"arrays": entries}).encode()
    start = _LENGTH.pack(len(text)) + text
    assert len(start) <= room
    return start + bytes(room - len(start)) + b"".join(integers.blobs)


class _Integers:
    """Arrays of integers behind the JSON, each once."""

    def __init__(self, begin: int) -> None:
        self.end = begin
        self.blobs: list[bytes] = []
        self._places: dict[int, dict[str, Any]] = {}

    def place(self, values: Array) -> dict[str, Any]:
        if id(values) not in self._places:
            self._places[id(values)] = {"dtype": _ID_NAMES[values.dtype], "shape": values.shape, "offset": self.end}
            self.blobs.append(padded(values.tobytes()))
            self.end += len(self.blobs[-1])
        return self._places[id(values)]


def _entry(array: TokenArray, offset: int) -> dict[str, Any]:
    return {
        "site": array.site,
        "channel": array.channel,
        "dtype": _CELL_DTYPES[array.codec],
        "codec": array.codec,
        "shape": array.codes.shape,
        "offset": offset,
    }


def _ids(entry: Any, payload: bytes) -> Array | None:
    if entry is None:
        return None
    if not isinstance(entry, dict) or entry.get("dtype") not in list(_ID_DTYPES):
        raise ScanFormatError(f"integers of a tokens frame are of dtype {', '.join(_ID_DTYPES)}")
    return _array(entry, _ID_DTYPES[entry["dtype"]], payload)


def _sequences(entry: Any, payload: bytes) -> Array | None:
    sequences = _ids(entry, payload)
    if sequences is not None and (sequences.ndim != 2 or sequences.shape[1] != 2):
        raise ScanFormatError("the sequences of a tokens frame are pairs: first token, number of tokens")
    return sequences


def _token_array(entry: Any, payload: bytes, num_sites: int) -> TokenArray:
    if not isinstance(entry, dict):
        raise ScanFormatError("an array of a tokens frame is described by an object")
    site, channel, codec = entry.get("site"), entry.get("channel"), entry.get("codec")
    if type(site) is not int or not 0 <= site < num_sites:
        raise ScanFormatError(f"site must be the place of a site in the schema, which has {num_sites}")
    if not isinstance(channel, str) or channel not in TOKEN_CHANNELS:
        raise ScanFormatError(f"a token channel is one of {', '.join(TOKEN_CHANNELS)}")
    if not isinstance(codec, str) or _CELL_DTYPES.get(codec) != entry.get("dtype"):
        raise ScanFormatError("an array of a tokens frame has a codec and the dtype that belongs to it")
    codes, positions = _array(entry, codecs.DTYPES[codec], payload), _ids(entry.get("positions"), payload)
    if positions is not None and (codes.ndim == 0 or positions.shape != codes.shape[:1]):
        raise ScanFormatError("positions of a tokens frame are one per row")
    return TokenArray(site, channel, codec, codes, positions)


def _array(entry: dict[str, Any], dtype: np.dtype[Any], payload: bytes) -> Array:
    """A copy of the array an entry describes, once it is known to lie inside the payload."""
    shape, offset = entry.get("shape"), entry.get("offset")
    if not isinstance(shape, list) or len(shape) > 8 or any(type(n) is not int or n < 0 for n in shape):
        raise ScanFormatError("a shape is a list of at most 8 integers >= 0")
    if type(offset) is not int or offset < 0 or offset % 64:
        raise ScanFormatError("an offset is a multiple of 64")
    extent = math.prod(n or 1 for n in shape) * dtype.itemsize
    if offset + extent > len(payload):
        raise ScanFormatError("an array of a tokens frame ends beyond its payload")
    return np.frombuffer(payload, dtype, math.prod(shape), offset).reshape(shape).copy()
