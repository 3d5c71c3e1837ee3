"""A scan in TensorBoard: curves of chosen sites, the counts of gradients, heat maps.

`follow` shows a scan while it is being made, `export` a file that is there. Needs the tensorboard package, and no
TensorFlow.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyscan.extras import need
from pyscan.integrations.curves import Point, Selection, points
from pyscan.integrations.follow import Follower
from pyscan.integrations.heatmap import png

if TYPE_CHECKING:
    from pyscan.run import Run
    from pyscan.scanner import Scanner


def follow(
    scan: Scanner,
    log_dir: str | os.PathLike[str],
    *,
    sites: str | None = None,
    channels: Sequence[str] = ("act", "grad"),
    every: int = 1,
    heat_every: int = 100,
    seconds: float = 10.0,
) -> Follower:
    """Show new rows of a scan in TensorBoard every so many `seconds`, from a thread of its own, until it is closed.

    sites       regular expression searched for in the names of sites
    channels    which numbers of them
    every       rows whose step is a multiple of this
    heat_every  heat maps of rows whose step is a multiple of this; 0: none
    """
    selection = Selection(sites, tuple(channels), every, heat_every)
    return Follower(scan, TensorBoardSink(log_dir), selection, seconds)


def export(run: Run, log_dir: str | os.PathLike[str], selection: Selection) -> int:
    """Write a whole run; returns how many rows were shown."""
    sink, num_rows = TensorBoardSink(log_dir), 0
    try:
        for point in points(run, slice(None), selection):
            sink.push(point)
            num_rows += 1
    finally:
        sink.close()
    return num_rows


class TensorBoardSink:
    """Writes an event file. Steps are those of the rows, times those at which they were recorded."""

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        self._events = need("tensorboard.compat.proto.event_pb2", "tensorboard")
        self._summaries = need("tensorboard.compat.proto.summary_pb2", "tensorboard")
        writer = need("tensorboard.summary.writer.event_file_writer", "tensorboard")
        self._writer: Any = writer.EventFileWriter(os.fspath(log_dir), max_queue_size=1000)
        self._is_first = True

    def push(self, point: Point) -> None:
        if self._is_first:
            self._begin(point)
        summary = self._summaries.Summary
        values = [summary.Value(tag=tag, simple_value=value) for tag, value in point.numbers.items()]
        for tag, pixels in point.pictures.items():
            height, width, _ = pixels.shape
            image = summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png(pixels))
            values.append(summary.Value(tag=tag, image=image))
        self._add(point, summary=summary(value=values))

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _begin(self, point: Point) -> None:
        """Tell TensorBoard to forget what an earlier event file has of this step and later ones: it was abandoned."""
        self._is_first = False
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._add(point, session_log=start)

    def _add(self, point: Point, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=point.time_ns / 1e9, step=point.step, **content))
