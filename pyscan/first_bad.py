"""Name the first value that was not finite: its site, the pass it was made in, and the last site before it.

Receives the non-finite counts of one row and the order in which the step met its sites; hands on a Fault. Forward comes
before backward: a bad activation makes every later gradient bad, so gradients count only where all inputs are finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Fault(NamedTuple):
    """Where a step stopped being finite. Sites are given by their place in the schema."""

    passed: str  # "forward": the input of `site` is the first bad one; "backward": its gradient is
    site: int
    after: int | None  # the last site before it, in the order of this pass, that was still finite
    inputs_finite: bool | None  # whether the input of `site` was; None: it was not observed
    num_values: int
    num_sites: int  # that are bad in this pass


class Orders(NamedTuple):
    """Sites in the order in which a forward met them, and in which their gradients came."""

    forward: Sequence[int] = ()
    backward: Sequence[int] = ()


def complete(order: Sequence[int], num_sites: int) -> list[int]:
    """All sites: those that the order leaves out stand behind the one that is defined before them."""
    missing = set(range(num_sites)).difference(order)
    full: list[int] = []
    for site in (-1, *order):
        full += [site] if site >= 0 else []
        while (site := site + 1) in missing:
            full.append(site)
    return full


def first_bad(act_bad: Floats, grad_bad: Floats, orders: Orders) -> Fault | None:
    """The first fault of a row, from its counts per site (negative: not observed); None if all is finite."""
    for passed, counts in (("forward", act_bad), ("backward", grad_bad)):
        if not (counts > 0).any():
            continue
        order = _order(passed, orders, len(counts))
        place = next(place for place, site in enumerate(order) if counts[site] > 0)
        site = order[place]
        return Fault(
            passed=passed,
            site=site,
            after=next((good for good in reversed(order[:place]) if counts[good] == 0), None),
            inputs_finite=None if act_bad[site] < 0 else bool(act_bad[site] == 0),
            num_values=round(float(counts[site])),
            num_sites=int((counts > 0).sum()),
        )
    return None


def _order(passed: str, orders: Orders, num_sites: int) -> list[int]:
    forward = complete(orders.forward, num_sites)
    if passed == "forward":
        return forward
    known = set(orders.backward)
    return [*orders.backward, *(site for site in reversed(forward) if site not in known)]


def explain(fault: Fault, names: Sequence[str], *, loss_is_bad: bool, after_clip: bool) -> str:
    """The fault in one sentence."""
    site = names[fault.site]
    if fault.passed == "forward":
        cause = "nothing before it was recorded: look at the batch and at the weights themselves"
        if fault.after is not None:
            cause = f"made after {names[fault.after]}, whose input was still finite"
        return f"the input of {site} is the first that is not finite; {cause}"
    if after_clip:
        return f"{fault.num_sites} gradients are not finite; they were read after clipping, which spreads one to all"
    cause = f"made between it and {'the loss' if fault.after is None else names[fault.after]}"
    if loss_is_bad:
        cause = "the loss itself is not finite: it is made in the loss, after the last weight"
    return f"the gradient of {site} is the first that is not finite, while every input is; {cause}"
