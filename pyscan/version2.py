"""A version 2 file as a Run: which schema governs a frame, which rows there are, and the cells of one site over time.

It receives a source (a file with its tail, or bytes) and touches the bytes of what is asked for alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import numpy as np

from pyscan import codecs
from pyscan import format as fmt
from pyscan.codecs import Array, Floats
from pyscan.errors import ScanFormatError
from pyscan.format import Frame
from pyscan.frames import ScanFile
from pyscan.journal import Journal
from pyscan.payloads import Event
from pyscan.run import Run
from pyscan.schema import Channel, Layout, Schema, SiteInfo
from pyscan.source import Source
from pyscan.timeline import Part, Segment, Timeline, arrange, gather

_BYTES = np.dtype((np.void, fmt.ROW_DTYPE.itemsize))


def read_layout(payload: bytes) -> Layout:
    return Layout(Schema.from_json(payload))


class FileRun(Run):
    """One version 2 file, with its tail while it is still being written."""

    version = fmt.VERSION

    def __init__(self, source: Source, read_layout: Callable[[bytes], Layout] = read_layout) -> None:
        self.path = source.path
        self._source = source
        self._read_layout = read_layout
        try:
            tail, main = source.load()
            self.file = ScanFile(main)
        except BaseException:
            source.close()
            raise
        self.governing: list[Layout | None] = []
        self._tables: dict[int, Array | None] = {}
        self.journal = Journal(self.file)
        self._notes: dict[int, str] = {}
        self._take(tail, 0)

    @property
    def _num_bytes(self) -> int:
        return len(self.file.view)

    def refresh(self) -> int:
        before = self.timeline.rows
        tail, main = self._source.load()
        if len(main) < self._num_bytes:
            raise ScanFormatError(f"{self.path} shrank from {self._num_bytes} to {len(main)} bytes; open it anew")
        kept = self.file.grow(main) if len(main) > self._num_bytes else len(self.file.frames)
        for frame in self.file.frames[kept:]:
            self._tables.pop(frame.offset, None)
            self._notes.pop(frame.offset, None)
            self.journal.forget(frame)
        self._take(tail, kept)
        return len(self.steps) - _num_equal(before, self.timeline.rows)

    def close(self) -> None:
        self.file.close()
        self._source.close()

    def _take(self, tail: bytes, first_frame: int) -> None:
        """Find the schema of every frame from `first_frame` on and forget what follows from the frames."""
        del self.governing[first_frame:]
        layout = self.governing[-1] if self.governing else None
        for frame in self.file.frames[first_frame:]:
            if frame.kind == fmt.KIND_SCHEMA:
                layout = self._read_schema(frame)
            self.governing.append(layout)
        if not any(self.governing):
            raise ScanFormatError("the file has no schema yet, or its schema is damaged")
        self.tail = self._open_tail(tail)
        self._describe()
        self._timeline: Timeline | None = None

    def _read_schema(self, frame: Frame) -> Layout | None:
        payload = self.file.payload(frame)
        first = not self.governing
        if payload is None:
            if first:
                raise ScanFormatError("the first schema of the file is damaged")
            return None
        try:
            return self._read_layout(payload)
        except ScanFormatError as error:
            if first:
                raise
            self._notes[frame.offset] = f"bad schema: {error}"
            return None

    def _open_tail(self, tail: bytes) -> ScanFile | None:
        """The tail, unless it is of another run or (being created or cut back at this moment) has no whole header."""
        self.tail_error = ""
        try:
            file = ScanFile(tail) if tail else None
        except ScanFormatError as error:
            self.tail_error = str(error)
            return None
        if file is not None and file.header.run_id != self.file.header.run_id:
            self.tail_error = "it belongs to another run"
            return None
        return file

    def _describe(self) -> None:
        layouts = list(dict.fromkeys(layout for layout in self.governing if layout is not None))
        schema = layouts[-1].schema
        self.layouts = layouts
        self.schema = schema
        self.model, self.block, self.every = schema.model, schema.block, schema.every
        self.rank, self.world = schema.rank, schema.world
        self.metadata, self.versions, self.row_kind = schema.metadata, schema.versions, schema.row_kind
        self.sites = list({site.name: site for layout in layouts for site in layout.schema.sites}.values())
        self.channels = list({c.name: c for layout in layouts for c in layout.schema.channels}.values())

    @property
    def timeline(self) -> Timeline:
        """Rows in force, found at first use."""
        if self._timeline is None:
            self._timeline = arrange([*self.main_parts(), *self.tail_parts()])
        return self._timeline

    @property
    def steps(self) -> Array:
        return self.timeline.steps

    def main_parts(self) -> Iterator[Part]:
        for frame, layout in zip(self.file.frames, self.governing, strict=True):
            if frame.kind != fmt.KIND_STEPS:
                continue
            if frame.offset not in self._tables:
                self._tables[frame.offset] = self._read_table(self.file, frame, layout)
            table = self._tables[frame.offset]
            if table is not None and layout is not None:
                yield Part(self.file, frame, layout, table)

    def tail_parts(self) -> Iterator[Part]:
        """The rows of the tail whose numbers are not in the main file yet."""
        if self.tail is None or self.governing[-1] is None:
            return
        steps = [frame for frame in self.file.frames if frame.kind == fmt.KIND_STEPS]
        next_row = max((frame.first_row + frame.rows for frame in steps), default=0)
        for frame in self.tail.frames:
            skip = max(next_row - frame.first_row, 0)
            if frame.kind != fmt.KIND_STEPS or skip >= frame.rows:
                continue
            table = self._read_table(self.tail, frame, self.governing[-1])
            if table is not None:
                yield Part(self.tail, frame, self.governing[-1], table, skip)
                next_row = frame.first_row + frame.rows

    def _read_table(self, file: ScanFile, frame: Frame, layout: Layout | None) -> Array | None:
        """The 48-byte records of a steps frame, or None if they cannot be trusted: then none of its rows can."""
        notes = self._notes if file is self.file else {}
        if layout is None:
            notes[frame.offset] = "steps frame without a schema in force"
            return None
        if frame.payload_bytes != layout.sections(frame.rows)[1]:
            notes[frame.offset] = f"a steps frame of {frame.rows} rows does not fit its schema"
            return None
        if file.bad_chunks(frame, 0, frame.rows * fmt.ROW_DTYPE.itemsize):
            return None
        return np.frombuffer(file.view, fmt.ROW_DTYPE, frame.rows, frame.payload_offset).copy()

    def _num_cells(self, channel: Channel, site: SiteInfo) -> int:
        """The largest number any schema gives the site; they differ only if the model was changed between two runs."""
        places = ((layout, layout.site_index.get(site.name)) for layout in self.layouts)
        return max(layout.schema.sites[i].num_cells(channel.per) for layout, i in places if i is not None)

    def _cells(self, channel: Channel, site: SiteInfo, start: int, stop: int) -> Floats:
        out = np.full((self._num_cells(channel, site), stop - start), codecs.ABSENT, np.float32)
        for codes, missing, codec, first in self._stored(channel, site, start, stop):
            place = out[: codes.shape[0], first : first + codes.shape[1]]
            place[:] = codecs.decode(codes, codec)
            if missing is not None:
                place[missing] = codecs.ABSENT
        return out.T

    def _all_cells(self, channel: Channel, start: int, stop: int) -> Floats:
        """Where every schema has the sites of the run, a frame's share is one piece of the file."""
        groups = [(layout, list(g)) for layout, g in groupby(self.timeline.overlapping(start, stop), _layout_of)]
        if any(layout.schema.sites != tuple(self.sites) for layout in {layout for layout, _ in groups}):
            return super()._all_cells(channel, start, stop)
        num_cells = sum(self._num_cells(channel, site) for site in self.sites)
        out = np.full((num_cells, stop - start), codecs.ABSENT, np.float32)
        for layout, segments in groups:
            number = layout.channel_index.get(channel.name)
            if number is None or layout.schema.channels[number].per != channel.per:
                continue
            first, last = max(segments[0].start, start), min(segments[-1].stop, stop)
            codes, missing = gather(segments, number, (0, num_cells), first, last)
            place = out[:, first - start : last - start]
            place[:] = codecs.decode(codes, layout.schema.channels[number].codec)
            if missing is not None:
                place[missing] = codecs.ABSENT
        return out.T

    def _codes(self, channel: Channel, site: SiteInfo, start: int, stop: int) -> Array:
        out = codecs.absent_codes((self._num_cells(channel, site), stop - start), channel.codec)
        for codes, missing, codec, first in self._stored(channel, site, start, stop):
            same = codes if codec == channel.codec else codecs.encode(codecs.decode(codes, codec), channel.codec)
            place = out[: codes.shape[0], first : first + codes.shape[1]]
            place[:] = same
            if missing is not None:
                place[missing] = codecs.absent_codes((), channel.codec)
        return out.T

    def _stored(
        self, channel: Channel, site: SiteInfo, start: int, stop: int
    ) -> Iterator[tuple[Array, Array | None, str, int]]:
        """Per schema: cells as stored [cells, rows], which are lost to damage, codec, place of the first row."""
        for layout, group in groupby(self.timeline.overlapping(start, stop), key=_layout_of):
            number, place = layout.channel_index.get(channel.name), layout.site_index.get(site.name)
            if number is None or place is None or layout.schema.channels[number].per != channel.per:
                continue
            segments = list(group)
            first, last = max(segments[0].start, start), min(segments[-1].stop, stop)
            codes, missing = gather(segments, number, layout.cells(number, place), first, last)
            yield codes, missing, layout.schema.channels[number].codec, first - start

    @property
    def events(self) -> list[Event]:
        return self.journal.events(self.timeline)

    def tokens(self, step: int) -> dict[str, Any]:
        return self.journal.tokens(step, self.timeline, self.governing)

    def token_steps(self) -> list[int]:
        """The steps that `tokens` has rows for."""
        return self.journal.token_steps(self.timeline)

    @property
    def damage(self) -> list[tuple[int, str]]:
        found = dict(self.file.all_damage()) | self.journal.notes | self._notes
        tail = self.tail.all_damage() if self.tail is not None else []
        return [*sorted(found.items()), *((offset, f"tail file: {reason}") for offset, reason in tail)]


def _layout_of(segment: Segment) -> Layout:
    return segment.part.layout


def _num_equal(before: Array, now: Array) -> int:
    """How many rows at the beginning are the same."""
    count = min(len(before), len(now))
    same = before[:count].view(_BYTES) == now[:count].view(_BYTES)
    return count if same.all() else int(np.argmin(same))
