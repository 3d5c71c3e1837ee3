"""The viewer's server without a browser: what it answers is what the file holds, and what it refuses."""

from __future__ import annotations

import base64
import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyscan
from pyscan import analysis, codecs
from pyscan.viewer.server import Viewer, is_own_host
from pyscan.viewer.session import Session
from pyscan.writer import Writer
from tests.view_scans import SPIKE, TOKEN_NORMS, make_view_scan, view_schema

NUM_CELLS = 26
LAST_SITE = 9  # the one with a 0, a NaN, an infinity and an absence
ODD_STEPS = (3, 4, 5, 6)  # places on the axis where it has them
V11 = Path(__file__).parent / "data" / "every_value_v1.1.mscan"
REAL_V11 = Path(__file__).parents[2] / "shared" / "data" / "qwen3-1.7b_v1.1.mscan"


class Client:
    """Asks a viewer in a thread of this process."""

    def __init__(self, *paths: Path) -> None:
        self.session = Session(paths)
        self.viewer = Viewer(self.session)
        self.port = self.viewer.server_address[1]
        self._thread = threading.Thread(target=self.viewer.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def get(self, target: str, **headers: str) -> tuple[int, bytes, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.putrequest("GET", target, skip_host=True)
        for name, value in ({"Host": f"127.0.0.1:{self.port}"} | headers).items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, body, dict(answer.getheaders())

    def ask(self, target: str) -> Any:
        status, body, _ = self.get(target)
        assert status == 200, body
        return json.loads(body)

    def close(self) -> None:
        self.viewer.shutdown()
        self.viewer.server_close()
        self.session.close()


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("view")
    one = make_view_scan(folder / "one.mscan", tokens=True)
    return [one, make_view_scan(folder / "two.mscan", factor=2.0)]


@pytest.fixture(scope="module")
def client(scans: list[Path]) -> Iterator[Client]:
    made = Client(scans[0])
    yield made
    made.close()


@pytest.fixture(scope="module")
def pair(scans: list[Path]) -> Iterator[Client]:
    made = Client(*scans)
    yield made
    made.close()


def unpack(packed: dict[str, str]) -> np.ndarray:
    codes = np.frombuffer(base64.b64decode(packed["data"]), codecs.DTYPES[packed["codec"]])
    return codecs.decode(codes, packed["codec"])


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.array_equal(np.asarray(a, np.float32).view(np.uint32), np.asarray(b, np.float32).view(np.uint32)))


@pytest.mark.parametrize("at", [0, *ODD_STEPS, 99])
@pytest.mark.parametrize("measure", ["act", "grad", "act_max", "grad_bad"])
def test_a_frame_holds_every_cell_of_the_row_as_the_file_has_it(
    client: Client, scans: list[Path], measure: str, at: int
) -> None:
    frame = client.ask(f"/api/frame?at={at}&measure={measure}")
    with pyscan.open(scans[0]) as run:
        expected = np.concatenate([run.get(measure, site.name, blocks=True)[at] for site in run.sites])
        assert frame["step"] == run.steps["step"][at]
    assert same_bits(unpack(frame["panels"][0]["values"][measure]), expected)


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_scores_are_those_of_the_analysis(client: Client, scans: list[Path], scope: Any) -> None:
    with pyscan.open(scans[0]) as run:
        act, grad = (run.cells(name, steps=slice(5, 6))[0] for name in ("act", "grad"))
        widths = np.concatenate([analysis.block_widths(s.shape[1], s.num_blocks, 64) for s in run.sites])
        layers = [analysis.layer_of(site.name) for site in run.sites for _ in range(site.num_blocks)]
    expected = analysis.sps(act, grad, widths, layers, scope)
    frame = client.ask(f"/api/frame?at=5&measure=sps&scope={scope}")
    np.testing.assert_allclose(unpack(frame["panels"][0]["scores"]), expected, rtol=1e-6)
    z = client.ask(f"/api/frame?at=5&measure=grad&colour=z&scope={scope}")
    expected = analysis.z_scores(analysis.levels(grad, widths), layers, scope)
    np.testing.assert_allclose(unpack(z["panels"][0]["scores"]), expected, rtol=1e-6)


def test_the_map_has_every_site_once_and_layers_in_order(client: Client) -> None:
    run = client.ask("/api/runs")["runs"][0]
    places = [p for section in run["sections"] for row in section["rows"] for box in row["boxes"] for p in box]
    assert sorted(places) == list(range(len(run["sites"])))
    layers = next(section for section in run["sections"] if section["title"] == "model.layers")
    assert [row["label"] for row in layers["rows"]] == ["0", "1"]
    assert layers["columns"] == ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"]
    assert sum(site["cells"]["block"] for site in run["sites"]) == NUM_CELLS


def test_a_history_keeps_the_highest_value_of_every_bucket(client: Client, scans: list[Path]) -> None:
    found = client.ask("/api/history?site=8&block=3&channel=grad&points=7")
    with pyscan.open(scans[0]) as run:
        values = run.grad(run.sites[8].name, blocks=True)[:, 3]
    starts = np.arange(7) * 100 // 7
    assert found["steps"] == (starts + 1).tolist()
    np.testing.assert_array_equal(found["high"], np.maximum.reduceat(values, starts))
    np.testing.assert_array_equal(found["low"], np.minimum.reduceat(values, starts))
    whole = client.ask("/api/history?site=8&channel=grad&first=20&last=22")
    with pyscan.open(scans[0]) as run:
        np.testing.assert_array_equal(np.float32(whole["mean"]), run.grad(run.sites[8].name)[19:22])


def test_a_history_counts_what_is_not_finite_and_leaves_out_what_was_not_observed(client: Client) -> None:
    found = client.ask(f"/api/history?site={LAST_SITE}&block=1&channel=act&first=4&last=7&points=1")
    assert found["num_bad"] == [2]
    assert (found["low"], found["high"]) == ([0.0], [0.0])


def test_events_stand_at_their_steps_and_alarms_are_marked(client: Client) -> None:
    told = client.ask("/api/timeline?points=10")
    assert [(e["kind"], e["step"], e["alarm"]) for e in told["events"]] == [
        ("attached", 1, False), ("spike", SPIKE, True), ("closed", 100, False),
    ]  # fmt: skip
    assert client.ask(f"/api/at?step={SPIKE}") == {"at": SPIKE - 1}
    assert len(told["steps"]) == 10


def test_the_difference_of_two_runs_is_that_of_their_values(pair: Client) -> None:
    frame = pair.ask("/api/frame?at=50&measure=grad")
    np.testing.assert_allclose(unpack(frame["difference"]["scores"]), 1.0, atol=1e-6)
    assert frame["difference"]["ends"] == [-1.0, 1.0]


@pytest.mark.parametrize("measure", ["act", "grad", "sps", "ratio", "act_max"])
def test_a_run_and_itself_differ_nowhere(scans: list[Path], measure: str) -> None:
    client = Client(scans[0], scans[0])
    try:
        for at in (0, 3, 99):
            found = unpack(client.ask(f"/api/frame?at={at}&measure={measure}")["difference"]["scores"])
            assert (found[~np.isnan(found)] == 0).all()
            assert np.isfinite(found).sum() >= len(found) - 2  # a cell that is 0 has no SPS and no ratio
    finally:
        client.close()


def test_tokens_have_the_norms_of_their_site(client: Client) -> None:
    found = client.ask("/api/tokens?step=3&channel=act")
    assert (found["step"], found["pieces"]) == (50, ["10", "11", "12", "13", "14", "15"])
    np.testing.assert_array_equal(unpack(found["values"]), TOKEN_NORMS)
    both = client.ask("/api/tokens?step=50&channel=contribution")
    np.testing.assert_array_equal(unpack(both["values"]), TOKEN_NORMS * TOKEN_NORMS[::-1])


@pytest.mark.parametrize("path", [V11, REAL_V11], ids=["every value", "real"])
def test_a_version_1_file_is_shown_with_its_text(path: Path) -> None:
    if not path.exists():
        pytest.skip("the real scan is not beside this repository")
    client = Client(path)
    try:
        frame = client.ask("/api/frame?at=0&measure=act")
        with pyscan.open(path) as run:
            expected = run.cells("act", steps=slice(0, 1))[0]
            text = run.events[0]["source"]
            first = run.act(run.sites[0].name)[0]
        assert np.array_equal(unpack(frame["panels"][0]["values"]["act"]), np.nan_to_num(expected))
        found = client.ask("/api/tokens?step=1&channel=act")
        assert found["source"] == text
        assert unpack(found["values"])[0] == first
    finally:
        client.close()


def test_rows_appended_by_a_writer_are_seen(tmp_path: Path) -> None:
    schema = view_schema()
    cells = np.ones(2 * NUM_CELLS + 2 * len(schema.sites))
    with Writer(tmp_path / "live.mscan", schema, flush_seconds=0.01) as writer:
        writer.write(1, cells)
        writer.flush()
        client = Client(tmp_path / "live.mscan")
        try:
            assert client.ask("/api/state")["num_steps"] == 1
            writer.write(2, 4 * cells)
            writer.flush()
            deadline = time.monotonic() + 10
            while (state := client.ask("/api/state"))["num_steps"] < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            assert state["last_step"] == 2
            assert unpack(client.ask("/api/frame?at=1&measure=act")["panels"][0]["values"]["act"])[0] == 2.0
        finally:
            client.close()


# What is refused


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8620", "127.0.0.1.evil.example", "", "localhost:x"])
def test_a_foreign_host_is_refused(client: Client, host: str) -> None:
    for target in ("/", "/api/state", "/plotly.js"):
        status, body, _ = client.get(target, Host=host)
        assert status == 403
        assert b"tiny" not in body


def test_own_hosts_are_those_of_this_machine() -> None:
    assert all(map(is_own_host, ("127.0.0.1", "127.0.0.1:1", "localhost:8620", "LOCALHOST")))
    assert not any(map(is_own_host, (None, "0.0.0.0", "10.0.0.1:80", "[::1]:80", "localhost.:1", "a@localhost")))


def test_it_listens_on_this_machine_alone(client: Client) -> None:
    assert client.viewer.socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "target",
    ["/../setup.py", "/..%2f..%2fetc/passwd", "/static/../server.py", "//etc/passwd", "/one.mscan", "/page.html",
     "/%2e%2e/%2e%2e/etc/passwd", "/style.css/../../server.py", "/report.js", "http://evil.example/etc/passwd"],
)  # fmt: skip
def test_no_path_leads_to_the_disk(client: Client, target: str) -> None:
    status, body, _ = client.get(target)
    assert status == 404
    assert body == b"there is nothing here"


@pytest.mark.parametrize(
    "target",
    ["/api/frame?at=100&measure=act", "/api/frame?at=-1&measure=act", "/api/frame?at=1e3&measure=act",
     "/api/frame?at=" + "9" * 300 + "&measure=act", "/api/frame?at=0&measure=loss", "/api/frame?at=0",
     "/api/frame?at=0&at=1&measure=act", "/api/frame?at=0&measure=act&scope=" + "x" * 900,
     "/api/history?site=10&channel=act", "/api/history?site=0&channel=act&block=2", "/api/history?site=0&channel=sps",
     "/api/history?site=0&channel=act&points=1000000", "/api/history?site=0&channel=act&points=0",
     "/api/timeline?run=1", "/api/tokens?step=1&site=10", "/api/frame?at=%D9%A1&measure=act", "/api/at?step=",
     "/api/frame?" + "&".join(f"a{i}=1" for i in range(50)), "/api/frame?at=0&measure=act&x=" + "y" * 990],
)  # fmt: skip
def test_parameters_outside_their_limits_are_refused(client: Client, target: str) -> None:
    status, body, _ = client.get(target)
    assert status == 400, body
    assert len(body) < 300


def test_an_endless_address_is_refused(client: Client) -> None:
    assert client.get("/api/frame?at=0&measure=" + "a" * 5000)[0] == 414
    assert client.get("/" + "a" * 70_000)[0] == 414


def test_only_get_is_answered(client: Client) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=20)
    connection.request("POST", "/api/state", b"{}", {"Host": "localhost"})
    assert connection.getresponse().status == 501
    connection.close()


def test_answers_set_no_cookie_and_forbid_what_is_not_theirs(client: Client) -> None:
    for target in ("/", "/api/state", "/codes.js", "/style.css", "/icon.svg", "/nothing"):
        _, _, headers = client.get(target)
        assert "Set-Cookie" not in headers
        assert "Access-Control-Allow-Origin" not in headers
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self';")
        assert headers["X-Content-Type-Options"] == "nosniff"


def test_the_page_names_no_other_place(client: Client) -> None:
    for target in ("/", "/style.css", "/codes.js", "/map.js", "/charts.js", "/page.js", "/viewer.js"):
        body = client.get(target)[1]
        assert b"http://" not in body
        assert b"https://" not in body
