"""Frames written from Python, for the rewriting of files that exist: repair, compact, merge, import.

It receives schemas, rows, events and tokens payloads in order, numbers the frames and rows, and hands bytes to a sink.
Scanning itself uses the compiled writer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pyscan import format as fmt
from pyscan.codecs import DTYPES, Array
from pyscan.format import Frame, padded
from pyscan.payloads import Event, encode_events
from pyscan.schema import Schema


class FrameWriter:
    """One file from its header to its index; `sink` takes the bytes in order."""

    def __init__(self, sink: Callable[[bytes], object], run_id: bytes, created_ns: int) -> None:
        self._sink = sink
        self._run_id = run_id
        self.frames: list[Frame] = []
        self.next_row = 0
        self.newest_step = 0
        self.offset = 0
        self._put(fmt.encode_header(run_id, created_ns))

    def _put(self, data: bytes) -> None:
        self._sink(data)
        self.offset += len(data)

    def schema(self, schema: Schema) -> None:
        self.frame(fmt.KIND_SCHEMA, schema.to_json())

    def steps(
        self, rows: Array, sections: Sequence[Array], *, first_row: int | None = None, row_major: bool = False
    ) -> None:
        """A steps frame: `rows` of ROW_DTYPE, and per channel the cells as stored, [cells, rows]."""
        if not len(rows):
            return
        if first_row is not None:
            self.next_row = first_row
        payload = steps_payload(rows, sections, row_major=row_major)
        first, flags = int(rows["step"][0]), fmt.FRAME_ROW_MAJOR if row_major else 0
        self.frame(fmt.KIND_STEPS, payload, first_step=first, rows=len(rows), flags=flags)
        self.next_row += len(rows)
        self.newest_step = int(rows["step"][-1])

    def events(self, events: Iterable[Event], *, first_row: int | None = None) -> None:
        lines = list(events)
        if lines:
            self.frame(fmt.KIND_EVENTS, encode_events(lines), rows=len(lines), first_row=first_row)

    def tokens(self, payload: bytes, *, first_row: int | None = None) -> None:
        self.frame(fmt.KIND_TOKENS, payload, first_row=first_row)

    def index(self) -> None:
        """The index frame, last in the file."""
        entries = np.zeros(len(self.frames), fmt.INDEX_DTYPE)
        for name in fmt.INDEX_DTYPE.names or ():
            entries[name] = [getattr(frame, name) for frame in self.frames]
        listed = entries.tobytes()
        filler = bytes(fmt.pad64(len(listed) + 16) - 16 - len(listed))
        self.frame(fmt.KIND_INDEX, listed + filler + fmt.INDEX_END.pack(self.offset, fmt.INDEX_MAGIC))

    def frame(
        self,
        kind: int,
        payload: bytes,
        *,
        first_step: int | None = None,
        first_row: int | None = None,
        rows: int = 0,
        flags: int = 0,
    ) -> None:
        """Any frame; step and row default to the newest step and the number of the next row."""
        step = self.newest_step if first_step is None else first_step
        row = min(self.next_row if first_row is None else first_row, 2**64 - 1)
        number = len(self.frames)
        self.frames.append(Frame(self.offset, kind, len(payload), step, row, rows, flags, number))
        self._put(
            fmt.encode_frame(
                kind,
                payload,
                run_id=self._run_id,
                frame_number=number,
                first_step=step,
                first_row=row,
                rows=rows,
                flags=flags,
            )
        )


def steps_payload(rows: Array, sections: Sequence[Array], *, row_major: bool = False) -> bytes:
    table = rows.astype(fmt.ROW_DTYPE)
    table["reserved"] = 0
    parts = [padded(table.tobytes())]
    parts += [padded((cells.T if row_major else cells).tobytes()) for cells in sections]
    return b"".join(parts)


def sections_of(schema: Schema, cells: Sequence[Array]) -> list[Array]:
    """Cells of each channel with the dtype its codec stores."""
    pairs = zip(schema.channels, cells, strict=True)
    return [np.ascontiguousarray(array, DTYPES[channel.codec]) for channel, array in pairs]
