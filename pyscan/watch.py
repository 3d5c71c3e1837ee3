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

import numpy as np
from numpy.typing import NDArray

from pyscan import alarms
from pyscan.alarms import Event
from pyscan.first_bad import Orders, first_bad
from pyscan.format import ROW_AFTER_CLIP, ROW_SKIPPED
from pyscan.levels import Bounds, Glance, Sites, glance, highest, is_level, levels_of
from pyscan.schema import SiteInfo

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
        look: Glance = glance,
    ) -> None:
        self.limits = limits or Watch()
        self._orders = orders
        self._look = look
        self._sites = Sites(sites)
        rows, columns = self.limits.patience, len(self._sites.sizes)
        self._bounds = Bounds(
            self._sites, explode=self.limits.explode, spike=self.limits.spike, deviations=self.limits.deviations
        )
        self._window = np.empty((rows, columns))  # sums of squares
        self._largest = np.empty(self._sites.num_blocks)  # of each block in the window
        self._window_step = 0  # of the window's first row
        self._num_rows = 0
        self._before: deque[tuple[int, float | None, Floats]] = deque(maxlen=self.limits.keep)
        self._was_exploded: Mask | None = None  # in the row before
        self._on = {kind: np.zeros(columns, bool) for kind in KINDS[2:]}
        self._quiet_rows = dict.fromkeys(KINDS, rows)  # since the alarm was last on
        self._num_skipped = 0  # rows running that a scaler skipped

    def see(self, step: int, cells: Floats, loss: float | None = None, flags: int = 0) -> list[Event]:
        """Look at the next row; what it sets off, most often nothing."""
        sites = self._sites
        if not sites.names:
            return []
        place = self._num_rows % self.limits.patience
        if place == 0:
            self._window_step = step
        self._num_rows += 1
        sums = self._window[place]
        largest, gradient, has_bad, is_above = self._look(
            cells,
            sites.starts,
            sites.num_blocks,
            2 * sites.num_all,
            self._bounds.largest_sum,
            sums,
            self._largest,
            place == 0,
        )
        events = []
        # A mean over no labels is NaN with gradients of 0: that is the other alarm.
        is_bad = has_bad or (loss is not None and not math.isfinite(loss) and gradient != 0)
        if not is_bad or self._scaler_skips(cells, flags):
            self._quiet_rows["nonfinite"] += 1
        elif self._begins("nonfinite"):
            events.append(self._nonfinite(step, cells, loss, flags))
        if not gradient <= 0 <= largest:
            self._quiet_rows["no_gradient"] += 1
        elif self._begins("no_gradient"):
            events.append(alarms.no_gradient(step, loss, gradient == 0))
        if is_above:
            events += self._too_high(step, levels_of(sums))
        else:
            self._was_exploded = None
        self._before.append((step, loss, cells))
        if place == self.limits.patience - 1:
            events += self._review(step, levels_of(self._window))
        elif self._num_rows == FIRST_ROWS:
            self._bounds.begin(levels_of(self._window[:FIRST_ROWS]))
        return events

    def finish(self, step: int) -> list[Event]:
        """Review the rows since the last review: there will be no more."""
        rows = self._num_rows % self.limits.patience
        return self._review(step, levels_of(self._window[:rows])) if rows >= FIRST_ROWS else []

    # What cannot wait

    def _begins(self, kind: str) -> bool:
        """Whether an alarm that is on fires: it was not on in the last `patience` rows."""
        fires = self._quiet_rows[kind] >= self.limits.patience
        self._quiet_rows[kind] = 0
        return fires

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
        return alarms.nonfinite(self._sites, step, fault, self._before, loss=loss, after_clip=after_clip)

    def _too_high(self, step: int, levels: Floats) -> list[Event]:
        bounds = self._bounds
        exploded = levels > bounds.explode
        lasting = np.zeros_like(exploded) if self._was_exploded is None else exploded & self._was_exploded
        self._was_exploded = exploded
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
            new &= self._quiet_rows[kind] >= self.limits.patience
            self._quiet_rows[kind] = 0
        return new

    # What must last

    def _review(self, step: int, window: Floats) -> list[Event]:
        exploding, spike = self._bounds.calm(window)
        self._on["exploding"] &= ~exploding
        self._on["spike"] &= ~spike
        for kind in KINDS[2:]:
            self._quiet_rows[kind] += len(window)
        self._bounds.follow(window)
        return self._find_faded(step, window[:, len(self._sites) :]) + self._find_dead(step)

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
        blocks = (self._largest == 0) & self._sites.may_die[self._sites.of_block]
        if self._quiet_rows["no_gradient"] == 0:
            blocks = blocks & (self._sites.of_block < len(self._sites))  # all gradients are 0, which has been said
        mask = np.zeros(len(self._sites.sizes), bool)
        mask[self._sites.of_block[blocks]] = True
        self._on["dead"] &= mask
        if not (new := self._turn_on("dead", mask)).any():
            return []
        return [alarms.dead(self._sites, step, self._window_step, new, blocks, self._orders())]
