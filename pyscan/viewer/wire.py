"""Arrays, sites and events as JSON for a page.

Receives what readers and analyses hand out; hands on plain objects. Numbers travel as stored, so that a page shows
exactly what `pyscan.open` gives.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import numpy as np

from pyscan import codecs
from pyscan.alarms import ADVICE
from pyscan.analysis import layer_of
from pyscan.colours import MARKS, SCALES
from pyscan.grid import arrange

if TYPE_CHECKING:
    from pyscan.overview import Overview
    from pyscan.run import Run

# Events that say nothing on a time axis, and how many a page is given.
_SILENT = ("execution_order", "sequence")
MAX_EVENTS = 500
_MAX_TEXT = 300
COLOURS = {"scales": SCALES, "marks": MARKS}


def pack(values: Any, codec: str = "f32") -> dict[str, str]:
    """Numbers in one of the codecs of the file; absent is told apart from NaN in `log2q8` and `f32`."""
    cells = codecs.encode(np.asarray(values, np.float32) if codec == "f32" else values, codec)
    return {"codec": codec, "data": base64.b64encode(np.ascontiguousarray(cells).tobytes()).decode("ascii")}


def describe(run: Run, overview: Overview) -> dict[str, Any]:
    """What a page must know of a run to draw its map."""
    return {
        "name": run.path.replace("\\", "/").rpartition("/")[2],
        "model": run.model,
        "version": "1.1" if run.version == 1 else str(run.version),
        "has_unit": all(channel.codec != "u16" for channel in run.channels),
        "block": run.block,
        "every": run.every,
        "measures": [{"name": name, "per": overview.per(name)} for name in overview.measures],
        "sites": [
            {
                "name": site.name,
                "layer": layer_of(site.name),
                "kind": site.kind,
                "shape": list(site.shape),
                "dtype": site.dtype,
                "tied_to": site.tied_to,
                "cells": {per: overview.counts(per)[place] for per in ("block", "row_block", "site")},
            }
            for place, site in enumerate(run.sites)
        ],
        "sections": [
            {
                "title": section.title,
                "columns": section.columns,
                "rows": [
                    {"label": row.label, "boxes": [row.boxes.get(i, []) for i in range(len(section.columns))]}
                    for row in section.rows
                ],
            }
            for section in arrange(run.sites)
        ],
    }


def events(run: Run) -> list[dict[str, Any]]:
    """What happened, alarms first where there are too many, in the order of steps."""
    told = [event for event in run.events if event["kind"] not in _SILENT]
    told.sort(key=lambda event: event["kind"] not in ADVICE)
    return sorted(map(_event, told[:MAX_EVENTS]), key=lambda event: int(event["step"]))


def _event(event: dict[str, Any]) -> dict[str, Any]:
    text = str(event.get("text") or _plain(event))[:_MAX_TEXT]
    kind, step = str(event["kind"])[:40], int(event["step"])
    return {"kind": kind, "step": step, "site": event["site"], "text": text, "alarm": kind in ADVICE}


def _plain(event: dict[str, Any]) -> str:
    rest = [f"{key} {value}" for key, value in event.items() if isinstance(value, int | float) and key != "step"]
    return ", ".join(rest)
