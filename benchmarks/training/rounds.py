"""Contestants in rounds, each round one turn of each, until the noise is small enough.

Receives names and hands on, for each, the ratio of its time to that of the two bare contestants of the same round. The
two bare ones tell the noise: the run goes on until the ratio of their undisturbed steps is within the bound. Where its
memory comes to lie makes a process faster or slower for all its life: so processes exchange their roles until each has
played every contestant equally often, and a process' own speed is divided out. Where a contestant cannot be detached
again, all processes are started anew some times instead.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.training.contestants import CONTESTANTS
from benchmarks.training.models import MODELS
from benchmarks.training.processes import Remote, Server, share
from pyscan.budget import WINDOW

BARE = ("bare", "bare again")
NOISE = 0.005
SLICE_SECONDS = 0.1
WARMUP_STEPS = 3
LAUNCHES = 4
ROUNDS_OF_A_ROLE = 8
CLAIM_SECONDS = 5.0
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


class Comparison:
    """A table's worth of contestants on one model."""

    def __init__(self, server: Server, names: list[str], model: str, **task: Any) -> None:
        chosen = [CONTESTANTS[name] for name in names]
        self.names = [*BARE, *names]
        self.taken: dict[str, Taken] = {name: Taken() for name in self.names}
        self.written: dict[str, dict[str, Any]] = {}
        self.unavailable: dict[str, str] = {}
        self.num_steps = max(MODELS[model].steps_per_turn, *(contestant.steps_per_turn for contestant in chosen))
        self.swaps = not task.get("compiled") and all(contestant.can_leave for contestant in chosen)
        self._slice = SLICE_SECONDS if all(contestant.can_be_stopped for contestant in chosen) else math.inf
        self._server = server
        self._task = {"model": model, **task}
        self._draw = random.Random(0)
        self._num_started = 0
        self._players: list[tuple[int, Remote]] = []

    def rounds(self, num_rounds: int, shift: int = 0) -> None:
        """So many rounds; with `shift`, each contestant in the process that played another one with shift - 1."""
        players = self._cast(shift)
        order = list(players)
        for _ in range(num_rounds):
            self._draw.shuffle(order)
            answers = share({name: players[name][1] for name in order}, {"turn": self.num_steps}, self._slice)
            for name, answer in answers.items():
                mine = self.taken[name]
                mine.turns.append(Turn(players[name][0], answer["wall"], answer["processor"]))
                mine.losses += answer["losses"]
                if math.isinf(self._slice) and answer["claimed"] is not None:
                    mine.claimed.append(answer["claimed"])
        for name, (_, player) in players.items():
            self.written[name] = player.ask({"leave": None})

    def claims(self) -> None:
        """What contestants say of their own cost. By the clock on the wall: nobody stops them meanwhile."""
        for name in self.names:
            player, mine = self._players[0][1], self.taken[name]
            player.ask({"become": name})
            spent = 0.0
            while spent < CLAIM_SECONDS:
                answer = player.ask({"turn": WINDOW + 1})
                if answer["claimed"] is None:
                    break
                mine.claimed.append(answer["claimed"])
                spent += sum(answer["wall"])
            player.ask({"leave": None})

    def seconds_of_a_round(self) -> float:
        return sum(statistics.median(sum(turn.wall) for turn in one.turns) for one in self.taken.values())

    def _cast(self, shift: int) -> dict[str, tuple[int, Remote]]:
        """Who plays whom, attached and warm."""
        if not self.swaps or not self._players:
            self._launch()
        num_players = len(self._players)
        players = {name: self._players[(place + shift) % num_players] for place, name in enumerate(self.names)}
        for name, (_, player) in players.items():
            if self.swaps:
                player.ask({"become": name})
            self.taken[name].losses += player.ask({"turn": WARMUP_STEPS})["losses"]
        return players

    def _launch(self) -> None:
        """New processes, as many as there are contestants that can attach; each is attached unless they exchange."""
        self._server.end_all()
        self._players = []
        for name in list(self.names):
            player = self._server.start(**self._task)
            try:
                player.ask({"become": name})
                if self.swaps:
                    player.ask({"leave": None})
            except RuntimeError as error:
                self.names.remove(name)
                del self.taken[name]
                self.unavailable[name] = str(error)
                continue
            self._players.append((self._num_started, player))
            self._num_started += 1


def compare(
    names: list[str], model: str, *, rounds: int | None, seconds: float, log: Path, threads: int = 2, **options: Any
) -> dict[str, Any]:
    """As many rounds as asked for, or as it takes until the noise is small enough or the time is over; the result is
    what `report.py` takes."""
    end = time.monotonic() + seconds
    with Server(log) as server:
        comparison = Comparison(server, names, model, threads=threads, **options)
        exchanged = comparison.swaps and rounds is None
        if rounds is not None:
            comparison.rounds(rounds)
        elif exchanged:
            _squares(comparison, end)
            comparison.claims()
        else:
            _launches(comparison, seconds)
    taken = comparison.taken
    found = ratios(taken, exchanged=exchanged)
    bare = np.concatenate([turn.wall for turn in taken["bare"].turns])
    return {
        "model": model,
        "threads": threads,
        **options,
        "rounds": len(taken["bare"].turns),
        "exchanged": exchanged,
        "steps_per_turn": comparison.num_steps,
        "settled": is_settled(found["bare"]),
        "bare_ms": float(np.median(bare)) * 1e3,
        "unavailable": comparison.unavailable,
        "contestants": {
            name: {
                **{clock: vars(ratio) for clock, ratio in found[name].items()},
                "same_losses": one.losses == taken["bare"].losses,
                "claimed": statistics.median(one.claimed) if one.claimed else None,
                **comparison.written[name],
            }
            for name, one in taken.items()
        },
    }


def _squares(comparison: Comparison, end: float) -> None:
    """Latin squares of processes and contestants: each process plays each contestant for as many rounds."""
    comparison.rounds(2)
    num_roles = len(comparison.names)
    fitting = (end - time.monotonic()) / comparison.seconds_of_a_round() / num_roles
    num_rounds = max(2, min(ROUNDS_OF_A_ROLE, round(fitting)))
    for one in comparison.taken.values():
        one.turns.clear()
    while True:
        for shift in range(num_roles):
            comparison.rounds(num_rounds, shift)
        if is_settled(ratios(comparison.taken, exchanged=True)["bare"]) or time.monotonic() > end:
            return


def _launches(comparison: Comparison, seconds: float) -> None:
    num_rounds = 2
    for _ in range(LAUNCHES):
        comparison.rounds(num_rounds)
        num_rounds = max(2, round(seconds / LAUNCHES / comparison.seconds_of_a_round()))
