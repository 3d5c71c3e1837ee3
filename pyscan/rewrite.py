"""New files from old ones, without the compiled writer: repair, compact, merge, and the way from and to version 1.1.

Each function receives the path of a scan and the path to write, which must not exist; it writes to a temporary file
beside it and renames that when it is whole. `progress(done, total)` is called as it goes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from itertools import groupby
from typing import Any, BinaryIO

import numpy as np

from pyscan import codecs
from pyscan import format as fmt
from pyscan.codecs import Array
from pyscan.errors import ScanError, ScanFormatError
from pyscan.format import ROWS_PER_FRAME
from pyscan.frame_writer import FrameWriter
from pyscan.frames import Progress
from pyscan.payloads import encode_tokens
from pyscan.ranks import RankedRun
from pyscan.reader import open as open_run
from pyscan.run import Run
from pyscan.schema import Layout
from pyscan.timeline import Part, cells_of_frame, gather
from pyscan.version2 import FileRun

Path = str | os.PathLike[str]
# Cells held in memory at a time when files are merged or imported.
WINDOW_CELLS = 1 << 22


def repair(source: Path, target: Path, *, progress: Progress | None = None) -> None:
    """Everything that is whole in a damaged file and its tail, as a file that is whole. Cells lost to damage are
    absent.

    Rows and frames keep their numbers' order and what a resume voided stays in the file, as it was.
    """
    with _open_version2(source, "repair") as run, writing(target) as file:
        writer = FrameWriter(file.write, *run.file.header)
        parts = {part.frame.offset: part for part in run.main_parts()}
        for frame, layout in zip(run.file.frames, run.governing, strict=True):
            _copy_frame(run, frame, layout, parts.get(frame.offset), writer)
            if progress:
                progress(frame.end, len(run.file.view))
        _write_tail(list(run.tail_parts()), writer)
        writer.index()


def compact(source: Path, target: Path, *, progress: Progress | None = None) -> None:
    """The rows, events and tokens in force, in full frames with a fresh index; what a resume voided is dropped."""
    with _open_version2(source, "compact") as run, writing(target) as file:
        writer = FrameWriter(file.write, *run.file.header)
        for layout in run.layouts:
            rows = _rows_of(run, layout)
            if len(rows) or layout is run.layouts[-1] or _governs(run, layout):
                writer.schema(layout.schema)
            for start in range(rows.start, rows.stop, ROWS_PER_FRAME):
                stop = min(start + ROWS_PER_FRAME, rows.stop)
                writer.steps(run.timeline.rows[start:stop], _sections(run, layout, start, stop))
                if progress:
                    progress(stop, len(run))
            _copy_journal(run, layout, writer)
        writer.index()


def merge(source: Path, target: Path, *, progress: Progress | None = None) -> None:
    """The files of all ranks as one file. Tokens are those of the lowest rank."""
    run = open_run(source)
    if not isinstance(run, RankedRun):
        run.close()
        raise ScanError(f"{os.fspath(source)} is one file already; merge takes the name that rank files share")
    with run, writing(target) as file:
        writer = FrameWriter(file.write, os.urandom(16), time.time_ns())
        schema = run.schema
        writer.schema(schema)
        write_merged(run, writer, progress=progress)
        _merge_tokens(run, writer)
        writer.events(run.events)
        writer.index()


def write_merged(run: RankedRun, writer: FrameWriter, first: int = 0, *, progress: Progress | None = None) -> None:
    """The rows of all ranks from `first` on; each file is read once for many rows."""
    steps = stored_rows(run.steps)
    for start, stop, values in run.merged(first):
        pairs = zip(values, run.channels, strict=True)
        _write_frames(writer, steps[start:stop], [codecs.encode(cells, channel.codec) for cells, channel in pairs])
        if progress:
            progress(stop, len(steps))


def write_rows(run: Run, channels: list[tuple[str, str]], writer: FrameWriter, progress: Progress | None) -> None:
    """All rows of a run, read site by site in windows that fit memory, with each channel in the codec given for it."""
    steps = stored_rows(run.steps)
    for start, stop in windows(run):
        sections = [_window(run, name, codec, start, stop) for name, codec in channels]
        _write_frames(writer, steps[start:stop], sections)
        if progress:
            progress(stop, len(steps))


def _write_frames(writer: FrameWriter, rows: Array, sections: list[Array]) -> None:
    for start in range(0, len(rows), ROWS_PER_FRAME):
        part = slice(start, start + ROWS_PER_FRAME)
        writer.steps(rows[part], [cells[:, part] for cells in sections])


def windows(run: Run) -> Iterator[tuple[int, int]]:
    """Ranges of rows, multiples of a frame, whose cells fit memory."""
    cells = sum(site.num_cells(channel.per) for site in run.sites for channel in run.channels)
    size = max(WINDOW_CELLS // max(cells, 1) // ROWS_PER_FRAME, 1) * ROWS_PER_FRAME
    count = len(run.steps)
    return ((start, min(start + size, count)) for start in range(0, count, size))


def _window(run: Run, name: str, codec: str, start: int, stop: int) -> Array:
    """A channel of all sites, [cells, rows], as stored with that codec."""
    span = slice(start, stop)
    same = run.channel(name).codec == codec
    parts = [
        run.codes(name, site.name, steps=span)
        if same
        else codecs.encode(run.get(name, site.name, blocks=True, steps=span), codec)
        for site in run.sites
    ]
    return np.concatenate(parts, axis=1).T if parts else np.zeros((0, stop - start), codecs.DTYPES[codec])


def stored_rows(steps: Array) -> Array:
    """Rows as users see them to rows as stored."""
    rows = np.zeros(len(steps), fmt.ROW_DTYPE)
    for name in steps.dtype.names or ():
        rows[name] = steps[name]
    for name, flag in fmt.KNOWN_FLAG.items():
        rows[name][(rows["flags"] & flag) == 0] = 0
    return rows


@contextlib.contextmanager
def writing(target: Path) -> Iterator[BinaryIO]:
    """A file that appears under its name when it is whole, and not at all if anything goes wrong."""
    name = os.fspath(target)
    if os.path.exists(name):
        raise FileExistsError(f"{name} exists; choose another name or remove it first")
    temporary = f"{name}.{os.getpid()}.part"
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, name)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _open_version2(source: Path, verb: str) -> FileRun:
    run = open_run(source)
    if isinstance(run, FileRun):
        return run
    run.close()
    if isinstance(run, RankedRun):
        raise ScanError(f"{verb} takes one file, {os.fspath(source)} is many: give it each rank's file, or merge them")
    raise ScanError(f"{verb} takes a version 2 file, {os.fspath(source)} has version 1.1: import it first")


def _copy_frame(run: FileRun, frame: fmt.Frame, layout: Layout | None, part: Part | None, writer: FrameWriter) -> None:
    if part is not None:
        writer.steps(part.table, _whole_frame(part), first_row=frame.first_row)
        return
    if frame.kind == fmt.KIND_EVENTS:
        writer.events(run.journal.events_in(frame), first_row=frame.first_row)
        return
    if frame.kind in (fmt.KIND_STEPS, fmt.KIND_INDEX) or not _is_whole(run, frame, layout):
        return
    payload = run.file.payload(frame)
    assert payload is not None
    writer.frame(
        frame.kind, payload, first_step=frame.first_step, first_row=frame.first_row, rows=frame.rows, flags=frame.flags
    )


def _is_whole(run: FileRun, frame: fmt.Frame, layout: Layout | None) -> bool:
    """Whether a frame without rows and events can be taken over as it is."""
    if run.file.payload(frame) is None:
        return False
    if frame.kind == fmt.KIND_SCHEMA:
        return layout is not None
    if frame.kind == fmt.KIND_TOKENS:
        with contextlib.suppress(ScanFormatError):
            run.journal.read_tokens(frame, layout)
            return True
        return False
    return True


def _whole_frame(part: Part) -> list[Array]:
    """All cells of a frame, [cells, rows] per channel, absent where they are lost."""
    sections = []
    for number, channel in enumerate(part.layout.schema.channels):
        cells, lost = cells_of_frame(part, number, (0, part.layout.num_cells[number]))
        sections.append(_filled(cells, lost, channel.codec))
    return sections


def _filled(cells: Array, lost: Array | None, codec: str) -> Array:
    return cells if lost is None else np.where(lost, codecs.absent_codes((), codec), cells)


def _write_tail(parts: list[Part], writer: FrameWriter) -> None:
    for part in parts:
        sections = [cells[:, part.skip :] for cells in _whole_frame(part)]
        writer.steps(part.table[part.skip :], sections, first_row=part.frame.first_row + part.skip)


def _rows_of(run: FileRun, layout: Layout) -> range:
    """The rows of the run that a schema governs; they stand together."""
    segments = [segment for segment in run.timeline.segments if segment.part.layout is layout]
    return range(segments[0].start, segments[-1].stop) if segments else range(0)


def _sections(run: FileRun, layout: Layout, start: int, stop: int) -> list[Array]:
    segments = run.timeline.overlapping(start, stop)
    sections = []
    for number, channel in enumerate(layout.schema.channels):
        cells, lost = gather(segments, number, (0, layout.num_cells[number]), start, stop)
        sections.append(_filled(cells, lost, channel.codec))
    return sections


def _governs(run: FileRun, layout: Layout) -> bool:
    """Whether tokens frames in force need the schema."""
    offsets = {frame.offset for frame, _ in run.journal.tokens_in_force(run.timeline)}
    pairs = zip(run.file.frames, run.governing, strict=True)
    return any(frame.offset in offsets for frame, governing in pairs if governing is layout)


def _copy_journal(run: FileRun, layout: Layout, writer: FrameWriter) -> None:
    """Events and tokens in force that were written under a schema, with the row numbers that the rows have now."""
    governing = {frame.offset: found for frame, found in zip(run.file.frames, run.governing, strict=True)}
    events = [pair for pair in run.journal.events_in_force(run.timeline) if governing[pair[0].offset] is layout]
    for number, group in groupby(events, key=lambda pair: _new_number(run, pair[0])):
        writer.events((event for _, event in group), first_row=number)
    for frame, _ in run.journal.tokens_in_force(run.timeline):
        if governing[frame.offset] is layout and _is_whole(run, frame, layout):
            writer.tokens(run.file.payload(frame) or b"", first_row=_new_number(run, frame))


def _new_number(run: FileRun, frame: fmt.Frame) -> int:
    return int(np.searchsorted(run.timeline.numbers, np.uint64(frame.first_row)))


def _merge_tokens(run: RankedRun, writer: FrameWriter) -> None:
    lead = run.ranks[min(run.ranks)]
    places = {site.name: place for place, site in enumerate(run.sites)}
    governing = {frame.offset: layout for frame, layout in zip(lead.file.frames, lead.governing, strict=True)}
    for frame, _ in lead.journal.tokens_in_force(lead.timeline):
        layout = governing[frame.offset]
        if layout is None or not _is_whole(lead, frame, layout):
            continue
        tokens = lead.journal.read_tokens(frame, layout)
        arrays = [array._replace(site=places[layout.schema.sites[array.site].name]) for array in tokens.arrays]
        count = 0 if tokens.ids is None else tokens.ids.size
        rest: dict[str, Any] = {"mode": tokens.mode, "mask": tokens.mask, "sequences": tokens.sequences}
        writer.tokens(encode_tokens(tokens.step, count, tokens.ids, arrays, **rest))


def version1_part(metadata: Any) -> dict[str, Any]:
    """What an imported run remembers of the version 1.1 file it came from."""
    kept = metadata.get("version1") if isinstance(metadata, dict) else None
    return kept if isinstance(kept, dict) else {}
