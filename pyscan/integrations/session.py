"""One scan inside a trainer: attached when training begins, closed when it ends, numbered as the trainer numbers.

Receives what a trainer's callback knows (model, optimizers, the step it goes on from) and hands on the open scan. The
callbacks of all trainers are built on it, so that a number means the same in each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from pyscan.config import ScanConfig
from pyscan.scanner import Scanner, attach


class Closeable(Protocol):
    def close(self) -> None: ...


Follow = Callable[[Scanner], Closeable]


class Session:
    """`options` are keywords of `pyscan.attach`, checked at once: a mistake shows before the model is built."""

    def __init__(self, path: str | Path | None, follow: Follow | None, options: Mapping[str, Any]) -> None:
        if "optimizer" in options:
            raise TypeError("optimizer is the trainer's own here: leave it out")
        self._resume = ScanConfig(**options).resume
        self._path = path
        self._follow = follow
        self._options = {name: value for name, value in options.items() if name != "resume"}
        self._follower: Closeable | None = None
        self.scan: Scanner | None = None
        self.is_open = False

    def begin(self, model: nn.Module, optimizers: Any, step: int, state: Mapping[str, Any] | None = None) -> None:
        """Attach. A run that has made steps before, or began and failed (a batch too large), continues its file."""
        resume = self._resume or step > 0 or self.is_open
        self.end()
        scan = attach(model, self._path, optimizer=optimizers, resume=resume, **self._options)
        if resume:
            scan.load_state_dict(scan.state_dict() | dict(state or {}) | {"step": step})
        self.scan, self.is_open = scan, True
        if self._follow is not None:
            self._follower = self._follow(scan)

    def figures(self) -> dict[str, float]:
        """What a trainer logs of the newest row; an error here is the scan's, not the run's."""
        if self.scan is None or not self.is_open:
            return {}
        try:
            return self.scan.figures()
        except Exception as error:
            self.scan._fail(error)
            return {}

    def end(self) -> None:
        """Close the file; `scan` stays for those who ask it for its last row."""
        if self.scan is not None and self.is_open:
            self.is_open = False
            self.scan.close()
        if self._follower is not None:
            self._follower.close()
            self._follower = None
