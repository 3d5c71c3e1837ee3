"""Whole training steps through the GPU path with the real kernels: interpreted, on the fake device."""

import numpy as np
import pytest

from pyscan.kernels.launch import Reducer
from tests.streams.fake_device import FakeDevice
from tests.streams.test_device_scan import (
    checkpointed,
    experts,
    llama,
    one_backward,
    three_backwards,
    train,
    train_on_fake,
)

CASES = {
    "plain": (lambda: llama(1), one_backward),
    "reentrant checkpointing": (lambda: checkpointed(True), one_backward),
    "accumulation": (lambda: llama(1).bfloat16(), three_backwards),
    "experts": (experts, one_backward),
}


@pytest.mark.parametrize("case", CASES)
def test_every_site_has_the_values_of_the_cpu_engine(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    make, step = CASES[case]
    device = FakeDevice()
    want = train(make(), step, 2)
    got = train_on_fake(monkeypatch, device, make(), step, 2, reducer=Reducer)
    assert device.violations == []
    assert [row.step for row in got.rows] == [1, 2]
    for mine, theirs in zip(got.rows, want.rows, strict=True):
        np.testing.assert_array_equal(mine.cells < 0, theirs.cells < 0)
        np.testing.assert_allclose(mine.cells, theirs.cells, rtol=1e-6)
        assert (mine.loss, mine.tokens) == (theirs.loss, theirs.tokens)
