"""Contestants in rounds, each round one turn of each, until the noise is small enough.

Receives names and hands on, for each, the ratio of its time to that of the two bare contestants of the same round. The
two bare ones tell the noise: the run goes on until the median of their ratio is known to within the bound. Where its
memory comes to lie makes a process faster or slower for all its life: so processes exchange their roles until each has
played every contestant equally often, and a process' own speed is divided out. Where a contestant cannot be detached
again, all processes are started anew some times instead.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.training.contestants import CONTESTANTS
from benchmarks.training.models import MODELS
from benchmarks.training.processes import Remote, Server, share
from pyscan.budget import WINDOW

BARE = ("bare", "bare again")
NOISE = 0.005
SLICE_SECONDS = 0.1
WARMUP_STEPS = 3
FEWEST_ROUNDS = 20
LAUNCHES = 4
ROUNDS_OF_A_ROLE = 8
CLAIM_SECONDS = 5.0


@dataclass
class Turn:
    """One turn of one process, in seconds per step."""

    process: int
    wall: float
    processor: float


@dataclass
class Taken:
    """The turns of one contestant, one per round, the losses they came to, and the overhead it measured itself."""

    turns: list[Turn] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    claimed: list[float] = field(default_factory=list)

    def of(self, clock: str) -> list[float]:
        return [getattr(turn, clock) for turn in self.turns]


@dataclass(frozen=True)
class Ratio:
    """To bare, over the rounds; `error`: half the width of the 95 % interval of the median."""

    median: float
    p20: float
    p80: float
    error: float


def ratio_of(mine: list[float], others: list[list[float]]) -> Ratio:
    """Of a contestant's times to the mean of the others' in the same round."""
    ratios = sorted(m / statistics.fmean(rest) for m, *rest in zip(mine, *others, strict=True))
    low, high = (ratios[round(q * (len(ratios) - 1))] for q in (0.2, 0.8))
    # 20 % and 80 % of a normal distribution are 1.683 deviations apart; a median has 1.253 times the error of a mean.
    deviation = (high - low) / 1.683
    return Ratio(statistics.median(ratios), low, high, 1.96 * 1.253 * deviation / math.sqrt(len(ratios)))


def levelled(taken: dict[str, Taken]) -> dict[str, Taken]:
    """The same turns as if all processes were equally fast: right where each has played each contestant as often."""
    turns = [turn for one in taken.values() for turn in one.turns]
    wall, processor = _speeds(turns, "wall"), _speeds(turns, "processor")

    def level(turn: Turn) -> Turn:
        return Turn(turn.process, turn.wall / wall[turn.process], turn.processor / processor[turn.process])

    return {name: replace(one, turns=list(map(level, one.turns))) for name, one in taken.items()}


def _speeds(turns: list[Turn], clock: str) -> dict[int, float]:
    """Geometric mean of what the turns of a process took."""
    logs: dict[int, list[float]] = {}
    for turn in turns:
        logs.setdefault(turn.process, []).append(math.log(getattr(turn, clock)))
    return {process: math.exp(statistics.fmean(values)) for process, values in logs.items()}


def is_settled(taken: dict[str, Taken], noise: float = NOISE) -> bool:
    """Whether bare against bare is 1 to within the noise, and known that well, in wall and processor time."""
    one, two = (taken[name] for name in BARE)
    if len(one.turns) < FEWEST_ROUNDS:
        return False
    ratios = [ratio_of(one.of(clock), [two.of(clock)]) for clock in ("wall", "processor")]
    return all(max(abs(ratio.median - 1), ratio.error) <= noise for ratio in ratios)


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
                spent += answer["wall"] * (WINDOW + 1)
            player.ask({"leave": None})

    def seconds_of_a_round(self) -> float:
        return sum(statistics.median(one.of("wall")) for one in self.taken.values()) * self.num_steps

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
    start = time.monotonic()
    with Server(log) as server:
        comparison = Comparison(server, names, model, threads=threads, **options)
        if rounds is not None:
            comparison.rounds(rounds)
            taken = comparison.taken
        elif comparison.swaps:
            comparison.rounds(2)
            taken = _squares(comparison, start + seconds)
            comparison.claims()
        else:
            taken = _launches(comparison, seconds)
        return {
            "model": model,
            "threads": threads,
            **options,
            "rounds": len(taken["bare"].turns),
            "exchanged": comparison.swaps and rounds is None,
            "steps_per_turn": comparison.num_steps,
            "settled": is_settled(taken),
            "bare_ms": statistics.median(comparison.taken["bare"].of("wall")) * 1e3,
            "unavailable": comparison.unavailable,
            "contestants": {name: _figures(name, taken) | comparison.written[name] for name in comparison.names},
        }


def _squares(comparison: Comparison, end: float) -> dict[str, Taken]:
    """Latin squares of processes and contestants: each process plays each contestant for as many rounds."""
    num_roles = len(comparison.names)
    fitting = (end - time.monotonic()) / comparison.seconds_of_a_round() / num_roles
    num_rounds = max(2, min(ROUNDS_OF_A_ROLE, round(fitting)))
    comparison.taken = {name: Taken(losses=one.losses) for name, one in comparison.taken.items()}
    while True:
        for shift in range(num_roles):
            comparison.rounds(num_rounds, shift)
        taken = levelled(comparison.taken)
        if is_settled(taken) or time.monotonic() > end:
            return taken


def _launches(comparison: Comparison, seconds: float) -> dict[str, Taken]:
    num_rounds = 2
    for _ in range(LAUNCHES):
        comparison.rounds(num_rounds)
        num_rounds = max(2, round(seconds / LAUNCHES / comparison.seconds_of_a_round()))
    return comparison.taken


def _figures(name: str, taken: dict[str, Taken]) -> dict[str, Any]:
    mine, others = taken[name], [taken[bare] for bare in BARE if bare != name]
    return {
        "wall": vars(ratio_of(mine.of("wall"), [bare.of("wall") for bare in others])),
        "processor": vars(ratio_of(mine.of("processor"), [bare.of("processor") for bare in others])),
        "same_losses": mine.losses == taken["bare"].losses,
        "claimed": statistics.median(mine.claimed) if mine.claimed else None,
    }
