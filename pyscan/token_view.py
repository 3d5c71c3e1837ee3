"""The token rows of one site as users see them: a dict whose contribution is computed when asked for."""

from __future__ import annotations

from typing import Any

import numpy as np

from pyscan.codecs import Array, is_absent


class SiteTokens(dict[str, Any]):
    """{"act": ||x_t||, "grad": ||g_t||, ...}; `["contribution"]` is their product, for an embedding ||g_t|| alone.

    With blocks, act is [..., in_blocks] and grad [..., out_blocks], and what position t adds to block (i, j) of the
    gradient is contribution[..., i, j]. Per sequence, grad is already what the sequence adds.
    """

    def __init__(self, channels: dict[str, Any], *, mode: str, is_lookup: bool = False) -> None:
        super().__init__(channels)
        self.mode = mode
        self._is_lookup = is_lookup

    def __missing__(self, key: str) -> Array:
        if key != "contribution" or "grad" not in self:
            raise KeyError(key)
        act, grad = self["act"], self["grad"]
        if self._is_lookup or self.mode == "sequences":
            return np.asarray(grad)
        with np.errstate(over="ignore", invalid="ignore"):
            if self.mode == "blocks":
                return np.asarray(grad[..., :, None] * act[..., None, :])
            return np.asarray(act * grad)

    def flat(self, channel: str) -> Array:
        """A channel as one norm per row, or per sequence: blocks are taken together, what is absent counts as 0."""
        if channel == "contribution" and self.mode == "blocks" and not self._is_lookup:
            return np.asarray(self.flat("act") * self.flat("grad"))
        values = np.asarray(self[channel], np.float64)
        squares = np.square(np.where(is_absent(values), 0.0, values))
        return np.asarray(np.sqrt(squares.sum(-1) if self.mode != "rows" else squares).ravel())
