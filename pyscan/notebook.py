"""What a run looks like as the value of a notebook's cell: a few facts and the map of its last step.

Receives an open run; hands on HTML without scripts, so that it also shows where notebooks are only read. Needs no
plotting library.
"""

from __future__ import annotations

import base64
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from pyscan import colours, text
from pyscan.codecs import is_absent
from pyscan.integrations.heatmap import png
from pyscan.overview import Overview, Picture
from pyscan.sheet import EMPTY, lay_out
from pyscan.summary import norm_channels

if TYPE_CHECKING:
    from pyscan.run import Run

# Pixels of a cell; a wide model has narrower ones.
_HEIGHT, _WIDTH, _ROOM = 12, 8, 900


def html(run: Run) -> str:
    steps, parts = run.steps, [f"<b>{escape(run.path)}</b> {escape(run.model)}"]
    parts.append(f"{text.plural(len(run.sites), 'site')}, {text.plural(len(steps), 'row')}")
    if len(steps):
        loss = float(steps["loss"][-1])
        told = "" if loss != loss else f", loss {text.norm(loss)}"
        parts.append(f"steps {int(steps['step'][0]):,} to {int(steps['step'][-1]):,}{told}")
    num_events = sum(bool(event.get("text")) for event in run.events)
    parts += [text.plural(num_events, "event")] if num_events else []
    body = "".join(_picture(run, name) for name in norm_channels(run)) if len(steps) else ""
    return f'<div style="font-family: system-ui, sans-serif">{" · ".join(parts)}{body}</div>'


def _picture(run: Run, channel: str) -> str:
    overview = Overview(run)
    row = len(run.steps) - 1
    picture = overview.picture(row, channel)
    sheet = lay_out(run.sites, overview.counts("block"))
    pixels = _pixels(picture, *overview.ends(channel))
    shown = np.where(sheet.cells[..., None] == EMPTY, np.uint8(255), pixels[sheet.cells])
    width = max(1, min(_WIDTH, _ROOM // shown.shape[1]))
    data = base64.b64encode(png(shown.repeat(_HEIGHT, axis=0).repeat(width, axis=1))).decode()
    label = f"{channel} at step {int(run.steps['step'][row]):,}, a line per layer"
    return f'<figure style="margin: 8px 0"><img alt="{label}" src="data:image/png;base64,{data}"><br>{label}</figure>'


def _pixels(picture: Picture, low: float, high: float) -> colours.Pixels:
    """A colour for every cell of the run, and one more for places without a cell."""
    pixels = colours.paint((picture.scores - low) / (high - low))
    pixels[~np.isfinite(picture.values)] = colours.NOT_FINITE
    pixels[picture.values == 0] = colours.ZERO
    pixels[is_absent(picture.values)] = colours.ABSENT
    return np.concatenate([pixels, np.zeros((1, 3), np.uint8)])
