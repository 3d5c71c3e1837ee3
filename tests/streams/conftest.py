"""Settings of the tests of the order."""

import pytest

from pyscan import gradients


@pytest.fixture(autouse=True)
def gradients_of_every_size_are_read_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models here are tiny, and their gradients must take the way of large ones."""
    monkeypatch.setattr(gradients, "SMALL_BYTES", 0)
