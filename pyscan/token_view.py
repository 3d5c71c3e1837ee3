"""The token rows of one site as users see them: a dict whose contribution is computed when asked for."""

from __future__ import annotations

from typing import Any

import numpy as np

from pyscan.codecs import Array


class SiteTokens(dict[str, Any]):
    """{"act": ||x_t||, "grad": ||g_t||, ...}; `["contribution"]` is their product, for an embedding ||g_t|| alone.

    With blocks, act is [..., in_blocks] and grad [..., out_blocks], and what position t adds to block (i, j) of the
    gradient is contribution[..., i, j]. Per sequence, grad is already what the sequence adds.
    """

    def __init__(self, channels: dict[str, Any], *, mode: str, is_lookup: bool = False) -> None:
        super().__init__(channels)
        self._mode = mode
        self._is_lookup = is_lookup

    def __missing__(self, key: str) -> Array:
        if key != "contribution" or "grad" not in self:
            raise KeyError(key)
        act, grad = self["act"], self["grad"]
        if self._is_lookup or self._mode == "sequences":
            return np.asarray(grad)
        with np.errstate(over="ignore", invalid="ignore"):
            if self._mode == "blocks":
                return np.asarray(grad[..., :, None] * act[..., None, :])
            return np.asarray(act * grad)
