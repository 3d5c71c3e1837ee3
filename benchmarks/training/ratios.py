"""What contestants took, as ratios to the bare ones, and how well they are known.

Receives the turns of each contestant, round by round. Turns are compared with the bare turns of the same round, and
undisturbed steps with undisturbed steps: neighbours on a shared machine make some longer and none shorter. Where
processes have exchanged their roles, a process' own speed is divided out. Two bare contestants tell the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

BARE = ("bare", "bare again")
NOISE = 0.005
RESAMPLED = 400

Floats = NDArray[np.float64]


@dataclass
class Turn:
    """One turn of one process: the seconds of its steps."""

    process: int
    wall: list[float]
    processor: list[float]


@dataclass
class Taken:
    """The turns of one contestant, one per round, the losses they came to, and the overhead it measured itself."""

    turns: list[Turn] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    claimed: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Ratio:
    """To bare, over the rounds: of turns, and of undisturbed steps. Errors are half the width of a 95 % interval."""

    median: float
    p20: float
    p80: float
    error: float
    quiet: float
    quiet_error: float


def ratios(taken: dict[str, Taken], *, exchanged: bool) -> dict[str, dict[str, Ratio]]:
    """Of every contestant, by clock, to the bare ones; of a bare one to the other."""
    found: dict[str, dict[str, Ratio]] = {name: {} for name in taken}
    for clock in ("wall", "processor"):
        turns = {name: _times(taken, name, clock, np.mean if exchanged else None) for name in taken}
        steps = {name: _times(taken, name, clock, _undisturbed if exchanged else None) for name in taken}
        for name in taken:
            bare = [other for other in BARE if other != name]
            of_turns = ratio_of_turns(turns[name], [turns[other] for other in bare])
            of_steps = ratio_of_undisturbed(steps[name], [steps[other] for other in bare])
            found[name][clock] = Ratio(*of_turns, *of_steps)
    return found


def _times(taken: dict[str, Taken], name: str, clock: str, typical: Callable[[Floats], Any] | None) -> Floats:
    """[rounds, steps]. With `typical`, as if all processes were equally fast by it: right where each has played each
    contestant equally often."""
    steps: dict[int, list[Floats]] = {}
    for one in taken.values():
        for turn in one.turns:
            steps.setdefault(turn.process, []).append(np.array(getattr(turn, clock)))
    speeds = {process: 1.0 if typical is None else typical(np.concatenate(all)) for process, all in steps.items()}
    return np.array([np.array(getattr(turn, clock)) / speeds[turn.process] for turn in taken[name].turns])


def ratio_of_turns(mine: Floats, others: list[Floats]) -> tuple[float, float, float, float]:
    """(median, p20, p80, error of the median) of turns to the mean of the others' turns in the same round."""
    ratios = mine.mean(1) / np.mean([other.mean(1) for other in others], axis=0)
    low, median, high = map(float, np.quantile(ratios, (0.2, 0.5, 0.8)))
    # 20 % and 80 % of a normal distribution are 1.683 deviations apart; a median has 1.253 times the error of a mean.
    return median, low, high, 1.96 * 1.253 * (high - low) / 1.683 / math.sqrt(len(ratios))


def ratio_of_undisturbed(mine: Floats, others: list[Floats]) -> tuple[float, float]:
    """Of the steps that a shared machine did not disturb, which makes some longer and none shorter; and its error."""
    draws = np.random.default_rng(0).integers(len(mine), size=(RESAMPLED, len(mine)))
    resampled = [_quiet(mine[draw], [other[draw] for other in others]) for draw in draws]
    low, high = np.quantile(resampled, (0.025, 0.975))
    return _quiet(mine, others), float(high - low) / 2


def _quiet(mine: Floats, others: list[Floats]) -> float:
    return float(_undisturbed(mine) / np.mean([_undisturbed(other) for other in others]))


def _undisturbed(steps: Floats) -> float:
    """What a fifth of the steps stay below."""
    return float(np.quantile(steps, 0.2))


def is_settled(found: dict[str, Ratio], noise: float = NOISE) -> bool:
    """Whether bare against bare, by clock, is 1 to within the noise, and known that well, for undisturbed steps."""
    return all(max(abs(ratio.quiet - 1), ratio.quiet_error) <= noise for ratio in found.values())
