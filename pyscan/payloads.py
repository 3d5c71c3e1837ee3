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
from pyscan.format import padded
from pyscan.strict_json import loads, loads_strict

_LENGTH = struct.Struct("<I")
_ID_DTYPES: dict[str, np.dtype[Any]] = {"i4": np.dtype("<i4"), "i8": np.dtype("<i8"), "u4": np.dtype("<u4")}
_CELL_DTYPES = {"log2q8": "i2", "u16": "u2", "f32": "f4"}
TOKEN_CHANNELS = ("act", "grad", "contribution")

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


class Tokens(NamedTuple):
    """The rows of one step, token by token."""

    step: int
    ids: Array | None
    arrays: list[TokenArray]


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
    ids = head.get("ids")
    return Tokens(
        step=head["step"],
        ids=None if ids is None else _ids(ids, payload),
        arrays=[_token_array(entry, payload, num_sites) for entry in entries],
    )


def encode_tokens(
    step: int, num_tokens: int, ids: Array | None, arrays: Iterable[TokenArray], extra: Mapping[str, Any] | None = None
) -> bytes:
    """A payload as FORMAT.md has it; the arrays stand behind the JSON in the order given."""
    given = list(arrays)
    blobs = ([] if ids is None else [padded(ids.tobytes())]) + [padded(array.codes.tobytes()) for array in given]
    room = 64 * math.ceil((4 + 256 + 256 * (len(given) + 1)) / 64)
    offsets, end = [], room
    for blob in blobs:
        offsets.append(end)
        end += len(blob)
    head: dict[str, Any] = {"step": step, "tokens": num_tokens, **(extra or {})}
    if ids is not None:
        dtype = {value: key for key, value in _ID_DTYPES.items()}[ids.dtype]
        head["ids"] = {"dtype": dtype, "shape": ids.shape, "offset": offsets.pop(0)}
    head["arrays"] = [
        {
            "site": array.site,
            "channel": array.channel,
            "dtype": _CELL_DTYPES[array.codec],
            "codec": array.codec,
            "shape": array.codes.shape,
            "offset": offset,
        }
        for array, offset in zip(given, offsets, strict=True)
    ]
    text = json.dumps(head).encode()
    start = _LENGTH.pack(len(text)) + text
    assert len(start) <= room
    return start + bytes(room - len(start)) + b"".join(blobs)


def _ids(entry: Any, payload: bytes) -> Array:
    if not isinstance(entry, dict) or entry.get("dtype") not in list(_ID_DTYPES):
        raise ScanFormatError(f"token ids are of dtype {', '.join(_ID_DTYPES)}")
    return _array(entry, _ID_DTYPES[entry["dtype"]], payload)


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
    return TokenArray(site, channel, codec, _array(entry, codecs.DTYPES[codec], payload))


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
