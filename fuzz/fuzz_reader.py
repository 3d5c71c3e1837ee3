"""Fuzz the reader: whatever the bytes, opening and reading them gives a Run or a ScanFormatError, and nothing else.

`python fuzz/fuzz_reader.py -runs=N` mutates small scans; half of the mutants get their checksums mended, so that the
fuzzer reaches what stands behind them. Further arguments are those of libFuzzer, for example `-max_total_time=60` or a
corpus directory.
"""

from __future__ import annotations

import contextlib
import json
import random
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import atheris

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy  # noqa: E402, F401  # before instrumentation: only pyscan's own code is of interest

with atheris.instrument_imports(include=["pyscan"]):
    from pyscan import format as fmt
    from pyscan.check import check_run
    from pyscan.errors import ScanError, ScanFormatError
    from pyscan.reader import Run, open_buffer

from pyscan.schema import Channel, Mesh  # noqa: E402
from tests.make_scan import Builder, make_schema  # noqa: E402


def seeds() -> list[bytes]:
    """Small files: every kind of frame, with and without index, resumed, torn, regrouped, with a tail, version 1.1."""
    channels = (Channel("act"), Channel("grad"), Channel("bad", "site", "f32", "plain", "add"))
    schema = make_schema((2, 1), channels)
    regrouped = make_schema((3, 1, 1), (Channel("act", "site"), Channel("grad", codec="u16"), Channel("bad")))
    mesh = make_schema((1,), channels, world=2, mesh=Mesh(("dp",), (2,), (0,)))
    tail = Builder(schema).steps([1, 2]).tail_rows([3]).tail_rows([4, 5])
    v1 = {
        "model_name": "m",
        "id_to_param_name_map": {"0": "a", "1": "b"},
        "sequences": [{"sequence_id": 0, "num_tokens": 2, "source": "x"}],
    }
    return [
        bytes(Builder(schema).steps([1, 2, 3]).event("x", 2).tokens(2).steps([4]).index().main),
        bytes(Builder(schema).steps([1, 2, 3]).event("x", 2).tokens(2).steps([2, 3], resumed=True).main),
        bytes(Builder(mesh).steps([1]).new_schema(schema).steps([2]).tear(90).steps([2, 3], resumed=True).main),
        bytes(Builder(schema).steps([1, 2]).new_schema(regrouped).steps([3]).new_schema(schema).steps([4]).main),
        _join(bytes(tail.main), bytes(tail.tail)),
        version1_file(v1, [(0, 0, 0, 1, 2), (0, 1, 0, 3, 4), (1, 0, 1, 65535, 0)]),
    ]


def version1_file(header: dict[str, object], records: list[tuple[int, ...]]) -> bytes:
    text = json.dumps(header).encode()
    start = struct.pack("<5sHII", b"MSCAN", 1, 15 + len(text), len(records))
    return start + text + b"".join(struct.pack("<IHHHH", *record) for record in records)


# A main file and its tail are one input, the main file's length behind them.
def _join(main: bytes, tail: bytes) -> bytes:
    return main + tail + struct.pack("<I4s", len(main), b"TAIL")


def _split(data: bytes) -> tuple[bytes, bytes]:
    if len(data) < 8 or data[-4:] != b"TAIL":
        return data, b""
    size = struct.unpack_from("<I", data, len(data) - 8)[0]
    return data[:-8][:size], data[:-8][size:]


def exercise(data: bytes) -> None:
    """What a user can call; the bytes decide which half of it, so that the same bytes always do the same."""
    try:
        run = open_buffer(*_split(data))
    except ScanFormatError:
        return
    choice = zlib.crc32(data)
    events = run.events
    for site in run.sites[:2]:
        _allowed((run.act, _grad_blocks(run), _codes(run))[choice % 3], site.name)
    if choice & 1:
        _allowed(run.tokens, next((event["step"] for event in events), 2))
    if choice & 2:
        run.refresh()
    if choice & 4:
        check_run(run)
    repr(run)
    run.damage.sort()
    run.close()


def _grad_blocks(run: Run) -> Callable[[str], object]:
    return lambda name: run.grad(name, blocks=True, steps=slice(1, None))


def _codes(run: Run) -> Callable[[str], object]:
    return lambda name: run.codes("bad", name)


def _allowed(call: Callable[[Any], object], argument: object) -> None:
    with contextlib.suppress(ScanError):
        call(argument)


def mend(data: bytearray) -> None:
    """Set the checksums of the file header and of every frame that still has its magic."""
    if len(data) < 64 or data[5] != 2:
        return
    data[60:64] = struct.pack("<I", zlib.crc32(data[:60]))
    offset = data.find(fmt.FRAME_MAGIC)
    while 0 <= offset <= len(data) - 64:
        payload_bytes = int.from_bytes(data[offset + 8 : offset + 16], "little")
        chunks = -(-payload_bytes // 4096)
        table = offset + 64
        payload = table + fmt.pad64(4 * chunks)
        if payload + payload_bytes <= len(data):
            for i in range(chunks):
                piece = data[payload + 4096 * i : min(payload + 4096 * (i + 1), payload + payload_bytes)]
                data[table + 4 * i : table + 4 * i + 4] = struct.pack("<I", zlib.crc32(piece))
            data[offset + 48 : offset + 56] = data[16:24]
            data[offset + 56 : offset + 60] = struct.pack("<I", zlib.crc32(data[table:payload]))
        data[offset + 60 : offset + 64] = struct.pack("<I", zlib.crc32(data[offset : offset + 60]))
        offset = data.find(fmt.FRAME_MAGIC, offset + 64)


WORDS = [
    b"FRAM",
    b"MSCANIDX",
    b"null",
    b"[]",
    b"{}",
    b"-1",
    b"1e999",
    b"99999999999",
    b'"act"',
    b"NaN",
    b'"site"',
    b'"block"',
    b'"u16"',
    b"\\ud800",
    b"TAIL",
]
NUMBERS = [0, 1, 63, 64, 65, 4096, 2**31, 2**32 - 1, 2**63, 2**64 - 1]


def change(data: bytearray, rng: random.Random) -> None:
    """One edit that a blind mutation would rarely make."""
    if len(data) < 72:
        return
    place = rng.randrange(len(data))
    choice = rng.randrange(4)
    if choice == 0:
        word = rng.choice(WORDS)
        data[place : place + len(word)] = word
    elif choice == 1:
        place -= place % 4
        data[place : place + 8] = rng.choice(NUMBERS).to_bytes(8, "little")
    elif choice == 2:  # a field of some frame header
        header = data.find(fmt.FRAME_MAGIC, place)
        if header >= 0:
            field = header + rng.choice((4, 8, 16, 24, 32, 36, 40))
            data[field : field + 4] = (rng.choice(NUMBERS) & 0xFFFFFFFF).to_bytes(4, "little")
    else:  # a frame moved or repeated
        place -= place % 64
        other = rng.randrange(0, len(data), 64)
        data[place : place + 64] = data[other : other + 64]


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    rng = random.Random(seed)
    mutant = bytearray(data)
    for _ in range(rng.randrange(3)):
        change(mutant, rng)
    if rng.random() < 0.4:
        mutant = bytearray(atheris.Mutate(bytes(mutant), max_size))
    if rng.random() < 0.6:
        mend(mutant)
    return bytes(mutant[:max_size])


def main() -> None:
    arguments = list(sys.argv)
    if not any(not argument.startswith("-") for argument in arguments[1:]):
        corpus = Path(tempfile.mkdtemp(prefix="fuzz_reader_"))
        for i, seed in enumerate(seeds()):
            (corpus / f"seed{i}").write_bytes(seed)
        arguments.append(str(corpus))
    atheris.Setup([*arguments, "-max_len=6144"], exercise, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
