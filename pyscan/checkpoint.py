"""What a training checkpoint keeps of a scan, checked when it comes back.

Receives the state of a scanner, hands on a plain dict that every checkpoint format can hold; and the other way round,
with what differs between the scan that saved it and the one that goes on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

_RANK = re.compile(r"\.rank\d{5,}(?=\.[^.]+$)")


@dataclass(frozen=True)
class Checkpoint:
    """A scan after the row of `step`."""

    step: int
    path: str | None = None
    run_id: str | None = None  # of the file, in hexadecimal; None: the rows are in memory
    world: int = 1
    every: int = 1
    loggers: dict[str, str] = field(default_factory=dict)  # name of a logger -> the id of its run

    def __post_init__(self) -> None:
        for name, least in (("step", 0), ("world", 1), ("every", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} of a scan's state must be an int >= {least}, got {value!r}")

    def to_state(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Checkpoint:
        """The checkpoint in a dict of `to_state`; keys that a later version added are passed over."""
        if "step" not in state:
            raise ValueError(f"the state of a scan has the key 'step', got {sorted(map(str, state))}: is it another's?")
        return cls(**{key.name: state[key.name] for key in fields(cls) if key.name in state})

    def _of_peer(self, now: Checkpoint) -> bool:
        """Whether another rank of the same run saved this: each has a file of its own."""
        saved, own = (_RANK.sub("", path or "") for path in (self.path, now.path))
        return saved == own and self.path != now.path

    def differences(self, now: Checkpoint) -> list[str]:
        """What is not as it was when this was saved, for people."""
        found = []
        if self.run_id is not None and now.run_id is not None and self.run_id != now.run_id and not self._of_peer(now):
            found.append(f"{now.path} is not the file that was being written ({self.path}): its rows begin here")
        if self.world != now.world:
            found.append(f"there are {now.world} ranks now and there were {self.world}")
        return found
