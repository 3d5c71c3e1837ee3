"""Synthetic scans for tests: every value in them is known, and every frame can be placed where a test needs it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pyscan import codecs
from pyscan import format as fmt
from pyscan.frame_writer import FrameWriter
from pyscan.payloads import TokenArray, encode_tokens
from pyscan.schema import Channel, Schema, SiteInfo

RUN_ID = bytes(range(16))
CREATED_NS = 1_700_000_000_000_000_000

CHANNELS = (
    Channel("act"),
    Channel("grad"),
    Channel("act_max", per="site", transform="plain", op="max"),
    Channel("grad_bad", per="site", codec="f32", transform="plain", op="add"),
)


def site(name: str, num_blocks: int, **more: object) -> SiteInfo:
    return SiteInfo(name, "linear", (8, 64 * num_blocks), "float32", num_blocks, **more)


def make_schema(blocks: tuple[int, ...] = (3, 1), channels: tuple[Channel, ...] = CHANNELS, **more: object) -> Schema:
    sites = tuple(site(f"model.layers.{i}.proj.weight", n) for i, n in enumerate(blocks))
    return Schema("tiny", channels, more.pop("sites", sites), metadata={"note": "synthetic"}, **more)


def make_rows(steps: range | list[int], *, resumed: bool = False) -> np.ndarray:
    rows = np.zeros(len(steps), fmt.ROW_DTYPE)
    rows["step"] = steps
    rows["time_ns"] = CREATED_NS + 1000 * rows["step"]
    rows["tokens"], rows["loss"] = 340, 1 / (1 + rows["step"].astype(np.float32))
    rows["flags"] = fmt.ROW_HAS_TOKENS | fmt.ROW_HAS_LOSS
    if resumed:
        rows["flags"][0] |= fmt.ROW_RESUMED
    return rows


def value(channel: int, cell: int, step: int) -> float:
    """The value of a cell: different for every channel, cell and step."""
    return 2.0 ** (((channel * 7 + cell * 13 + step * 3) % 997) / 32 - 12)


def make_cells(schema: Schema, steps: range | list[int]) -> list[np.ndarray]:
    """Per channel the cells as stored, [cells, rows]."""
    sections = []
    for number, channel in enumerate(schema.channels):
        count = sum(site.num_cells(channel.per) for site in schema.sites)
        values = np.array([[value(number, cell, step) for step in steps] for cell in range(count)])
        sections.append(codecs.encode(values.reshape(count, len(steps)), channel.codec))
    return sections


def expected(schema: Schema, channel: str, name: str, steps: range | list[int]) -> np.ndarray:
    """What the reader must give for that site, [steps, blocks], from the definition and independent of any file."""
    number = [c.name for c in schema.channels].index(channel)
    what = schema.channels[number]
    place = [s.name for s in schema.sites].index(name)
    first = sum(s.num_cells(what.per) for s in schema.sites[:place])
    count = schema.sites[place].num_cells(what.per)
    values = np.array([[value(number, first + cell, step) for cell in range(count)] for step in steps])
    codes = np.rint(256 * np.log2(values))
    return (2.0 ** (codes / 256) if what.codec == "log2q8" else values).astype(np.float32).reshape(len(steps), count)


class Builder:
    """A file in the making: the bytes of `main` and of `tail`."""

    def __init__(self, schema: Schema | None = None, *, run_id: bytes = RUN_ID) -> None:
        self.main, self.tail = bytearray(), bytearray()
        self.run_id = run_id
        self.writer = FrameWriter(self.main.extend, run_id, CREATED_NS)
        self.schema = schema or make_schema()
        self.writer.schema(self.schema)

    def new_schema(self, schema: Schema) -> Builder:
        self.schema = schema
        self.writer.schema(schema)
        return self

    def steps(self, steps: range | list[int], *, resumed: bool = False, num_rows: int = 64) -> Builder:
        """Full frames of `num_rows` and a shorter last one."""
        for start in range(0, len(steps), num_rows):
            part = steps[start : start + num_rows]
            rows = make_rows(part, resumed=resumed and start == 0)
            self.writer.steps(rows, make_cells(self.schema, part))
        return self

    def events(self, *events: dict) -> Builder:
        self.writer.events(events)
        return self

    def event(self, kind: str, step: int, **more: object) -> Builder:
        return self.events({"kind": kind, "step": step, "site": None, **more})

    def tokens(self, step: int, num_tokens: int = 5) -> Builder:
        ids = np.arange(num_tokens, dtype="<i4").reshape(1, -1)
        norms = np.linspace(1, 2, num_tokens) * (step + 1)
        arrays = [TokenArray(0, name, "log2q8", codecs.encode(norms, "log2q8")) for name in ("act", "grad")]
        self.writer.tokens(encode_tokens(step, num_tokens, ids, arrays))
        return self

    def tear(self, num_bytes: int) -> Builder:
        """Cut the last frame to so many bytes and go on at the next multiple of 64, as a resumed writer does."""
        frame = self.writer.frames.pop()
        del self.main[frame.offset + num_bytes :]
        self.main.extend(bytes(-len(self.main) % 64))
        self.writer.offset = len(self.main)
        if frame.kind == fmt.KIND_STEPS:
            self.writer.next_row = frame.first_row
        return self

    def index(self) -> Builder:
        self.writer.index()
        return self

    def tail_rows(self, steps: range | list[int], *, first_row: int | None = None, resumed: bool = False) -> Builder:
        """A row-major frame in the tail file; by default its rows follow those of the main file and of the tail."""
        if not self.tail:
            self._tail_writer = FrameWriter(self.tail.extend, self.run_id, CREATED_NS)
            self._tail_writer.next_row = self.writer.next_row
        rows = make_rows(steps, resumed=resumed)
        self._tail_writer.steps(rows, make_cells(self.schema, steps), first_row=first_row, row_major=True)
        return self

    def save(self, path: Path) -> Path:
        path.write_bytes(self.main)
        tail = path.with_name(path.name + ".tail")
        if self.tail:
            tail.write_bytes(self.tail)
        elif tail.exists():
            tail.unlink()
        return path
