"""The worked example of FORMAT.md: its hex is a file that the code writes and reads, its table says what is in it."""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path

import numpy as np

import pyscan
from pyscan.format import FRAME_MAGIC, ROW_DTYPE, ROW_HAS_LOSS, ROW_HAS_TOKENS
from pyscan.frame_writer import FrameWriter
from pyscan.schema import Channel, Schema, SiteInfo
from pyscan.writer import Writer

EXAMPLE = (Path(__file__).parent.parent / "FORMAT.md").read_text().split("## Worked example")[1].split("\n## ")[0]
RUN_ID = bytes(range(16))
CREATED_NS, TIME_NS = 1_700_000_000_000_000_000, 1_700_000_001_000_000_000
SCHEMA = Schema("m", (Channel("act"),), (SiteInfo("w", "linear", (8, 128), "float32", 2),))


def example() -> bytes:
    """The bytes of the hex dump; a line `*` repeats the line before it up to the next offset."""
    data = bytearray()
    for line in re.findall(r"^(?:[0-9a-f]{4}  .*|[0-9a-f]{4}|\*)$", EXAMPLE, re.M):
        if line == "*":
            continue
        offset, *words = line[:53].split()
        while len(data) < int(offset, 16):
            data += data[-16:]
        data += bytes.fromhex("".join(words))
    return bytes(data)


def as_file() -> bytes:
    data = bytearray()
    writer = FrameWriter(data.extend, RUN_ID, CREATED_NS)
    writer.schema(SCHEMA)
    row = np.zeros(1, ROW_DTYPE)
    row["step"], row["time_ns"], row["tokens"], row["loss"] = 5, TIME_NS, 340, 1.5
    row["flags"] = ROW_HAS_TOKENS | ROW_HAS_LOSS
    writer.steps(row, [np.array([[256], [-32767]], "<i2")])
    return bytes(data)


def hex_dump(data: bytes) -> str:
    """As the document prints it: 16 bytes a line, repeated lines as `*`, the length last."""
    lines: list[str] = []
    last = None
    for offset in range(0, len(data), 16):
        part = data[offset : offset + 16]
        if part != last:
            text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
            lines.append(f"{offset:04x}  {part.hex(' ')}  {text}")
        elif lines[-1] != "*":
            lines.append("*")
        last = part
    return "\n".join([*lines, f"{len(data):04x}"])


def test_the_example_is_what_the_code_writes() -> None:
    assert hex_dump(as_file()) in EXAMPLE
    assert example() == as_file()


def test_the_compiled_writer_writes_the_example_too(tmp_path: Path) -> None:
    path = tmp_path / "run.mscan"
    with Writer(path, SCHEMA, run_id=RUN_ID) as writer:
        writer.write(5, np.array([4.0, -1.0]), time_ns=TIME_NS, tokens=340, loss=1.5)
    written = bytearray(path.read_bytes())
    struct.pack_into("<Q", written, 32, CREATED_NS)
    struct.pack_into("<I", written, 60, zlib.crc32(written[:60]))
    assert written[: len(example())] == example()
    assert written[len(example()) :][:4] == FRAME_MAGIC  # the index, which a close appends


def test_the_reader_reads_the_example(tmp_path: Path) -> None:
    path = tmp_path / "run.mscan"
    path.write_bytes(example())
    with pyscan.open(path) as run:
        assert run.steps[["step", "tokens", "loss"]].tolist() == [(5, 340, 1.5)]
        values = run.act("w", blocks=True)
        assert values[0, 0] == 2.0
        assert pyscan.is_absent(values).tolist() == [[False, True]]


def test_the_table_names_the_bytes_that_are_there() -> None:
    data = example()
    rows = re.findall(r"^\| ([0-9a-f]{4}) \| `([0-9a-f ]+)` \| (\w+) \| ([^|]+) \|$", EXAMPLE, re.M)
    assert len(rows) > 25
    for offset, stored, field, value in rows:
        at, expected = int(offset, 16), bytes.fromhex(stored)
        assert data[at : at + len(expected)] == expected, (offset, field)
        number = value.split(" ")[0].replace(",", "")
        if re.fullmatch(r"-?\d+", number):
            signed = number.startswith("-")
            assert int.from_bytes(expected, "little", signed=signed) == int(number), (offset, field)
        elif field == "loss":
            assert struct.unpack("<f", expected) == (float(number),)
        elif value.startswith("CRC-32"):
            first, last = (int(place, 16) for place in re.findall(r"\b[0-9a-f]{4}\b", value))
            assert zlib.crc32(data[first : last + 1]) == int.from_bytes(expected, "little"), (offset, field)
        else:
            assert value == f"`{expected.decode()}`" or expected in (RUN_ID, RUN_ID[:8]), (offset, field)
