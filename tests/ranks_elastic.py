"""A DDP job that goes on from its last checkpoint, as torchrun starts it again; one rank kills itself once.

torchrun --nproc-per-node 2 --max-restarts 1 -m tests.ranks_elastic DIRECTORY LAST_STEP [KILL_AT]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import pyscan
from tests.gloo import leave


def main() -> None:
    out, last_step = Path(sys.argv[1]), int(sys.argv[2])
    kill_at = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    environment = os.environ
    attempt = (
        f"{environment['MASTER_PORT']}-{environment['TORCHELASTIC_RESTART_COUNT']}"  # meets no one of the last one
    )
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{out}/store-{attempt}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(70, 40), nn.ReLU(), nn.Linear(40, 3))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.01)
    scan = pyscan.attach(ddp, out / "run.mscan", optimizer=optimizer, resume=True, live=0.5)
    saved, step = out / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        scan.load_state_dict(state["scan"])
        step = state["scan"]["step"]
    while step < last_step:
        step += 1
        optimizer.zero_grad()
        ddp(torch.randn(8, 70)).square().mean().backward()
        optimizer.step()
        if step == kill_at and dist.get_rank() == dist.get_world_size() - 1:
            once = out / "killed"
            if not once.exists():
                once.touch()
                scan.flush()  # so that there are rows to void
                os.kill(os.getpid(), signal.SIGKILL)
        if step % 10 == 0:
            state = {"model": model.state_dict(), "scan": scan.state_dict()}
            if dist.get_rank() == 0:
                torch.save(state, out / "part.pt")
                (out / "part.pt").replace(saved)
            dist.barrier()
    scan.close()
    leave()


if __name__ == "__main__":
    main()
