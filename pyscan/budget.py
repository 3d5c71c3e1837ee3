"""Keep the scanner's own share of the step time in sight, and below a budget if there is one.

Receives the seconds each step took and the seconds of them spent scanning; hands on how many steps to leave out between
two scanned ones. Steps are chosen by their number, so that all ranks keep the same ones.
"""

from __future__ import annotations

# Steps between two decisions, and the most that `every` may become.
WINDOW = 32
LARGEST = 1 << 16


class Budget:
    """Counts, and doubles or halves `every` between the user's own and LARGEST."""

    def __init__(self, every: int, budget: float | None) -> None:
        self.every = every
        self._least = every
        self._budget = budget
        self._spent = 0.0
        self._elapsed = 0.0
        self._scanned = 0
        self._num_steps = 0
        self._overhead = 0.0

    @property
    def overhead(self) -> float:
        """Share of the time of the steps so far (of the last full window, once there is one) spent scanning."""
        if self._overhead == 0.0 and self._elapsed > 0:
            return self._spent / self._elapsed
        return self._overhead

    def step(self, spent: float, elapsed: float, scanned: bool) -> dict[str, float] | None:
        """Count a step; returns what changed about `every`, if anything."""
        self._spent += spent
        self._elapsed += elapsed
        self._scanned += scanned
        self._num_steps += 1
        if self._num_steps < max(WINDOW, 2 * self.every) or self._elapsed <= 0:
            return None
        change = self._decide()
        self._overhead = self._spent / self._elapsed
        self._spent = self._elapsed = 0.0
        self._scanned = self._num_steps = 0
        return change

    def _decide(self) -> dict[str, float] | None:
        if self._budget is None or not self._scanned:
            return None
        per_scan = self._spent / self._scanned
        per_step = (self._elapsed - self._spent) / self._num_steps
        every = self._least
        while every < LARGEST and per_scan / every > self._budget * per_step:
            every *= 2
        if every == self.every:
            return None
        before, self.every = self.every, every
        return {"before": before, "after": every, "overhead": self._spent / self._elapsed}
