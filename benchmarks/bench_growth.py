"""The growth of cost (growth.py): timed by `make bench-growth`; as a test, its parts on small cases and known lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import growth


def test_a_line_is_fitted_with_its_slope() -> None:
    slope, intercept, explained = growth.fit([1.0, 2.0, 3.0], [12.0, 22.0, 32.0])
    assert (slope, intercept, explained) == (pytest.approx(10), pytest.approx(2), pytest.approx(1))
    assert growth.fit([1.0, 2.0, 3.0, 4.0], [1.0, -1.0, 1.0, -1.0])[2] < 0.5


def test_growth_is_measured_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    small = growth.Case(sites=2, tokens=4, width=64)
    axes = {name: [small, small._replace(sites=3)] for name in growth.AXES}
    monkeypatch.setattr(growth, "AXES", axes)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = [growth.measure_axis(name, 2, 10.0) for name in axes]
    torch.set_num_threads(threads)
    steps = growth.file_growth((128, 256))
    assert steps["bytes_per_value"] == pytest.approx(2.05, abs=0.1), "the file grows by two bytes a value"
    assert found[0]["limit_us"][0] == pytest.approx(4 * 2 * (4 * 64 + 64 * 64) / 10e9 * 1e6)
    result = {"read_gb_per_s": 10.0, "axes": found, "steps": steps}
    assert "bytes a value" in growth.table(result)
    growth.picture(result, tmp_path / "growth.svg", "note")
    assert "</svg>" in (tmp_path / "growth.svg").read_text()
