"""The report without a browser: its data are those of the file, its size is bounded, and no name in a file escapes."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyscan
from pyscan import analysis, codecs, digest
from pyscan.cli import main
from pyscan.schema import SiteInfo
from tests.make_scan import Builder, make_schema
from tests.view_scans import HOSTILE, SPIKE, make_view_scan

V11 = Path(__file__).parent / "data" / "every_value_v1.1.mscan"


def report_of(scan: Path, capsys: Any) -> str:
    output = scan.with_name("report.html")
    assert main(["report", str(scan), "-o", str(output), "--force"]) == 0
    assert "report.html" in capsys.readouterr().out
    return output.read_text(encoding="utf-8")


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    return json.loads(found[1])


def unpack(packed: dict[str, str]) -> np.ndarray:
    codes = np.frombuffer(base64.b64decode(packed["data"]), codecs.DTYPES[packed["codec"]])
    return codecs.decode(codes, packed["codec"])


@pytest.fixture
def scan(tmp_path: Path) -> Path:
    return make_view_scan(tmp_path / "run.mscan")


def test_snapshots_and_curves_of_a_report_are_the_numbers_of_the_file(scan: Path, capsys: Any) -> None:
    data = data_of(report_of(scan, capsys))
    with pyscan.open(scan) as run:
        steps = run.steps["step"].tolist()
        assert (data["steps"][0], data["steps"][-1]) == (1, 100)
        for step, shown in zip(data["steps"], data["snapshots"], strict=True):
            row = steps.index(step)
            for name in ("act", "grad"):
                expected = run.cells(name, steps=slice(row, row + 1))[0]
                assert np.array_equal(unpack(shown["norms"][name]).view(np.uint32), expected.view(np.uint32))
        curve = unpack(data["curves"]["grad"]["high"]).reshape(len(run.sites), -1)
        for place, site in enumerate(run.sites):  # 100 rows have a point each
            np.testing.assert_allclose(curve[place], run.grad(site.name), rtol=0.0014)


def test_a_report_has_verdict_events_overhead_coverage_and_what_moved(scan: Path, capsys: Any) -> None:
    page = report_of(scan, capsys)
    assert "1 problem in 100 rows, steps 1 to 100" in page
    assert "1.2 % of the step" in page
    assert "<td>model.frozen.weight</td><td>frozen</td>" in page
    assert [e["step"] for e in data_of(page)["timeline"]["events"] if e["alarm"]] == [SPIKE]
    assert page.count("<tr data-site=") >= 5


def test_no_name_in_a_file_becomes_markup(scan: Path, capsys: Any) -> None:
    page = report_of(scan, capsys)
    assert HOSTILE not in page
    assert f"lm_head{HOSTILE}" in [site["name"] for site in data_of(page)["info"]["runs"][0]["sites"]]


def test_a_report_names_no_other_place_and_may_load_nothing(scan: Path, capsys: Any) -> None:
    page = report_of(scan, capsys)
    assert "default-src 'none'" in page
    assert not re.search(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=", page.partition('id="data"')[0])


def test_a_report_shows_version_1_files_with_their_text(tmp_path: Path, capsys: Any) -> None:
    scan = tmp_path / "old.mscan"
    scan.write_bytes(V11.read_bytes())
    page = report_of(scan, capsys)
    assert "<p>text 0 ü</p>" in page
    with pyscan.open(scan) as run:
        assert np.array_equal(unpack(data_of(page)["snapshots"][0]["norms"]["act"]), run.cells("act")[0])


def test_a_report_of_a_run_without_rows_says_so(tmp_path: Path, capsys: Any) -> None:
    page = report_of(Builder().index().save(tmp_path / "empty.mscan"), capsys)
    assert "No rows yet, nothing to judge" in page


def test_a_report_of_a_huge_model_shows_sites_and_stays_small(tmp_path: Path, capsys: Any) -> None:
    sites = [SiteInfo(f"layers.{i}.proj.weight", "linear", (8, 64 * 400), "float32", 400) for i in range(60)]
    builder = Builder(make_schema(sites=tuple(sites)))
    counts = {"block": 24_000, "site": 60}
    rows = np.zeros(3, pyscan.format.ROW_DTYPE)
    rows["step"] = [1, 2, 3]
    cells = [np.full((counts[c.per], 3), 256, codecs.DTYPES[c.codec]) for c in builder.schema.channels]
    builder.writer.steps(rows, cells)
    page = report_of(builder.index().save(tmp_path / "huge.mscan"), capsys)
    data = data_of(page)
    assert data["merged"]
    assert np.allclose(unpack(data["snapshots"][0]["norms"]["act"]), 2 * np.sqrt(400), rtol=0.0014)
    assert len(page) < 8_000_000


def test_drift_of_a_digest_is_that_of_the_analysis(scan: Path) -> None:
    with pyscan.open(scan) as run:
        for name, curve in digest.curves(run, 7).items():
            norms = np.stack([run.get(name, site.name) for site in run.sites], axis=1)
            np.testing.assert_allclose(curve.drift, analysis.drift(norms).ratio, rtol=1e-9)
            assert np.nanmax(curve.buckets.high) == norms[np.isfinite(norms)].max()
            assert curve.buckets.num_bad.sum() == (~np.isfinite(norms) & ~codecs.is_absent(norms)).sum()


def test_site_norms_are_those_of_the_run(scan: Path) -> None:
    with pyscan.open(scan) as run:
        found = digest.site_norms(run.cells("act"), [site.num_blocks for site in run.sites])
        for place, site in enumerate(run.sites):
            assert np.array_equal(found[:, place].view(np.uint32), run.act(site.name).view(np.uint32))


def test_an_output_that_exists_is_kept(scan: Path, capsys: Any) -> None:
    output = scan.with_name("there.html")
    output.write_text("mine")
    assert main(["report", str(scan), "-o", str(output)]) == 2
    assert output.read_text() == "mine"
    assert "add --force" in capsys.readouterr().err
