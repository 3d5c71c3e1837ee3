"""Say, once, what the scanner does not see: nothing at all, or a weight whose gradient comes without its input.

Receives finished rows until one has gradients, and hands on events; coverage is told too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from pyscan.accumulate import RowCells
from pyscan.sites import Inventory

_UNSEEN = "its input was not seen; its module was not called, or ran inside a compiled region or a fused kernel"
_NOTHING = (
    "nothing was recorded in this step: no forward of this model ran with gradients enabled. "
    "generate() and no_grad() record nothing: run a forward on the generated tokens and call backward()"
)


class Silence:
    """Listens to the rows of one set of sites until all is said. `problems`: what is known about a site's input."""

    def __init__(
        self, inventory: Inventory, buffer: RowCells, problems: Mapping[int, str], on_event: Callable[..., None]
    ) -> None:
        self.done = False
        self._inventory = inventory
        self._buffer = buffer
        self._problems = problems
        self._on_event = on_event
        self._said_nothing = False

    def explain(self, cells: NDArray[np.float64]) -> None:
        if (cells < 0).all():
            if not self._said_nothing:
                self._said_nothing = True
                self._on_event("nothing_recorded", text=_NOTHING)
        elif self._buffer.has_grads(cells):
            self.done = True
            self._explain_inputs(cells)

    def _explain_inputs(self, cells: NDArray[np.float64]) -> None:
        silent = []
        for index, site in enumerate(self._inventory.sites):
            due = site.observe != "none" and site.expert is None and site.tied_to is None
            if due and self._buffer.observed(cells, "grad", index) and not self._buffer.observed(cells, "act", index):
                self._inventory.coverage[site.name] = f"gradient only: {self._problems.get(index, _UNSEEN)}"
                silent.append(site.name)
        if silent:
            reason = self._inventory.coverage[silent[0]]
            self._on_event("input_not_seen", site=silent[0], sites=silent, text=f"{len(silent)} sites, {reason}")
