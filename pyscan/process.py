"""What this process is part of: its rank among others, and the file that is its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch


def is_distributed() -> bool:
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )


def rank_and_world() -> tuple[int, int]:
    return (torch.distributed.get_rank(), torch.distributed.get_world_size()) if is_distributed() else (0, 1)


def own_path(path: Path, *, resume: bool = False) -> Path:
    """Where this process writes: beside `path`, with its rank in the name, when there are several.

    A run that goes on with another number of ranks stays where it is: one rank alone continues the file of rank 0, and
    what one rank has begun becomes that file when there are several.
    """
    rank, world = rank_and_world()
    own = path.with_name(f"{path.stem}.rank{rank:05d}{path.suffix}")
    if world == 1:
        return own if resume and own.exists() and not path.exists() else path
    if resume and rank == 0 and path.exists() and not own.exists():
        for suffix in (".tail", ""):
            old, new = (file.with_name(file.name + suffix) for file in (path, own))
            if old.exists():
                old.rename(new)
    return own


def start_live(path: str | Path | None, seconds: float) -> Callable[[], None]:
    """On rank 0 of several, keep the files of all ranks merged beside the training; what ends it."""
    rank, world = rank_and_world()
    if path is None or not seconds or rank or world == 1:
        return lambda: None
    from pyscan import live_merge

    process = live_merge.start(path, seconds)
    assert process.stdin is not None
    return process.stdin.close
