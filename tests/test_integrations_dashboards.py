"""What dashboards are shown is what the file holds, live and exported, and never from the training thread."""

import io
import json
import os
import struct
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pyscan
from pyscan import cli, codecs
from pyscan.codecs import is_absent
from pyscan.extras import MissingExtraError
from pyscan.integrations import tensorboard, wandb
from pyscan.integrations.curves import Point, Selection, points
from pyscan.integrations.follow import Follower
from pyscan.integrations.heatmap import heat_map, png
from tests.make_scan import Builder, make_cells, make_rows, make_schema

PICTURES = {"heat/act": [50, 100], "heat/grad": [50, 100]}
NAMES = ["model.layers.0.proj.weight", "model.layers.1.proj.weight"]


@pytest.fixture
def scan_path(tmp_path: Path) -> Path:
    """130 steps of two sites with every special value in them."""
    schema = make_schema()
    builder = Builder(schema)
    for steps in (range(1, 65), range(65, 131)):
        cells = make_cells(schema, steps)
        cells[1][3, :4] = [codecs.CODE_ZERO, codecs.CODE_ABSENT, codecs.CODE_NAN, codecs.CODE_INFINITY]
        builder.writer.steps(make_rows(steps), cells)
    return builder.index().save(tmp_path / "run.mscan")


def want(run: pyscan.Run, every: int = 1, names: list[str] = NAMES) -> dict[str, dict[int, float]]:
    """Curves by the plainest reading of the file."""
    steps = run.steps["step"].tolist()
    curves = {f"{c}/{name}": run.get(c, name) for c in ("act", "grad") for name in names}
    curves |= run.grad_check()
    curves |= {f"row/{name}": run.steps[name] for name in ("loss", "lr", "tokens")}
    known = {"row/loss": 16, "row/lr": 32, "row/tokens": 8}
    found: dict[str, dict[int, float]] = {}
    for name, curve in curves.items():
        for row, step in enumerate(steps):
            is_known = run.steps["flags"][row] & known[name] if name in known else not is_absent(curve[row])
            if is_known and step % every == 0:
                found.setdefault(name, {})[step] = float(curve[row])
    return found


def assert_same_curves(found: dict[str, dict[int, float]], expected: dict[str, dict[int, float]]) -> None:
    assert set(found) == set(expected)
    for name, curve in expected.items():
        assert found[name].keys() == curve.keys(), name
        values, wanted = zip(*[(found[name][step], curve[step]) for step in curve], strict=True)
        np.testing.assert_array_equal(np.float32(values), np.float32(wanted), err_msg=name)


def read_tensorboard(directory: Path) -> tuple[dict[str, dict[int, float]], dict[str, dict[int, Any]], list[float]]:
    """Curves, pictures and times as TensorBoard itself reads them."""
    from PIL import Image
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0, "images": 0}).Reload()
    tags = events.Tags()
    curves = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in tags["scalars"]}
    pictures = {
        tag: {e.step: np.array(Image.open(io.BytesIO(e.encoded_image_string))) for e in events.Images(tag)}
        for tag in tags["images"]
    }
    return curves, pictures, [e.wall_time for e in events.Scalars(tags["scalars"][0])]


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of an offline run: a header of 7 bytes, then a log of LevelDB's kind in blocks of 32 KiB."""
    assert data.startswith(b":W&B")
    at, parts = 7, []
    while at + 7 <= len(data):
        if (left := -at % 32768 or 32768) < 7:
            at += left  # the rest of a block that has no room for a header
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def finished_records(file: Path) -> list[Any]:
    """Of a finished run: the process behind wandb puts down the last of them a moment after `finish` has returned."""
    from wandb.proto.wandb_internal_pb2 import Record

    for _ in range(600):
        records = [Record.FromString(data) for data in wandb_records(file.read_bytes())]
        if any(record.WhichOneof("record_type") == "exit" for record in records):
            return records
        threading.Event().wait(0.05)
    raise TimeoutError(f"{file} has no end")


def read_wandb(directory: Path) -> tuple[dict[str, dict[int, float]], dict[str, dict[int, Any]]]:
    """Curves, and descriptions of pictures, as they stand in the one offline run under a directory."""
    (file,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    curves: dict[str, dict[int, float]] = {}
    pictures: dict[str, dict[int, Any]] = {}
    for record in finished_records(file):
        if record.WhichOneof("record_type") != "history":
            continue
        items = {tuple(item.nested_key) or (item.key,): json.loads(item.value_json) for item in record.history.item}
        step = items.pop(("pyscan/step",))
        for (name, *inner), value in items.items():
            if inner:
                pictures.setdefault(name, {}).setdefault(step, {})[inner[0]] = value
            elif not name.startswith("_"):
                curves.setdefault(name, {})[step] = float(value)
    return curves, pictures


def pictures_of(run: pyscan.Run, step: int, channel: str) -> np.ndarray:
    row = run.steps["step"].tolist().index(step)
    norms = [run.get(channel, name, blocks=True)[row] for name in NAMES]
    return heat_map(norms, [np.full(len(line), 64.0) for line in norms])


# Pictures


def test_a_heat_map_is_lighter_where_levels_are_higher_and_marks_what_is_no_number() -> None:
    norms = [np.float32([1, 2, 4, 8]), np.float32([0, np.nan, np.inf, codecs.ABSENT]), np.float32([16])]
    pixels = heat_map(norms, [np.full(len(line), 64.0) for line in norms])
    size = pixels.shape[0] // 3
    assert pixels.shape == (3 * size, 4 * size, 3)
    cells = pixels[size // 2 :: size, size // 2 :: size].astype(int)
    light = [*cells[0].sum(-1).tolist(), int(cells[2, 0].sum())]
    assert light == sorted(light)
    assert len(set(light)) == 5
    assert cells[1].tolist() == [[0, 0, 0], [255, 0, 0], [255, 0, 0], [128, 128, 128]]
    assert cells[2, 1:].tolist() == [[128, 128, 128]] * 3, "there are no such blocks"


def test_the_width_of_a_block_does_not_colour_it() -> None:
    pixels = heat_map([np.float32([8, 2]), np.float32([1, 1])], [np.array([64.0, 4.0]), np.ones(2)])
    assert (pixels == pixels[0, 0]).all(), "8 / sqrt(64) = 2 / sqrt(4) = 1"


@pytest.mark.parametrize("shape", [(1, 1), (3, 1000), (2000, 3), (0, 0)])
def test_pictures_of_any_size_are_read_back_by_others(shape: tuple[int, int]) -> None:
    image = pytest.importorskip("PIL.Image")
    norms = list(np.random.default_rng(0).random(shape).astype(np.float32))
    pixels = heat_map(norms, [np.ones(shape[1])] * shape[0])
    assert (np.array(image.open(io.BytesIO(png(pixels)))) == pixels).all()
    assert pixels.shape[0] >= max(shape[0], 1)


# A file that is there


@pytest.mark.parametrize("every", [1, 7])
def test_tensorboard_export_holds_numbers_and_times_of_the_file(scan_path: Path, tmp_path: Path, every: int) -> None:
    pytest.importorskip("tensorboard")
    with pyscan.open(scan_path) as run:
        tensorboard.export(run, tmp_path / "logs", Selection(every=every, heat_every=50))
        curves, pictures, times = read_tensorboard(tmp_path / "logs")
        assert_same_curves(curves, want(run, every))
        assert {tag: sorted(steps) for tag, steps in pictures.items()} == PICTURES
        for step in (50, 100):
            assert (pictures["heat/grad"][step] == pictures_of(run, step, "grad")).all()
        assert times[0] == pytest.approx(run.steps["time_ns"][every - 1] / 1e9)


def test_wandb_export_holds_the_numbers_of_the_file(scan_path: Path, tmp_path: Path, offline: None) -> None:
    with pyscan.open(scan_path) as run:
        wandb.export(run, Selection(sites="layers.1", every=10, heat_every=50), dir=str(tmp_path))
        curves, pictures = read_wandb(tmp_path)
        assert_same_curves(curves, want(run, 10, NAMES[1:]))
        assert {tag: sorted(steps) for tag, steps in pictures.items()} == PICTURES
        norms = [run.get("act", NAMES[1], blocks=True)[99]]
    from PIL import Image

    (media,) = tmp_path.glob("wandb/offline-run-*/files")
    pixels = np.array(Image.open(media / pictures["heat/act"][100]["path"]))
    assert (pixels == heat_map(norms, [np.full(1, 64.0)])).all()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


def test_pyscan_export_to_tensorboard(scan_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    command = ["export", str(scan_path), "--to", "tensorboard", "-o", str(tmp_path / "logs"), "--every", "10"]
    assert cli.main(command) == 0
    assert "13 rows" in capsys.readouterr().err
    curves, pictures, _ = read_tensorboard(tmp_path / "logs")
    with pyscan.open(scan_path) as run:
        assert_same_curves(curves, want(run, 10))
    assert sorted(pictures["heat/act"]) == [100]
    assert cli.main(command) == 2
    assert cli.main([*command, "--force", "--heat-every", "0", "--site", "layers.0"]) == 0
    curves, pictures, _ = read_tensorboard(tmp_path / "logs")
    assert pictures == {}
    assert [name for name in curves if name.startswith("act/")] == [f"act/{NAMES[0]}"]


def test_pyscan_export_to_wandb(scan_path: Path, tmp_path: Path, offline: None) -> None:
    assert cli.main(["export", str(scan_path), "--to", "wandb", "-o", str(tmp_path / "logs"), "--every", "13"]) == 0
    curves, _ = read_wandb(tmp_path / "logs")
    with pyscan.open(scan_path) as run:
        assert_same_curves(curves, want(run, 13))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "tensorboard", "--every", "0"], "--every must be >= 1, got 0"),
        (["--to", "tensorboard", "--heat-every", "-1"], "--heat-every must be >= 0, got -1"),
        (["--to", "tensorboard", "--site", "nothing"], "--site 'nothing' finds none of the 2 sites"),
        (["--to", "csv", "--every", "2"], "--every and --heat-every choose what dashboards show; --to csv holds every"),
    ],
)
def test_mistakes_with_dashboards_are_one_line(
    scan_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert cli.main(["export", str(scan_path), "-o", str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_force_replaces_log_directories_alone(scan_path: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    assert cli.main(["export", str(scan_path), "--to", "tensorboard", "-o", str(tmp_path / "mine"), "--force"]) == 2
    assert "--force does not replace it" in capsys.readouterr().err
    assert (tmp_path / "mine" / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"every": 0}, ValueError, "every must be >= 1, got 0"),
        ({"sites": "("}, ValueError, "sites must be a regular expression"),
        ({"channels": "act"}, TypeError, "channels is a sequence of names"),
    ],
)
def test_a_selection_is_checked_when_it_is_made(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Selection(**options)


# A scan that is being made


class Recorder:
    """A sink that keeps points, and the threads that brought them."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.threads: set[int] = set()
        self.is_closed = False
        self.is_broken = False

    def push(self, point: Point) -> None:
        if self.is_broken:
            raise ConnectionError("the network is gone")
        self.threads.add(threading.get_ident())
        self.points.append(point)

    def flush(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True


class Loop:
    """A model that takes a step when it is told to."""

    def __init__(self, path: Path | None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 8))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scan = pyscan.attach(self.model, path, optimizer=self.optimizer, **options)

    def steps(self, count: int) -> None:
        for _ in range(count):
            loss = self.model(torch.randn(4, 96)).square().mean()
            loss.backward()
            self.scan.note(loss=loss, tokens=4)
            self.optimizer.step()
            self.optimizer.zero_grad()


def test_rows_are_shown_while_training_goes_on_and_never_by_its_thread(tmp_path: Path) -> None:
    loop, sink = Loop(tmp_path / "run.mscan"), Recorder()
    follower = Follower(loop.scan, sink, Selection(), 0.02)
    loop.steps(3)
    loop.scan.flush()
    deadline = threading.Event()
    for _ in range(500):
        if len(sink.points) == 3:
            break
        deadline.wait(0.02)
    assert [point.step for point in sink.points] == [1, 2, 3], "before the scan is closed"
    loop.steps(100)
    follower.close()
    follower.close()
    loop.scan.close()
    assert [point.step for point in sink.points] == list(range(1, 104)), "each once, and the last ones too"
    assert sink.threads
    assert threading.get_ident() not in sink.threads
    assert sink.is_closed
    with pyscan.open(tmp_path / "run.mscan") as run:
        for shown, held in zip(sink.points, points(run, slice(None), Selection()), strict=True):
            assert shown.numbers == held.numbers
            assert shown.step == held.step


def test_the_rate_is_that_of_the_user(tmp_path: Path) -> None:
    loop, sink = Loop(tmp_path / "run.mscan"), Recorder()
    with loop.scan, Follower(loop.scan, sink, Selection(every=5, heat_every=4), 60):
        loop.steps(20)
    assert [point.step for point in sink.points if point.numbers] == [5, 10, 15, 20]
    assert [point.step for point in sink.points if point.pictures] == [4, 8, 12, 16, 20]


def test_rows_of_an_abandoned_timeline_are_not_shown(tmp_path: Path) -> None:
    before = Loop(tmp_path / "run.mscan")
    before.steps(6)
    before.scan.close()
    loop, sink = Loop(tmp_path / "run.mscan", resume=True), Recorder()
    loop.scan.load_state_dict(loop.scan.state_dict() | {"step": 4})
    with loop.scan, Follower(loop.scan, sink, Selection(), 0.01):
        threading.Event().wait(0.1)
        assert sink.points == [], "rows 5 and 6 of the run that was given up are still in the file"
        loop.steps(3)
    assert [point.step for point in sink.points] == [5, 6, 7]


def test_a_sink_that_fails_ends_the_following_with_one_warning_and_not_the_run(tmp_path: Path) -> None:
    loop, sink = Loop(tmp_path / "run.mscan"), Recorder()
    sink.is_broken = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with loop.scan, Follower(loop.scan, sink, Selection(), 0.01) as follower:
            loop.steps(2)
            loop.scan.flush()
            threading.Event().wait(0.1)
            loop.steps(2)
    texts = [str(w.message) for w in caught if "pyscan" in str(w.message)]
    assert len(texts) == 1
    assert "no longer shows rows: ConnectionError: the network is gone" in texts[0]
    assert isinstance(follower.error, ConnectionError)
    assert pyscan.open(tmp_path / "run.mscan").steps["step"].tolist() == [1, 2, 3, 4]


def test_following_needs_a_file_and_a_rate(tmp_path: Path) -> None:
    with Loop(None).scan as scan, pytest.raises(ValueError, match="this one has none: give attach a path"):
        Follower(scan, Recorder(), Selection(), 1)
    with Loop(tmp_path / "run.mscan").scan as scan, pytest.raises(ValueError, match="seconds must be > 0, got 0"):
        Follower(scan, Recorder(), Selection(), 0)


def test_tensorboard_follows_a_scan_and_forgets_what_a_resume_abandoned(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    names = ["0.weight", "2.weight"]
    loop = Loop(tmp_path / "run.mscan")
    with loop.scan, tensorboard.follow(loop.scan, tmp_path / "logs", seconds=0.05, heat_every=4):
        loop.steps(9)
    loop = Loop(tmp_path / "run.mscan", resume=True)
    loop.scan.load_state_dict(loop.scan.state_dict() | {"step": 4})
    with loop.scan, tensorboard.follow(loop.scan, tmp_path / "logs", seconds=0.05, heat_every=4):
        loop.steps(2)
    curves, pictures, _ = read_tensorboard(tmp_path / "logs")
    with pyscan.open(tmp_path / "run.mscan") as run:
        assert run.steps["step"].tolist() == list(range(1, 7))
        assert_same_curves(curves, want(run, 1, names))
    assert sorted(pictures["heat/act"]) == [4]


def test_wandb_follows_a_scan_in_a_run_of_its_own(tmp_path: Path, offline: None) -> None:
    import wandb as library

    mine = library.init(dir=str(tmp_path / "mine"), project="trains", reinit="create_new")
    loop = Loop(tmp_path / "run.mscan")
    (tmp_path / "scan").mkdir()
    with loop.scan, wandb.follow(loop.scan, dir=str(tmp_path / "scan"), seconds=0.05, heat_every=0):
        assert loop.scan.loggers["wandb"] != mine.id
        for step in range(1, 8):
            loop.steps(1)
            mine.log({"loss": step}, step=step)
    assert mine.step == 7, "the counter of the training script is its own"
    mine.finish()
    curves, _ = read_wandb(tmp_path / "scan")
    with pyscan.open(tmp_path / "run.mscan") as run:
        assert_same_curves(curves, want(run, 1, ["0.weight", "2.weight"]))


def test_wandb_follows_into_the_run_it_is_given_and_leaves_it_open(tmp_path: Path, offline: None) -> None:
    import wandb as library

    mine = library.init(dir=str(tmp_path), reinit="create_new")
    loop = Loop(tmp_path / "run.mscan")
    with loop.scan, wandb.follow(loop.scan, mine, sites="0", channels=["grad"], seconds=0.05, heat_every=0):
        loop.steps(3)
    assert "wandb" not in loop.scan.loggers
    mine.log({"after": 1, "pyscan/step": 4})
    mine.finish()
    curves, _ = read_wandb(tmp_path)
    assert [name for name in curves if name.startswith(("act/", "grad/"))] == ["grad/0.weight"]
    assert curves.pop("after") == {4: 1.0}


@pytest.mark.parametrize(("module", "library"), [(tensorboard, "tensorboard"), (wandb, "wandb")])
def test_a_missing_dashboard_is_named_with_its_extra(
    scan_path: Path, tmp_path: Path, module: Any, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wandb", "tensorboard.compat.proto.event_pb2"):
        monkeypatch.setitem(sys.modules, name, None)
    arguments = (os.fspath(tmp_path / "logs"), Selection()) if library == "tensorboard" else (Selection(),)
    with pyscan.open(scan_path) as run, pytest.raises(MissingExtraError, match=rf"pip install 'pyscan\[{library}\]'"):
        module.export(run, *arguments)
