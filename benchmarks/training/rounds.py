"""Contestants in rounds, each round one turn of each, until the noise is small enough.

Receives names and hands on, for each, the ratio of its time to that of two bare contestants, which also tell the noise.
Where its memory comes to lie makes a process faster or slower for all its life: so processes exchange their roles until
each has played every contestant equally often. Where a contestant cannot be detached again, all processes are started
anew some times instead.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.training.contestants import CONTESTANTS
from benchmarks.training.models import MODELS
from benchmarks.training.processes import Remote, Server, share
from benchmarks.training.ratios import BARE, Taken, Turn, is_settled, ratios
from pyscan.budget import WINDOW

SLICE_SECONDS = 0.1
WARMUP_STEPS = 3
LAUNCHES = 4
ROUNDS_OF_A_ROLE = 8
CLAIM_SECONDS = 5.0


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
        for name in [name for name in self.names if name.startswith("pyscan")]:
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
