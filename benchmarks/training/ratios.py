"""What contestants took, as ratios to the bare ones, and how well they are known.

Receives the turns of each contestant, one per round. A turn is compared with each of the two bare turns of the same
round: a shared machine changes its speed, but less within a round than between rounds. Never with their mean, which
meets a slow moment of the machine twice as often as one turn does: whatever costs nothing would come out below 1.

Steps are compared stretch by stretch, from layer to layer: a slow moment of the machine that is shorter than a step
spoils a few stretches and not the whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

BARE = ("bare", "bare again")
CLOCKS = ("wall", "processor")
NOISE = 0.005
RESAMPLED = 400
FEWEST_ROUNDS = 6  # of fewer, all may lie on one side of the median in more than 5 % of the cases

Floats = NDArray[np.float64]


@dataclass
class Taken:
    """The turns of one contestant, in seconds of each stretch of a step, the losses they came to, and the overhead it
    measured itself."""

    wall: list[Floats] = field(default_factory=list)
    processor: list[Floats] = field(default_factory=list)
    background: list[float] = field(default_factory=list)
    losses: set[float] = field(default_factory=set)
    claimed: list[float] = field(default_factory=list)

    def add(self, turn: dict[str, Any]) -> None:
        self.wall.append(turn["wall"])
        self.processor.append(turn["processor"])
        self.background.append(turn["background"])
        self.losses.update(turn["losses"])
        self.claimed += [] if turn["claimed"] is None else [turn["claimed"]]

    def seconds(self, clock: str) -> Floats:
        """[rounds, stretches]"""
        return np.array(getattr(self, clock))

    def background_seconds(self, clock: str) -> float:
        """Of a step. Such work comes in bursts, some rounds apart, which a median would not see."""
        return float(np.mean(self.background)) if clock == "processor" else 0.0


@dataclass(frozen=True)
class Ratio:
    """To bare, over the rounds: `median` puts together the medians of the stretches, `p20` and `p80` are those of whole
    turns. `error` is half the width of a 95 % interval of the median."""

    median: float
    p20: float
    p80: float
    error: float


def ratios(taken: dict[str, Taken]) -> dict[str, dict[str, Ratio]]:
    """Of every contestant, by clock, to the bare ones; of a bare one to the other."""
    return {name: {clock: _ratio(taken, name, clock) for clock in CLOCKS} for name in taken}


def _ratio(taken: dict[str, Taken], name: str, clock: str) -> Ratio:
    mine = taken[name].seconds(clock)
    bare = np.array([taken[bare].seconds(clock) for bare in BARE if bare != name])
    of_stretch = np.median(bare, axis=(0, 1))
    share = of_stretch / of_stretch.sum()
    background = taken[name].background_seconds(clock) / of_stretch.sum()
    low, high = np.quantile(mine.sum(axis=-1) / bare.sum(axis=-1), (0.2, 0.8)) + background
    by_stretch = mine / bare
    median = put_together(by_stretch, share) + background
    return Ratio(median, float(low), float(high), error_of_median(by_stretch, share))


def put_together(by_stretch: Floats, share: Floats) -> float:
    """The ratio of a step, of ratios [bare turns, rounds, stretches] and the stretches' share of a bare step."""
    return float(np.median(by_stretch, axis=(0, 1)) @ share)


def error_of_median(by_stretch: Floats, share: Floats) -> float:
    """Rounds are drawn, with what they hold."""
    num_rounds = by_stretch.shape[1]
    if num_rounds < FEWEST_ROUNDS:
        return math.inf
    draws = np.random.default_rng(0).integers(num_rounds, size=(RESAMPLED, num_rounds))
    low, high = np.quantile([put_together(by_stretch[:, drawn], share) for drawn in draws], (0.025, 0.975))
    return float(high - low) / 2


def is_settled(found: dict[str, dict[str, Ratio]]) -> bool:
    """Whether bare against bare is 1 to within the noise, and it and every scanner of ours are known that well."""
    is_fair = all(abs(found["bare"][clock].median - 1) <= NOISE for clock in CLOCKS)
    ours = [name for name in found if name == "bare" or name.startswith("pyscan")]
    return is_fair and all(found[name][clock].error <= NOISE for name in ours for clock in CLOCKS)
