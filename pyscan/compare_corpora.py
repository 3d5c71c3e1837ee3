"""Compare two corpus scans of one model: which blocks work differently for the sequences of one than of the other.

Receives two open runs whose rows are sequences; pairs their sites by name and hands on per cell the difference, the
effect size and the significance. Inputs are compared per token (norm / sqrt(tokens)), so that longer sequences do not
count as stronger ones; gradients as they are, those of each sequence's mean loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pyscan.analysis import levels
from pyscan.batching import BATCH_CELLS, batches
from pyscan.codecs import combine
from pyscan.permutation import Comparison, PermutationTest, adjusted

if TYPE_CHECKING:
    from pyscan.run import Run

Tick = Callable[[int, int], None]


class Place(NamedTuple):
    """A site in a channel, whose cells stand in a row; without blocks it is one cell."""

    a: str
    b: str
    channel: str
    num_cells: int
    whole: bool  # the two runs have other blocks: compared as one


class Cell(NamedTuple):
    site: str
    channel: str
    block: int | None
    difference: float  # log2(B / A) of the geometric means
    effect: float
    p: float
    q: float


@dataclass(frozen=True)
class CorporaDiff:
    places: list[Place]
    found: Comparison
    q: NDArray[np.float64]
    fdr: float

    @property
    def num_tested(self) -> int:
        return int((~np.isnan(self.q)).sum())

    @property
    def significant(self) -> NDArray[np.bool_]:
        return np.asarray(self.q <= self.fdr)

    def strongest(self, count: int | None = None) -> list[Cell]:
        """The significant cells, that with the largest effect first."""
        which = np.flatnonzero(self.significant)
        order = which[np.argsort(-np.abs(self.found.effect[which]), kind="stable")]
        return [self._cell(int(cell)) for cell in order[:count]]

    def _cell(self, cell: int) -> Cell:
        ends = np.cumsum([place.num_cells for place in self.places])
        place = self.places[int(np.searchsorted(ends, cell, side="right"))]
        block = cell - int(ends[self.places.index(place)] - place.num_cells)
        values = (float(column[cell]) for column in (*self.found, self.q))
        return Cell(place.a, place.channel, None if place.whole else block, *values)


def compare_corpora(
    a: Run,
    b: Run,
    *,
    pairs: Sequence[tuple[str, str]],
    channels: Sequence[str],
    fdr: float = 0.05,
    num_permutations: int = 2000,
    seed: int = 0,
    tick: Tick = lambda done, total: None,
) -> CorporaDiff:
    """Test every cell of the paired sites; memory is bounded whatever the size of the runs."""
    if not 0 < fdr < 1:
        raise ValueError(f"fdr is a rate between 0 and 1, got {fdr}")
    test = PermutationTest(len(a), len(b), num_permutations=num_permutations, seed=seed)
    places = [_place(a, b, pair, channel) for channel in channels for pair in pairs]
    done, rows = 0, len(a) + len(b)
    for part in batches(places, lambda place: place.num_cells * rows, BATCH_CELLS):
        test.add(*(np.concatenate([_levels(run, place, is_b) for place in part], axis=1) for run, is_b in _both(a, b)))
        done += len(part)
        tick(done, len(places))
    found = test.finish()
    return CorporaDiff(places, found, adjusted(found.p), fdr)


def _both(a: Run, b: Run) -> tuple[tuple[Run, bool], tuple[Run, bool]]:
    return (a, False), (b, True)


def _place(a: Run, b: Run, pair: tuple[str, str], channel: str) -> Place:
    blocks = [run.site(name).num_cells(run.channel(channel).per) for run, name in zip((a, b), pair, strict=True)]
    whole = blocks[0] != blocks[1]
    return Place(*pair, channel, 1 if whole else blocks[0], whole)


def _levels(run: Run, place: Place, is_b: bool) -> NDArray[np.float64]:
    """log2 of the norms [sequences, cells]; inputs per token."""
    norms = run.get(place.channel, place.b if is_b else place.a, blocks=True)
    if place.whole:
        norms = combine(norms, "sumsq", axis=1)[:, None]
    found = levels(norms)
    if place.channel != "act":
        return found
    tokens = np.maximum(run.steps["tokens"], 1).astype(np.float64)
    per_token: NDArray[np.float64] = found - 0.5 * np.log2(tokens)[:, None]
    return per_token
