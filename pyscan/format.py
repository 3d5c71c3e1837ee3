"""The numbers of FORMAT.md and the bytes of headers and frames, in both directions.

It receives buffers and hands on `FileHeader` and `Frame` tuples; it knows nothing of what a payload means.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import numpy as np

from pyscan.errors import ScanFormatError

MAGIC = b"MSCAN"
VERSION = 2
HEADER_BYTES = 64
FRAME_MAGIC = b"FRAM"
FRAME_HEADER_BYTES = 64
ALIGNMENT = 64
CHUNK_BYTES = 4096
INDEX_MAGIC = b"MSCANIDX"
ROWS_PER_FRAME = 64

KIND_SCHEMA = 1
KIND_STEPS = 2
KIND_EVENTS = 3
KIND_TOKENS = 4
KIND_INDEX = 5

FRAME_ROW_MAJOR = 1

ROW_SKIPPED = 1
ROW_AFTER_CLIP = 2
ROW_RESUMED = 4
ROW_HAS_TOKENS = 8
ROW_HAS_LOSS = 16
ROW_HAS_LR = 32
ROW_HAS_GRAD_SCALE = 64
ROW_HAS_TOTAL_NORM = 128

_FILE_HEADER = struct.Struct("<5sHBII16sQ20sI")
_FRAME_HEADER = struct.Struct("<4sIQQQIIQ8sII")
_CRC = struct.Struct("<I")
INDEX_END = struct.Struct("<Q8s")

ROW_DTYPE = np.dtype(
    [
        ("step", "<u8"),
        ("time_ns", "<u8"),
        ("tokens", "<u8"),
        ("loss", "<f4"),
        ("lr", "<f4"),
        ("grad_scale", "<f4"),
        ("total_norm", "<f4"),
        ("flags", "<u4"),
        ("reserved", "<u4"),
    ]
)
INDEX_DTYPE = np.dtype(
    [
        ("offset", "<u8"),
        ("kind", "<u4"),
        ("rows", "<u4"),
        ("first_step", "<u8"),
        ("first_row", "<u8"),
        ("payload_bytes", "<u8"),
        ("frame_number", "<u8"),
    ]
)
# field of a row -> the row flag that says it is known
KNOWN_FLAG = {
    "tokens": ROW_HAS_TOKENS,
    "loss": ROW_HAS_LOSS,
    "lr": ROW_HAS_LR,
    "grad_scale": ROW_HAS_GRAD_SCALE,
    "total_norm": ROW_HAS_TOTAL_NORM,
}


class FileHeader(NamedTuple):
    run_id: bytes
    created_ns: int


class Frame(NamedTuple):
    """Where a frame stands and what its header says of it."""

    offset: int
    kind: int
    payload_bytes: int
    first_step: int
    first_row: int
    rows: int
    flags: int
    frame_number: int

    @property
    def num_chunks(self) -> int:
        return -(-self.payload_bytes // CHUNK_BYTES)

    @property
    def table_offset(self) -> int:
        return self.offset + FRAME_HEADER_BYTES

    @property
    def payload_offset(self) -> int:
        chunks = (self.payload_bytes + 4095) >> 12
        return self.offset + FRAME_HEADER_BYTES + (4 * chunks + 63 & ~63)

    @property
    def end(self) -> int:
        return self.payload_offset + (self.payload_bytes + 63 & ~63)


def pad64(num_bytes: int) -> int:
    return (num_bytes + 63) & ~63


def padded(data: bytes) -> bytes:
    return data + bytes(pad64(len(data)) - len(data))


def encode_header(run_id: bytes, created_ns: int) -> bytes:
    head = _FILE_HEADER.pack(MAGIC, VERSION, 0, HEADER_BYTES, 0, run_id, created_ns, bytes(20), 0)[:-4]
    return head + _CRC.pack(zlib.crc32(head))


def decode_header(buffer: memoryview | bytes) -> FileHeader:
    """The header of a version 2 file; ScanFormatError for anything else."""
    if len(buffer) < HEADER_BYTES:
        raise ScanFormatError(f"a .mscan file has a header of {HEADER_BYTES} bytes, this one has {len(buffer)} bytes")
    magic, version, zero, size, flags, run_id, created_ns, reserved, crc = _FILE_HEADER.unpack_from(buffer, 0)
    if magic != MAGIC:
        raise ScanFormatError(f"not a .mscan file: it begins with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise ScanFormatError(f"version {version} of .mscan is not known here; a newer pyscan may read it")
    if crc != zlib.crc32(buffer[: HEADER_BYTES - 4]):
        raise ScanFormatError("the file header is damaged: its CRC does not fit, so no frame can be trusted")
    if zero or size != HEADER_BYTES or flags or any(reserved):
        raise ScanFormatError("the file header uses fields that must be zero in version 2")
    return FileHeader(run_id, created_ns)


def encode_frame(
    kind: int,
    payload: bytes,
    *,
    run_id: bytes,
    frame_number: int,
    first_step: int = 0,
    first_row: int = 0,
    rows: int = 0,
    flags: int = 0,
) -> bytes:
    """One frame, whole: header, chunk table, payload, padding."""
    chunks = (zlib.crc32(payload[i : i + CHUNK_BYTES]) for i in range(0, len(payload), CHUNK_BYTES))
    table = padded(b"".join(map(_CRC.pack, chunks)))
    head = _FRAME_HEADER.pack(
        FRAME_MAGIC,
        kind,
        len(payload),
        first_step,
        first_row,
        rows,
        flags,
        frame_number,
        run_id[:8],
        zlib.crc32(table),
        0,
    )[:-4]
    return b"".join((head, _CRC.pack(zlib.crc32(head)), table, padded(payload)))


def decode_frame(buffer: memoryview, offset: int, run_id: bytes) -> Frame | str:
    """The frame whose header stands at `offset`, or why there is none. No length is believed before its CRC."""
    if offset + FRAME_HEADER_BYTES > len(buffer):
        return "torn frame header"
    magic, kind, payload_bytes, first_step, first_row, rows, flags, number, prefix, _, crc = _FRAME_HEADER.unpack_from(
        buffer, offset
    )
    if magic != FRAME_MAGIC:
        return "no frame header where one should stand"
    if crc != zlib.crc32(buffer[offset : offset + FRAME_HEADER_BYTES - 4]):
        return "damaged frame header"
    if prefix != run_id[:8]:
        return "frame of another run"
    frame = Frame(offset, kind, payload_bytes, first_step, first_row, rows, flags, number)
    return frame if frame.end <= len(buffer) else "torn frame: it ends beyond the end of the file"


def table_crc(buffer: memoryview, frame: Frame) -> int:
    """The CRC of the chunk table as the frame header has it."""
    return int(_CRC.unpack_from(buffer, frame.offset + 56)[0])


def chunk_crc(buffer: memoryview, frame: Frame, chunk: int) -> int:
    """The CRC of a chunk as the chunk table has it."""
    return int(_CRC.unpack_from(buffer, frame.table_offset + 4 * chunk)[0])
