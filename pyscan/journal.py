"""The events and tokens frames of a file that are in force, parsed once each."""

from __future__ import annotations

from typing import Any

from pyscan import codecs, payloads
from pyscan import format as fmt
from pyscan.errors import ScanError, ScanFormatError
from pyscan.format import Frame
from pyscan.frames import ScanFile
from pyscan.payloads import Event, Tokens
from pyscan.schema import Layout, SiteInfo
from pyscan.timeline import Timeline
from pyscan.token_view import SiteTokens


class Journal:
    """Reads what a file says beside its rows; `notes` are the frames it could not understand."""

    def __init__(self, file: ScanFile) -> None:
        self._file = file
        self.notes: dict[int, str] = {}
        self._parsed: dict[int, list[Event]] = {}
        self._token_step: dict[int, int | None] = {}

    def forget(self, frame: Frame) -> None:
        self._parsed.pop(frame.offset, None)
        self._token_step.pop(frame.offset, None)
        self.notes.pop(frame.offset, None)

    def events(self, timeline: Timeline) -> list[Event]:
        return [event for _, event in self.events_in_force(timeline)]

    def events_in_force(self, timeline: Timeline) -> list[tuple[Frame, Event]]:
        return [
            (frame, event)
            for frame in self._frames(fmt.KIND_EVENTS)
            for event in self.events_in(frame)
            if not timeline.is_voided(event["step"], frame.first_row)
        ]

    def tokens_in_force(self, timeline: Timeline) -> list[tuple[Frame, int]]:
        """Tokens frames with their steps."""
        found = [(frame, self._step_of(frame)) for frame in self._frames(fmt.KIND_TOKENS)]
        return [
            (frame, step) for frame, step in found if step is not None and not timeline.is_voided(step, frame.first_row)
        ]

    def token_steps(self, timeline: Timeline) -> list[int]:
        return sorted({step for _, step in self.tokens_in_force(timeline)})

    def tokens(self, step: int, timeline: Timeline, governing: list[Layout | None]) -> dict[str, Any]:
        frames = [frame for frame, found in self.tokens_in_force(timeline) if found == step]
        if not frames:
            raise ScanError(f"no tokens are stored for step {step}; tokens mode writes them: attach(..., tokens=True)")
        layout = governing[self._file.frames.index(frames[-1])]
        tokens = self.read_tokens(frames[-1], layout)
        return by_site(tokens, layout.schema.sites if layout is not None else ())

    def read_tokens(self, frame: Frame, layout: Layout | None) -> Tokens:
        payload = self._file.payload(frame)
        if payload is None:
            raise ScanFormatError(f"the tokens frame at offset {frame.offset} is damaged")
        return payloads.decode_tokens(payload, len(layout.schema.sites) if layout is not None else 0)

    def _frames(self, kind: int) -> list[Frame]:
        return [frame for frame in self._file.frames if frame.kind == kind]

    def events_in(self, frame: Frame) -> list[Event]:
        if frame.offset not in self._parsed:
            payload = self._file.payload(frame)
            events, reasons = payloads.decode_events(payload) if payload is not None else ([], [])
            if reasons:
                self.notes[frame.offset] = reasons[0]
            self._parsed[frame.offset] = events
        return self._parsed[frame.offset]

    def _step_of(self, frame: Frame) -> int | None:
        if frame.offset not in self._token_step:
            self._token_step[frame.offset] = self._read_step(frame)
        return self._token_step[frame.offset]

    def _read_step(self, frame: Frame) -> int | None:
        """The step a tokens frame names, from the chunks of its JSON alone."""
        try:
            size = payloads.tokens_head_bytes(self._start(frame, 4))
            return int(payloads.decode_tokens_head(self._start(frame, size))["step"])
        except ScanFormatError as error:
            self.notes[frame.offset] = f"bad tokens frame: {error}"
            return None

    def _start(self, frame: Frame, size: int) -> bytes:
        """The first bytes of a payload, fewer if it is shorter, none if they are damaged."""
        stop = min(size, frame.payload_bytes)
        if self._file.bad_chunks(frame, 0, stop):
            return b""
        return bytes(self._file.view[frame.payload_offset : frame.payload_offset + stop])


def by_site(tokens: Tokens, sites: tuple[SiteInfo, ...]) -> dict[str, Any]:
    """The arrays of a step under the names of their sites; a contribution is computed when it is asked for.

    ||x_t|| * ||g_t|| is the norm of position t's own contribution to the gradient; for an embedding, ||g_t|| alone.
    """
    mask = None if tokens.mask is None else tokens.mask != 0
    result: dict[str, Any] = {"ids": tokens.ids, "mask": mask, "sequences": tokens.sequences}
    for array in tokens.arrays:
        site = sites[array.site]
        new = SiteTokens({}, mode=tokens.mode, is_lookup=site.kind == "embedding")
        channels = result.setdefault(site.name, new)
        channels[array.channel] = codecs.decode(array.codes, array.codec)
        if array.positions is not None:
            channels["positions"] = array.positions
    return result
