"""What this process is part of: its rank among others, and the file that is its own."""

from __future__ import annotations

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


def own_path(path: Path) -> Path:
    """Where this process writes: beside `path`, with its rank in the name, when there are several."""
    rank, world = rank_and_world()
    return path if world == 1 else path.with_name(f"{path.stem}.rank{rank:05d}{path.suffix}")
