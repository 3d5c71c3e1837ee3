"""One HTML file about a run that opens anywhere, without a net and without pyscan.

Receives an open run, its verdict and the facts of `pyscan info`; hands on the text of the page. The page is that of the
viewer, with the data inside it; its size is bounded whatever the length of the run.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from pyscan import buckets, codecs, digest, text
from pyscan.digest import Curves
from pyscan.overview import Overview
from pyscan.summary import norm_channels
from pyscan.viewer import wire
from pyscan.viewer.server import plotly_js, static

if TYPE_CHECKING:
    from pyscan.health import Finding, Health
    from pyscan.run import Run

Tick = Callable[[int, int], None]

# Bytes of snapshots and of curves before they become text, which takes a third more; Plotly takes 5 MB beside them.
_SNAPSHOT_BYTES = _CURVE_BYTES = 900_000
_MAX_SNAPSHOTS, _FEW_SNAPSHOTS, _MAX_POINTS = 80, 8, 300
_MOST = 12  # sites that moved most
_SCRIPTS = ("codes.js", "map.js", "charts.js", "page.js", "report.js")
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


def build(run: Run, facts: dict[str, Any], health: Health, tick: Tick = lambda done, total: None) -> str:
    """The page of a run; `facts` is what `pyscan info` says about it."""
    points = _CURVE_BYTES // max(12 * len(run.sites), 1)
    found = digest.curves(run, max(10, min(points, _MAX_POINTS)), tick)
    data = _data(run, health, found)
    head = f"<title>{escape(data['info']['runs'][0]['name'])} – pyscan report</title>"
    head += f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    head += f"<style>{static('style.css').decode()}</style>"
    scripts = f'<script type="application/json" id="data">{_script_json(data)}</script>'
    scripts += f"<script>{plotly_js().decode()}</script>"
    scripts += "".join(f"<script>{static(name).decode()}</script>" for name in _SCRIPTS)
    bottom = f'<div class="two">{_moved(run, found)}{_coverage(run)}</div>{_texts(run)}'
    parts = {"head": head, "top": _verdict(run, facts, health), "bottom": bottom, "scripts": scripts}
    page = static("page.html").decode()
    for name, part in parts.items():
        page = page.replace(f"<!--{name}-->", part)
    return page


def _script_json(data: Any) -> str:
    """JSON that cannot end the script it stands in, whatever a file names its sites."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


# What the scripts draw


def _data(run: Run, health: Health, found: dict[str, Curves]) -> dict[str, Any]:
    channels = norm_channels(run)
    num_cells = sum(site.num_blocks for site in run.sites)
    room = _SNAPSHOT_BYTES // max(_bytes_per_cell(run) * num_cells, 1)
    merged = room < _FEW_SNAPSHOTS
    if merged:
        room = _SNAPSHOT_BYTES // (_bytes_per_cell(run) * len(run.sites))
    rows = digest.snapshot_rows(run, min(room, _MAX_SNAPSHOTS), [finding.step for finding in health.findings])
    overview = Overview(run)
    info = wire.describe(run, overview)
    if merged:
        for site in info["sites"]:
            site["cells"]["block"] = 1
    measures = [m for m in overview.measures if m in (*channels, "sps", "ratio")]
    described = {"runs": [info], "measures": measures, "colours": wire.COLOURS, "num_steps": len(rows)}
    counts = overview.counts("block")
    return {
        "info": described,
        "steps": run.steps["step"][rows].tolist(),
        "merged": merged,
        "widths": wire.pack(digest.cell_widths(run, counts, merged=merged)),
        "ends": {measure: overview.ends(measure) for measure in measures},
        "snapshots": [_snapshot(run, digest.snapshot(run, row, merged=merged)) for row in rows],
        "timeline": _timeline(run),
        "curves": {name: _curve(run, name, curve) for name, curve in found.items()},
        "curve_steps": run.steps["step"][next(iter(found.values())).first_rows].tolist() if found else [],
    }


def _bytes_per_cell(run: Run) -> int:
    return 8 + sum(codecs.DTYPES[run.channel(name).codec].itemsize for name in norm_channels(run))


def _snapshot(run: Run, snap: digest.Snapshot) -> dict[str, Any]:
    norms = {name: wire.pack(values, run.channel(name).codec) for name, values in snap.norms.items()}
    return {"norms": norms, "sps": {scope: wire.pack(values) for scope, values in snap.sps.items()}}


def _curve(run: Run, channel: str, curve: Curves) -> dict[str, Any]:
    """Buckets site after site, as codes: what lasts one row only is told exactly."""
    codec = "log2q8" if run.channel(channel).codec == "log2q8" else "f32"
    parts = {name: np.ascontiguousarray(getattr(curve.buckets, name).T) for name in ("low", "high", "mean")}
    with np.errstate(over="ignore"):
        packed = {name: wire.pack(values.astype(np.float32), codec) for name, values in parts.items()}
    places = np.argwhere(curve.buckets.num_bad.T > 0)[:10_000]
    bad = [[int(site), int(at), int(curve.buckets.num_bad[at, site])] for site, at in places]
    return packed | {"bad": bad}


def _timeline(run: Run) -> dict[str, Any]:
    bounds = buckets.edges(0, len(run.steps), 600)
    loss = run.steps["loss"][:, None].astype(np.float32)
    told: dict[str, Any] = {"steps": [], "low": [], "high": [], "mean": [], "num_bad": []}
    if len(loss):
        found = buckets.reduce_rows(loss, bounds[:-1])
        told = {name: _plain(getattr(found, name)[:, 0]) for name in ("low", "high", "mean")}
        told |= {"num_bad": [0] * (len(bounds) - 1), "steps": run.steps["step"][bounds[:-1]].tolist()}
    return {"events": wire.events(run)} | told


def _plain(values: Any) -> list[float | None]:
    return [None if value != value else float(f"{value:.6g}") for value in values.tolist()]


# What is text


def _verdict(run: Run, facts: dict[str, Any], health: Health) -> str:
    span = f", steps {health.steps[0]:,} to {health.steps[1]:,}" if health.steps else ""
    rows = text.plural(health.num_rows, "row") + span
    if not health.num_rows:
        kind, words = "unknown", "No rows yet, nothing to judge"
    elif health.findings:
        kind, words = "sick", f"{text.plural(len(health.findings), 'problem')} in {rows}"
    else:
        kind, words = "", f"Healthy in {rows}"
    told = "".join(map(_finding, health.findings))
    unjudged = "".join(f"<dd>not judged: {escape(line)}</dd>" for line in health.not_judged)
    shown = "".join(f"<div><span>{escape(k)}</span><b>{escape(v)}</b></div>" for k, v in _facts(run, facts))
    return (
        f'<section class="card verdict {kind}"><h2>{escape(words)}</h2><dl>{told}{unjudged}</dl>'
        f'<div class="facts">{shown}</div></section>'
    )


def _finding(finding: Finding) -> str:
    where = f" · {finding.site}" if finding.site else ""
    again = f" ({finding.num_events} times, last at step {finding.last_step:,})" if finding.num_events > 1 else ""
    title = f"{finding.kind.replace('_', ' ')} since step {finding.step:,}{where}"
    return f"<dt>{escape(title)}</dt><dd>{escape(finding.text + again)}</dd><dd>try: {escape(finding.advice)}</dd>"


def _facts(run: Run, facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    steps = facts["steps"]
    yield "model", facts["model"] or "not named"
    yield "sites", f"{len(run.sites):,}"
    yield "cells per step", f"{facts['cells_per_step']:,}"
    yield "rows", f"{steps['rows']:,}"
    if steps.get("loss"):
        yield "loss", f"{text.norm(steps['loss'][0])} → {text.norm(steps['loss'][1])}"
    if steps.get("seconds"):
        yield "time", text.duration(steps["seconds"])
    if steps.get("tokens"):
        yield "tokens", f"{steps['tokens']:,}"
    yield "overhead", _overhead(run)
    yield "file", text.size(facts["bytes"])


def _overhead(run: Run) -> str:
    """What the scanner measured itself taking of the step time, as far as the file tells."""
    told = [event["overhead"] for event in run.events if isinstance(event.get("overhead"), float)]
    return f"{100 * told[-1]:.2g} % of the step" if told else "not recorded"


def _moved(run: Run, found: dict[str, Curves]) -> str:
    """Sites by how far act or grad went between the first and the last tenth of the run."""
    rows = []
    far = np.max([np.nan_to_num(np.abs(curve.drift)) for curve in found.values()], axis=0) if found else np.zeros(0)
    for place in np.argsort(-far, kind="stable")[:_MOST]:
        cells = "".join(f'<td class="number">{escape(text.factor(float(c.drift[place])))}</td>' for c in found.values())
        if far[place] > 0:
            rows.append(f'<tr data-site="{place}"><td>{escape(run.sites[place].name)}</td>{cells}</tr>')
    titles = "".join(f'<th class="number">{escape(name)}</th>' for name in found)
    body = "".join(rows) or '<tr><td class="soft">nothing moved</td></tr>'
    return (
        '<section class="card"><h2>Moved most <small>last tenth of the run against the first</small></h2>'
        f'<div class="wide"><table class="list"><tr><th>site</th>{titles}</tr>{body}</table></div></section>'
    )


def _coverage(run: Run) -> str:
    told = [event for event in run.events if event["kind"] == "attached" and isinstance(event.get("not_scanned"), dict)]
    left_out = dict(told[-1]["not_scanned"]) if told else {}
    notes = {str(event["site"]): event.get("text") for event in run.events if event["kind"] == "note" and event["site"]}
    rows = "".join(
        f"<tr><td>{escape(str(name))}</td><td>{escape(str(reason))}</td></tr>"
        for name, reason in [*left_out.items(), *notes.items()][:200]
    )
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in Counter(site.kind for site in run.sites).most_common())
    words = f"{text.plural(len(run.sites), 'site')} recorded ({kinds})"
    words += f", {len(left_out)} not or in part" if left_out else ", none left out" if told else ""
    body = rows or '<tr><td class="soft">every weight of two or more dimensions</td></tr>' if told else rows
    return (
        f'<section class="card"><h2>Coverage <small>{escape(words)}</small></h2>'
        f'<div class="wide"><table class="list">{body}</table></div></section>'
    )


def _texts(run: Run) -> str:
    """The text of the first sequences, if the run tells it."""
    told = [event for event in run.events if event["kind"] == "sequence" and event.get("text", event.get("source"))]
    parts = [f"<p>{escape(str(event.get('text', event.get('source')))[:4000])}</p>" for event in told[:5]]
    title = f"Text <small>{len(parts)} of {text.plural(len(told), 'sequence')}</small>"
    return f'<section class="card" id="text"><h2>{title}</h2>{"".join(parts)}</section>' if parts else ""
