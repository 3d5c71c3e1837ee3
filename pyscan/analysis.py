"""What the norms of a run say: SPS, extreme cells, drift, dead blocks, the difference of two runs.

Receives plain numpy arrays whose last axis is cells and whose first, where there is one, is steps; hands back arrays of
the same cells. Only `iter_sps`, `run_sps` and `compare_runs` know what a run is: they read it in bounded pieces.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pyscan.batching import BATCH_CELLS, batches
from pyscan.codecs import CODE_ABSENT, CODE_INFINITY, CODE_NAN, CODE_ZERO, is_absent
from pyscan.compare import common_steps, compare_runs, difference
from pyscan.names import match_names

if TYPE_CHECKING:
    from pyscan.run import Run
    from pyscan.schema import SiteInfo

__all__ = [
    "Drift",
    "Extremes",
    "Spread",
    "block_widths",
    "common_steps",
    "compare_runs",
    "dead",
    "difference",
    "drift",
    "extremes",
    "features_of",
    "iter_sps",
    "layer_of",
    "levels",
    "match_names",
    "mean_over_steps",
    "run_sps",
    "sps",
    "z_scores",
]

Floats = NDArray[np.float64]
Scope = Literal["layer", "global"]

# Levels whose standard deviation is below this are equal but for rounding; a log2q8 code is 0.004 wide.
_FLAT = 1e-9
# Levels of one layer that may stay in memory while it is scored: 128 MB for each channel.
_HELD_CELLS = 1 << 24
# The level of each log2q8 code, at the place of its bits as uint16: NaN for 0, absent, NaN and infinity.
_LEVEL_OF_CODE = np.arange(65536, dtype=np.uint16).view(np.int16) / 256
_LEVEL_OF_CODE[[CODE_ZERO & 0xFFFF, CODE_ABSENT & 0xFFFF, CODE_NAN, CODE_INFINITY]] = np.nan
_FIRST_INTEGER = re.compile(r"(?:^|[.\[])\d+(?:\]|(?=\.)|$)")


def layer_of(name: str) -> str:
    """The name up to and including its first integer; a name without one is a layer of its own."""
    found = _FIRST_INTEGER.search(name)
    return name[: found.end()] if found else name


def block_widths(features: int, num_blocks: int, block: int) -> Floats:
    """Input features in each block: the last block may be shorter, and `block=0` is one block of all features.

    Features may be 0 for "not known" (version 1.1 has no shapes): then all blocks count as equally wide.
    """
    if num_blocks <= 1 or block == 0:
        return np.full(num_blocks, max(features, 1), np.float64)
    widths = np.full(num_blocks, block, np.float64)
    if features:
        widths[-1] = max(features - block * (num_blocks - 1), 1)
    return widths


def levels(norms: ArrayLike, widths: ArrayLike = 1.0) -> Floats:
    """log2(norm / sqrt(width)); NaN where the norm is 0, infinite, NaN or absent, so that no such cell moves a mean."""
    norms = np.asarray(norms, np.float64)
    usable = np.isfinite(norms) & (norms > 0)
    log2 = np.full(norms.shape, np.nan)
    np.log2(norms, out=log2, where=usable)
    return log2 - 0.5 * np.log2(np.asarray(widths, np.float64))


def mean_over_steps(values: ArrayLike) -> Floats:
    """Mean of the finite values of each cell; NaN for a cell that has none. Of SPS this is the integral."""
    values = np.asarray(values, np.float64)
    finite = np.isfinite(values)
    count = finite.sum(axis=0)
    total = np.where(finite, values, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


class Spread:
    """Mean and standard deviation over the finite levels of each step, gathered piece by piece in bounded memory."""

    def __init__(self, num_steps: int) -> None:
        self.count = np.zeros(num_steps)
        self.mean = np.zeros(num_steps)
        self.m2 = np.zeros(num_steps)  # sum of squared distances from the mean

    def add(self, piece: Floats) -> None:
        """Take in levels [steps, cells]; pieces merge exactly (Chan, Golub and LeVeque), whatever their order."""
        finite = np.isfinite(piece)
        count = finite.sum(axis=1)
        mean = np.where(finite, piece, 0.0).sum(axis=1) / np.maximum(count, 1)
        m2 = np.square(np.where(finite, piece - mean[:, None], 0.0)).sum(axis=1)
        total = np.maximum(self.count + count, 1)
        delta = mean - self.mean
        self.m2 += m2 + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count += count

    def z(self, piece: Floats) -> Floats:
        """z-scores (population standard deviation); NaN with fewer than 2 finite levels, 0 where all are equal."""
        std = np.sqrt(self.m2 / np.maximum(self.count, 1))
        flat = std < _FLAT
        score = (piece - self.mean[:, None]) / np.where(flat, 1.0, std)[:, None]
        score = np.where(flat[:, None] & np.isfinite(piece), 0.0, score)
        return np.where(self.count[:, None] >= 2, score, np.nan)


def sps(act: ArrayLike, grad: ArrayLike, widths: ArrayLike, layers: Sequence[Any], scope: Scope = "layer") -> Floats:
    """SPS of each cell: z(act) - z(grad), the z-scores of log2(norm / sqrt(block width)) within a step.

    `act` and `grad` are [cells] or [steps, cells]; `widths` and `layers` name each cell's width and layer. With
    scope="global" the whole model is one layer. High = strongly used and already settled. A cell of which either norm
    is 0, infinite, NaN or absent has no level: its SPS is NaN and it does not move the others. z(act) is taken over the
    cells with an act level, z(grad) over those with a grad level; where either has fewer than 2, SPS is NaN.
    """
    act_levels, grad_levels = levels(act, widths), levels(grad, widths)
    if act_levels.shape != grad_levels.shape:
        raise ValueError(f"act and grad must have one shape, got {act_levels.shape} and {grad_levels.shape}")
    return z_scores(act_levels, layers, scope) - z_scores(grad_levels, layers, scope)


def z_scores(cell_levels: Floats, layers: Sequence[Any], scope: Scope = "layer") -> Floats:
    """Levels [cells] or [steps, cells] as z-scores within their layer, or within the whole model."""
    if len(layers) != cell_levels.shape[-1]:
        raise ValueError(f"layers must name each of the {cell_levels.shape[-1]} cells, got {len(layers)} names")
    rows = np.atleast_2d(cell_levels)
    out = np.full(rows.shape, np.nan)
    for cells in _groups(layers, scope):
        out[:, cells] = _z(rows[:, cells])
    return out.reshape(cell_levels.shape)


def _z(piece: Floats) -> Floats:
    spread = Spread(len(piece))
    spread.add(piece)
    return spread.z(piece)


def _groups(layers: Sequence[Any], scope: Scope) -> list[NDArray[np.intp]]:
    """The positions of each layer's members; all of them in one group for scope="global"."""
    if scope not in ("layer", "global"):
        raise ValueError(f'scope must be "layer" or "global", got {scope!r}')
    if scope == "global" or not len(layers):
        return [np.arange(len(layers))]
    _, inverse = np.unique(np.asarray(layers), return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(inverse[order])) + 1)


class Extremes(NamedTuple):
    top: NDArray[np.intp]  # positions of the highest values, highest first
    bottom: NDArray[np.intp]  # positions of the lowest values, lowest first


def extremes(values: ArrayLike, count: int) -> Extremes:
    """Positions of the `count` highest and lowest values; NaN is neither, and of equal values the first comes first."""
    values = np.asarray(values, np.float64)
    known = np.flatnonzero(~np.isnan(values))
    down = known[np.argsort(-values[known], kind="stable")]
    up = known[np.argsort(values[known], kind="stable")]
    return Extremes(down[:count], up[:count])


class Drift(NamedTuple):
    ratio: Floats  # log2(late / early) of each cell, geometric means over the two windows: 1 = doubled
    slope: Floats  # least-squares slope of log2(norm), per step

    def farthest(self) -> int | None:
        """The cell that moved most, up or down; None when none has a ratio."""
        moved = np.abs(self.ratio)
        return None if np.isnan(moved).all() else int(np.nanargmax(moved))


def drift(norms: ArrayLike, steps: ArrayLike | None = None, window: float = 0.1) -> Drift:
    """How far each cell of norms [steps, cells] has moved over time.

    `window` is the share of rows at each end that are compared, at least one row; `steps` are the step numbers
    (default: the row numbers). Norms without a level are left out; with nothing left in a window or on fewer than 2
    steps the answer is NaN.
    """
    if not 0 < window <= 0.5:
        raise ValueError(f"window must be above 0 and at most 0.5 of the rows, got {window}")
    level = levels(norms)
    num_steps = len(level)
    if num_steps < 2:
        return Drift(np.full(level.shape[1:], np.nan), np.full(level.shape[1:], np.nan))
    rows = max(1, int(window * num_steps))
    ratio = mean_over_steps(level[-rows:]) - mean_over_steps(level[:rows])
    return Drift(ratio, _slope(level, np.arange(num_steps) if steps is None else np.asarray(steps, np.float64)))


def _slope(level: Floats, steps: ArrayLike) -> Floats:
    finite = np.isfinite(level)
    x = np.where(finite, np.asarray(steps, np.float64).reshape(-1, *[1] * (level.ndim - 1)), np.nan)
    x = np.where(finite, x - mean_over_steps(x), 0.0)
    y = np.where(finite, level - mean_over_steps(level), 0.0)
    width = np.square(x).sum(axis=0)
    return np.where(width > 0, (x * y).sum(axis=0) / np.where(width > 0, width, 1.0), np.nan)


def dead(norms: ArrayLike, share: float = 1.0) -> NDArray[np.bool_]:
    """Cells of norms [steps, cells] that are 0 or absent in at least `share` of the steps; no steps prove nothing.

    An ordinary NaN is a sick cell, not a dead one.
    """
    if not 0 < share <= 1:
        raise ValueError(f"share must be above 0 and at most 1, got {share}")
    quiet = (np.asarray(norms) == 0) | is_absent(norms)
    if not len(quiet):
        return np.zeros(quiet.shape[1:], bool)
    return np.asarray(quiet.sum(axis=0) >= share * len(quiet))


def features_of(site: SiteInfo) -> int:
    """Input features of a site, whose shape is [out, in] or [out, in, kernel...]; 0 where the file gives no shape."""
    return math.prod(site.shape[1:]) if len(site.shape) > 1 else sum(site.shape)


def iter_sps(run: Run, scope: Scope = "layer", only: Collection[str] | None = None) -> Iterator[tuple[str, Floats]]:
    """SPS of the sites of a run as (name, [steps, blocks]), layer by layer, in bounded memory.

    With `only`, sites of other names are not handed out, and layers without one of these names are not read.
    """
    num_steps = len(run.steps)
    wanted = {site.name for site in run.sites} if only is None else set(only)
    for members in _groups([layer_of(site.name) for site in run.sites], scope):
        sites = [run.sites[i] for i in members]
        if wanted.isdisjoint(site.name for site in sites):
            continue
        parts = list(batches(sites, lambda site: site.num_blocks * num_steps, BATCH_CELLS))
        read = _level_reader(run, held=len(parts) * BATCH_CELLS <= _HELD_CELLS)
        act, grad = (_spread(num_steps, (read(channel, part)[0] for part in parts)) for channel in ("act", "grad"))
        for part in parts:
            act_levels, ends = read("act", part)
            scores = act.z(act_levels) - grad.z(read("grad", part)[0])
            pieces = zip(part, np.split(scores, ends[:-1], axis=1), strict=True)
            yield from ((site.name, piece) for site, piece in pieces if site.name in wanted)


def _spread(num_steps: int, parts: Iterable[Floats]) -> Spread:
    spread = Spread(num_steps)
    for part in parts:
        spread.add(part)
    return spread


SideBySide = tuple[Floats, NDArray[np.intp]]  # levels [steps, cells] of some sites, and where each site's cells end


def _level_reader(run: Run, held: bool) -> Callable[[str, list[SiteInfo]], SideBySide]:
    """Reads the levels of some sites; every one is needed twice, and stays in memory in between if `held`."""
    kept: dict[tuple[str, str], SideBySide] = {}

    def read(channel: str, sites: list[SiteInfo]) -> SideBySide:
        key = channel, sites[0].name
        if key in kept:
            return kept.pop(key)
        found = _read_levels(run, channel, sites)
        if held:
            kept[key] = found
        return found

    return read


def _read_levels(run: Run, channel: str, sites: list[SiteInfo]) -> SideBySide:
    is_log = run.channel(channel).codec == "log2q8"
    stored = [run.codes(channel, s.name) if is_log else run.get(channel, s.name, blocks=True) for s in sites]
    widths = [block_widths(features_of(s), cells.shape[1], run.block) for s, cells in zip(sites, stored, strict=True)]
    cells = np.concatenate(stored, axis=1)
    found = _LEVEL_OF_CODE[cells.view(np.uint16)] if is_log else levels(cells)
    return found - 0.5 * np.log2(np.concatenate(widths)), np.cumsum([len(width) for width in widths])


def run_sps(run: Run, scope: Scope = "layer", integral: bool = True) -> dict[str, Floats]:
    """SPS of every site: its integral [blocks], or [steps, blocks] with integral=False (as large as the run)."""
    return {name: mean_over_steps(values) if integral else values for name, values in iter_sps(run, scope)}
