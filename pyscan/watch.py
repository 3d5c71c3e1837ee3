"""Rules over finished rows: what is not finite, explodes, spikes, fades, is dead, or has no gradient at all.

Receives each row as it is closed, or the rows of a file one after another, and hands on events. Every row is tested for
what cannot wait (not finite, no gradient, a level above its bound); every `patience` rows the window of these rows is
reviewed: bounds follow the run, and what must last to be a fault (a faded gradient, a dead block) is looked for. An
alarm fires once for a site, and again only after a whole window without it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pyscan import alarms
from pyscan.alarms import Event
from pyscan.first_bad import Orders, first_bad
from pyscan.format import ROW_AFTER_CLIP, ROW_SKIPPED
from pyscan.levels import Bounds, Glance, Seen, Sites, highest, is_level, levels_of
from pyscan.schema import SiteInfo

if TYPE_CHECKING:
    from pyscan import _C

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

# Rows after which a level has a reference to explode from; a window at the end of a run has at least as many.
FIRST_ROWS = 4
KINDS = tuple(alarms.ADVICE)


@dataclass(frozen=True)
class Watch:
    """The limits of the rules, as in `pyscan.attach(..., watch=pyscan.Watch(spike=32))`."""

    explode: float = 1024.0  # a norm so many times that of its first rows, in two rows running
    spike: float = 16.0  # a norm so many times its moving average,
    deviations: float = 6.0  # and so many standard deviations above it
    fade: float = 2.0**-24  # a gradient (root mean square) so small a share of the largest, for `patience` rows
    patience: int = 16  # rows a block must be 0 or a gradient faded, and a site calm before it may fire again
    keep: int = 8  # rows before the first bad value that its event carries
    detail: int = 16  # steps to record one by one after an alarm, whatever `every` is; 0: none

    def __post_init__(self) -> None:
        for name, least, below in (
            ("explode", 1, math.inf),
            ("spike", 1, math.inf),
            ("deviations", 0, math.inf),
            ("fade", 0, 1),
        ):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not least < value < below:
                raise ValueError(f"{name} must lie between {least} and {below}, got {value!r}")
        for name, least in (("patience", FIRST_ROWS), ("keep", 0), ("detail", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an int >= {least}, got {value!r}")


class RowWatch:
    """The rules for one list of sites.

    A row begins with the sums of squares of `act` and `grad`, block by block, and ends with `act_max`, `grad_max`,
    `act_bad` and `grad_bad`, site by site; negative is not observed. So is a row of the scanner.
    """

    def __init__(
        self,
        sites: Sequence[SiteInfo],
        limits: Watch | None = None,
        orders: Callable[[], Orders] = Orders,
        glance: type[Glance] | type[_C.Glance] = Glance,
    ) -> None:
        self.limits = limits or Watch()
        self._orders = orders
        self._sites = Sites(sites)
        rows, columns = self.limits.patience, len(self._sites.sizes)
        self._bounds = Bounds(
            self._sites, explode=self.limits.explode, spike=self.limits.spike, deviations=self.limits.deviations
        )
        self.glance = glance(self._sites.starts, self._sites.num_blocks, 2 * self._sites.num_all, rows, FIRST_ROWS)
        # Rows that were looked at: (step, cells, tokens, loss, ...). Others may put those here that set off nothing.
        self.before: deque[tuple[Any, ...]] = deque(maxlen=self.limits.keep)
        self._exploded = 0, np.zeros(columns, bool)  # number of the last row above a bound, and what exploded in it
        self._is_any_on = False  # of the following
        self._on = {kind: np.zeros(columns, bool) for kind in KINDS[2:]}
        self._last_on = dict.fromkeys(KINDS[:2], -rows)  # number of the row
        self._quiet_rows = dict.fromkeys(KINDS[2:], rows)  # since the alarm was last on
        self._num_skipped = 0  # rows running that a scaler skipped

    def see(
        self, step: int, cells: Floats, loss: float | None = None, flags: int = 0, seen: Seen | None = None
    ) -> list[Event]:
        """Look at the next row; what it sets off, most often nothing. With `seen` the glance has looked already."""
        sites = self._sites
        if not sites.names:
            return []
        largest, gradient, has_bad, is_above = self.glance.look(cells, step) if seen is None else seen
        place = (self.glance.num_rows - 1) % self.limits.patience
        events = []
        # A mean over no labels is NaN with gradients of 0: that is the other alarm.
        is_bad = has_bad or (loss is not None and not math.isfinite(loss) and gradient != 0)
        if is_bad and not self._scaler_skips(cells, flags) and self._begins("nonfinite"):
            events.append(self._nonfinite(step, cells, loss, flags))
        if gradient <= 0 <= largest and self._begins("no_gradient"):
            events.append(alarms.no_gradient(step, loss, gradient == 0))
        if is_above:
            events += self._too_high(step, levels_of(self.glance.window[place]))
        self.before.append((step, cells, None, loss))
        if place == self.limits.patience - 1 and not self._takes_in():
            events += self._review(step, levels_of(self.glance.window))
        elif self.glance.num_rows == FIRST_ROWS:
            self._bounds.begin(levels_of(self.glance.window[:FIRST_ROWS]))
            self.glance.limits = self._bounds.largest_sum
        return events

    def finish(self, step: int) -> list[Event]:
        """Review the rows since the last review: there will be no more."""
        rows = self.glance.num_rows % self.limits.patience
        return self._review(step, levels_of(self.glance.window[:rows])) if rows >= FIRST_ROWS else []

    # What cannot wait

    def _begins(self, kind: str) -> bool:
        """Whether an alarm that is on fires: it was not on in the last `patience` rows."""
        before, self._last_on[kind] = self._last_on[kind], self.glance.num_rows
        return self.glance.num_rows - before > self.limits.patience

    def _scaler_skips(self, cells: Floats, flags: int) -> bool:
        """A scaler that looks for its scale skips steps whose gradients overflow; only for ever is a fault."""
        skips = bool(flags & ROW_SKIPPED) and not (self._bad(cells)[0] > 0).any()
        self._num_skipped = self._num_skipped + 1 if skips else 0
        return skips and self._num_skipped < self.limits.patience

    def _bad(self, cells: Floats) -> tuple[Floats, Floats]:
        """The counts of non-finite inputs and gradients, site by site."""
        half = self._sites.num_all
        return cells[-2 * half : -half], cells[-half:]

    def _nonfinite(self, step: int, cells: Floats, loss: float | None, flags: int) -> Event:
        orders = self._orders()
        fault = first_bad(*self._bad(cells), orders)
        if fault is None:
            return alarms.bad_loss(self._sites, step, orders)
        after_clip = bool(flags & ROW_AFTER_CLIP)
        return alarms.nonfinite(self._sites, step, fault, self.before, loss=loss, after_clip=after_clip)

    def _too_high(self, step: int, levels: Floats) -> list[Event]:
        bounds = self._bounds
        exploded = levels > bounds.explode
        number, before = self._exploded
        lasting = exploded & before if number == self.glance.num_rows - 1 else np.zeros_like(exploded)
        self._exploded = self.glance.num_rows, exploded
        events = []
        for kind, mask, usual in (
            ("exploding", lasting, bounds.reference),
            ("spike", levels > bounds.spike, bounds.mean),
        ):
            if (new := self._turn_on(kind, mask)).any():
                events.append(alarms.too_high(kind, self._sites, step, new, levels - usual, self._orders()))
        return events

    def _turn_on(self, kind: str, mask: Mask) -> Mask:
        """The sites for which an alarm fires now. Those that follow within a window belong to the first."""
        new = mask & ~self._on[kind]
        self._on[kind] |= mask
        if new.any():
            self._is_any_on = True
            new &= self._quiet_rows[kind] >= self.limits.patience
            self._quiet_rows[kind] = 0
        return new

    # What must last

    def _takes_in(self) -> bool:
        """Take in the window that ends, if there is nothing to review in it; False: nothing was done."""
        if self._is_any_on or isinstance(self.glance, Glance):
            return False
        if not self._bounds.follow_plain(self.glance, 2 * math.log2(self.limits.fade)):
            return False
        for kind in KINDS[2:]:
            self._quiet_rows[kind] += self.limits.patience
        return True

    def _review(self, step: int, window: Floats) -> list[Event]:
        exploding, spike = self._bounds.calm(window)
        self._on["exploding"] &= ~exploding
        self._on["spike"] &= ~spike
        for kind in KINDS[2:]:
            self._quiet_rows[kind] += len(window)
        self._bounds.follow(window)
        self.glance.limits = self._bounds.largest_sum
        events = self._find_faded(step, window[:, len(self._sites) :]) + self._find_dead(step)
        self._is_any_on = any(on.any() for on in self._on.values())
        return events

    def _find_faded(self, step: int, gradients: Floats) -> list[Event]:
        relative = highest(gradients) - self._sites.sizes[len(self._sites) :]
        usable = is_level(gradients).all(axis=0) & self._sites.own[len(self._sites) :]
        top = int(np.argmax(np.where(usable, relative, -np.inf)))
        low = usable & (relative < relative[top] + 2 * math.log2(self.limits.fade))
        mask = np.concatenate([np.zeros_like(low), low])
        self._on["vanishing"] &= mask
        if not self._turn_on("vanishing", mask).any():
            return []
        return [alarms.faded(self._sites, step, np.flatnonzero(low), top, relative, self._orders())]

    def _find_dead(self, step: int) -> list[Event]:
        blocks = (self.glance.tops == 0) & self._sites.may_die[self._sites.of_block]
        if self._last_on["no_gradient"] == self.glance.num_rows:
            blocks = blocks & (self._sites.of_block < len(self._sites))  # all gradients are 0, which has been said
        mask = np.zeros(len(self._sites.sizes), bool)
        mask[self._sites.of_block[blocks]] = True
        self._on["dead"] &= mask
        if not (new := self._turn_on("dead", mask)).any():
            return []
        return [alarms.dead(self._sites, step, self.glance.window_step, new, blocks, self._orders())]
