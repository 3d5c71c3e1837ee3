"""check_grad_flow with data parallelism: each rank by itself, or an error that says why not."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pyscan
from tests.gloo import leave


def train(rank: int, check: bool) -> Any:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))
    messages, counts = [], []
    for _ in range(3):
        if check:
            report = pyscan.check_grad_flow(model, batch=lambda: model(x).square().mean(), verbose=False)
            counts.append(report["ok"])
            with model.no_sync():
                local = model(x).square().mean()
            if rank == 0:  # no other rank is waited for
                counts.append(pyscan.check_grad_flow(model, local, verbose=False)["ok"])
        else:
            with model.no_sync():
                model(x)
        loss = model(x).square().mean()
        if check:
            try:
                pyscan.check_grad_flow(model, loss, verbose=False)
            except ValueError as error:
                messages.append(str(error))
        loss.backward()
        if check:
            counts.append(pyscan.check_grad_flow(model, verbose=False)["ok"])
        optimizer.step()
        optimizer.zero_grad()
    return {k: v.clone() for k, v in model.module.state_dict().items()}, messages, counts


@pytest.mark.slow
def test_data_parallel_ranks_check_alone_and_train_on_bit_for_bit(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.test_flow_ranks", str(rank), str(port), str(tmp_path / str(rank))]
        )
        for rank in (0, 1)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    for rank in (0, 1):
        (bare, _, _), (checked, messages, counts) = torch.load(tmp_path / str(rank))
        assert all(torch.equal(bare[key], checked[key]) for key in bare)
        assert len(messages) == 3
        assert "averaged by the first backward only. On every rank: pass batch=" in messages[0]
        names = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
        assert counts == [names] * (9 if rank == 0 else 6)


def main(rank: int, port: int, path: str) -> None:
    """One rank of two: the same steps with and without checks in between must end in the same weights."""
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.save((train(rank, False), train(rank, True)), path)
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
