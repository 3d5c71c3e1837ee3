"""What is known of a row when its step ends, and what becomes known when it arrives.

Receives what the hooks have seen beside the cells: losses, token counts, the loss scale. Where these are tensors on a
GPU they are not asked for their values, which would make the host wait; they travel with the row. Hands on the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pyscan.format import ROW_RESUMED
from pyscan.latest import Row
from pyscan.writer import AFTER_CLIP, SKIPPED


class Scaling(NamedTuple):
    """What a GradScaler has done to a step: the scale of the gradients, and for each device whether it found an inf."""

    scale: Tensor
    found_inf: tuple[Tensor, ...] = ()


class Seen(NamedTuple):
    """What the forwards of a step have shown. The number of tokens is the sum of both counts."""

    losses: tuple[Tensor, ...] = ()
    num_tokens: int | None = None
    masked_counts: tuple[Tensor, ...] = ()
    are_shares: bool = False  # the losses of the micro-batches add up to that of the step


class Closing(NamedTuple):
    """A step that has ended. `loss` and `tokens` are the loop's own word, which counts before what was seen."""

    step: int
    is_due: bool  # the step is to have a row
    seen: Seen = Seen()
    loss: float | None = None
    tokens: int | None = None
    lr: float | None = None
    scaling: Scaling | None = None
    late: frozenset[int] = frozenset()  # sites whose gradient was read only when the optimizer stepped
    late_unscaled: bool = False  # and the scaler had divided it by then
    resumed: dict[str, Any] | None = None  # the first step after a checkpoint: what its event says

    @property
    def scale(self) -> Tensor | float:
        """What gradients are divided by."""
        return 1.0 if self.scaling is None else self.scaling.scale

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Single values that `row` needs."""
        scaling = () if self.scaling is None else (self.scaling.scale, *self.scaling.found_inf)
        losses = self.seen.losses if self.loss is None else ()
        counts = self.seen.masked_counts if self.tokens is None else ()
        return (*losses, *counts, *scaling)

    def row(self, cells: NDArray[np.float64], values: Sequence[float]) -> Row:
        """The row, given the values of `tensors`."""
        num_losses = len(self.seen.losses) if self.loss is None else 0
        num_counted = num_losses + (len(self.seen.masked_counts) if self.tokens is None else 0)
        losses, counts = values[:num_losses], values[num_losses:num_counted]
        scale, found_inf = (None, ()) if self.scaling is None else (values[num_counted], values[num_counted + 1 :])
        return Row(
            step=self.step,
            cells=cells,
            tokens=self._num_tokens(counts),
            loss=sum(losses) / (1 if self.seen.are_shares else len(losses)) if losses else self.loss,
            lr=self.lr,
            grad_scale=scale,
            flags=SKIPPED * any(found_inf) | AFTER_CLIP * bool(self.late) | ROW_RESUMED * (self.resumed is not None),
        )

    def _num_tokens(self, counts: Sequence[float]) -> int | None:
        if self.tokens is not None:
            return self.tokens
        if self.seen.num_tokens is None and not counts:
            return None
        return (self.seen.num_tokens or 0) + int(sum(counts))


class Finished(NamedTuple):
    """A step whose row is there."""

    closing: Closing
    cells: NDArray[np.float64]
    values: Sequence[float]  # of `closing.tensors`
