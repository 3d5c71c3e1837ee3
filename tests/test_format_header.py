"""The numbers in csrc/format.h are those of FORMAT.md and of pyscan/format.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TEXT = " ".join((ROOT / "FORMAT.md").read_text().split())
HEADER = (ROOT / "csrc" / "format.h").read_text()


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def constants() -> dict[str, int]:
    """`kRowHasLoss = 16` as row_has_loss: 16."""
    found = re.findall(r"constexpr \w+ k(\w+) = (-?\w+);", HEADER)
    return {snake(name): int(value, 0) for name, value in found}


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
    python = pytest.importorskip("pyscan.format")
    found = constants()
    assert {name: getattr(python, f"KIND_{name.upper()}") for name in kinds()} == kinds()
    rows = {name: value for name, value in found.items() if name.startswith("row_")}
    assert {name: getattr(python, name.upper()) for name in rows} == rows
    assert (
        found["version"],
        found["chunk_bytes"],
        found["frame_rows"],
        found["frame_row_major"],
    ) == (python.VERSION, python.CHUNK_BYTES, python.ROWS_PER_FRAME, python.FRAME_ROW_MAJOR)
