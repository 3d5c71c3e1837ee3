"""The verdict of a whole run: what was wrong, where, since when, how bad, and what to try.

Receives an open run, gives its rows to the rules of watch.py in bounded pieces, adds what the file itself says (events,
kinds of weights, damage), and hands on findings, the worst first, with everything that could not be judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pyscan import alarms
from pyscan.codecs import is_absent
from pyscan.first_bad import Orders
from pyscan.format import ROW_AFTER_CLIP, ROW_HAS_LOSS
from pyscan.watch import RowWatch, Watch

if TYPE_CHECKING:
    from pyscan.alarms import Event
    from pyscan.run import Run

Floats = NDArray[np.float64]
Tick = Callable[[int, int], None]

# Cells of rows that are in memory at once: 32 MB.
_PIECE_CELLS = 1 << 22
_BLOCK_CHANNELS = ("act", "grad")
_SITE_CHANNELS = ("act_max", "grad_max", "act_bad", "grad_bad")

# What a file can tell beside the alarms, and what to try.
ADVICE = alarms.ADVICE | {
    "nothing_recorded": "generate() and no_grad() leave nothing to record: run one forward on the generated tokens "
    "with gradients enabled, and call backward()",
    "quantized": "load the model in bf16 to get gradients of its weights, or train LoRA adapters and scan those",
    "init": "give the named weight the scale of its neighbours (a standard deviation of 0.02, or 1/sqrt(inputs)); "
    "pyscan.check_init(model, batch) tests it before the first step",
    "replicas_differ": "ranks that hold the same weight must agree: look for a missing all-reduce or other seeds",
    "rank_differs": "look at the card, the memory and the batch of this rank; compare checksums of its weights with "
    "those of the others",
    "rank_nonfinite": "look at the batch and the card of this rank: the others got the value from it",
    "off": "see the text; rows after this step are missing, training itself was not touched",
}
# Events that are findings by themselves.
_TOLD = ("nothing_recorded", "init", "replicas_differ", "rank_differs", "rank_nonfinite", "off")
_WORST_FIRST = ["nonfinite", "nothing_recorded", "no_gradient", "quantized", "init", "exploding", "vanishing", "dead"]
_WORST_FIRST += ["rank_nonfinite", "rank_differs", "replicas_differ", "off", "spike"]


@dataclass
class Finding:
    """One thing that is wrong; `detail` is the first event about it."""

    kind: str
    step: int  # since when
    site: str | None
    text: str
    num_events: int = 1
    last_step: int = 0  # of the last event
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def advice(self) -> str:
        return ADVICE[self.kind]


@dataclass(frozen=True)
class Health:
    """What a run looks like as a whole; healthy if there are no findings."""

    num_rows: int
    steps: tuple[int, int] | None
    findings: list[Finding]
    not_judged: list[str]


def judge(run: Run, limits: Watch | None = None, tick: Tick = lambda done, total: None) -> Health:
    """Look at all rows of a run."""
    events = run.events
    orders = _orders(run, events)
    found = _from_codes(run) if run.version == 1 else _from_rows(run, limits, orders, tick)
    if not _has_channel(run, "grad"):
        found = [event for event in found if event["kind"] != "no_gradient"]
    found += [_told(event) for event in events if event["kind"] in _TOLD]
    found += _quantised(run, found)
    steps = run.steps["step"]
    span = (int(steps[0]), int(steps[-1])) if len(steps) else None
    # Last, because damage is known once everything has been read.
    return Health(len(steps), span, _findings(found), list(_not_judged(run, orders)))


def _findings(events: list[Event]) -> list[Finding]:
    """Events of one kind are one finding: the first of them, and how often it came."""
    found: dict[str, Finding] = {}
    for event in sorted(events, key=lambda event: int(event["step"])):
        kind, step = event["kind"], int(event["step"])
        if kind in found:
            found[kind].num_events += 1
            found[kind].last_step = step
            continue
        told = {key: value for key, value in event.items() if key not in ("kind", "step", "site", "text")}
        found[kind] = Finding(kind, told.get("since", step), event["site"], event["text"], 1, step, told)
    return sorted(found.values(), key=lambda finding: _WORST_FIRST.index(finding.kind))


def _told(event: Event) -> Event:
    """An event of the file, of whose other fields nothing is known."""
    text = str(event.get("text", event["kind"].replace("_", " ")))
    return {"kind": event["kind"], "step": event["step"], "site": event["site"], "text": text}


# The rows


def _from_rows(run: Run, limits: Watch | None, orders: Orders, tick: Tick) -> list[Event]:
    run._refuse_monster(1, sum(site.num_blocks for site in run.sites))
    rules = RowWatch(run.sites, limits, lambda: orders)
    events: list[Event] = []
    step = 0
    for start, piece in _pieces(run):
        table = run.steps[start : start + len(piece)]
        for row, cells in zip(table, piece, strict=True):
            step, flags = int(row["step"]), int(row["flags"])
            loss = float(row["loss"]) if flags & ROW_HAS_LOSS else None
            events += rules.see(step, cells, loss, flags)
        tick(start + len(piece), len(run.steps))
    return events + rules.finish(step)


def _pieces(run: Run) -> Iterator[tuple[int, Floats]]:
    """The rows of a run as the rules want them, [rows, cells], piece by piece with the place of the first."""
    num_cells = sum(2 * site.num_blocks + len(_SITE_CHANNELS) for site in run.sites)
    size = max(_PIECE_CELLS // max(num_cells, 1), 16)
    for start in range(0, len(run.steps) if num_cells else 0, size):
        rows = slice(start, min(start + size, len(run.steps)))
        blocks = [_sums(run, channel, rows) for channel in _BLOCK_CHANNELS]
        of_sites = [_values(run, channel, rows, blocks) for channel in _SITE_CHANNELS]
        # The compiled glance at a row takes its cells in one piece.
        yield start, np.ascontiguousarray(np.concatenate([*(part for part, _ in blocks), *of_sites], axis=1))


def _sums(run: Run, channel: str, rows: slice) -> tuple[Floats, Floats]:
    """Sums of squares [rows, blocks], negative where absent; and whether a site has a NaN [rows, sites]."""
    num_rows = rows.stop - rows.start
    if not _has_channel(run, channel):
        return np.full((num_rows, sum(site.num_blocks for site in run.sites)), -1.0), np.zeros(
            (num_rows, len(run.sites))
        )
    norms = run.cells(channel, steps=rows)
    absent = is_absent(norms)
    widths = [run._num_cells(run.channel(channel), site) for site in run.sites]
    num_absent, num_bad = (_per_site(mask, widths) for mask in (absent, np.isnan(norms) & ~absent))
    is_bad = np.where(num_absent == widths, -1.0, num_bad > 0)
    return np.where(absent, -1.0, np.square(norms.astype(np.float64))), is_bad


def _per_site(mask: NDArray[np.bool_], widths: list[int]) -> Floats:
    """How many blocks of each site are marked, [rows, sites]; a site may have none."""
    running = np.zeros((len(mask), mask.shape[1] + 1))
    np.cumsum(mask, axis=1, out=running[:, 1:])
    ends = np.cumsum(widths, dtype=np.int64)
    return np.asarray(running[:, ends] - running[:, ends - widths])


def _values(run: Run, channel: str, rows: slice, blocks: list[tuple[Floats, Floats]]) -> Floats:
    """A channel of one cell per site. A file without counts of bad values still has NaN in the blocks."""
    if _has_channel(run, channel):
        found = run.cells(channel, steps=rows)
        return np.where(is_absent(found), -1.0, found.astype(np.float64))
    shape = rows.stop - rows.start, len(run.sites)
    return blocks[channel == "grad_bad"][1] if channel.endswith("_bad") else np.full(shape, -1.0)


def _has_channel(run: Run, name: str) -> bool:
    per = "block" if name in _BLOCK_CHANNELS else "site"
    return any(channel.name == name and channel.per == per for channel in run.channels)


# What the file says itself


def _orders(run: Run, events: list[Event]) -> Orders:
    """The order the scanner has noted for the sites the run has now; none if the file gives none that fits."""
    ranks = getattr(run, "ranks", {}).values()
    if any([site.name for site in rank.sites] != [site.name for site in run.sites] for rank in ranks):
        return Orders()  # each rank counts its own sites
    for event in reversed(events):
        parts = [event.get("forward"), event.get("backward")] if event["kind"] == "execution_order" else []
        if parts and all(_is_order(part, len(run.sites)) for part in parts):
            return Orders(event["forward"], event["backward"])
    return Orders()


def _is_order(part: Any, num_sites: int) -> bool:
    if not isinstance(part, list) or not all(type(site) is int and 0 <= site < num_sites for site in part):
        return False
    return len(set(part)) == len(part)


def _from_codes(run: Run) -> list[Event]:
    """Version 1.1 has codes without a unit, and 0 for everything that is not there: only "all are 0" says something."""
    if not len(run.steps) or any(run.codes("grad", site.name).any() for site in run.sites):
        return []
    text = "every gradient is 0, in every token: the loss was 0, or nothing was recorded (frozen, 4-bit, no_grad)"
    return [{"kind": "no_gradient", "step": int(run.steps["step"][0]), "site": None, "text": text, "gradients": "zero"}]


def _quantised(run: Run, found: list[Event]) -> list[Event]:
    """Weights that cannot have a gradient, where nothing is trained in their place."""
    stored = [site for site in run.sites if site.kind == "quantized"]
    if not stored or any("lora_" in site.name for site in run.sites) or not len(run.steps):
        return []
    names = ", ".join(sorted({site.dtype for site in stored}))
    text = f"{len(stored)} of {len(run.sites)} weights are quantised ({names}): they have no gradient and do not learn"
    found[:] = [event for event in found if event.get("gradients") != "none"]  # this is why
    return [{"kind": "quantized", "step": int(run.steps["step"][0]), "site": stored[0].name, "text": text}]


def _not_judged(run: Run, orders: Orders) -> Iterator[str]:
    if run.version == 1:
        yield "explosions, spikes and fading: the values of version 1.1 are codes without a unit, one row per token"
        yield "dead blocks and bad values: version 1.1 stores 0 for what is 0, not finite or was not observed"
        return
    for name in (*_BLOCK_CHANNELS, "act_bad", "grad_bad"):
        if not _has_channel(run, name):
            rest = "bad values are seen as NaN norms only" if name.endswith("bad") else "nothing is said about it"
            yield f"the file has no channel {name}: {rest}"
    if not orders.backward:
        yield "which site came first: the file does not tell the order of execution, so the order of definition is used"
    if run.missing_ranks:
        yield f"cells shared with missing ranks ({', '.join(map(str, run.missing_ranks))})"
    if run.every > 1:
        yield f"steps between the rows: one in {run.every} was recorded"
    if num_late := int(((run.steps["flags"] & ROW_AFTER_CLIP) != 0).sum()):
        yield f"gradients before clipping in {num_late} of {len(run.steps)} rows: they were read after it"
    if run.damage:
        yield f"{len(run.damage)} damaged places: see pyscan check"
