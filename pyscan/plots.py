"""Plotly figures of a run for notebooks: curves of sites, and the map of the whole model.

Receives an open run; hands on figures. Long histories are reduced to a few hundred points, with a band from the lowest
to the highest value, before Plotly sees them.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pyscan import buckets, colours, digest, text
from pyscan.codecs import is_absent
from pyscan.errors import ScanError
from pyscan.extras import need
from pyscan.overview import Overview, Picture
from pyscan.sheet import EMPTY, Sheet, lay_out

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyscan.buckets import Buckets
    from pyscan.run import Run

# Eight colours that stay apart without full colour vision (Okabe and Ito).
TRACES = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8a7f00", "#7f7f7f")
_MOST = 6
_LOOK = {"template": "plotly_white", "margin": {"l": 60, "r": 20, "t": 40, "b": 40}}


def curves(run: Run, names: Sequence[str], *, channel: str, blocks: bool, points: int) -> Any:
    """The sites over time; without names the loss and, below it, the sites that moved most."""
    if points < 1:
        raise ValueError(f"points must be >= 1, got {points}")
    go = need("plotly.graph_objects", "view")
    figure = go.Figure(layout=_LOOK | {"hovermode": "x unified"})
    bounds = buckets.edges(0, len(run.steps), points)
    steps = run.steps["step"][bounds[:-1]] if len(run.steps) else np.zeros(0, np.uint64)
    chosen = [run.site(name).name for name in names] or _moved(run, channel)
    number = 0
    for name in chosen:
        for label, found in _reduced(run, channel, name, blocks, bounds):
            figure.add_traces(_band(go, steps, found, label, TRACES[number % len(TRACES)], "y"))
            number += 1
    figure.update_layout(xaxis_title="step", yaxis={"type": "log", "title": channel, "exponentformat": "power"})
    if not names and len(steps):
        loss = buckets.reduce_rows(run.steps["loss"][:, None].astype(np.float32), bounds[:-1])
        figure.add_traces(_band(go, steps, loss, "loss", "#444444", "y2"))
        figure.update_layout(yaxis={"domain": [0, 0.62]}, yaxis2={"domain": [0.7, 1], "title": "loss"})
    return figure


def _moved(run: Run, channel: str) -> list[str]:
    found = digest.curves(run, 1).get(channel)
    if found is None:
        return [site.name for site in run.sites[:_MOST]]
    far = np.nan_to_num(np.abs(found.drift), nan=-1.0)
    return [run.sites[place].name for place in np.argsort(-far, kind="stable")[:_MOST]]


def _reduced(run: Run, channel: str, name: str, blocks: bool, bounds: Any) -> list[tuple[str, Buckets]]:
    """A label and its buckets for the site, or for each of its blocks."""
    num_cells = run._num_cells(run.channel(channel), run.site(name))
    parts = []
    for part in buckets.windows(bounds, num_cells):
        values = run.get(channel, name, blocks, steps=slice(int(part[0]), int(part[-1])))
        parts.append(buckets.reduce_rows(values.reshape(len(values), -1), part[:-1] - part[0]))
    if not parts:
        return []
    whole = buckets.join(parts)
    short = name.removesuffix(".weight")
    labels = [f"{short} [{i}]" for i in range(whole.mean.shape[1])] if blocks else [short]
    return [(label, _column(whole, i)) for i, label in enumerate(labels)]


def _column(found: Buckets, i: int) -> Buckets:
    return buckets.Buckets(*(getattr(found, name)[:, i : i + 1] for name in ("low", "high", "mean", "num_bad")))


def _band(go: Any, steps: Any, found: Buckets, name: str, colour: str, axis: str) -> list[Any]:
    low, high, mean = (getattr(found, part)[:, 0] for part in ("low", "high", "mean"))
    line: dict[str, Any] = {"x": steps, "mode": "lines", "yaxis": axis, "legendgroup": name}
    hidden = {"line": {"width": 0}, "hoverinfo": "skip", "showlegend": False}
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    fill = {"fill": "tonexty", "fillcolor": f"rgba({red},{green},{blue},0.2)"}
    edges = [go.Scatter(y=low, **line, **hidden), go.Scatter(y=high, **line, **hidden, **fill)]
    middle = go.Scatter(y=mean, **line, name=escape(name), line={"color": colour, "width": 1.6})
    return [*(edges if (low < high).any() else []), middle]


def heatmap(run: Run, step: int | None, *, measure: str, colour: str) -> Any:
    """The model at one step; a cell says its site, block and value."""
    go = need("plotly.graph_objects", "view")
    overview = Overview(run)
    if measure not in overview.measures:
        raise ValueError(f"measure must be one of {', '.join(overview.measures)}, got {measure!r}")
    row = _row(run, step)
    picture = overview.picture(row, measure, cast(Any, colour))
    sheet = lay_out(run.sites, overview.counts(overview.per(measure)))
    scores = np.where(sheet.cells == EMPTY, np.nan, picture.scores[sheet.cells])
    diverging = colour == "z" or measure == "sps"
    low, high = (-3.0, 3.0) if diverging else overview.ends(measure)
    scale = colours.plotly_scale(colours.DIVERGING if diverging else colours.SEQUENTIAL)
    title = {"text": "z" if diverging and measure != "sps" else measure if diverging else f"log2 {measure}"}
    look = {"colorscale": scale, "zmin": low, "zmax": high, "xgap": 0.5, "ygap": 1, "colorbar": {"title": title}}
    labels = [escape(label) for label in sheet.labels]
    shown = go.Heatmap(z=scores, y=labels, text=_hover(run, picture, sheet, measure), hoverinfo="text", **look)
    figure = go.Figure(shown, layout=_LOOK | {"height": 140 + 22 * len(labels)})
    ticks = {"tickvals": [at for at, _ in sheet.ticks], "ticktext": [escape(name) for _, name in sheet.ticks]}
    words = f"{escape(run.model)} · {measure} at step {int(run.steps['step'][row]):,}"
    figure.update_layout(title=words, xaxis={**ticks, "showgrid": False})
    return figure.update_layout(yaxis={"autorange": "reversed", "type": "category", "showgrid": False})


def _row(run: Run, step: int | None) -> int:
    known = run.steps["step"]
    if not len(known):
        raise ScanError(f"{run.path} has no steps yet")
    if step is None:
        return len(known) - 1
    found = np.flatnonzero(known == step)
    if not len(found):
        raise ScanError(f"step {step} is not in the scan: its {len(known)} rows are steps {known[0]} to {known[-1]}")
    return int(found[0])


def _hover(run: Run, picture: Picture, sheet: Sheet, measure: str) -> list[list[str]]:
    absent = is_absent(picture.values)

    def words(cell: int, site: int, block: int) -> str:
        if cell == EMPTY:
            return ""
        value = "not observed" if absent[cell] else text.norm(float(picture.values[cell]))
        return f"{escape(run.sites[site].name)}<br>block {block}<br>{measure} {value}"

    places = zip(sheet.cells.tolist(), sheet.sites.tolist(), sheet.blocks.tolist(), strict=True)
    return [[words(*cell) for cell in zip(*row, strict=True)] for row in places]
