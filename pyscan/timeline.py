"""Which rows of a file are in force: the rows of its steps frames in order, without those that a later resume voids.

It receives the row tables of the frames and hands on the rows users see, and for each frame which of its rows they are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pyscan.codecs import DTYPES, Array
from pyscan.format import CHUNK_BYTES, FRAME_ROW_MAJOR, KNOWN_FLAG, ROW_DTYPE, ROW_RESUMED, Frame
from pyscan.frames import ScanFile
from pyscan.schema import Layout

STEPS_DTYPE = np.dtype([(name, ROW_DTYPE[name]) for name in ROW_DTYPE.names or () if name != "reserved"])
_NEVER = np.uint64(2**64 - 1)


class Part(NamedTuple):
    """A steps frame that can be read, from its row `skip` on (rows before are in the main file already)."""

    file: ScanFile
    frame: Frame
    layout: Layout
    table: Array
    skip: int = 0


class Segment(NamedTuple):
    """The rows of one frame that are in force: rows [start, stop) of the run; `keep` are their places in the frame."""

    part: Part
    start: int
    stop: int
    keep: slice | Array


@dataclass(frozen=True)
class Timeline:
    segments: list[Segment]
    rows: Array  # as stored
    numbers: Array  # of these rows, counted over the whole file
    steps: Array  # as users see them
    # row numbers of the first rows after a resume, ascending, and the lowest step resumed at from each of them on
    resumed_at: list[int]
    resumed_step: list[int]

    def is_voided(self, step: int, next_row: int) -> bool:
        """Whether an event or tokens frame of `step`, written when `next_row` was to come, is of an abandoned timeline.

        A writer that resumes writes neither before its first row, so what has the number of that row is older.
        """
        place = bisect_left(self.resumed_at, next_row)
        return place < len(self.resumed_at) and step >= self.resumed_step[place]

    def overlapping(self, start: int, stop: int) -> list[Segment]:
        first = bisect_right(self.segments, start, key=lambda segment: segment.stop)
        last = bisect_left(self.segments, stop, key=lambda segment: segment.start)
        return self.segments[first:last]


def arrange(parts: list[Part]) -> Timeline:
    rows = _all_rows(parts)
    numbers = _row_numbers(parts)
    resumed_at, resumed_step = _resumes(numbers, rows)
    keep = _in_force(rows) if resumed_at else None
    segments = _segments(parts, keep)
    if keep is not None:
        rows, numbers = rows[keep], numbers[keep]
    return Timeline(segments, rows, numbers, known_steps(rows), resumed_at, resumed_step)


def _all_rows(parts: list[Part]) -> Array:
    tables = b"".join(part.table[part.skip :].tobytes() for part in parts)
    return np.frombuffer(tables, ROW_DTYPE)


def _segments(parts: list[Part], keep: Array | None) -> list[Segment]:
    """The rows of each frame that are kept; None keeps all."""
    segments, first, start = [], 0, 0
    for part in parts:
        count = len(part.table) - part.skip
        places: slice | Array = slice(part.skip, None)
        stop = start + count
        if keep is not None and not keep[first : first + count].all():
            places = np.flatnonzero(keep[first : first + count]) + part.skip
            stop = start + len(places)
        if stop > start:
            segments.append(Segment(part, start, stop, places))
        first, start = first + count, stop
    return segments


def known_steps(rows: Array) -> Array:
    """Rows as stored to rows as users see them: what is not known is NaN, or 0 for tokens."""
    steps = np.empty(len(rows), STEPS_DTYPE)
    for name in STEPS_DTYPE.names or ():
        steps[name] = rows[name]
    for name, flag in KNOWN_FLAG.items():
        steps[name][(rows["flags"] & flag) == 0] = 0 if name == "tokens" else np.nan
    return steps


def _in_force(rows: Array) -> Array:
    """False for rows with a step that a later row resumed at or before."""
    limits = np.where(rows["flags"] & ROW_RESUMED, rows["step"], _NEVER)
    later = np.append(np.minimum.accumulate(limits[::-1])[::-1][1:], _NEVER) if len(rows) else limits
    return np.asarray((rows["step"] < later) | (later == _NEVER))


def _row_numbers(parts: list[Part]) -> Array:
    numbers = [
        np.arange(part.skip, len(part.table), dtype=np.uint64) + np.uint64(part.frame.first_row) for part in parts
    ]
    return np.concatenate(numbers) if numbers else np.zeros(0, np.uint64)


def _resumes(numbers: Array, rows: Array) -> tuple[list[int], list[int]]:
    places = np.flatnonzero(rows["flags"] & ROW_RESUMED)
    resumes = sorted(zip(numbers[places].tolist(), rows["step"][places].tolist(), strict=True))
    steps = [step for _, step in resumes]
    for i in range(len(steps) - 2, -1, -1):
        steps[i] = min(steps[i], steps[i + 1])
    return [number for number, _ in resumes], steps


def gather(
    segments: list[Segment], channel: int, cells: tuple[int, int], start: int, stop: int
) -> tuple[Array, Array | None]:
    """Cells of a channel as stored, [cells, rows], for the rows [start, stop); and which are lost to damage."""
    dtype = DTYPES[segments[0].part.layout.schema.channels[channel].codec]
    out = np.empty((cells[1] - cells[0], stop - start), dtype)
    lost: Array | None = None
    for segment in segments:
        stored, bad = cells_of_frame(segment.part, channel, cells)
        low, high = max(segment.start, start), min(segment.stop, stop)
        rows = slice(low - segment.start, high - segment.start)
        place = slice(low - start, high - start)
        whole = high - low == segment.part.frame.rows
        out[:, place] = stored if whole else stored[:, segment.keep][:, rows]
        if bad is not None:
            lost = np.zeros(out.shape, bool) if lost is None else lost
            lost[:, place] = bad[:, segment.keep][:, rows]
    return out, lost


def cells_of_frame(part: Part, channel: int, cells: tuple[int, int]) -> tuple[Array, Array | None]:
    """One frame's share of the above, all its rows, as a view of the file."""
    frame, layout = part.frame, part.layout
    dtype = DTYPES[layout.schema.channels[channel].codec]
    section = layout.sections(frame.rows)[0][channel]
    row_major = bool(frame.flags & FRAME_ROW_MAJOR)
    first, end = (0, layout.num_cells[channel]) if row_major else cells
    itemsize = dtype.itemsize
    start = section + first * frame.rows * itemsize
    count = (end - first) * frame.rows
    stored = np.frombuffer(part.file.view, dtype, count, frame.payload_offset + start)
    bad = part.file.bad_chunks(frame, start, start + count * itemsize) if count else []
    lost = _lost(bad, start, count, itemsize) if bad else None
    if row_major:
        shape, pick = (frame.rows, end), slice(*cells)
        return stored.reshape(shape)[:, pick].T, None if lost is None else lost.reshape(shape)[:, pick].T
    shape = (end - first, frame.rows)
    return stored.reshape(shape), None if lost is None else lost.reshape(shape)


def _lost(bad_chunks: list[int], start: int, count: int, itemsize: int) -> Array:
    """Which of `count` values from payload byte `start` on stand in a bad chunk."""
    lost = np.zeros(count, bool)
    for chunk in bad_chunks:
        low = max(chunk * CHUNK_BYTES - start, 0) // itemsize
        high = -(-(max((chunk + 1) * CHUNK_BYTES - start, 0)) // itemsize)
        lost[low:high] = True
    return lost
