"""The numbers in csrc/format.h are those of FORMAT.md and of pyscan/format.py."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from pyscan import codecs
from pyscan import format as fmt

ROOT = Path(__file__).parent.parent
TEXT = " ".join((ROOT / "FORMAT.md").read_text().split())
HEADER = (ROOT / "csrc" / "format.h").read_text()


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def constants() -> dict[str, int]:
    """`kRowHasLoss = 16` as row_has_loss: 16."""
    found = re.findall(r"constexpr \w+ k(\w+) = (-?\w+);", HEADER)
    return {snake(name): int(value, 0) for name, value in found}


def magics() -> dict[str, bytes]:
    """`kFileMagic[5] = {'M', ...}` as file: b"M..."."""
    found = re.findall(r"constexpr char k(\w+)Magic\[\d\] = \{(.*?)\};", HEADER)
    return {snake(name): "".join(re.findall(r"'(.)'", letters)).encode() for name, letters in found}


def kinds() -> dict[str, int]:
    (body,) = re.findall(r"enum class FrameKind : uint32_t \{(.*?)\}", HEADER)
    return {snake(name): int(value) for name, value in re.findall(r"k(\w+) = (\d+)", body)}


def sentence(start: str) -> str:
    """From `start` to the next full stop."""
    return TEXT[TEXT.index(start) + len(start) :].split(".")[0]


def numbered(text: str) -> dict[str, int]:
    return {
        name.replace(" ", "_"): int(number)
        for number, name in re.findall(r"(-?\d+) (?:= )?([a-z][a-z_-]*(?: (?!\()[a-z_]+)?)", text)
    }


def test_kinds_and_flags_are_those_of_the_format() -> None:
    assert kinds() == numbered(sentence("Kinds:"))
    rows = {name.removeprefix("row_"): value for name, value in constants().items() if name.startswith("row_")}
    assert rows == numbered(sentence("Row flags:"))
    assert len(rows) == 8
    assert "Frame flags: 1 = row-major" in TEXT
    assert constants()["frame_row_major"] == 1


def test_codes_and_sizes_are_those_of_the_format() -> None:
    found = constants()
    reserved = numbered(sentence("Reserved:").lower())
    assert reserved == {
        "zero": found["zero_code"],
        "absent": found["absent_code"],
        "nan": found["nan_code"],
        "infinity": found["inf_code"],
    }
    assert f"clamped to [-{found['max_code']}, {found['max_code']}]" in TEXT
    assert f"0x{found['absent_float_bits']:x}" in TEXT
    assert f"each {found['chunk_bytes']:,} bytes of payload" in TEXT
    assert f"A frame in the main file holds {found['frame_rows']} rows" in TEXT
    assert f"u16 | version, {found['version']} |" in TEXT


def test_the_python_side_has_the_same_numbers() -> None:
    found = constants()
    assert {name: getattr(fmt, f"KIND_{name.upper()}") for name in kinds()} == kinds()
    rows = {name: value for name, value in found.items() if name.startswith("row_")}
    assert {name: getattr(fmt, name.upper()) for name in rows} == rows
    same = {
        "version": fmt.VERSION,
        "align": fmt.ALIGNMENT,
        "chunk_bytes": fmt.CHUNK_BYTES,
        "frame_rows": fmt.ROWS_PER_FRAME,
        "frame_row_major": fmt.FRAME_ROW_MAJOR,
        "zero_code": codecs.CODE_ZERO,
        "absent_code": codecs.CODE_ABSENT,
        "max_code": codecs.CODE_LIMIT,
        "nan_code": codecs.CODE_NAN,
        "inf_code": codecs.CODE_INFINITY,
        "absent_float_bits": codecs.ABSENT_BITS,
    }
    assert {name: found[name] for name in same} == same
    assert magics() == {"file": fmt.MAGIC, "frame": fmt.FRAME_MAGIC, "index": fmt.INDEX_MAGIC}
    assert all(f"`{magic.decode()}`" in TEXT for magic in magics().values())


TYPES = {"uint32_t": "u32", "uint64_t": "u64", "float": "f32", "<u4": "u32", "<u8": "u64", "<f4": "f32"}


def fields_of_struct(name: str) -> list[tuple[str, str]]:
    """Type and name of each member, with the types of FORMAT.md."""
    (body,) = re.findall(rf"struct {name} \{{(.*?)\}};", HEADER, re.S)
    return [(TYPES[kind], field) for kind, field in re.findall(r"(\w+) (\w+);", body)]


def fields_of_dtype(dtype: np.dtype) -> list[tuple[str, str]]:
    return [(TYPES[dtype[name].str], name.replace("reserved", "zero")) for name in dtype.names or ()]


def test_row_records_have_the_same_fields_in_all_three() -> None:
    table = TEXT.split("## Steps frame")[1].split("Row flags")[0]
    told = re.findall(r"\| (\d+) \| (\w+) \| (\w+) ", table)
    assert [(kind, name.replace("0", "zero")) for _, kind, name in told] == fields_of_struct("RowRecord")
    assert [int(offset) for offset, _, _ in told] == [fmt.ROW_DTYPE.fields[name][1] for name in fmt.ROW_DTYPE.names]
    assert fields_of_dtype(fmt.ROW_DTYPE) == fields_of_struct("RowRecord")


def test_index_entries_have_the_same_fields_in_all_three() -> None:
    told = re.search(r"for every frame before it 48 bytes \((.*?)\)", TEXT)
    assert [tuple(field.split()) for field in told[1].split(", ")] == fields_of_struct("IndexEntry")
    assert fields_of_dtype(fmt.INDEX_DTYPE) == fields_of_struct("IndexEntry")
