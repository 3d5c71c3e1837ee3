"""Keep the scanner's own share of the step time in sight, and below a budget if there is one.

Receives the seconds each step took and the seconds of them spent scanning; hands on how many steps to leave out between
two scanned ones. Steps are chosen by their number, so that all ranks keep the same ones.
"""

from __future__ import annotations

# Steps between two decisions, and the most that `every` may become.
WINDOW = 32
LARGEST = 1 << 16
# Where the hooks alone are above the budget, scanning may still take this share of what they take.
SHARE_OF_HOOKS = 0.1


class Budget:
    """Counts, and doubles or halves `every` between the user's own and LARGEST."""

    def __init__(self, every: int, budget: float | None) -> None:
        self.every = every
        self._least = every
        self._budget = budget
        self._overhead: float | None = None
        self._begin_window()

    def _begin_window(self) -> None:
        self._spent = 0.0
        self._hooks = 0.0
        self._elapsed = 0.0
        self._scanned = 0
        self._num_steps = 0

    @property
    def is_every_step(self) -> bool:
        """Every step is scanned, and that will not change."""
        return self.every == 1 and self._budget is None

    @property
    def overhead(self) -> float:
        """How much longer the steps so far (of the last full window, once there is one) took because of the scanner."""
        return self._now() if self._overhead is None else self._overhead

    def _now(self) -> float:
        bare = self._elapsed - self._spent - self._hooks
        return (self._spent + self._hooks) / bare if bare > 0 else 0.0

    def step(
        self, spent: float, elapsed: float, scanned: bool, hooks: float = 0.0, num_steps: int = 1
    ) -> dict[str, float] | None:
        """Count a step, or several that are alike; returns what changed about `every`, if anything.

        `spent` is the time of scanning; `hooks` what the calls of hooks take, which a step that is left out has too, as
        all that is spent in such a step.
        """
        self._spent += spent if scanned else 0.0
        self._hooks += hooks if scanned else hooks + spent
        self._elapsed += elapsed
        self._scanned += scanned * num_steps
        self._num_steps += num_steps
        if self._num_steps < max(WINDOW, 2 * self.every) or self._elapsed <= 0:
            return None
        change = self._decide()
        self._overhead = self._now()
        self._begin_window()
        return change

    def _decide(self) -> dict[str, float] | None:
        if self._budget is None or not self._scanned:
            return None
        per_scan = self._spent / self._scanned
        hooks = self._hooks / self._num_steps
        bare = (self._elapsed - self._spent) / self._num_steps - hooks
        allowed = max(self._budget * bare - hooks, SHARE_OF_HOOKS * hooks, 0.0)
        every = self._least
        while every < LARGEST and per_scan / every > allowed:
            every *= 2
        if every == self.every:
            return None
        before, self.every = self.every, every
        return {"before": before, "after": every, "overhead": self._now()}
