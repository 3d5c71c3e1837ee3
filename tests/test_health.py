"""`pyscan health`: the verdict from the file alone, the same as the watch gave beside training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pyscan
from pyscan import codecs, health, version1
from pyscan.cli import main
from pyscan.schema import Channel, Merge, Mesh, Schema, SiteInfo
from pyscan.version1 import RECORD_DTYPE
from pyscan.watch import KINDS
from tests.make_scan import Builder, make_rows

NAMES = ("embed.weight", "layers.0.up.weight", "layers.0.down.weight", "head.weight")
BLOCKS = 2
SITE_CHANNELS = ("act_max", "grad_max", "act_bad", "grad_bad")
CHANNELS = (
    Channel("act"),
    Channel("grad"),
    *(Channel(name, "site", "log2q8", "plain", "max" if name.endswith("max") else "add") for name in SITE_CHANNELS),
)
DATA = Path(__file__).parent / "data"
SHARED = Path(__file__).parents[2] / "shared" / "data"


def values(num_rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Healthy cells by channel, [cells, rows]."""
    random = np.random.default_rng(seed)
    blocks = {name: np.exp(random.normal(0, 0.2, (len(NAMES) * BLOCKS, num_rows))) for name in ("act", "grad")}
    sites = {name: np.full((len(NAMES), num_rows), float(name.endswith("max"))) for name in SITE_CHANNELS}
    return blocks | sites


def write(
    path: Path,
    cells: dict[str, np.ndarray],
    *,
    channels: tuple[Channel, ...] = CHANNELS,
    events: tuple[dict[str, Any], ...] = (),
    kinds: dict[str, str] | None = None,
    merge: dict[str, Merge] | None = None,
    **schema: Any,
) -> Path:
    sites = tuple(
        SiteInfo(name, (kinds or {}).get(name, "linear"), (32, 64 * BLOCKS), "nf4", BLOCKS, merge=merge or {})
        for name in NAMES
    )
    num_rows = cells["act"].shape[1]
    builder = Builder(Schema("m", channels, sites, **schema), run_id=bytes([schema.get("rank", 0)] * 16))
    for start in range(0, num_rows, 64):
        part = slice(start, min(start + 64, num_rows))
        sections = [codecs.encode(cells[channel.name][:, part], channel.codec) for channel in channels]
        builder.writer.steps(make_rows(list(range(1, num_rows + 1))[part]), sections)
    if events:
        builder.events(*events)
    return builder.index().save(path)


def judge(path: Path) -> health.Health:
    with pyscan.open(path) as run:
        return health.judge(run)


def found(path: Path) -> list[tuple[str, int, str | None]]:
    return [(finding.kind, finding.step, finding.site) for finding in judge(path).findings]


def cells_of(name: str) -> slice:
    place = NAMES.index(name)
    return slice(BLOCKS * place, BLOCKS * place + BLOCKS)


def ill() -> dict[str, np.ndarray]:
    """A spike at 41, an explosion from 61 on, a dead block from 1 on, and a NaN gradient at 90."""
    cells = values(100)
    cells["grad"][cells_of("head.weight"), 40] *= 50
    cells["act"][cells_of("layers.0.up.weight"), 60:] *= 1e5
    cells["act"][0] = 0.0
    cells["grad"][cells_of("layers.0.down.weight"), 89:] = np.nan
    cells["grad_bad"][NAMES.index("layers.0.down.weight"), 89:] = 17
    return cells


ILL = [
    ("nonfinite", 90, "layers.0.down.weight"),
    ("exploding", 62, "layers.0.up.weight"),
    ("dead", 1, "embed.weight"),
    ("spike", 41, "head.weight"),
]


def test_a_healthy_run_is_healthy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = {"kind": "execution_order", "step": 1, "site": None, "forward": [0, 1, 2, 3], "backward": [3, 2, 1, 0]}
    path = write(tmp_path / "run.mscan", values(300), events=(order,))
    assert judge(path) == health.Health(300, (1, 300), [], [])
    assert main(["health", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}: healthy in 300 rows, steps 1 to 300\n"


def test_every_fault_is_found_and_the_worst_comes_first(tmp_path: Path) -> None:
    assert found(write(tmp_path / "run.mscan", ill())) == ILL


def test_the_verdict_does_not_depend_on_the_size_of_the_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "run.mscan", ill())
    whole = judge(path)
    monkeypatch.setattr(health, "_PIECE_CELLS", 1)
    assert judge(path) == whole


def test_the_screen_and_the_json_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "run.mscan", ill())
    assert main(["health", str(path)]) == 1
    screen = capsys.readouterr().out
    assert screen.startswith(f"{path}: 4 problems in 100 rows, steps 1 to 100\n")
    assert len(screen.splitlines()) <= 24, "one screen"
    assert main(["health", "--json", str(path)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["healthy"], report["rows"], report["steps"]) == (False, 100, [1, 100])
    assert [(f["kind"], f["step"], f["site"]) for f in report["findings"]] == ILL
    for finding in report["findings"]:
        assert finding["text"] in screen
        assert finding["advice"] in screen
    before = report["findings"][0]["detail"]["before"]
    assert [row["step"] for row in before] == list(range(82, 90))


def test_the_file_gives_the_alarms_that_training_gave(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 4))
    with torch.no_grad():
        model[0].bias[:64] = -1e4
    optimizer, path = torch.optim.SGD(model.parameters(), 1e-4), tmp_path / "run.mscan"
    with pyscan.attach(model, path, optimizer=optimizer) as scan:
        for step in range(1, 71):
            factor = {40: 300.0, 60: torch.inf}.get(step, 1.0)
            model(torch.randn(8, 16) * factor).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    alarms = [event for event in scan.events if event["kind"] in KINDS]
    assert {event["kind"] for event in alarms} >= {"nonfinite", "dead", "spike"}
    firsts = {event["kind"]: event for event in reversed(alarms)}
    findings = {finding.kind: finding for finding in judge(path).findings}
    assert set(findings) == set(firsts)
    for kind, event in firsts.items():
        assert findings[kind].step == event.get("since", event["step"]), kind
        assert findings[kind].site == event["site"], kind
        assert findings[kind].num_events == sum(alarm["kind"] == kind for alarm in alarms), kind


def test_without_counts_a_nan_norm_is_a_bad_value(tmp_path: Path) -> None:
    path = write(tmp_path / "run.mscan", ill(), channels=CHANNELS[:2])
    assert found(path) == ILL
    assert [line for line in judge(path).not_judged if "channel" in line] == [
        f"the file has no channel {name}: bad values are seen as NaN norms only" for name in ("act_bad", "grad_bad")
    ]


def test_a_file_of_inputs_alone_is_not_blamed_for_it(tmp_path: Path) -> None:
    path = write(tmp_path / "run.mscan", values(40), channels=CHANNELS[:1])
    assert found(path) == []
    assert "the file has no channel grad: nothing is said about it" in judge(path).not_judged


@pytest.mark.parametrize(
    ("forward", "first"),
    [([3, 2, 1, 0], "head.weight"), ([1, 0, 3, 2], "layers.0.up.weight"), ([2, 2, 1, 0], "embed.weight")],
)
def test_the_order_in_the_file_decides_which_came_first(tmp_path: Path, forward: list[int], first: str) -> None:
    """An order that names a site twice is none; then the order of definition counts, and that is said."""
    cells = values(40)
    cells["act_bad"][:, 20] = 1
    order = {"kind": "execution_order", "step": 1, "site": None, "forward": forward, "backward": forward[::-1]}
    path = write(tmp_path / "run.mscan", cells, events=(order,))
    assert found(path) == [("nonfinite", 21, first)]
    assert any("order of definition" in line for line in judge(path).not_judged) == (forward[0] == forward[1])


@pytest.mark.parametrize(
    "junk", [None, 7, "all", [0, 1, 2, 9], [-1], [0.5], [True], {"a": 1}, [[0]], list(range(4)) * 2]
)
def test_a_hostile_order_is_no_order(tmp_path: Path, junk: Any) -> None:
    event = {"kind": "execution_order", "step": 1, "site": None, "forward": junk, "backward": junk}
    off = {"kind": "off", "step": 3, "site": None, "text": junk, "since": junk, "before": junk}
    path = write(tmp_path / "run.mscan", ill(), events=(event, off))
    assert found(path)[:3] == ILL[:3]
    assert main(["health", str(path)]) == 1


def test_what_the_scanner_said_is_part_of_the_verdict(tmp_path: Path) -> None:
    off = {"kind": "off", "step": 5, "site": None, "text": "pyscan turned itself off at step 5: OSError"}
    (finding,) = judge(write(tmp_path / "run.mscan", values(40), events=(off,))).findings
    assert (finding.kind, finding.step, finding.text) == ("off", 5, off["text"])


def test_quantised_weights_explain_why_there_is_no_gradient(tmp_path: Path) -> None:
    cells = values(40)
    cells["grad"][:] = codecs.ABSENT
    for name in ("grad_max", "grad_bad"):
        cells[name][:] = codecs.ABSENT
    assert found(write(tmp_path / "bare.mscan", cells)) == [("no_gradient", 1, None)]
    kinds = dict.fromkeys(NAMES[:3], "quantized")
    (finding,) = judge(write(tmp_path / "run.mscan", cells, kinds=kinds)).findings
    assert (finding.kind, finding.site) == ("quantized", "embed.weight")
    assert finding.text.startswith("3 of 4 weights are quantised (nf4)")


def test_ranks_are_judged_together(tmp_path: Path) -> None:
    """Inputs of two ranks are added; a bad value on either is found; a missing rank is said."""
    merge = {name: Merge((), ("dp",)) for name in ("grad", "grad_max", "grad_bad")}
    for rank in range(2):
        cells = values(40)
        cells["act_bad"][2:, 30] = rank
        mesh = Mesh(("dp",), (2,), (rank,))
        write(tmp_path / f"run.rank0000{rank}.mscan", cells, rank=rank, world=2, mesh=mesh, merge=merge)
    first = 31, "layers.0.down.weight"
    assert found(tmp_path / "run.mscan") == [("nonfinite", *first), ("rank_nonfinite", *first)]
    (tmp_path / "run.rank00001.mscan").unlink()
    verdict = judge(tmp_path / "run.mscan")
    assert verdict.findings == [], "the bad value was on the rank that is missing"
    assert "cells shared with missing ranks (1)" in verdict.not_judged


def test_thinned_and_damaged_rows_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "run.mscan", values(130), every=4)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    lines = judge(path).not_judged
    assert "steps between the rows: one in 4 was recorded" in lines
    assert any("damaged place" in line for line in lines)


def test_a_run_without_rows_is_neither_well_nor_ill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "run.mscan", values(0))
    assert main(["health", str(path)]) == 0
    assert "no rows yet, nothing to judge" in capsys.readouterr().out


def write_v1(path: Path, grads: np.ndarray) -> Path:
    """A version 1.1 file of one weight with these gradient codes [tokens, blocks]."""
    tokens, blocks = np.indices(grads.shape).reshape(2, -1)
    records = np.zeros(grads.size, RECORD_DTYPE)
    records["token_idx"], records["block_idx"] = tokens, blocks
    records["activation"], records["grad_norm"] = 100, grads.ravel()
    header = {"id_to_param_name_map": {"0": "a"}, "sequences": [{"sequence_id": 0, "num_tokens": len(grads)}]}
    path.write_bytes(version1.encode_header(header, len(records)) + records.tobytes())
    return path


def test_a_version_1_file_is_judged_by_what_it_can_say(tmp_path: Path) -> None:
    grads = np.zeros((6, 3), np.uint16)
    verdict = judge(write_v1(tmp_path / "zero.mscan", grads))
    assert [finding.kind for finding in verdict.findings] == ["no_gradient"]
    assert len(verdict.not_judged) == 2
    grads[4, 1] = 1
    assert judge(write_v1(tmp_path / "one.mscan", grads)).findings == []
    assert judge(DATA / "every_value_v1.1.mscan").findings == []


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real scan is not beside this repository")
def test_the_real_version_1_scan_has_no_gradient() -> None:
    (finding,) = judge(SHARED / "qwen3-1.7b_v1.1.mscan").findings
    assert finding.kind == "no_gradient"
    assert finding.text.startswith("every gradient is 0, in every token")


def test_a_badly_initialised_head_is_part_of_the_verdict(tmp_path: Path) -> None:
    for std, ill in ((0.02, False), (5.0, True)):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)), nn.Linear(32, 10, bias=False))
        nn.init.normal_(model[-1].weight, std=std)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        path = tmp_path / f"{std}.mscan"
        with pyscan.attach(model, path, optimizer=optimizer):
            for _ in range(6):
                nn.functional.cross_entropy(model(torch.randn(8, 32)), torch.arange(8)).backward()
                optimizer.step()
                optimizer.zero_grad()
        found = {finding.kind: finding for finding in health.judge(pyscan.open(path)).findings}
        assert ("init" in found) == ill
        if ill:
            assert found["init"].site == "3.weight"
            assert found["init"].step == 1
