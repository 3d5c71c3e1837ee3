"""What an alarm says: events as dicts with one sentence for people, and what to try against each kind.

Receives what a rule found, by place; hands on events with names. Every number in them can be written as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyscan.first_bad import Fault, Orders, complete, explain
from pyscan.levels import Sites

Event = dict[str, Any]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

# Every kind of alarm, the worst first, and what to try.
ADVICE = {
    "nonfinite": "run pyscan.trace_nonfinite(model, batch) on the batch of this step to find the operation; clipping "
    "does not help, it spreads one bad gradient to all",
    "no_gradient": "look at the labels (all masked with -100?) and for detach() or no_grad() between the model and the "
    "loss; pyscan.check_grad_flow(model, loss) names the cause for every weight",
    "exploding": "lower the learning rate or warm up longer, clip gradients, and look at how this layer is initialised",
    "vanishing": "add or check residual connections and normalisation, and look at saturating activations between here "
    "and the loss",
    "dead": "look at the activation before it (a ReLU that never fires, a mask that hides everything) and at the "
    "learning rate at the time it died",
    "spike": "look at the batch of this step; clip gradients if spikes come often",
}
_WORDS = {"act": "input", "grad": "gradient"}


def _event(kind: str, step: int, site: str | None, text: str, told: dict[str, Any]) -> Event:
    return {"kind": kind, "step": step, "site": site, "text": text, **told}


def finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def place_name(sites: Sites, place: int) -> tuple[str, str]:
    """Channel and site of a column of levels."""
    return ("act", "grad")[place >= len(sites)], sites.names[place % len(sites)]


def nonfinite(
    sites: Sites,
    step: int,
    fault: Fault,
    before: Iterable[tuple[Any, ...]],
    *,
    loss: float | None,
    after_clip: bool,
) -> Event:
    """The first bad value, with the rows before it as far as they concern its site."""
    names = sites.all_names
    loss_is_bad = loss is not None and not math.isfinite(loss)
    told = {
        "pass": fault.passed,
        "after": None if fault.after is None else names[fault.after],
        "inputs_finite": fault.inputs_finite,
        "loss_finite": None if loss is None else not loss_is_bad,
        "values": fault.num_values,
        "sites": fault.num_sites,
        "before": [
            {"step": s, "loss": finite(lost), **sites.norms(np.frombuffer(cells), fault.site)}
            for s, cells, _, lost, *_ in before
        ],
    }
    text = explain(fault, names, loss_is_bad=loss_is_bad, after_clip=after_clip)
    return _event("nonfinite", step, names[fault.site], text, told)


def bad_loss(sites: Sites, step: int, orders: Orders) -> Event:
    last = sites.all_names[complete(orders.forward, sites.num_all)[-1]]
    text = f"the loss is not finite, while every input and gradient is; made after {last}"
    return _event("nonfinite", step, None, text, {"pass": "loss", "after": last, "loss_finite": False})


def no_gradient(step: int, loss: float | None, is_zero: bool) -> Event:
    """Every gradient is 0, or none came at all."""
    text = "no weight got a gradient: no backward ran in this step, or every weight is frozen or quantised"
    if is_zero and loss is not None and math.isnan(loss):
        text = "every gradient is 0 and the loss is NaN: the mean over no labels at all, every one is masked (-100)"
    elif is_zero and loss == 0:
        text = "every gradient is 0 and so is the loss: every label is masked (-100), or nothing is left to learn"
    elif is_zero:
        text = "every gradient is 0: the loss does not depend on the weights (masked, detached, clamped or saturated)"
    return _event("no_gradient", step, None, text, {"gradients": "zero" if is_zero else "none", "loss": finite(loss)})


def too_high(kind: str, sites: Sites, step: int, new: Mask, excess: Floats, orders: Orders) -> Event:
    """The site that is farthest above what it is measured by, and how its neighbours in the forward stand."""
    worst = int(np.argmax(np.where(new, excess, -np.inf)))
    channel, site = place_name(sites, worst)
    factor, others = _factor(excess[worst]), _and_others(sites, new)
    measure = "that of its first rows" if kind == "exploding" else "its moving average"
    text = f"the {_WORDS[channel]} of {site} is {factor:.3g} times {measure}{others}"
    near = {sites.names[i % len(sites)]: finite(_factor(excess[i])) for i in _neighbours(sites, worst, orders)}
    told = {"channel": channel, "factor": factor, "sites": _num_sites(sites, new), "neighbours": near}
    return _event(kind, step, site, text, told)


def faded(sites: Sites, step: int, low: NDArray[np.intp], top: int, relative: Floats, orders: Orders) -> Event:
    """Gradients that fade, or grow, on their way through the layers; `relative` are their levels per element."""
    arrival = {site: place for place, site in enumerate(orders.backward)}
    if not arrival:
        arrival = {site: -place for place, site in enumerate(complete(orders.forward, sites.num_all))}
    places = [arrival.get(site, len(arrival)) for site in sites.kept]
    worst = int(low[np.argmin(relative[low])])
    share = 2 ** ((relative[worst] - relative[top]) / 2)
    small, large = sites.names[worst], sites.names[top]
    told = {"channel": "grad", "factor": float(share), "sites": len(low), "largest": large}
    if places[top] > np.median([places[site] for site in low]):
        text = f"gradients grow by {1 / share:.2g} from {small} back to {large}"
        return _event("exploding", step, large, text, told | {"factor": float(1 / share), "smallest": small})
    text = f"the gradient of {small} is {share:.2g} of that of {large}, per element{_more(len(low) - 1)}"
    return _event("vanishing", step, small, text, told)


def dead(sites: Sites, step: int, since: int, new: Mask, blocks: Mask, orders: Orders) -> Event:
    """Blocks that were 0 in every row of a window; of all sites that have some, the first in the forward is named."""
    rank = {site: place for place, site in enumerate(complete(orders.forward, sites.num_all))}
    columns = np.flatnonzero(new).tolist()
    first = min(columns, key=lambda place: (rank[sites.kept[place % len(sites)]], place))
    channel, site = place_name(sites, first)
    of_site = sites.of_block == first
    num_dead, num_blocks = int(blocks[of_site].sum()), int(of_site.sum())
    which = "" if num_blocks == 1 else f" in {num_dead} of its {num_blocks} blocks"
    text = f"the {_WORDS[channel]} of {site} is 0{which} since step {since}{_and_others(sites, new)}"
    told = {"channel": channel, "since": since, "blocks": np.flatnonzero(blocks[of_site]).tolist()[:64]}
    return _event("dead", step, site, text, told | {"sites": _num_sites(sites, new)})


def _factor(excess: float) -> float:
    """A difference of levels, which are those of squares, as a factor between norms."""
    return float(2 ** min(excess / 2, 1000.0))


def _num_sites(sites: Sites, mask: Mask) -> int:
    return len(set((np.flatnonzero(mask) % len(sites)).tolist()))


def _and_others(sites: Sites, mask: Mask) -> str:
    return _more(_num_sites(sites, mask) - 1)


def _more(number: int) -> str:
    return "" if number < 1 else f"; so it is with {number} more site" + ("s" if number > 1 else "")


def _neighbours(sites: Sites, place: int, orders: Orders) -> Sequence[int]:
    """The columns of the sites that run just before and just after the one of this column."""
    columns = {site: column for column, site in enumerate(sites.kept)}
    order = [columns[site] for site in complete(orders.forward, sites.num_all) if site in columns]
    at = order.index(place % len(sites))
    shift = place - order[at]
    return [column + shift for column in (order[max(at - 1, 0) : at] + order[at + 1 : at + 2])]
