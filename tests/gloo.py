"""How a rank of a test ends. Receives nothing, hands on nothing: the process is over."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import torch.distributed as dist


def leave() -> NoReturn:
    """End this rank without finalizing Python.

    Threads of gloo outlive the process group (caches of DTensor hold it) and may be about to drop a tensor of the last
    collective. One that asks for the GIL while Python finalizes is unwound through a noexcept frame of torch: the
    process dies with "terminate called without an active exception" (pytorch/pytorch#190489), with or without a scan.
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
