"""`check()`: read every byte of a scan and list what is wrong with it, as (offset, reason)."""

from __future__ import annotations

import os

from pyscan import format as fmt
from pyscan.errors import ScanFormatError
from pyscan.frames import Progress, ScanFile
from pyscan.ranks import find_ranks
from pyscan.reader import open as open_run
from pyscan.reader import open_buffer
from pyscan.run import Run
from pyscan.schema import Layout
from pyscan.version2 import FileRun

Damage = list[tuple[int, str]]


def check(path: str | os.PathLike[str], progress: Progress | None = None) -> Damage:
    """Everything that is wrong with a file, or with the files of all ranks; an empty list if nothing is."""
    name = os.fspath(path)
    ranks = {} if os.path.exists(name) else find_ranks(name)
    if ranks:
        run = open_run(name)
        missing = [(0, f"rank {rank}: no file") for rank in run.missing_ranks if rank not in ranks]
        run.close()
        found = {rank: check(file, progress) for rank, file in ranks.items()}
        return missing + [(at, f"rank {rank}: {reason}") for rank, damage in found.items() for at, reason in damage]
    try:
        run = open_run(name)
    except ScanFormatError as error:
        return [(0, str(error))]
    with run:
        return check_run(run, progress)


def check_buffer(main: bytes, tail: bytes = b"") -> Damage:
    """The same for the bytes of a file."""
    try:
        return check_run(open_buffer(main, tail))
    except ScanFormatError as error:
        return [(0, str(error))]


def check_run(run: Run, progress: Progress | None = None) -> Damage:
    if not isinstance(run, FileRun):
        return run.damage
    found = dict(run.file.check(progress)) | _check_meaning(run)
    tail = dict(run.tail.check()) if run.tail is not None else {}
    if run.tail_error:
        tail[0] = run.tail_error
    return sorted((found | dict(run.damage)).items()) + [(at, f"tail file: {reason}") for at, reason in tail.items()]


def _check_meaning(run: FileRun) -> dict[int, str]:
    """What checksums cannot know: rows, events and tokens that say what FORMAT.md does not allow."""
    found: dict[int, str] = {}
    for segment in run.timeline.segments:
        if segment.part.table["reserved"].any():
            found[segment.part.frame.offset] = "reserved bytes of a row that are not zero"
    for frame, layout in zip(run.file.frames, run.governing, strict=True):
        reason = _check_frame(run, frame, layout)
        if reason:
            found[frame.offset] = reason
    return found


def _check_frame(run: FileRun, frame: fmt.Frame, layout: Layout | None) -> str:
    if frame.kind == fmt.KIND_TOKENS:
        try:
            run.journal.read_tokens(frame, layout)
        except ScanFormatError as error:
            return str(error)
    if frame.kind == fmt.KIND_EVENTS and len(run.journal.events_in(frame)) != frame.rows:
        return f"the frame claims {frame.rows} events and has {len(run.journal.events_in(frame))}"
    return _check_index(run.file, frame) if frame.kind == fmt.KIND_INDEX else ""


def _check_index(file: ScanFile, index: fmt.Frame) -> str:
    """An index lists the frames before it, all of them and nothing else."""
    listed = file.frames_of_index(index)
    before = [frame for frame in file.frames if frame.offset <= index.offset]
    same = listed is not None and [frame[:6] for frame in listed] == [frame[:6] for frame in before]
    return "" if same else "the index does not list the frames before it"
