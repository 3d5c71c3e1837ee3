"""Decodes an .mscan file from FORMAT.md alone, with struct, zlib and json: the writer's tests trust no reader of ours.

`decode(path)` takes the main file and its tail and hands back frames, schemas, rows with their numbers, and events.
Every byte that the format says is checked is checked; damage raises unless `strict=False`.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

SCHEMA, STEPS, EVENTS, TOKENS, INDEX = 1, 2, 3, 4, 5
ABSENT_F32 = 0x7FC0AB5E
RECORD = struct.Struct("<QQQffffII")
RECORD_FIELDS = ("step", "time_ns", "tokens", "loss", "lr", "grad_scale", "total_norm", "flags", "zero")
WIDTH = {"log2q8": "<i2", "u16": "<u2", "f32": "<f4"}


@dataclass
class Frame:
    offset: int
    kind: int
    first_step: int
    first_row: int
    rows: int
    flags: int
    number: int
    payload: bytes
    size: int


@dataclass
class Decoded:
    run_id: bytes
    frames: list[Frame] = field(default_factory=list)
    tail_frames: list[Frame] = field(default_factory=list)
    schemas: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)  # number -> record and "cells": codes per channel
    events: list[dict[str, Any]] = field(default_factory=list)
    damage: list[int] = field(default_factory=list)  # offsets stepped over

    @property
    def steps(self) -> list[int]:
        return [self.rows[number]["step"] for number in sorted(self.rows)]


def pad64(size: int) -> int:
    return (size + 63) // 64 * 64


def values(codes: np.ndarray, codec: str) -> np.ndarray:
    """float64 values; absent is -1."""
    if codec == "u16":
        return codes.astype(np.float64)
    if codec == "f32":
        return np.where(codes.view(np.uint32) == ABSENT_F32, -1.0, codes.astype(np.float64))
    out = np.exp2(codes.astype(np.float64) / 256)
    for code, value in ((-32768, 0.0), (-32767, -1.0), (32766, np.nan), (32767, np.inf)):
        out[codes == code] = value
    return out


def decode(path: str | Path, *, strict: bool = True) -> Decoded:
    path = Path(path)
    tail_path = path.with_name(path.name + ".tail")
    tail = tail_path.read_bytes() if tail_path.exists() else b""  # before the main file, as a reader must
    data = path.read_bytes()
    run_id = check_header(data)
    out = Decoded(run_id)
    layout: list[tuple[str, int]] = []
    out.frames = list(walk(data, run_id, out.damage, strict))
    for place, frame in enumerate(out.frames):
        assert frame.flags == 0
        if frame.kind == SCHEMA:
            out.schemas.append(json.loads(frame.payload))
            layout = cells_of(out.schemas[-1])
        elif frame.kind == STEPS:
            add_rows(out, frame, layout)
        elif frame.kind == EVENTS:
            lines = frame.payload.decode().splitlines()
            assert len(lines) == frame.rows
            out.events += [json.loads(line) for line in lines]
        elif frame.kind == INDEX:
            check_index(frame, out.frames[:place])
    if len(tail) >= 64 and check_header(tail) == run_id:
        out.tail_frames = list(walk(tail, run_id, [], strict))
        for place, frame in enumerate(out.tail_frames):
            assert (frame.kind, frame.flags, frame.number) == (STEPS, 1, place)
            add_rows(out, frame, layout)
    return out


def check_header(data: bytes) -> bytes:
    magic, version, zero, size, flags, run_id, created, zeros, crc = struct.unpack("<5sHBII16sQ20sI", data[:64])
    assert (magic, version, zero, size, flags, zeros) == (b"MSCAN", 2, 0, 64, 0, bytes(20))
    assert crc == zlib.crc32(data[:60])
    assert created > 1_500_000_000_000_000_000
    return run_id


def walk(data: bytes, run_id: bytes, damage: list[int], strict: bool):
    offset = 64
    while offset + 64 <= len(data):
        frame = parse_frame(data, offset, run_id)
        if frame is None:
            assert not strict, f"no frame at {offset}"
            damage.append(offset)
            offset += 64
        else:
            yield frame
            offset += frame.size
    assert not strict or offset == len(data)


def parse_frame(data: bytes, offset: int, run_id: bytes) -> Frame | None:
    header = data[offset : offset + 64]
    magic, kind, size, step, row, rows, flags, number, mark, table_crc, crc = struct.unpack("<4sIQQQIIQ8sII", header)
    if magic != b"FRAM" or crc != zlib.crc32(header[:60]) or mark != run_id[:8]:
        return None
    num_chunks = -(-size // 4096)
    begin = offset + 64 + pad64(4 * num_chunks)
    end = begin + pad64(size)
    if end > len(data):
        return None
    table = data[offset + 64 : begin]
    payload = data[begin : begin + size]
    crcs = [zlib.crc32(payload[i : i + 4096]) for i in range(0, size, 4096)]
    assert table_crc == zlib.crc32(table)
    assert table == struct.pack(f"<{num_chunks}I", *crcs).ljust(len(table), b"\0"), f"chunk table at {offset}"
    assert not any(data[begin + size : end]), f"padding of the frame at {offset}"
    return Frame(offset, kind, step, row, rows, flags, number, payload, end - offset)


def cells_of(schema: dict[str, Any]) -> list[tuple[str, int]]:
    keys = {"block": "blocks", "row_block": "row_blocks"}
    out = []
    for channel in schema["channels"]:
        per = channel["per"]
        count = len(schema["sites"]) if per == "site" else sum(site.get(keys[per], 0) for site in schema["sites"])
        out.append((channel["codec"], count))
    return out


def add_rows(out: Decoded, frame: Frame, layout: list[tuple[str, int]]) -> None:
    records = [dict(zip(RECORD_FIELDS, r, strict=True)) for r in RECORD.iter_unpack(frame.payload[: 48 * frame.rows])]
    assert frame.first_step == records[0]["step"]
    offset = pad64(48 * frame.rows)
    assert not any(frame.payload[48 * frame.rows : offset])
    sections = []
    for codec, count in layout:
        codes = np.frombuffer(frame.payload, WIDTH[codec], count * frame.rows, offset)
        end = offset + codes.nbytes
        offset = pad64(end)
        assert not any(frame.payload[end:offset])
        row_major = codes.reshape(frame.rows, count) if frame.flags & 1 else codes.reshape(count, frame.rows).T
        sections.append(row_major)
    assert offset == len(frame.payload)
    for place, record in enumerate(records):
        assert record["zero"] == 0
        number = frame.first_row + place
        in_main = number in out.rows
        assert not in_main or frame.flags & 1, f"row {number} is in the main file twice"
        if not in_main:
            out.rows[number] = {**record, "cells": [section[place] for section in sections]}


def check_index(frame: Frame, before: list[Frame]) -> None:
    assert len(frame.payload) % 64 == 0
    offset, magic = struct.unpack("<Q8s", frame.payload[-16:])
    assert (offset, magic) == (frame.offset, b"MSCANIDX")
    expected = b"".join(
        struct.pack("<QIIQQQQ", f.offset, f.kind, f.rows, f.first_step, f.first_row, len(f.payload), f.number)
        for f in before
    )
    assert frame.payload[: len(expected)] == expected
    assert not any(frame.payload[len(expected) : -16])
    assert len(frame.payload) - len(expected) < 64 + 16
