"""Which scanners watch a model right now: where a diagnosis finds them, without knowing what a scanner is.

Receives scanners as they attach and close; hands them on to whoever runs the model once more on its own account.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn


class Attached(Protocol):
    """What a diagnosis may ask of a scanner."""

    @property
    def model(self) -> nn.Module: ...
    def paused(self) -> AbstractContextManager[None]: ...
    def latest(self) -> dict[str, Any]: ...
    def coverage(self) -> dict[str, str]: ...


_attached: weakref.WeakSet[Attached] = weakref.WeakSet()


def add(scanner: Attached) -> None:
    _attached.add(scanner)


def discard(scanner: Attached) -> None:
    _attached.discard(scanner)


def scanners_of(model: nn.Module) -> list[Attached]:
    """The scanners that watch this model, a wrapper of it or a part of it."""
    modules = set(map(id, model.modules()))
    return [scanner for scanner in list(_attached) if modules & set(map(id, scanner.model.modules()))]
