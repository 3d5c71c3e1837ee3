"""The frames of one `.mscan` file: find them, check them, hand on the bytes of their payloads.

`ScanFile` receives a buffer (a memory map, or bytes) and lists its frames from the index or by walking the headers. It
checks a frame's header before it believes a length, and each 4 KiB chunk once, when it is first touched. What is
damaged is noted with its offset and given as missing, never guessed at.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import zlib
from collections.abc import Callable, Iterator

import numpy as np

from pyscan import format as fmt
from pyscan.format import Frame

Buffer = bytes | mmap.mmap
Progress = Callable[[int, int], None]

_UNKNOWN, _GOOD, _BAD = 0, 1, 2


class ScanFile:
    """A buffer, the frames in it, and which of their chunks are known to be good."""

    def __init__(self, buffer: Buffer) -> None:
        self._take(buffer)
        self.header = fmt.decode_header(self.view)
        self.damage: dict[int, str] = {}
        self._chunks: dict[int, bytearray] = {}
        self.has_index = False
        indexed = self._read_index()
        self.frames = indexed if indexed is not None else []
        self.has_index = indexed is not None
        self._gaps: dict[int, str] = {}
        if indexed is None:
            self._walk(fmt.HEADER_BYTES)
        else:
            self._note_gaps(indexed)

    def _take(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.view = memoryview(buffer)

    def close(self) -> None:
        """Let go of the bytes. A view that someone still holds keeps the map alive until it is gone."""
        with contextlib.suppress(BufferError):
            self.view.release()
            if isinstance(self.buffer, mmap.mmap):
                self.buffer.close()

    def grow(self, buffer: Buffer) -> int:
        """Take a longer buffer of the same file; returns the number of frames that stay as they were.

        The last frame and what follows it are looked at anew: it may be a torn one that a resumed writer has appended
        behind, and what follows may have been half written.
        """
        self.close()
        self._take(buffer)
        start = self.frames.pop().offset if self.frames else fmt.HEADER_BYTES
        kept = len(self.frames)
        self.damage = {at: reason for at, reason in self.damage.items() if at < start}
        self._gaps = {at: reason for at, reason in self._gaps.items() if at < start}
        self._chunks = {at: states for at, states in self._chunks.items() if at < start}
        self._walk(start)
        return kept

    def all_damage(self) -> list[tuple[int, str]]:
        return sorted((self._gaps | self.damage).items())

    def _walk(self, offset: int) -> None:
        """List the frames from `offset` on; bytes that belong to none are gaps."""
        found = self._frame_at(offset)
        while offset < len(self.view):
            if isinstance(found, str):
                self._gaps[offset] = found
                offset = self._next_frame(offset + 64, len(self.view))
                found = self._frame_at(offset)
                continue
            follower = self._frame_at(found.end)
            torn = self._frame_inside_torn(found, follower)
            if torn is not None:
                self._gaps[offset] = "torn frame, overwritten by frames that follow it"
                offset, found = torn, self._frame_at(torn)
                continue
            self.frames.append(found)
            offset, found = found.end, follower

    def _frame_at(self, offset: int) -> Frame | str:
        return fmt.decode_frame(self.view, offset, self.header.run_id)

    def _next_frame(self, offset: int, limit: int) -> int:
        """The offset of the next good frame header from `offset` on, or `limit`."""
        while True:
            offset = self.buffer.find(fmt.FRAME_MAGIC, offset, limit)
            if offset < 0:
                return limit
            if offset % 64 == 0 and isinstance(self._frame_at(offset), Frame):
                return offset
            offset += 1

    def _frame_inside_torn(self, frame: Frame, follower: Frame | str) -> int | None:
        """Where the next frame stands if `frame` was cut short and a resumed writer appended behind the cut.

        Its header is good and may even claim to end inside the file, but its successor does not stand where it ends and
        its last chunk holds other bytes.
        """
        if isinstance(follower, Frame) and _follows(follower, frame):
            return None
        if frame.end == len(self.view) or not frame.payload_bytes:
            return None
        if not self.bad_chunks(frame, frame.payload_bytes - 1, frame.payload_bytes):
            return None
        inside = self._next_frame(frame.offset + 64, frame.end)
        if inside == frame.end:
            return None
        self._chunks.pop(frame.offset, None)
        self.damage = {at: reason for at, reason in self.damage.items() if not frame.offset <= at < frame.end}
        return inside

    def _read_index(self) -> list[Frame] | None:
        """The frames as the index at the end of the file lists them, or None if there is none that fits."""
        size = len(self.view)
        if size < 128 or size % 64:
            return None
        offset, magic = fmt.INDEX_END.unpack_from(self.view, size - 16)
        if magic != fmt.INDEX_MAGIC or offset % 64 or offset >= size:
            return None
        index = self._frame_at(offset)
        if isinstance(index, str) or index.kind != fmt.KIND_INDEX or index.end != size or index.payload_bytes % 64:
            return None
        if self.bad_chunks(index, 0, index.payload_bytes):
            return None
        return self.frames_of_index(index)

    def frames_of_index(self, index: Frame) -> list[Frame] | None:
        count = max(index.payload_bytes - 16, 0) // fmt.INDEX_DTYPE.itemsize
        entries = np.frombuffer(self.view, fmt.INDEX_DTYPE, count, index.payload_offset)
        frames, end = [], fmt.HEADER_BYTES
        for offset, kind, rows, first_step, first_row, payload_bytes, number in entries.tolist():
            if not offset:
                break
            frame = Frame(offset, kind, payload_bytes, first_step, first_row, rows, 0, number)
            if offset % 64 or offset < end or frame.end > index.offset:
                return None
            frames.append(frame)
            end = frame.end
        return [*frames, index]

    def _note_gaps(self, frames: list[Frame]) -> None:
        end = fmt.HEADER_BYTES
        for frame in frames:
            if frame.offset != end:
                self._gaps[end] = "bytes that belong to no frame"
            end = frame.end

    def bad_chunks(self, frame: Frame, start: int, stop: int) -> list[int]:
        """The chunks of the payload bytes [start, stop) that are damaged; each is computed once and remembered."""
        states = self._chunks.get(frame.offset)
        if states is None:
            states = self._chunks[frame.offset] = self._trust(frame)
        bad = []
        for chunk in range(start // fmt.CHUNK_BYTES, -(-stop // fmt.CHUNK_BYTES)):
            if states[chunk] == _UNKNOWN:
                states[chunk] = self._test(frame, chunk)
            if states[chunk] == _BAD:
                bad.append(chunk)
        return bad

    def _trust(self, frame: Frame) -> bytearray:
        """The states of a frame touched for the first time: all bad if its header or chunk table does not fit."""
        reason = self._doubt(frame)
        if reason:
            self.damage[frame.offset] = reason
            return bytearray([_BAD]) * frame.num_chunks
        table = self.view[frame.table_offset : frame.payload_offset]
        if zlib.crc32(table) != fmt.table_crc(self.view, frame):
            self.damage[frame.offset] = "damaged chunk table"
            return bytearray([_BAD]) * frame.num_chunks
        return bytearray(frame.num_chunks)

    def _doubt(self, frame: Frame) -> str:
        """Why a frame is not as the index lists it, flags aside: a main file has no row-major rows."""
        if not self.has_index:
            return ""
        found = self._frame_at(frame.offset)
        if isinstance(found, str):
            return found
        row_major = found.kind == fmt.KIND_STEPS and found.flags & fmt.FRAME_ROW_MAJOR
        same = found._replace(flags=frame.flags) == frame and not row_major
        return "" if same else "the index does not describe this frame"

    def _test(self, frame: Frame, chunk: int) -> int:
        payload = frame.payload_offset
        start = payload + chunk * fmt.CHUNK_BYTES
        stop = min(start + fmt.CHUNK_BYTES, payload + frame.payload_bytes)
        if zlib.crc32(self.view[start:stop]) == fmt.chunk_crc(self.view, frame, chunk):
            return _GOOD
        self.damage[start] = f"damaged chunk of frame {frame.frame_number}"
        return _BAD

    def payload(self, frame: Frame) -> bytes | None:
        """A copy of the whole payload, or None if any of it is damaged."""
        if self.bad_chunks(frame, 0, frame.payload_bytes):
            return None
        return bytes(self.view[frame.payload_offset : frame.payload_offset + frame.payload_bytes])

    def check(self, progress: Progress | None = None) -> Iterator[tuple[int, str]]:
        """Read every byte; what is wrong with headers, chunks, padding and gaps, as (offset, reason)."""
        for frame in self.frames:
            self.bad_chunks(frame, 0, frame.payload_bytes)
            reason = self._doubt(frame)
            if reason:
                yield frame.offset, reason
            elif not frame.num_chunks and fmt.table_crc(self.view, frame):
                yield frame.offset, "damaged chunk table"
            if any(self.view[frame.payload_offset + frame.payload_bytes : frame.end]):
                yield frame.payload_offset + frame.payload_bytes, "padding that is not zero"
            if progress:
                progress(frame.end, len(self.view))
        yield from self.all_damage()


def _follows(follower: Frame, frame: Frame) -> bool:
    rows = frame.rows if frame.kind == fmt.KIND_STEPS else 0
    return follower.frame_number == frame.frame_number + 1 and follower.first_row == frame.first_row + rows


def map_file(fileno: int) -> Buffer:
    """The file as it is now, mapped for reading."""
    size = os.fstat(fileno).st_size
    return mmap.mmap(fileno, size, access=mmap.ACCESS_READ) if size else b""
