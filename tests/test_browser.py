"""Viewer and report in headless Chromium: what is on the screen is what `pyscan.open` gives."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyscan
from pyscan import analysis
from pyscan.cli import main
from pyscan.viewer.server import Viewer
from pyscan.viewer.session import Session
from pyscan.writer import Writer
from tests.browser import CHROMIUM, MISSING, Watched, browsing
from tests.view_scans import HOSTILE, SPIKE, make_view_scan, view_schema

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=MISSING)]
V11 = Path(__file__).parent / "data" / "every_value_v1.1.mscan"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsing() as found:
        yield found


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("browser")
    one = make_view_scan(folder / "one.mscan", tokens=True)
    return [one, make_view_scan(folder / "two.mscan", factor=2.0)]


class Shown:
    """A viewer and a page of it; at the end no error was heard and nothing but this machine was asked."""

    def __init__(self, browser: Any, *paths: Path, **look: Any) -> None:
        self.session = Session(paths)
        self.viewer = Viewer(self.session)
        threading.Thread(target=self.viewer.serve_forever, daemon=True).start()
        self.watched = Watched(browser, **look)

    def __enter__(self) -> Any:
        return self.watched.open(self.viewer.url)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.watched.page.close()
        self.viewer.shutdown()
        self.viewer.server_close()
        self.session.close()
        if error is None:
            assert self.watched.errors == []
            assert self.watched.hosts <= {"127.0.0.1", "data", "blob"}


def cells_of(page: Any, map_number: int = 0) -> list[dict[str, Any]]:
    return page.evaluate(f"pyscan.maps[{map_number}].cells")


def hover(page: Any, cell: dict[str, Any], map_number: int = 0) -> dict[str, Any]:
    """Move the mouse to the middle of a cell; what the tooltip then says."""
    page.locator(".map canvas").nth(map_number).scroll_into_view_if_needed()
    box = page.locator(".map canvas").nth(map_number).bounding_box()
    page.mouse.move(box["x"] + cell["x"] + cell["w"] / 2, box["y"] + cell["y"] + cell["h"] / 2)
    data = page.evaluate(
        "({...document.getElementById('tip').dataset, text: document.getElementById('tip').innerText})"
    )
    return data | {"values": json.loads(data["values"])}


def press(page: Any, value: str) -> None:
    page.click(f"#controls button[value={value}]")
    settle(page)


def until(page: Any, condition: str, seconds: float = 20) -> None:
    """Wait for a condition; asked from outside, because the page's policy lets no text become code inside it."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"did not come about: {condition}"
        page.wait_for_timeout(30)


def settle(page: Any) -> None:
    until(page, "pyscan.page.busy === null && !pyscan.page.wanted")


def slide(page: Any, at: int) -> None:
    page.evaluate(f"(() => {{const s = pyscan.by('slider'); s.value = {at}; s.dispatchEvent(new Event('input'));}})()")
    settle(page)


def test_every_cell_is_on_the_map_and_its_tooltip_tells_the_value_of_the_file(browser: Any, scans: list[Path]) -> None:
    with Shown(browser, scans[0]) as page, pyscan.open(scans[0]) as run:
        cells = cells_of(page)
        expected = [(place, block) for place, site in enumerate(run.sites) for block in range(site.num_blocks)]
        assert sorted((cell["site"], cell["block"]) for cell in cells) == expected
        for cell in cells:
            tip = hover(page, cell)
            site = run.sites[cell["site"]]
            assert (tip["site"], tip["block"], tip["step"]) == (site.name, str(cell["block"]), "100")
            assert site.name in tip["text"]
            for channel in ("act", "grad"):
                value = float(run.get(channel, site.name, blocks=True)[-1, cell["block"]])
                assert tip["values"][channel] == pytest.approx(value, rel=1e-7)
                assert f"{value:.4g}"[:4] in tip["text"]


def test_slider_play_channels_colours_and_scope_change_what_is_shown(browser: Any, scans: list[Path]) -> None:
    with Shown(browser, scans[0]) as page, pyscan.open(scans[0]) as run:
        cell = cells_of(page)[20]
        name = run.sites[cell["site"]].name
        for at in (0, 41, 98):
            slide(page, at)
            assert page.inner_text("#step") == f"step {at + 1}"
            value = run.act(name, True)[at, cell["block"]]
            assert hover(page, cell)["values"]["act"] == pytest.approx(float(value), rel=1e-7)
        sps = analysis.run_sps(run, "layer", integral=False)[name][98, cell["block"]]
        press(page, "sps")
        assert hover(page, cell)["values"]["sps"] == pytest.approx(sps, abs=1e-6)
        press(page, "global")
        sps = analysis.run_sps(run, "global", integral=False)[name][98, cell["block"]]
        assert hover(page, cell)["values"]["sps"] == pytest.approx(sps, abs=1e-6)
        press(page, "grad")
        press(page, "z")
        assert "z-score" in hover(page, cell)["text"]
        press(page, "act_max")
        assert len(cells_of(page)) == len(run.sites)
        last = cells_of(page)[4]
        value = run.get("act_max", run.sites[last["site"]].name)[98]
        assert hover(page, last)["values"]["act_max"] == pytest.approx(float(value), rel=1e-7)
        slide(page, 90)
        page.click("#play")
        until(page, "pyscan.page.view.at === 99 && !pyscan.page.playing")
        assert page.inner_text("#step") == "step 100"


def test_odd_values_have_words_of_their_own(browser: Any, scans: list[Path]) -> None:
    with Shown(browser, scans[0]) as page:
        cell = next(c for c in cells_of(page) if (c["site"], c["block"]) == (9, 1))
        for at, word in ((3, "0"), (4, "NaN"), (5, "infinite"), (6, "not observed")):
            slide(page, at)
            lines = [line.split("\t") for line in hover(page, cell)["text"].splitlines()]
            assert ["act", word] in lines
        assert HOSTILE in hover(page, cell)["text"]


def test_the_filter_hides_sites_and_says_when_it_is_no_expression(browser: Any, scans: list[Path]) -> None:
    with Shown(browser, scans[0]) as page:
        page.fill("#filter", r"layers\.1\..*(up|down)_proj")
        assert sorted({cell["site"] for cell in cells_of(page)}) == [7, 8]
        page.fill("#filter", "(")
        assert "wrong" in page.get_attribute("#filter", "class")
        page.fill("#filter", "")
        assert len(cells_of(page)) == 26


def test_a_click_shows_the_history_and_a_shift_click_compares(browser: Any, scans: list[Path]) -> None:
    with Shown(browser, scans[0]) as page, pyscan.open(scans[0]) as run:
        first, second = cells_of(page)[6], cells_of(page)[15]
        for cell, keys in ((first, []), (second, ["Shift"])):
            place = {"x": cell["x"] + cell["w"] / 2, "y": cell["y"] + cell["h"] / 2}
            page.locator(".map canvas").click(position=place, modifiers=keys)
        until(page, "pyscan.by('history').data?.filter((t) => t.name).length === 4")
        traces = page.evaluate("pyscan.by('history').data.filter((t) => t.name).map(({name, y}) => [name, y])")
        for cell in (first, second):
            site = run.sites[cell["site"]]
            for channel in ("act", "grad"):
                name = f"{channel} {site.name.removesuffix('.weight')} [{cell['block']}]"
                curve = next(y for label, y in traces if label == name)
                np.testing.assert_allclose(curve, run.get(channel, site.name, True)[:, cell["block"]], rtol=1e-6)
        page.click("#chosen button")
        until(page, "pyscan.by('history').data.filter((t) => t.name).length === 2")


def test_events_lead_to_their_step(browser: Any, scans: list[Path]) -> None:
    with Shown(browser, scans[0]) as page:
        page.click("#events button.alarm")
        until(page, f"pyscan.by('step').textContent === 'step {SPIKE}'")
        marks = page.evaluate("pyscan.by('timeline').data.at(-1).x")
        assert marks == [SPIKE]


def test_two_runs_stand_side_by_side_with_their_difference(browser: Any, scans: list[Path]) -> None:
    with Shown(browser, *scans) as page:
        assert page.locator(".map canvas").count() == 3
        for cell in cells_of(page, 2)[::5]:
            assert hover(page, cell, 2)["values"]["difference"] == pytest.approx(1.0, abs=1e-6)
        one, two = (hover(page, cells_of(page, i)[3], i)["values"]["act"] for i in (0, 1))
        assert two == pytest.approx(2 * one)


def test_a_run_beside_itself_differs_nowhere(browser: Any, scans: list[Path]) -> None:
    with Shown(browser, scans[0], scans[0]) as page:
        for measure in ("act", "grad"):
            press(page, measure)
            assert page.evaluate("pyscan.page.apart.every((d) => d === 0)")
            assert "+0.00" in hover(page, cells_of(page, 2)[0], 2)["text"]


def test_tokens_are_coloured_by_their_norm(browser: Any, scans: list[Path]) -> None:
    with Shown(browser, scans[0]) as page:
        page.wait_for_selector("#tokens span")
        assert page.locator("#tokens span").all_inner_texts() == ["10", "11", "12", "13", "14", "15"]
        page.click("#tokens-channel button:text-is('act')")
        until(page, "document.querySelector('#tokens span').title.startsWith('act')")
        assert page.evaluate("[...document.querySelectorAll('#tokens span')].map((s) => Number(s.dataset.value))") == [
            1, 2, 4, 8, 16, 32,
        ]  # fmt: skip
        colours = page.evaluate("[...document.querySelectorAll('#tokens span')].map((s) => s.style.background)")
        assert len(set(colours)) == 6


def test_a_version_1_file_is_shown_with_its_text(browser: Any) -> None:
    with Shown(browser, V11) as page, pyscan.open(V11) as run:
        slide(page, 40)
        until(page, "pyscan.by('source').textContent === 'text 1 ü'")
        cell = cells_of(page)[0]
        assert hover(page, cell)["values"]["act"] == run.act(run.sites[cell["site"]].name, True)[40, cell["block"]]


def test_rows_of_a_running_writer_appear_by_themselves(browser: Any, tmp_path: Path) -> None:
    schema = view_schema()
    cells = np.ones(2 * 26 + 2 * len(schema.sites))
    with Writer(tmp_path / "live.mscan", schema, flush_seconds=0.01) as writer:
        writer.write(1, cells, loss=3.0)
        writer.flush()
        with Shown(browser, tmp_path / "live.mscan") as page:
            assert page.inner_text("#step") == "step 1"
            for step in range(2, 6):
                writer.write(step, step**2 * cells, loss=1.0)
            writer.flush()
            until(page, "pyscan.by('step').textContent === 'step 5'")
            assert hover(page, cells_of(page)[0])["values"]["act"] == pytest.approx(5.0, rel=0.0014)
            until(page, "pyscan.by('timeline').data.some(({x}) => x.length === 5)")
            assert page.evaluate("performance.getEntriesByType('navigation').length") == 1


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_is_wider_than_a_phone(browser: Any, scans: list[Path], dark: bool) -> None:
    with Shown(browser, scans[0], width=360, height=740, dark=dark) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.evaluate("pyscan.maps[0].cells.every((c) => c.x + c.w <= 360 && c.w >= 3)")


def test_a_report_from_the_disk_shows_the_numbers_of_the_file(browser: Any, scans: list[Path], tmp_path: Path) -> None:
    output = tmp_path / "report.html"
    assert main(["report", str(scans[0]), "-o", str(output)]) == 0
    assert output.stat().st_size < 8_000_000
    watched = Watched(browser)
    watched.page.context.set_offline(True)
    page = watched.open(output.as_uri())
    with pyscan.open(scans[0]) as run:
        assert len(cells_of(page)) == 26
        for cell in cells_of(page)[::3]:
            tip, site = hover(page, cell), run.sites[cell["site"]]
            for channel in ("act", "grad"):
                value = float(run.get(channel, site.name, True)[-1, cell["block"]])
                assert tip["values"][channel] == pytest.approx(value, rel=1e-7)
        press(page, "sps")
        cell = cells_of(page)[10]
        name = run.sites[cell["site"]].name
        expected = analysis.run_sps(run, "layer", integral=False)[name][-1, cell["block"]]
        assert hover(page, cell)["values"]["sps"] == pytest.approx(expected, abs=1e-6)
        slide(page, 0)
        press(page, "ratio")
        ratio = run.grad(name, True)[0, cell["block"]] / run.act(name, True)[0, cell["block"]]
        assert hover(page, cell)["values"]["ratio"] == pytest.approx(float(ratio), rel=1e-6)
        page.click("tr[data-site]")
        place = int(page.locator("tr[data-site]").first.get_attribute("data-site"))
        until(page, "pyscan.by('history').data?.filter((t) => t.name).length === 2")
        curve = page.evaluate("pyscan.by('history').data.find((t) => t.name?.startsWith('grad')).y")
        np.testing.assert_allclose(curve, run.grad(run.sites[place].name), rtol=0.0014)
    assert watched.errors == []
    assert watched.hosts <= {"file", "data", "blob"}
    watched.page.close()
