"""One row of a run as a picture of the whole model: a value and a score for colour of every cell.

Receives an open run, a row and what to show; hands on arrays over all cells of the run, site after site. `Overview`
also says what numbers it has to offer and between which ends a colour scale must run to hold over the whole run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from pyscan import analysis
from pyscan.codecs import ABSENT, combine, is_absent
from pyscan.compare import difference
from pyscan.summary import norm_channels

if TYPE_CHECKING:
    from pyscan.run import Run

Floats = NDArray[np.float64]
Colour = Literal["log", "z"]
DERIVED = ("sps", "ratio")
# Rows that are looked at to find the ends of a colour scale, and the share of cells beyond them.
_SAMPLE, _BEYOND = 24, 0.5


@dataclass(frozen=True)
class Picture:
    """`values` are what the file says (absent ones are `pyscan.ABSENT`), `scores` what their colours stand for."""

    values: NDArray[np.float32]
    scores: Floats


class Overview:
    """The cells of a run side by side, with what is needed to score them."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._sites = list(run.sites)
        self._numbers = {name: i for i, name in enumerate(dict.fromkeys(analysis.layer_of(s.name) for s in run.sites))}
        self._layouts: dict[str, tuple[list[int], Floats, NDArray[np.intp]]] = {}

    @property
    def measures(self) -> list[str]:
        """Channels of the run; SPS and ratio where it has act and grad per block."""
        derived = DERIVED if len(norm_channels(self.run)) == 2 else ()
        first = [*norm_channels(self.run), *derived]
        return [*first, *(channel.name for channel in self.run.channels if channel.name not in first)]

    def per(self, measure: str) -> str:
        return "block" if measure in DERIVED else self.run.channel(measure).per

    def counts(self, per: str) -> list[int]:
        """Cells of each site."""
        return self._layout(per)[0]

    def picture(self, row: int, measure: str, colour: Colour = "log", scope: analysis.Scope = "layer") -> Picture:
        """Score is log2(norm / sqrt(width)), or its z-score within the layer or model; of SPS it is the SPS."""
        _check(colour in ("log", "z"), f'colour must be "log" or "z", got {colour!r}')
        per = self.per(measure)
        _, widths, layers = self._layout(per)
        if measure == "sps":
            act, grad = self._values("act", row), self._values("grad", row)
            scores = analysis.sps(act, grad, widths, cast(Sequence[Any], layers), scope)
            return Picture(_known(scores, is_absent(act) | is_absent(grad)), scores)
        values, levels = self._leveled(measure, row, widths)
        scores = levels if colour == "log" else analysis.z_scores(levels, cast(Sequence[Any], layers), scope)
        return Picture(values, scores)

    def ends(self, measure: str) -> tuple[float, float]:
        """Lowest and highest score of log colours over a sample of rows, but for the outermost of them."""
        rows = np.unique(np.linspace(0, max(len(self.run.steps) - 1, 0), _SAMPLE).astype(int))
        found = [self.picture(int(row), measure).scores for row in rows] if len(self.run.steps) else []
        scores = np.concatenate(found or [np.zeros(0)])
        scores = scores[np.isfinite(scores)]
        if not scores.size:
            return 0.0, 1.0
        low, high = np.percentile(scores, [_BEYOND, 100 - _BEYOND])
        return float(low), float(max(high, low + 0.1))

    def _leveled(self, measure: str, row: int, widths: Floats) -> tuple[NDArray[np.float32], Floats]:
        if measure == "ratio":
            act, grad = self._values("act", row), self._values("grad", row)
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                ratio = np.divide(grad, act, dtype=np.float64)
            values = _known(ratio, is_absent(act) | is_absent(grad))
            return values, analysis.levels(ratio)
        values = self._values(measure, row)
        if self.run.channel(measure).op == "add":  # a count: 0 is the usual, and no level
            return values, np.log2(1 + np.where(np.isfinite(values), values, np.nan).astype(np.float64))
        return values, analysis.levels(values, widths if self.per(measure) == "block" else 1.0)

    def _values(self, channel: str, row: int) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self.run.cells(channel, steps=slice(row, row + 1))[0]
        return found

    def _layout(self, per: str) -> tuple[list[int], Floats, NDArray[np.intp]]:
        """Cells of each site; width and layer of each cell."""
        if per not in self._layouts:
            channel = next((c for c in self.run.channels if c.per == per), None)
            counts = [self.run._num_cells(channel, site) if channel else 0 for site in self._sites]
            pairs = zip(self._sites, counts, strict=True)
            widths = [analysis.block_widths(analysis.features_of(site), n, self.run.block) for site, n in pairs]
            of_site = [self._numbers[analysis.layer_of(site.name)] for site in self._sites]
            layers = np.repeat(np.array(of_site, np.intp), counts)
            self._layouts[per] = counts, np.concatenate(widths or [np.zeros(0)]), layers
        return self._layouts[per]


def apart(a: Picture, b: Picture, pairs: list[tuple[int, int]], counts_a: list[int], counts_b: list[int]) -> Floats:
    """log2(b / a) of every cell of A whose site has a partner in B, given by their places; NaN where there is none.

    Sites whose blocks differ in number are compared as a whole.
    """
    out = np.full(sum(counts_a), np.nan)
    ends_a, ends_b = np.cumsum(counts_a), np.cumsum(counts_b)
    for place_a, place_b in pairs:
        mine = slice(ends_a[place_a] - counts_a[place_a], ends_a[place_a])
        theirs = slice(ends_b[place_b] - counts_b[place_b], ends_b[place_b])
        x, y = a.values[mine], b.values[theirs]
        if len(x) != len(y):
            x, y = combine(x[None], "sumsq", axis=1), combine(y[None], "sumsq", axis=1)
        out[mine] = difference(x, y)
    return out


def _known(values: Floats, absent: NDArray[np.bool_]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        found = values.astype(np.float32)
    found[absent] = ABSENT
    return found


def _check(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(text)
