"""The settings of a scan, checked when they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyscan.watch import Watch

Event = dict[str, Any]
TOKEN_MODES = ("blocks", "sequences")  # beside True
LIVE_SECONDS = 10.0


@dataclass(frozen=True)
class ScanConfig:
    """What `pyscan.attach` takes, as it takes it."""

    include: str | Sequence[str] | None = None
    exclude: str | Sequence[str] | None = None
    block: int = 64
    rows: bool = False
    every: int = 1
    mask: str | None = None
    budget: float | None = None
    resume: bool = False
    metadata: Mapping[str, Any] | None = None
    on_event: Callable[[Event], None] | None = None
    watch: Watch | bool = True
    tokens: bool | str = False
    live: bool | float = False

    @property
    def live_seconds(self) -> float:
        """How often the files of all ranks are merged for rank 0; 0: not at all."""
        return LIVE_SECONDS if self.live is True else float(self.live)

    def __post_init__(self) -> None:
        for name, least in (("block", 0), ("every", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an int >= {least}, got {value!r}")
        if self.budget is not None and not 0 < self.budget < 1:
            raise ValueError(f"budget is a share of the step time and must lie between 0 and 1, got {self.budget!r}")
        if self.mask is not None and not isinstance(self.mask, str):
            raise TypeError(f"mask names a keyword of the model's forward, got {type(self.mask).__name__}")
        if self.on_event is not None and not callable(self.on_event):
            raise TypeError(f"on_event must be callable, got {type(self.on_event).__name__}")
        if not isinstance(self.tokens, bool) and self.tokens not in TOKEN_MODES:
            modes = ", ".join(map(repr, TOKEN_MODES))
            raise ValueError(f"tokens must be False, True or one of {modes}, got {self.tokens!r}")
        if not isinstance(self.live, bool | int | float) or (self.live is not False and not self.live > 0):
            raise ValueError(f"live must be True, False or a number of seconds, got {self.live!r}")
        if not isinstance(self.watch, Watch | bool):
            raise TypeError(f"watch must be True, False or a pyscan.Watch, got {type(self.watch).__name__}")
