"""Version 1.1 files, read and written: a header, a JSON object, and packed records of 12 bytes in any order.

There is a step per token, numbered from 1. The values are uint16 codes whose scale only their writer knew; `codes`
gives them as they are, `act` and `grad` as float32, decoded if the JSON names a codec. The records are read into
memory: writers of such files rewrite them in place, and a map of a file that shrinks is deadly.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from pyscan import codecs
from pyscan.codecs import Array, Floats
from pyscan.errors import ScanError, ScanFormatError
from pyscan.format import MAGIC
from pyscan.payloads import Event
from pyscan.run import Run
from pyscan.schema import Channel, SiteInfo
from pyscan.strict_json import loads_strict
from pyscan.timeline import STEPS_DTYPE

HEADER = struct.Struct("<5sHII")
RECORD_DTYPE = np.dtype(
    [("token_idx", "<u4"), ("param_id", "<u2"), ("block_idx", "<u2"), ("activation", "<u2"), ("grad_norm", "<u2")]
)
# The codec named in the JSON of an exported file: the int16 code plus 32768.
LOG2Q8_OFFSET = "log2q8+32768"
FIELDS = {"act": "activation", "grad": "grad_norm"}
# A file may claim tokens it has no records of, but not more than this.
_TOKENS_WITHOUT_RECORDS = 1 << 16


class Version1Run(Run):
    """A version 1.1 file. Without a record a cell is absent; of two records of one cell the later one counts."""

    version = 1
    block, every, rank, world = 0, 1, 0, 1

    def __init__(self, path: str, data: bytes | None = None) -> None:
        self.path = path
        self._in_memory = data
        self._load()

    def _load(self) -> None:
        self._damage: list[tuple[int, str]] = []
        data, self._stamp = self._read()
        self._num = len(data)
        self.header, start = decode_header(data)
        self.model = str(self.header.get("model_name", ""))
        self.metadata = {key: value for key, value in self.header.items() if key != "sequences"}
        self.versions = {"format_version": self.header.get("format_version", "1.1")}
        codec = "log2q8" if self.header.get("codec") == LOG2Q8_OFFSET else "u16"
        self.channels = [Channel(name, "block", codec, "plain", "sumsq") for name in FIELDS]
        self.param_names = _param_names(self.header)
        self.sequences = _sequences(self.header)
        self.num_tokens = sum(sequence["num_tokens"] for sequence in self.sequences)
        self.records = self._sorted(self._records(data, start))
        self.sites = list(self._find_sites())

    def _read(self) -> tuple[bytes, tuple[int, int]]:
        if self._in_memory is not None:
            return self._in_memory, (0, 0)
        with open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            return file.read(), (status.st_size, status.st_mtime_ns)

    def _records(self, data: bytes, start: int) -> Array:
        """The whole records the file has, without those that point nowhere; what is left out is damage."""
        claimed = HEADER.unpack_from(data)[3]
        there = (len(data) - start) // RECORD_DTYPE.itemsize
        if claimed != there or (len(data) - start) % RECORD_DTYPE.itemsize:
            self._damage.append((start, f"the header claims {claimed} records, the file has room for {there}"))
        records = np.frombuffer(data, RECORD_DTYPE, min(claimed, there), start)
        if self.num_tokens > max(len(records), _TOKENS_WITHOUT_RECORDS):
            raise ScanFormatError(f"the sequences claim {self.num_tokens} tokens, there are {len(records)} records")
        named = np.zeros(65536, bool)
        named[list(self.param_names)] = True
        for good, reason in (
            (records["token_idx"] < self.num_tokens, "records of tokens beyond the sequences"),
            (named[records["param_id"]], "records of parameters without a name"),
        ):
            if not good.all():
                first = int(np.argmin(good))
                place = start + first * RECORD_DTYPE.itemsize
                self._damage.append((place, f"{int((~good).sum())} {reason}, left out"))
        usable: Array = records[(records["token_idx"] < self.num_tokens) & named[records["param_id"]]]
        return usable

    def _sorted(self, records: Array) -> Array:
        """By parameter, in the order written inside each, so that one site is one slice."""
        order = np.argsort(records["param_id"], kind="stable")
        self._first = np.append(0, np.cumsum(np.bincount(records["param_id"], minlength=65536)))
        return records[order]

    def _of(self, param_id: int) -> Array:
        records: Array = self.records[self._first[param_id] : self._first[param_id + 1]]
        return records

    def _find_sites(self) -> Iterator[SiteInfo]:
        for param_id, name in sorted(self.param_names.items()):
            records = self._of(param_id)
            if len(records):
                yield SiteInfo(name, "unknown", (), "unknown", int(records["block_idx"].max()) + 1)

    @property
    def _num_bytes(self) -> int:
        return self._num

    @property
    def steps(self) -> Array:
        steps = np.zeros(self.num_tokens, STEPS_DTYPE)
        steps["step"] = np.arange(1, self.num_tokens + 1)
        for name in ("loss", "lr", "grad_scale", "total_norm"):
            steps[name] = np.nan
        return steps

    @property
    def events(self) -> list[Event]:
        """One event per sequence, at the step of its first token."""
        events, step = [], 1
        for sequence in self.sequences:
            events.append({**sequence, "kind": "sequence", "step": step, "site": None})
            step += sequence["num_tokens"]
        return events

    @property
    def damage(self) -> list[tuple[int, str]]:
        return list(self._damage)

    def _stored(self, channel: Channel, site: SiteInfo, start: int, stop: int) -> tuple[Array, Array]:
        """Codes [rows, blocks] with 0 where there is no record, and where there is one."""
        self._refuse_monster(stop - start, site.num_blocks)
        records = self._of(self.param_id(site))
        records = records[(records["token_idx"] >= start) & (records["token_idx"] < stop)]
        codes = np.zeros((stop - start, site.num_blocks), "<u2")
        there = np.zeros(codes.shape, bool)
        place = records["token_idx"] - np.uint32(start), records["block_idx"]
        codes[place] = records[FIELDS[channel.name]]
        there[place] = True
        return codes, there

    def param_id(self, site: SiteInfo) -> int:
        return next(param_id for param_id, name in self.param_names.items() if name == site.name)

    def _cells(self, channel: Channel, site: SiteInfo, start: int, stop: int) -> Floats:
        codes, there = self._stored(channel, site, start, stop)
        values = codecs.decode(_from_offset(codes) if channel.codec == "log2q8" else codes, channel.codec)
        values[~there] = codecs.ABSENT
        return values

    def _codes(self, channel: Channel, site: SiteInfo, start: int, stop: int) -> Array:
        codes, there = self._stored(channel, site, start, stop)
        if channel.codec == "log2q8":
            return np.where(there, _from_offset(codes), np.int16(codecs.CODE_ABSENT))
        return codes

    def tokens(self, step: int) -> dict[str, Any]:
        raise ScanError("a version 1.1 file has no token ids; each of its steps is a token: use act() and grad()")

    def refresh(self) -> int:
        """Read the file again if it changed. A file caught while it is rewritten is left for the next time."""
        before = self.num_tokens
        if self._in_memory is None and self._changed():
            state = dict(vars(self))
            try:
                self._load()
            except ScanFormatError:
                vars(self).update(state)
        return int(max(self.num_tokens - before, 0))

    def _changed(self) -> bool:
        status = os.stat(self.path)
        return (status.st_size, status.st_mtime_ns) != self._stamp

    def close(self) -> None: ...


def _from_offset(codes: Array) -> Array:
    return (codes ^ np.uint16(0x8000)).view("<i2")


def decode_header(data: bytes) -> tuple[dict[str, Any], int]:
    """The JSON object of a version 1.1 file and where its records begin."""
    if len(data) < HEADER.size:
        raise ScanFormatError(f"a version 1.1 file has a header of {HEADER.size} bytes, this one has {len(data)} bytes")
    magic, version, start, _ = HEADER.unpack_from(data)
    if magic != MAGIC or version != 1:
        raise ScanFormatError(f"not a version 1.1 file: it begins with {magic!r}, version {version}")
    if not HEADER.size <= start <= len(data):
        raise ScanFormatError(f"the header claims {start} bytes, the file has {len(data)}")
    header = loads_strict(data[HEADER.size : start])
    if not isinstance(header, dict):
        raise ScanFormatError("the header of a version 1.1 file is a JSON object")
    return header, start


def _param_names(header: dict[str, Any]) -> dict[int, str]:
    raw = header.get("id_to_param_name_map")
    if not isinstance(raw, dict):
        raise ScanFormatError("id_to_param_name_map must be a JSON object")
    names: dict[int, str] = {}
    for key, name in raw.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 5 and int(key) < 65536 and isinstance(name, str)):
            raise ScanFormatError(f"id_to_param_name_map maps numbers below 65536 to names, got {key[:40]!r}")
        names[int(key)] = name
    if len(set(names.values())) != len(raw):
        raise ScanFormatError("id_to_param_name_map gives two ids one name")
    return names


def _sequences(header: dict[str, Any]) -> list[dict[str, Any]]:
    raw = header.get("sequences")
    if not isinstance(raw, list) or not all(isinstance(sequence, dict) for sequence in raw):
        raise ScanFormatError("sequences must be a list of JSON objects")
    for sequence in raw:
        count = sequence.get("num_tokens")
        if type(count) is not int or not 0 <= count < 2**32:
            raise ScanFormatError("num_tokens of a sequence must be an integer from 0 to 2**32 - 1")
    return raw


def encode_header(header: dict[str, Any], num_records: int) -> bytes:
    """The bytes in front of the records."""
    text = json.dumps(header, ensure_ascii=False, allow_nan=False).encode()
    return HEADER.pack(MAGIC, 1, HEADER.size + len(text), num_records) + text
