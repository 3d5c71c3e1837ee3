import subprocess
import sys

import pytest
import torch

import pyscan
from pyscan import _C, threads
from pyscan.engine import DTYPES
from tests import families


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_torchs_own_threads_are_found() -> None:
    assert torch.backends.openmp.is_available()
    assert threads.borrow()


@pytest.mark.parametrize("dtype", DTYPES)
def test_borrowed_and_own_threads_give_the_same_bits(dtype: torch.dtype, two_threads: None) -> None:
    x = torch.randn(3001, 515).to(dtype)
    torch.set_num_threads(3)  # which cannot share its even number of chunks evenly
    results = []
    for borrowed in (True, False):
        threads.borrow() if borrowed else _C.borrow_threads(0, 0)
        results.append(pyscan.reduce(x))
    threads.borrow()
    assert all(map(torch.equal, *results))


def test_without_a_runtime_the_engine_keeps_its_own_threads(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> None:
    monkeypatch.setattr(threads, "_loaded_runtimes", lambda: [])
    assert not threads.borrow()
    x = torch.ones(4000, 512)
    assert pyscan.reduce(x)[0].sum() == x.numel()


FORK = """
import os, signal, torch, pyscan
from pyscan import threads
torch.set_num_threads(2)
x = torch.ones(4000, 512)
ok = lambda: pyscan.reduce(x)[0].sum() == x.numel()
assert threads.borrow() and ok()                   # torch's team has a thread now, which the child will not have
pid = os.fork()
if pid == 0:
    signal.alarm(30)                               # nobody else ends a child that waits for ever
    os._exit(0 if ok() else 1)
assert os.waitpid(pid, 0)[1] == 0
assert ok()
"""


def test_borrowed_threads_survive_fork() -> None:
    run = subprocess.run([sys.executable, "-c", FORK], timeout=60, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


ATTRIBUTES = """
import sys, torch
del torch.Tensor.__dlpack_c_exchange_api__
from tests.test_threads import cells
print(cells())
"""


def cells() -> list[float]:
    """One scanned step of a small model."""
    torch.manual_seed(0)
    family = families.build("llama")
    optimizer = torch.optim.SGD(family.model.parameters(), lr=0.1)
    with pyscan.attach(family.model.train(), optimizer=optimizer) as scan:
        family.loss().backward()
        optimizer.step()
        assert scan._gradients.state.num_reads == len(scan.schema.sites)
        return scan.rows[0].cells.tolist()


@pytest.mark.skipif(not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="this torch has no such table")
def test_a_torch_without_the_exchange_table_gives_the_same_cells() -> None:
    run = subprocess.run([sys.executable, "-c", ATTRIBUTES], timeout=120, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(cells())
