"""Headers, frames, codecs and schemas: exact bytes, and hostile ones raise ScanFormatError and nothing else."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pyscan
from pyscan import codecs
from pyscan import format as fmt
from pyscan.errors import ScanFormatError
from pyscan.payloads import TokenArray, decode_events, decode_tokens, encode_tokens
from pyscan.schema import Channel, Layout, Merge, Mesh, Schema, SiteInfo
from tests.make_scan import CREATED_NS, RUN_ID, make_schema

ROOT = Path(__file__).parent.parent


def test_header_bytes_are_those_of_the_document() -> None:
    data = fmt.encode_header(RUN_ID, CREATED_NS)
    assert data[:16] == b"MSCAN\x02\x00\x00" + (64).to_bytes(4, "little") + bytes(4)
    assert data[16:40] == RUN_ID + CREATED_NS.to_bytes(8, "little")
    assert data[40:60] == bytes(20)
    assert data[60:] == zlib.crc32(data[:60]).to_bytes(4, "little")
    assert fmt.decode_header(data) == (RUN_ID, CREATED_NS)


def test_frame_bytes_are_those_of_the_document() -> None:
    payload = bytes(range(256)) * 17  # 4352 bytes: a whole chunk and a piece of one
    data = fmt.encode_frame(3, payload, run_id=RUN_ID, frame_number=9, first_step=5, first_row=6, rows=7, flags=1)
    assert len(data) == 64 + 64 + 4352
    assert data[:8] == b"FRAM\x03\x00\x00\x00"
    fields = [
        int.from_bytes(data[a:b], "little") for a, b in ((8, 16), (16, 24), (24, 32), (32, 36), (36, 40), (40, 48))
    ]
    assert fields == [4352, 5, 6, 7, 1, 9]
    assert data[48:56] == RUN_ID[:8]
    table = data[64:128]
    assert table[:8] == b"".join(zlib.crc32(p).to_bytes(4, "little") for p in (payload[:4096], payload[4096:]))
    assert table[8:] == bytes(56)
    assert data[56:60] == zlib.crc32(table).to_bytes(4, "little")
    assert data[60:64] == zlib.crc32(data[:60]).to_bytes(4, "little")
    assert data[128:] == payload


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 4095, 4096, 4097, 65536, 70001])
def test_frame_takes_the_space_the_document_says(size: int) -> None:
    data = fmt.encode_frame(1, bytes(size), run_id=RUN_ID, frame_number=0)
    frame = fmt.decode_frame(memoryview(data), 0, RUN_ID)
    assert isinstance(frame, fmt.Frame)
    assert frame.end == len(data) == 64 + -(-4 * -(-size // 4096) // 64) * 64 + -(-size // 64) * 64


def test_a_million_norms_come_back_within_the_promised_error() -> None:
    rng = np.random.default_rng(0)
    norms = np.exp2(rng.uniform(-127, 127, 1_000_000))
    read = codecs.decode(codecs.encode(norms, "log2q8"), "log2q8").astype(np.float64)
    assert np.abs(read / norms - 1).max() <= 0.001356


@settings(max_examples=300, deadline=None)
@given(st.lists(st.floats(min_value=2.0**-127, max_value=2.0**127), min_size=1, max_size=64))
def test_any_norm_comes_back_within_the_promised_error(norms: list[float]) -> None:
    values = np.array(norms)
    read = codecs.decode(codecs.encode(values, "log2q8"), "log2q8").astype(np.float64)
    assert np.abs(read / values - 1).max() <= 0.001356


def test_special_values_are_exact_and_beyond_the_range_the_code_clamps() -> None:
    values = np.array([0.0, np.inf, np.nan, pyscan.ABSENT], np.float32)
    codes = codecs.encode(values, "log2q8")
    assert codes.tolist() == [-32768, 32767, 32766, -32767]
    read = codecs.decode(codes, "log2q8")
    assert read.view(np.uint32).tolist()[3] == 0x7FC0AB5E
    assert pyscan.is_absent(read).tolist() == [False, False, False, True]
    assert read[0] == 0
    assert np.isinf(read[1])
    assert np.isnan(read[2])
    assert codecs.encode(np.array([1e300, 1e-300, -1.0, 1.0]), "log2q8").tolist() == [32765, -32765, 32766, 0]


def test_every_code_survives_decoding_and_encoding() -> None:
    codes = np.arange(-32768, 32768).astype("<i2")
    again = codecs.encode(codecs.decode(codes, "log2q8"), "log2q8")
    clamped = np.flatnonzero(codes != again)
    assert codes[clamped].tolist() == [-32766]  # never written: the smallest code is -32765
    values = codecs.decode(codes[3:-2], "log2q8")
    assert (np.diff(values) > 0).all()


def test_every_u16_value_survives() -> None:
    codes = np.arange(65536).astype("<u2")
    assert np.array_equal(codecs.encode(codecs.decode(codes, "u16"), "u16"), codes)


def test_combining_leaves_absent_out_and_lets_nan_through() -> None:
    absent, nan = pyscan.ABSENT, np.float32(np.nan)
    cells = np.array([[3, 4], [3, absent], [absent, absent], [nan, absent], [nan, 1], [np.inf, 1]], np.float32)
    for op, expected in (("sumsq", [5, 3]), ("add", [7, 3]), ("max", [4, 3])):
        merged = codecs.combine(cells, op, axis=1)
        assert merged[:2].tolist() == expected
        assert pyscan.is_absent(merged).tolist() == [False, False, True, False, False, False]
        assert np.isnan(merged[3:5]).all()
        assert np.isinf(merged[5])
    assert pyscan.is_absent(codecs.combine(np.zeros((2, 0), np.float32), "max", axis=1)).all()


def test_schema_survives_json() -> None:
    site = SiteInfo(
        "a.weight", "linear", (8, 130), "bfloat16", 3, 1, "b.weight", (4, 64), {"act": Merge(("dp",), ("tp",))}
    )
    mesh = Mesh(("dp", "tp"), (2, 4), (1, 3))
    schema = Schema("m", (Channel("act"),), (site,), 64, 2, 7, 8, mesh, {"torch": "2"}, {"note": ["ü", 1.5]})
    assert Schema.from_json(schema.to_json()) == schema


def test_layout_puts_channel_after_channel_and_site_after_site() -> None:
    layout = Layout(make_schema((3, 1)))
    assert layout.num_cells == [4, 4, 2, 2]
    assert [layout.cells(0, i) for i in range(2)] == [(0, 3), (3, 4)]
    assert [layout.cells(2, i) for i in range(2)] == [(0, 1), (1, 2)]
    assert layout.sections(64) == ([3072, 3584, 4096, 4352], 4864)
    assert layout.sections(1) == ([64, 128, 192, 256], 320)


def _broken(change: str) -> bytes:
    raw = json.loads(make_schema().to_json())
    target, key, value = json.loads(change)
    place = raw
    for step in target:
        place = place[step]
    place[key] = value
    return json.dumps(raw).encode()


@pytest.mark.parametrize(
    "change",
    [
        '[[], "model", 7]',
        '[[], "block", -1]',
        '[[], "block", true]',
        '[[], "block", 1.5]',
        '[[], "block", 1e400]',
        '[[], "every", 0]',
        '[[], "rank", 1]',
        '[[], "world", 1000000000000]',
        '[[], "channels", {}]',
        '[[], "sites", null]',
        '[[], "versions", []]',
        '[[], "mesh", {"dims": ["a"], "shape": [2], "coords": [2]}]',
        '[[], "mesh", {"dims": ["a", "a"], "shape": [2, 2], "coords": [1, 1]}]',
        '[[], "mesh", {"dims": ["a"], "shape": [[[]]], "coords": [2]}]',
        '[["channels", 0], "codec", "pickle"]',
        '[["channels", 0], "per", ["block"]]',
        '[["channels", 0], "name", null]',
        '[["channels", 1], "name", "act"]',
        '[["sites", 0], "name", "model.layers.1.proj.weight"]',
        '[["sites", 0], "name", 3]',
        '[["sites", 0], "blocks", -1]',
        '[["sites", 0], "blocks", 1e999]',
        '[["sites", 0], "blocks", 99999999999999999999999]',
        '[["sites", 0], "shape", "8"]',
        '[["sites", 0], "shape", [-1]]',
        '[["sites", 0], "offset", [1]]',
        '[["sites", 0], "offset", ["a", 1]]',
        '[["sites", 0], "merge", {"act": ["dp"]}]',
        '[["sites", 0], "merge", {"act": {"over": [1]}}]',
        '[["sites"], 0, 5]',
    ],
)
def test_a_schema_that_breaks_a_rule_is_refused(change: str) -> None:
    with pytest.raises(ScanFormatError):
        Schema.from_json(_broken(change))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        b'{"model": NaN}',
        b'{"model": "m", "model": "m"}',
        b'{"block": ' + b"9" * 5000 + b"}",
        make_schema().to_json().replace(b"tiny", b"\\ud800"),
    ],
)
def test_hostile_json_is_refused(data: bytes) -> None:
    with pytest.raises(ScanFormatError):
        Schema.from_json(data)


def test_bad_event_lines_are_named_and_skipped() -> None:
    lines = [b'{"kind": "x", "step": 1, "site": null}', b"{", b'{"kind": 1}', b'{"kind": "x", "step": -1}', b""]
    events, reasons = decode_events(b"\n".join(lines))
    assert events == [{"kind": "x", "step": 1, "site": None}]
    assert len(reasons) == 3


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"site": 0', b'"site": 9'),
        (b'"offset": 832', b'"offset": 999999'),
        (b'"offset": 832', b'"offset": 833'),
        (b'"offset": 832', b'"offset": -64'),
        (b'"shape": [1, 5]', b'"shape": [0, 99999999999999999999]'),
        (b'"dtype": "i2"', b'"dtype": "O8"'),
        (b'"dtype": "i4"', b'"dtype": "O"'),
        (b'"channel": "act"', b'"channel": "ids"'),
        (b'"codec": "log2q8"', b'"codec": []'),
        (b'"step": 3', b'"step": null'),
    ],
)
def test_a_tokens_frame_that_points_outside_is_refused(old: bytes, new: bytes) -> None:
    arrays = [TokenArray(0, "act", "log2q8", np.zeros(5, "<i2"))]
    good = encode_tokens(3, 5, np.zeros((1, 5), "<i4"), arrays)
    assert decode_tokens(good, 1).step == 3
    size = int.from_bytes(good[:4], "little")
    text = good[4 : 4 + size]
    assert old in text
    text = text.replace(old, new, 1)
    bad = len(text).to_bytes(4, "little") + text
    with pytest.raises(ScanFormatError):
        decode_tokens(bad + bytes(len(good) - len(bad)), 1)
