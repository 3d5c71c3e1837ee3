"""Maps on terminals and in notebooks, the colours they share, and reading all sites of a run side by side."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pyscan
from pyscan import colours, grid
from pyscan.cli import main
from pyscan.heat_text import heat_lines
from pyscan.schema import Channel, Schema, SiteInfo
from pyscan.sheet import EMPTY, lay_out
from pyscan.writer import Writer
from tests.make_scan import Builder, make_schema, site
from tests.view_scans import HOSTILE, make_view_scan, view_schema


@pytest.fixture(scope="module")
def scan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_view_scan(tmp_path_factory.mktemp("pictures") / "run.mscan")


def brightness(rgb: np.ndarray) -> np.ndarray:
    """Relative luminance of sRGB."""
    linear = np.where(rgb <= 10, rgb / 255 / 12.92, ((rgb / 255 + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])


# How sRGB looks without the red-sensing, green-sensing and blue-sensing cones (Machado, Oliveira and Fernandes 2009).
BLINDNESS = {
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


def test_the_sequential_scale_rises_in_brightness_alone() -> None:
    shades = colours.paint(np.linspace(0, 1, 64)).astype(float)
    assert (np.diff(brightness(shades)) > 0).all()


@pytest.mark.parametrize("scale", [colours.DIVERGING, colours.DIVERGING_DARK])
@pytest.mark.parametrize("kind", BLINDNESS)
def test_the_ends_of_diverging_scales_stay_apart_without_full_colour_vision(scale: Any, kind: str) -> None:
    seen = np.clip(colours.paint([0, 0.25, 0.75, 1], scale) @ np.array(BLINDNESS[kind]).T, 0, 255)
    assert np.linalg.norm(seen[0] - seen[3]) > 100
    assert np.linalg.norm(seen[1] - seen[2]) > 60


def test_layers_stand_in_the_order_of_their_numbers_and_experts_share_a_box() -> None:
    names = [f"m.layers.{i}.mlp.experts.up[{e}]" for i in (0, 10, 2) for e in range(3)] + ["head.weight", "m.wte"]
    found = grid.arrange([site(name, 1) for name in names])
    assert [section.title for section in found] == ["m.layers", ""]
    assert [row.label for row in found[0].rows] == ["0", "2", "10"]
    assert found[0].columns == ["mlp.experts.up[*]"]
    assert [row.boxes for row in found[0].rows] == [{0: [0, 1, 2]}, {0: [6, 7, 8]}, {0: [3, 4, 5]}]
    assert [row.label for row in found[1].rows] == ["head", "m.wte"]


def test_a_sheet_holds_every_cell_once() -> None:
    schema = view_schema()
    counts = [s.num_blocks for s in schema.sites]
    sheet = lay_out(schema.sites, counts)
    assert sorted(sheet.cells[sheet.cells != EMPTY].tolist()) == list(range(sum(counts)))
    assert [name for _, name in sheet.ticks] == ["self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"]


def test_cells_are_the_sites_side_by_side_whatever_the_schema(tmp_path: Path) -> None:
    """After a change of the model the sites of the first rows are absent in the others."""
    builder = Builder(make_schema((3, 1))).steps(range(1, 71))
    builder.new_schema(make_schema((3, 1))).steps(range(71, 80))  # resumed: another schema that says the same
    same = builder.save(tmp_path / "same.mscan")
    builder.new_schema(make_schema(sites=(site("other.weight", 2),))).steps(range(80, 90))
    for path in (same, builder.index().save(tmp_path / "changed.mscan")):
        with pyscan.open(path) as run:
            for name in ("act", "grad", "grad_bad"):
                parts = [run.get(name, s.name, blocks=True) for s in run.sites]
                found = run.cells(name)
                assert np.array_equal(found.view(np.uint32), np.concatenate(parts, axis=1).view(np.uint32))
                assert np.array_equal(run.cells(name, steps=slice(60, 75, 3)), found[60:75:3], equal_nan=True)


def test_cells_lost_to_damage_are_absent(tmp_path: Path) -> None:
    builder = Builder(make_schema((3000, 1))).steps(range(1, 65))
    frame = builder.writer.frames[-1]
    builder.main[frame.payload_offset + 64 * 48 + 10_000] ^= 1
    with pyscan.open(builder.save(tmp_path / "hurt.mscan")) as run:
        found = run.cells("act")
        assert 0 < pyscan.is_absent(found).sum() < found.size
        assert np.array_equal(found[:, :3000].view(np.uint32), run.act(run.sites[0].name, True).view(np.uint32))


# Terminals


def test_a_map_in_text_has_a_line_per_layer_and_a_mark_per_block(scan: Path) -> None:
    with pyscan.open(scan) as run:
        lines = ["".join(piece.text for piece in line) for line in heat_lines(run, 0, "act", width=120, colour=False)]
    assert len(lines) == 1 + 1 + 2 + 1  # embedding, heads, two layers, head
    assert [len(part) for part in lines[2].split()[1:]] == [2, 2, 2, 5]
    assert set("".join(lines[2].split()[1:])) <= set("▁▂▃▄▅▆▇█")


def test_a_map_in_text_marks_zero_bad_and_absent_and_fits_any_width(scan: Path) -> None:
    with pyscan.open(scan) as run:
        last = [heat_lines(run, row, "act", width=120, colour=False)[-1] for row in (3, 4, 5, 6)]
        assert ["".join(p.text for p in line)[-2] for line in last] == ["·", "!", "!", " "]
        for width in (30, 44):
            for line in heat_lines(run, 0, "grad", width=width):
                assert len("".join(piece.text for piece in line).rstrip()) <= width


def test_colours_of_a_map_rise_with_the_norm(scan: Path) -> None:
    with pyscan.open(scan) as run:
        line = heat_lines(run, 0, "act", width=120)[2]
        norms = np.concatenate([run.act(s.name, True)[0] / 8 for s in run.sites[1:5]])
    shades = brightness(np.array([piece.background for piece in line if piece.background], float))
    assert len(shades) == len(norms) == 11
    assert shades[np.argmax(norms)] == shades.max()
    assert shades[np.argmin(norms)] == shades.min()


def test_show_map_prints_the_model_and_refuses_what_the_run_has_not(scan: Path, capsys: Any) -> None:
    assert main(["show", str(scan), "--map", "sps", "--step", "7"]) == 0
    assert "step 7 " in capsys.readouterr().out
    assert main(["show", str(scan), "--map", "weights"]) == 2
    assert "--map shows one of act, grad, sps, ratio" in capsys.readouterr().err
    assert main(["show", str(scan), "--watch", "--json"]) == 2


def test_watch_follows_a_run_on_a_terminal_in_colour(tmp_path: Path) -> None:
    path, schema = tmp_path / "live.mscan", view_schema()
    ours, theirs = pty.openpty()
    cells = np.arange(1.0, 2 * 26 + 2 * len(schema.sites) + 1)
    with Writer(path, schema, flush_seconds=0.01) as writer:
        writer.write(1, cells, loss=3.0)
        writer.flush()
        environment = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor", "COLUMNS": "100", "LINES": "40"}
        command = [sys.executable, "-m", "pyscan", "show", path.name, "--watch"]
        process = subprocess.Popen(command, cwd=tmp_path, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        try:
            assert "step 1 · loss 3.000" in read_until(ours, "48;2;")
            writer.write(2, cells, loss=2.5)
            writer.flush()
            assert "loss 2.500" in read_until(ours, "loss 2.500")
        finally:
            process.send_signal(signal.SIGINT)
            read_to_the_end(ours, process)
            os.close(ours)
            os.close(theirs)
    assert process.returncode == 130


def read_until(terminal: int, wanted: str, seconds: float = 30) -> str:
    text, deadline = "", time.monotonic() + seconds
    while wanted not in text and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            text += os.read(terminal, 65536).decode(errors="replace")
    return text


def read_to_the_end(terminal: int, process: subprocess.Popen[bytes], seconds: float = 30) -> None:
    """A screen is longer than what a terminal takes unread: whoever writes it waits for a reader, also to end."""
    deadline = time.monotonic() + seconds
    while process.poll() is None:
        assert time.monotonic() < deadline, "it does not end"
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 65536)


# Notebooks


def test_a_run_shows_itself_in_a_notebook_without_scripts(scan: Path) -> None:
    with pyscan.open(scan) as run:
        html = run._repr_html_()
    assert html.count("data:image/png;base64,") == 2
    assert "<script" not in html
    assert "steps 1 to 100" in html


def test_figures_hold_the_values_of_the_file(scan: Path) -> None:
    with pyscan.open(scan) as run:
        name = run.sites[4].name
        curves = [trace for trace in run.plot(name, channel="grad").data if trace.name]
        np.testing.assert_array_equal(np.float32(curves[0].y), run.grad(name))
        assert len([t for t in run.plot(name, blocks=True).data if t.name]) == 5
        assert [t.name for t in run.plot().data if t.name][-1] == "loss"
        figure = run.heatmap(10, measure="ratio")
        ratio = run.grad(name, True)[9, 2] / run.act(name, True)[9, 2]
        sheet = lay_out(run.sites, [s.num_blocks for s in run.sites])
        at = np.argwhere((sheet.sites == 4) & (sheet.blocks == 2))[0]
        assert figure.data[0].z[tuple(at)] == pytest.approx(np.log2(ratio), abs=1e-5)
        assert HOSTILE not in str(run.heatmap().data[0].text)
        with pytest.raises(ValueError, match="measure must be one of act, grad, sps"):
            run.heatmap(measure="loss")
        with pytest.raises(pyscan.ScanError, match="step 1000 is not in the scan"):
            run.heatmap(1000)


def test_missing_plotly_is_told_with_the_remedy(scan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pyscan.open(scan) as run, pytest.raises(ImportError, match=r"pip install 'pyscan\[view\]'"):
        run.plot()


def test_runs_without_act_or_rows_are_shown_as_far_as_they_go(tmp_path: Path) -> None:
    schema = Schema("one", (Channel("grad"),), (SiteInfo("w", "linear", (2, 2), "float32", 1),), block=0)
    with pyscan.open(Builder(schema).save(tmp_path / "none.mscan")) as run:
        assert "0 rows" in run._repr_html_()
        with pytest.raises(pyscan.ScanError, match="no steps yet"):
            run.heatmap(measure="grad")
    with pyscan.open(Builder(schema).steps(range(1, 4)).save(tmp_path / "grad.mscan")) as run:
        assert run._repr_html_().count("<img") == 1
        assert run.heatmap(measure="grad").data
