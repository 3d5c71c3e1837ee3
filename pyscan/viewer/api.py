"""What the viewer answers: one function per question, from a session and a query to an object for JSON.

Every answer is sliced and reduced here: it grows with the cells or points on the screen, never with the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from pyscan import buckets
from pyscan.buckets import Buckets
from pyscan.codecs import Floats
from pyscan.overview import Picture, apart
from pyscan.run import Run
from pyscan.schema import SiteInfo
from pyscan.summary import norm_channels
from pyscan.viewer import wire
from pyscan.viewer.query import BadRequestError, Query
from pyscan.viewer.session import Session
from pyscan.viewer.tokens import tokens

_MAX_POINTS = 2000
_FAR = 2**53  # beyond any row or step a page can name
# z-scores and SPS beyond this have the colour of the end of the scale.
_Z_END = 3.0
# Ends of the scale of a difference, in log2.
_STEPS_OF_ENDS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def state(session: Session, query: Query) -> dict[str, Any]:
    """Little and often: how far the runs are by now."""
    return {
        "num_steps": len(session.steps),
        "last_step": int(session.steps[-1]) if len(session.steps) else None,
        "rows": [len(run.steps) for run in session.runs],
        "changes": session.changes,
    }


def runs(session: Session, query: Query) -> dict[str, Any]:
    """What the runs are; asked once, and again when `changes` has risen."""
    parts = zip(session.runs, session.overviews, strict=True)
    shared = [m for m in session.overviews[0].measures if all(m in o.measures for o in session.overviews)]
    described = [wire.describe(run, overview) for run, overview in parts]
    drawn = {"measures": shared, "num_pairs": len(session.pairs), "colours": wire.COLOURS}
    return {"runs": described, **drawn, **state(session, query)}


def at(session: Session, query: Query) -> dict[str, Any]:
    """The place on the axis that is nearest to a step."""
    step = query.integer("step", low=0, high=_FAR)
    if not len(session.steps):
        raise BadRequestError("there are no steps yet")
    places = np.abs(session.steps.astype(np.int64) - step)
    return {"at": int(np.argmin(places))}


def frame(session: Session, query: Query) -> dict[str, Any]:
    """The map of every run at one place of the axis, and their difference if there are two."""
    measures = session.overviews[0].measures
    measure = query.choice("measure", [m for m in measures if all(m in o.measures for o in session.overviews)])
    colour = query.choice("colour", ("log", "z"), "log")
    scope = query.choice("scope", ("layer", "global"), "layer")
    at = query.integer("at", low=0, high=_FAR)
    rows = session.rows(at)
    pictures = [
        overview.picture(row, measure, cast(Any, colour), cast(Any, scope))
        for overview, row in zip(session.overviews, rows, strict=True)
    ]
    is_log = colour == "log" and measure != "sps"
    answer: dict[str, Any] = {"at": at, "step": int(session.steps[at])}
    answer["ends"] = session.ends(measure) if is_log else (-_Z_END, _Z_END)
    answer["diverging"] = not is_log
    panels = zip(session.runs, pictures, rows, strict=True)
    answer["panels"] = [_panel(run, picture, measure, row) for run, picture, row in panels]
    if len(pictures) == 2:
        answer["difference"] = _difference(session, pictures, measure)
    return answer


def _panel(run: Run, picture: Picture, measure: str, row: int) -> dict[str, Any]:
    """Values of the measure and, for what is made of them, of act and grad."""
    own = measure if measure not in ("sps", "ratio") else None
    values = {measure: wire.pack(picture.values, run.channel(own).codec if own else "f32")}
    for name in norm_channels(run) if own is None or run.channel(own).per == "block" else ():
        if name != measure:
            values[name] = wire.pack(run.cells(name, steps=slice(row, row + 1))[0], run.channel(name).codec)
    return {"values": values, "scores": wire.pack(picture.scores)}


def _difference(session: Session, pictures: list[Picture], measure: str) -> dict[str, Any]:
    """log2(B / A); of SPS, which is a logarithm already, B - A."""
    counts = [overview.counts(overview.per(measure)) for overview in session.overviews]
    a, b = pictures
    if measure == "sps":
        a, b = (Picture(np.exp2(p.scores).astype(np.float32), p.scores) for p in pictures)
    found = apart(a, b, session.pairs, *counts)
    known = np.abs(found[np.isfinite(found)])
    far = float(np.percentile(known, 99)) if known.size else 0.0
    end = next((end for end in _STEPS_OF_ENDS if far <= 1.001 * end), _STEPS_OF_ENDS[-1])
    return {"scores": wire.pack(found), "ends": (-end, end), "largest": float(known.max()) if known.size else None}


def history(session: Session, query: Query) -> dict[str, Any]:
    """One cell, or a site as a whole, over the rows [first, last]."""
    run = session.run(query.integer("run", low=0, high=1, default=0))
    channel = query.choice("channel", [channel.name for channel in run.channels])
    site = run.sites[query.integer("site", low=0, high=max(len(run.sites) - 1, 0))] if run.sites else None
    if site is None:
        raise BadRequestError("the run has no sites")
    num_cells = run._num_cells(run.channel(channel), site)
    block = query.integer("block", low=-1, high=num_cells - 1, default=-1)
    bounds = _bounds(run, query)
    found = reduce_site(run, channel, site, block, bounds, num_cells)
    return {"site": site.name, "block": block, "channel": channel} | _points(run, bounds, found)


def timeline(session: Session, query: Query) -> dict[str, Any]:
    """Loss of the rows [first, last], and the events of the run."""
    run = session.run(query.integer("run", low=0, high=1, default=0))
    bounds = _bounds(run, query)
    loss = run.steps["loss"][bounds[0] : bounds[-1], None].astype(np.float32)
    found = buckets.reduce_rows(loss, bounds[:-1] - bounds[0]) if len(loss) else None
    return {"events": wire.events(run)} | _points(run, bounds, found)


def reduce_site(
    run: Run, channel: str, site: SiteInfo, block: int, bounds: Any, num_cells: int | None = None
) -> Buckets | None:
    """The cell (block -1: all cells of the site together) in buckets with these bounds, read in windows."""
    width = num_cells if num_cells is not None else site.num_blocks
    parts = []
    for part in buckets.windows(bounds, max(width, 1)):
        values = _cell(run, channel, site, block, slice(int(part[0]), int(part[-1])))
        parts.append(buckets.reduce_rows(values[:, None], part[:-1] - part[0]))
    return buckets.join(parts) if parts else None


def _cell(run: Run, channel: str, site: SiteInfo, block: int, rows: slice) -> Floats:
    if block < 0:
        return run.get(channel, site.name, steps=rows)
    return run.get(channel, site.name, blocks=True, steps=rows)[:, block]


def _bounds(run: Run, query: Query) -> Any:
    """Where the buckets begin that the question asks for; `first` and `last` are steps."""
    steps = run.steps["step"]
    first = query.integer("first", low=0, high=_FAR, default=0)
    last = query.integer("last", low=0, high=_FAR, default=_FAR)
    points = query.integer("points", low=1, high=_MAX_POINTS, default=400)
    inside = np.flatnonzero((steps >= first) & (steps <= last))
    start, stop = (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)
    return buckets.edges(start, stop, points)


def _points(run: Run, bounds: Any, found: Buckets | None) -> dict[str, Any]:
    steps = run.steps["step"]
    if found is None:
        return {"num_rows": 0, "steps": [], "low": [], "high": [], "mean": [], "num_bad": []}
    parts = {name: getattr(found, name)[:, 0] for name in ("low", "high", "mean", "num_bad")}
    told = {name: [None if v != v else v for v in values.tolist()] for name, values in parts.items()}
    return {"num_rows": int(bounds[-1] - bounds[0]), "steps": steps[bounds[:-1]].tolist(), **told}


QUESTIONS: dict[str, Callable[[Session, Query], dict[str, Any]]] = {
    "/api/state": state,
    "/api/runs": runs,
    "/api/at": at,
    "/api/frame": frame,
    "/api/history": history,
    "/api/timeline": timeline,
    "/api/tokens": tokens,
}
