import csv
import fcntl
import io
import json
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import types
from pathlib import Path

import numpy as np
import pytest

import pyscan
from pyscan import analysis, cli, codecs, tables
from pyscan.commands import VERBS
from pyscan.commands.show import Show
from pyscan.schema import Channel, Mesh, SiteInfo
from tests.make_scan import Builder, make_cells, make_rows, make_schema, site

ROOT = Path(__file__).parent.parent
SITES = ("model.layers.0.q.weight", "model.layers.0.k.weight", "model.layers.1.q.weight", "lm_head.weight")


def make_run(path, steps=range(1, 71), names=SITES, factor=1.0, blocks=(3, 1, 2, 2)):
    """A run whose cells are known: act 2 ** (cell + step / 64), grad factor * 2 ** -cell, one dead and one sick."""
    schema = make_schema(sites=tuple(site(name, n) for name, n in zip(names, blocks, strict=True)))
    builder = Builder(schema)
    for start in range(0, len(steps), 64):
        part = steps[start : start + 64]
        cells = make_cells(schema, part)
        cell = np.arange(len(cells[0]), dtype=float)[:, None]
        cells[0] = codecs.encode(np.exp2(cell + np.array(part) / 64), "log2q8")
        cells[1] = codecs.encode(np.exp2(-cell) * factor + 0 * np.array(part), "log2q8")
        cells[1][1] = codecs.CODE_ZERO
        cells[0][4, 0] = codecs.CODE_NAN
        builder.writer.steps(make_rows(part), cells)
    return builder.event("nonfinite", 3).index().save(path)


@pytest.fixture
def scan(tmp_path):
    return str(make_run(tmp_path / "run.mscan"))


@pytest.fixture
def run_cli(capsys):
    """Run the program in this process: (exit status, stdout, stderr)."""

    def call(*arguments):
        status = cli.main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def run_json(run_cli, *arguments, status=0):
    """The JSON a verb prints; NaN and Infinity are not JSON and fail here."""
    found, out, err = run_cli(*arguments, "--json")
    assert (found, err) == (status, "")

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(out, parse_constant=refuse)


def run_process(*arguments, **environment):
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-m", "pyscan", *map(str, arguments)], capture_output=True, text=True, env=env
    )


def test_version_names_the_program(run_cli):
    assert run_cli("--version") == (0, f"pyscan {pyscan.__version__}\n", "")


def test_help_lists_every_verb(run_cli):
    status, out, _ = run_cli("--help")
    assert status == 0
    for verb in VERBS:
        assert re.search(rf"^    {verb.name} ", out, re.M), verb.name


@pytest.mark.parametrize("verb", [verb.name for verb in VERBS])
def test_every_verb_has_help_with_an_example_that_fits_a_terminal(run_cli, verb):
    status, out, _ = run_cli(verb, "--help")
    assert status == 0
    assert f"  pyscan {verb}" in out
    description = out.partition("\n\n")[2].partition("\npositional")[0].partition("\noptions")[0]
    assert max(map(len, description.splitlines())) <= 80


def test_the_program_needs_neither_torch_nor_pandas(scan):
    unwanted = "sorted({'torch', 'pandas', 'pyarrow'} & set(sys.modules))"
    code = f"import sys; from pyscan.cli import main; main(sys.argv[1:]); print({unwanted})"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for verb in ("info", "show", "check"):
        done = subprocess.run([sys.executable, "-c", code, verb, scan], capture_output=True, text=True, env=env)
        assert done.stdout.splitlines()[-1] == "[]"


def test_without_a_verb_the_help_goes_to_stderr(run_cli):
    status, out, err = run_cli()
    assert (status, out) == (2, "")
    assert "usage: pyscan" in err


def test_python_dash_m_is_the_same_program():
    done = run_process("--version")
    assert (done.returncode, done.stdout) == (0, f"pyscan {pyscan.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shwo", "x"], "no verb 'shwo': did you mean show?"),
        (["zzz"], "no verb 'zzz': see pyscan --help"),
        (["info"], "the following arguments are required: SCAN (see pyscan info --help)"),
        (["info", "{dir}/none.mscan"], "there is no file"),
        (["info", "{dir}"], "is a directory: name the .mscan file in it"),
        (["info", "{dir}/text"], "not a .mscan file"),
        (["info", "{dir}/empty"], "not a .mscan file"),
        (["check", "{dir}/text"], "is not a scan: it does not begin with MSCAN"),
        (["check", "{dir}/none.mscan"], "there is no file"),
        (["show", "{scan}", "--site", "("], "--site '(' is not a regular expression"),
        (["show", "{scan}", "--site", "nothing"], "finds none of the 4 sites, such as model.layers.1.q.weight"),
        (["show", "{scan}", "--step", "999"], "step 999 is not in the scan: its 70 rows are steps 1 to 70"),
        (["show", "{scan}", "--step", "x"], "invalid int value: 'x'"),
        (["show", "{scan}", "--top", "0"], "--top must be >= 1, got 0"),
        (["show", "{scan}", "--scope", "world"], "invalid choice: 'world'"),
        (["diff", "{scan}", "{dir}/other.mscan"], "no site is in both runs"),
        (["diff", "{scan}", "{dir}/late.mscan"], "no step is in both runs: A has 1 to 70, B has 100 to 102"),
        (["export", "{scan}", "--to", "csv", "-o", "{dir}/text"], "exists: name another output or add --force"),
        (["export", "{scan}", "--to", "csv", "-o", "{scan}", "--force"], "is the input itself: name another output"),
        (["export", "{scan}", "--to", "csv", "-o", "{dir}/no/such"], "/no is not a directory: make it first"),
        (["export", "{scan}", "--to", "csv", "-o", "{dir}", "--force"], "is a directory: name a file"),
        (["export", "{scan}", "--to", "parquet", "-o", "{dir}", "--force"], "is not a Parquet export"),
        (["export", "{scan}", "--to", "xml", "-o", "x"], "invalid choice: 'xml'"),
        (["export", "{scan}", "--to", "csv"], "required: -o/--output"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(run_cli, scan, tmp_path, arguments, message):
    (tmp_path / "text").write_text("hello, this is no scan")
    (tmp_path / "empty").write_bytes(b"")
    make_run(tmp_path / "other.mscan", names=("a", "b", "c", "d"))
    make_run(tmp_path / "late.mscan", steps=range(100, 103))
    before = sorted(path.name for path in tmp_path.iterdir())
    status, out, err = run_cli(*(argument.format(scan=scan, dir=tmp_path) for argument in arguments))
    assert (status, out) == (2, "")
    assert err.startswith("pyscan: ")
    assert err.count("\n") == 1
    assert message in err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_an_error_message_cannot_steer_the_terminal(run_cli, tmp_path):
    status, _, err = run_cli("info", tmp_path / "a\x1b[31m\nb.mscan")
    assert status == 2
    assert "\x1b" not in err
    assert err.count("\n") == 1


def test_ctrl_c_is_silent_and_status_130(run_cli, scan, monkeypatch):
    def interrupt(self, args):
        raise KeyboardInterrupt

    monkeypatch.setattr(Show, "run", interrupt)
    assert run_cli("show", scan) == (130, "", "")


def test_a_bug_is_not_hidden(scan, monkeypatch):
    def broken(self, args):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Show, "run", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["show", scan])


@pytest.mark.parametrize("arguments", ["export {} --to csv -o -", "show {} --blocks"])
def test_a_pipe_that_closes_is_silent(tmp_path, arguments):
    schema = make_schema(sites=tuple(site(f"model.layers.{i}.projection.weight", 2) for i in range(1500)))
    path = Builder(schema).steps(range(1, 4)).save(tmp_path / "wide.mscan")
    command = f"{sys.executable} -m pyscan {arguments.format(path)} | head -1; exit ${{PIPESTATUS[0]}}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr) == (141, "")
    assert done.stdout.count("\n") == 1


def test_without_rich_tables_name_the_extra_and_json_works(run_cli, scan, monkeypatch):
    for name in ("rich", "rich.console", "rich.table", "rich.box", "rich.text", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    status, out, err = run_cli("info", scan)
    assert (status, out) == (2, "")
    assert err == "pyscan: rich is not installed: pip install 'pyscan[cli]'\n"
    for arguments in (["info", scan], ["show", scan], ["diff", scan, scan], ["check", scan]):
        assert run_json(run_cli, *arguments)


def on_terminal(columns, *arguments, **environment):
    """What the program writes to a terminal of so many columns."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **environment}
    env.pop("COLUMNS", None)
    command = [sys.executable, "-m", "pyscan", *map(str, arguments)]
    with subprocess.Popen(command, stdout=inner, stderr=inner, env=env) as process:
        os.close(inner)
        data = b""
        while True:
            try:
                piece = os.read(outer, 65536)
            except OSError:  # the last writer has closed its end
                break
            if not piece:
                break
            data += piece
    os.close(outer)
    assert process.returncode == 0
    return data.decode()


@pytest.mark.parametrize("columns", [60, 80, 120])
@pytest.mark.parametrize("verb", ["info", "show", "diff"])
def test_tables_fit_the_terminal_and_cut_no_number(scan, verb, columns):
    out = on_terminal(columns, verb, scan, *([scan] if verb == "diff" else []), NO_COLOR="1")
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out).split("\n")]
    shown = "\n".join(line for line in lines if "━" not in line)  # a machine that is slow also shows a bar
    table = shown.strip("\n").partition("\n\n")[0].splitlines()
    assert len(table) >= 6
    assert max(map(len, table)) <= columns
    assert not re.search(r"\d…", "\n".join(table))


def test_colour_is_for_terminals_alone(scan):
    assert "\x1b[" in on_terminal(100, "show", scan)
    assert "\x1b" not in run_process("show", scan).stdout


def test_a_pipe_gets_whole_names_and_no_trailing_spaces(tmp_path):
    name = "model.layers.0." + "very_long_name_of_a_module." * 10 + "weight"
    path = make_run(tmp_path / "long.mscan", names=(name, *SITES[1:]))
    for verb in ("show", "info"):
        lines = run_process(verb, path).stdout.splitlines()
        assert [line for line in lines if line != line.rstrip()] == []
    assert name in run_process("show", path).stdout


def test_a_terminal_without_unicode_gets_ascii(scan):
    done = run_process("show", scan, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "_" in done.stdout
    assert "#" in done.stdout


@pytest.mark.parametrize("name", ["[red]x[/red].0.w", "a\x1b[2J.0.w", "层.0.权重", "a\nb"])
def test_names_of_any_kind_are_shown_without_harm(run_cli, tmp_path, name):
    path = make_run(tmp_path / "odd.mscan", names=(name, *SITES[1:]))
    _, out, _ = run_cli("show", path)
    assert "\x1b" not in out
    assert tables.printable(name) in out
    assert run_json(run_cli, "show", path)["sites"][0]["site"] == name


def test_progress_shows_on_a_terminal_when_work_lasts(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(tables, "_BAR_AFTER_SECONDS", -1)
    with tables.progress("Reading sites") as tick:
        tick(1, 3)
        assert "Reading sites" in screen.getvalue()


def test_progress_waits_until_work_lasts(monkeypatch):
    monkeypatch.setattr(sys, "stderr", screen := io.StringIO())
    monkeypatch.setattr(screen, "isatty", lambda: True, raising=False)
    with tables.progress("Reading sites") as tick:
        tick(1, 3)
    assert screen.getvalue() == ""


def test_progress_is_silent_on_a_pipe(capsys, monkeypatch):
    monkeypatch.setattr(tables, "_BAR_AFTER_SECONDS", -1)
    with tables.progress("Reading sites") as tick:
        tick(1, 3)
    assert capsys.readouterr() == ("", "")


def test_info_says_what_is_in_the_file(run_cli, scan):
    facts = run_json(run_cli, "info", scan)
    assert facts["model"] == "tiny"
    assert facts["version"] == 2
    assert facts["bytes"] == Path(scan).stat().st_size
    assert facts["cells_per_step"] == 8 + 8 + 4 + 4
    assert facts["bytes_per_value"] == pytest.approx(facts["bytes"] / (24 * 70))
    assert facts["sites"] == {"count": 4, "kinds": {"linear": 4}}
    assert [channel["name"] for channel in facts["channels"]] == ["act", "grad", "act_max", "grad_bad"]
    assert facts["events"] == {"nonfinite": {"count": 1, "first_step": 3, "first_site": None}}
    assert facts["damage"] == []
    steps = facts["steps"]
    assert (steps["rows"], steps["first"], steps["last"], steps["tokens"]) == (70, 1, 70, 70 * 340)
    assert steps["rows_per_second"] == pytest.approx(69 / 69e-6)  # a row every 1000 ns
    assert steps["loss"] == pytest.approx([1 / 2, 1 / 71])


def test_info_of_a_run_without_steps(run_cli, tmp_path):
    path = Builder().save(tmp_path / "empty.mscan")
    assert run_json(run_cli, "info", path)["steps"] == {"rows": 0}
    status, out, _ = run_cli("info", path)
    assert status == 0
    assert "none yet" in out


def test_info_counts_the_tail_file(run_cli, tmp_path):
    path = Builder().steps(range(1, 65)).tail_rows(range(65, 68)).save(tmp_path / "live.mscan")
    facts = run_json(run_cli, "info", path)
    assert facts["steps"]["rows"] == 67
    assert list(facts["files"]) == [str(path), f"{path}.tail"]


def test_info_reports_damage_it_meets(run_cli, tmp_path):
    path = Builder().steps(range(1, 65)).steps(range(65, 129)).save(tmp_path / "torn.mscan")
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)
    status, out, _ = run_cli("info", path)
    assert status == 0
    assert "see pyscan check" in out
    assert run_json(run_cli, "info", path)["damage"]


def test_a_clock_that_runs_backwards_gives_no_rate(run_cli, tmp_path):
    builder = Builder()
    rows = make_rows(range(1, 4))
    rows["time_ns"] = rows["time_ns"][::-1].copy()
    builder.writer.steps(rows, make_cells(builder.schema, range(1, 4)))
    path = builder.save(tmp_path / "clock.mscan")
    assert run_json(run_cli, "info", path)["steps"]["rows_per_second"] is None
    assert run_cli("info", path)[0] == 0


def test_show_gives_norms_of_the_last_step_and_sps_over_all(run_cli, scan):
    found = run_json(run_cli, "show", scan)
    assert found["step"] == 70
    assert [record["site"] for record in found["sites"]] == list(SITES)
    first = found["sites"][0]
    # blocks 2**(0 + 70/64), 2**(1 + 70/64), 2**(2 + 70/64): together 2**(70/64) * sqrt(1 + 4 + 16)
    assert first["act"]["norm"] == pytest.approx(2 ** (70 / 64) * math.sqrt(21), rel=0.0014)
    # grad blocks 1, 0 (dead), 1/4
    assert first["grad"]["norm"] == pytest.approx(math.sqrt(1 + 1 / 16), rel=0.0014)
    assert first["grad"]["dead_blocks"] == 1
    assert found["sites"][2]["act"]["norm"] == pytest.approx(2 ** (70 / 64) * math.sqrt(2**8 + 2**10), rel=0.0014)


def test_show_drift_is_last_tenth_against_first(run_cli, scan):
    # level rises by 1/64 per step: 7 rows at each end, 63 steps apart
    found = run_json(run_cli, "show", scan)["sites"][0]
    assert found["act"]["drift_log2"] == pytest.approx(63 / 64, abs=1 / 256)
    assert found["grad"]["drift_log2"] == 0


def test_show_sps_equals_the_worked_example(run_cli, scan):
    # layer 0, all steps alike: act levels 0 1 2 3 (less a constant): z = (x - 1.5) / sqrt(1.25)
    # grad levels 0 . -2 -3: mean -5/3, variance (25/9 + 1/9 + 16/9) / 3 = 14/9
    act = [(x - 1.5) / math.sqrt(1.25) for x in (0, 2, 3)]
    grad = [(x + 5 / 3) / math.sqrt(14 / 9) for x in (0, -2, -3)]
    expected = [a - g for a, g in zip(act, grad, strict=True)]
    blocks = run_json(run_cli, "show", scan, "--blocks", "--site", r"layers\.0\.")["sites"]
    assert [(b["site"], b["block"]) for b in blocks] == [(SITES[0], 0), (SITES[0], 1), (SITES[0], 2), (SITES[1], 0)]
    found = [block["sps"] for block in blocks]
    assert found[1] is None  # its gradient is 0
    assert [found[0], found[2], found[3]] == pytest.approx(expected, abs=0.01)
    site_sps = run_json(run_cli, "show", scan, "--site", r"0\.q")["sites"][0]["sps"]
    assert site_sps == pytest.approx((expected[0] + expected[1]) / 2, abs=0.01)


def test_show_step_takes_norms_of_that_step(run_cli, scan):
    found = run_json(run_cli, "show", scan, "--step", 64, "--blocks")
    assert found["step"] == 64
    assert found["sites"][0]["act"]["norm"] == pytest.approx(2, rel=0.0014)


def test_show_step_scores_that_step_alone(run_cli, tmp_path):
    sites = tuple(site(f"l.0.{name}", 3) for name in "abc")
    path = Builder(make_schema(sites=sites)).steps(range(305, 330)).save(tmp_path / "run.mscan")
    with pyscan.open(path) as run:
        act, grad = (np.hstack([run.get(c, s.name, blocks=True) for s in sites]) for c in ("act", "grad"))
    expected = analysis.sps(act, grad, [64] * 9, ["l.0"] * 9)
    found = run_json(run_cli, "show", path, "--blocks", "--step", 308)["sites"]
    assert [record["sps"] for record in found] == pytest.approx(expected[3].tolist(), abs=1e-5)
    found = run_json(run_cli, "show", path, "--blocks")["sites"]
    assert [record["sps"] for record in found] == pytest.approx(expected.mean(axis=0).tolist(), abs=1e-5)
    assert not np.allclose(expected[3], expected.mean(axis=0), atol=0.1)


def test_show_top_orders_by_sps_and_shows_no_line_twice(run_cli, scan):
    everything = run_json(run_cli, "show", scan, "--blocks")["sites"]
    known = sorted((r["sps"] for r in everything if r["sps"] is not None), reverse=True)
    top = [r["sps"] for r in run_json(run_cli, "show", scan, "--blocks", "--top", 2)["sites"]]
    assert top == known[:2] + known[-2:]
    assert [r["sps"] for r in run_json(run_cli, "show", scan, "--blocks", "--top", 100)["sites"]] == known


def test_show_scope_global_compares_with_the_whole_model(run_cli, scan):
    layer = run_json(run_cli, "show", scan)["sites"][0]["sps"]
    whole = run_json(run_cli, "show", scan, "--scope", "global")["sites"][0]["sps"]
    assert whole is not None
    assert whole != layer


def test_show_marks_dead_and_sick_blocks(run_cli, scan):
    _, out, _ = run_cli("show", scan)
    assert "!" in next(line for line in out.splitlines() if SITES[2] in line)  # cell 4 was NaN twice
    assert "grad is 0 or absent in every step: 1 block in 1 site" in out
    assert "act moved most:" in out


def test_show_of_a_run_without_steps(run_cli, tmp_path):
    path = Builder().save(tmp_path / "empty.mscan")
    assert run_cli("show", path) == (0, f"{path}: 2 sites, no steps yet\n", "")
    assert run_json(run_cli, "show", path) == {"step": None, "sites": [], "damage": []}


def test_show_says_that_damaged_cells_are_left_out(run_cli, scan):
    with pyscan.open(scan) as run:
        frame = next(frame for frame in run.file.frames if frame.kind == 2)
    data = bytearray(Path(scan).read_bytes())
    data[frame.end - 70] ^= 1
    Path(scan).write_bytes(data)
    status, out, _ = run_cli("show", scan)
    assert status == 0
    assert "1 damaged place: the cells there count as not observed; see pyscan check" in out
    assert len(run_json(run_cli, "show", scan)["damage"]) == 1


def test_show_of_a_run_with_one_channel_has_no_sps(run_cli, tmp_path):
    path = Builder(make_schema(channels=(Channel("act"),))).steps(range(1, 4)).save(tmp_path / "act.mscan")
    found = run_json(run_cli, "show", path)["sites"]
    assert [(r["sps"], "grad" in r) for r in found] == [(None, False)] * 2
    assert run_cli("show", path)[0] == 0


def test_diff_of_a_run_with_itself_is_zero(run_cli, scan):
    found = run_json(run_cli, "diff", scan, scan)
    assert [(d["a"], d["b"]) for d in found["sites"]] == [(name, name) for name in SITES]
    for record in found["sites"]:
        for channel in ("act", "grad"):
            assert (record[channel]["mean"], record[channel]["largest"], record[channel]["first_step"]) == (0, 0, None)
    assert (found["only_a"], found["only_b"], found["steps"]["count"]) == ([], [], 70)


def test_diff_finds_a_factor_under_other_names(run_cli, scan, tmp_path):
    names = [f"base_model.model.{name}" for name in SITES[:3]] + ["extra.head.weight"]
    other = make_run(tmp_path / "b.mscan", names=names, factor=4.0, steps=range(21, 91))
    found = run_json(run_cli, "diff", scan, other)
    assert [(d["a"], d["b"]) for d in found["sites"]] == list(zip(SITES[:3], names[:3], strict=True))
    assert (found["only_a"], found["only_b"]) == ([SITES[3]], [names[3]])
    assert found["steps"] == {"count": 50, "first": 21, "last": 70}
    for record in found["sites"]:
        assert record["act"]["mean"] == pytest.approx(0, abs=1e-6)
        assert record["grad"]["mean"] == pytest.approx(2, abs=1e-6)
        assert record["grad"]["first_step"] == 21
    assert found["sites"][0]["grad"]["blocks"] == pytest.approx([2, 0, 2], abs=1e-6)  # the middle one is 0 in both
    _, out, _ = run_cli("diff", scan, other)
    assert f"only in {scan}: 1 (lm_head.weight)" in out
    assert f"only in {other}: 1 (extra.head.weight)" in out


def test_diff_tolerance_hides_small_differences(run_cli, scan, tmp_path):
    other = make_run(tmp_path / "b.mscan", factor=1.01)
    assert run_json(run_cli, "diff", scan, other)["sites"][0]["grad"]["first_step"] == 1
    assert run_json(run_cli, "diff", scan, other, "--tolerance", 0.1)["sites"][0]["grad"]["first_step"] is None


def test_diff_names_the_first_step_that_differs(run_cli, tmp_path):
    paths = []
    for number in (0, 1):
        builder = Builder()
        cells = make_cells(builder.schema, range(1, 11))
        cells[0][2, 6] += number  # one code of one block at step 7
        cells[1][0, 3] = codecs.CODE_NAN if number else cells[1][0, 3]
        builder.writer.steps(make_rows(range(1, 11)), cells)
        paths.append(builder.save(tmp_path / f"{number}.mscan"))
    record = run_json(run_cli, "diff", *paths)["sites"][0]
    assert record["act"]["first_step"] == 7
    assert record["act"]["largest"] == pytest.approx(1 / 256, rel=1e-3)
    assert record["grad"]["first_step"] == 4  # a NaN on one side alone is a difference


def test_diff_compares_whole_sites_where_blocks_differ(run_cli, scan, tmp_path):
    other = make_run(tmp_path / "b.mscan", blocks=(4, 1, 2, 1))
    record = run_json(run_cli, "diff", scan, other)["sites"][0]
    assert record["act"]["blocks"] == []
    # blocks 1, 2, 4 against 1, 2, 4, 8: half of log2(85 / 21)
    assert record["act"]["mean"] == pytest.approx(math.log2(85 / 21) / 2, abs=0.01)


def test_diff_top_shows_the_farthest_first(run_cli, scan, tmp_path):
    other = make_run(tmp_path / "b.mscan", blocks=(4, 1, 2, 1))

    def farthest(record):
        return max(abs(record[channel]["mean"]) for channel in ("act", "grad"))

    everything = sorted(map(farthest, run_json(run_cli, "diff", scan, other)["sites"]), reverse=True)
    assert [farthest(record) for record in run_json(run_cli, "diff", scan, other, "--top", 2)["sites"]] == everything[
        :2
    ]


def test_check_of_a_whole_file_is_status_0(run_cli, scan):
    assert run_cli("check", scan) == (0, f"{scan} is whole\n", "")
    assert run_json(run_cli, "check", scan) == {"path": scan, "whole": True, "damage": []}


def test_check_names_the_offset_of_every_damaged_place(run_cli, scan):
    data = bytearray(Path(scan).read_bytes())
    with pyscan.open(scan) as run:
        frames = [frame for frame in run.file.frames if frame.kind == 2]
    for frame in frames[:2]:
        data[frame.payload_offset + 100] ^= 1
    Path(scan).write_bytes(data)
    found = run_json(run_cli, "check", scan, status=1)
    assert [place["offset"] for place in found["damage"]] == [frame.payload_offset for frame in frames[:2]]
    status, out, _ = run_cli("check", scan)
    assert status == 1
    assert f"{frames[0].payload_offset:,}" in out
    assert "2 damaged places" in out


def test_check_reads_the_files_of_all_ranks(run_cli, tmp_path):
    for rank in (0, 1):
        schema = make_schema(rank=rank, world=2)
        Builder(schema, run_id=bytes([rank]) * 16).steps(range(1, 4)).save(tmp_path / f"run.rank{rank:05}.mscan")
    path = tmp_path / "run.mscan"
    assert run_cli("check", path)[0] == 0
    (tmp_path / "run.rank00001.mscan").unlink()
    assert "rank 1: no file" in run_cli("check", path)[1]


def test_repair_keeps_all_that_is_whole(run_cli, scan, tmp_path):
    data = bytearray(Path(scan).read_bytes())
    with pyscan.open(scan) as run:
        first = next(frame for frame in run.file.frames if frame.kind == 2)
        before = run.act(SITES[0], blocks=True)
    data[first.end - 70] ^= 1  # in the last chunk of the first steps frame: cells, not rows
    Path(scan).write_bytes(data)
    target = tmp_path / "whole.mscan"
    status, out, err = run_cli("repair", scan, "-o", target)
    assert (status, out) == (0, "")
    assert err.startswith(f"{target}: 70 rows, ")
    assert run_cli("check", scan)[0] == 1
    assert run_cli("check", target)[0] == 0
    with pyscan.open(target) as run:
        after = run.act(SITES[0], blocks=True)
    kept = ~codecs.is_absent(after)
    assert kept[64:].all()
    np.testing.assert_array_equal(after[kept], before[kept])


def test_repair_takes_the_rows_of_the_tail(run_cli, tmp_path):
    path = Builder().steps(range(1, 65)).tail_rows(range(65, 68)).save(tmp_path / "live.mscan")
    assert run_cli("repair", path, "-o", tmp_path / "new.mscan")[0] == 0
    assert run_json(run_cli, "info", tmp_path / "new.mscan")["steps"]["last"] == 67


def test_compact_drops_what_a_resume_replaced(run_cli, tmp_path):
    path = Builder().steps(range(1, 65)).steps(range(30, 80), resumed=True).save(tmp_path / "run.mscan")
    target = tmp_path / "small.mscan"
    assert run_cli("compact", path, "-o", target)[0] == 0
    assert target.stat().st_size < path.stat().st_size
    found = run_json(run_cli, "diff", path, target)
    assert found["steps"] == {"count": 79, "first": 1, "last": 79}
    assert [d[channel]["largest"] for d in found["sites"] for channel in ("act", "grad")] == [0] * 4


def test_merge_writes_one_file_for_all_ranks(run_cli, tmp_path):
    mesh = {"dims": ("dp",), "shape": (2,)}
    for rank in (0, 1):
        schema = make_schema(rank=rank, world=2, mesh=Mesh(**mesh, coords=(rank,)))
        Builder(schema, run_id=bytes([rank]) * 16).steps(range(1, 4)).save(tmp_path / f"run.rank{rank:05}.mscan")
    target = tmp_path / "merged.mscan"
    assert run_cli("merge", tmp_path / "run.mscan", "-o", target)[0] == 0
    facts = run_json(run_cli, "info", target)
    assert (facts["steps"]["rows"], len(facts["files"])) == (3, 1)
    with pyscan.open(tmp_path / "run.mscan") as ranks, pyscan.open(target) as merged:
        for where in ranks.sites:
            np.testing.assert_allclose(merged.act(where.name), ranks.act(where.name), rtol=0.0014)


def test_merge_of_a_single_file_is_refused(run_cli, scan, tmp_path):
    status, _, err = run_cli("merge", scan, "-o", tmp_path / "x.mscan")
    assert status == 2
    assert "is one file already" in err


def test_import_of_an_exported_version_1_scan_gives_the_same_values(run_cli, scan, tmp_path):
    old, new = tmp_path / "old.mscan", tmp_path / "new.mscan"
    assert run_cli("export", scan, "--to", "mscan1", "-o", old)[0] == 0
    assert run_json(run_cli, "info", old)["version"] == 1
    assert run_cli("import", old, "-o", new)[0] == 0
    assert run_json(run_cli, "info", new)["version"] == 2
    found = run_json(run_cli, "diff", scan, new)
    assert len(found["sites"]) == 4
    assert {d[channel]["first_step"] for d in found["sites"] for channel in ("act", "grad")} == {None}


def test_the_real_version_1_scan_is_shown_and_imported(run_cli, tmp_path):
    real = ROOT.parent / "shared" / "data" / "qwen3-1.7b_v1.1.mscan"
    if not real.exists():
        pytest.skip(f"{real} is not there")
    new = tmp_path / "new.mscan"
    assert run_cli("import", real, "-o", new)[0] == 0
    facts = run_json(run_cli, "info", new)
    assert (facts["sites"]["count"], facts["steps"]["rows"], facts["cells_per_step"]) == (196, 1, 2 * 5376)
    for path in (real, new):
        shown = run_json(run_cli, "show", path)["sites"]
        assert len(shown) == 196
        assert {record["grad"]["norm"] for record in shown} == {0}


@pytest.mark.parametrize("verb", ["repair", "compact"])
def test_rewriting_replaces_only_with_force_and_never_its_input(run_cli, scan, tmp_path, verb):
    target = tmp_path / "new.mscan"
    target.write_bytes(b"something of the user's")
    Path(f"{target}.tail").write_bytes(b"a tail that is not ours")
    status, _, err = run_cli(verb, scan, "-o", target)
    assert (status, err) == (2, f"pyscan: {target} exists: name another output or add --force\n")
    assert target.read_bytes() == b"something of the user's"
    assert run_cli(verb, scan, "-o", target, "--force")[0] == 0
    assert run_cli("check", target)[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.mscan", "run.mscan"]
    assert run_cli(verb, scan, "-o", scan, "--force")[0] == 2
    assert run_cli("check", scan)[0] == 0


def test_a_strange_tail_beside_the_output_is_not_taken_over(run_cli, scan, tmp_path):
    Path(f"{tmp_path}/new.mscan.tail").write_bytes(b"rows of another run")
    status, _, err = run_cli("repair", scan, "-o", tmp_path / "new.mscan")
    assert status == 2
    assert "new.mscan.tail exists" in err


def test_export_csv_to_stdout_and_to_a_file_are_equal(run_cli, scan, tmp_path):
    status, out, err = run_cli("export", scan, "--to", "csv", "-o", "-")
    assert (status, err) == (0, "")
    status, _, err = run_cli("export", scan, "--to", "csv", "-o", tmp_path / "run.csv")
    assert (status, err) == (0, f"{tmp_path}/run.csv: 1,680 lines\n")
    assert (tmp_path / "run.csv").read_text() == out
    assert len(list(csv.reader(io.StringIO(out)))) == 1 + 24 * 70


def test_export_force_replaces_a_file_and_leaves_nothing_beside_it(run_cli, scan, tmp_path):
    target = tmp_path / "run.csv"
    target.write_text("old")
    assert run_cli("export", scan, "--to", "csv", "-o", target, "--force", "--site", "lm_head")[0] == 0
    assert {line.split(",")[1] for line in target.read_text().splitlines()[1:]} == {"lm_head.weight"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.csv", "run.mscan"]


def test_export_parquet_is_read_by_duckdb_and_replaced_by_force(run_cli, scan, tmp_path):
    pytest.importorskip("pyarrow")
    duckdb = pytest.importorskip("duckdb")
    target = tmp_path / "out"
    for force in ([], ["--force"]):
        assert run_cli("export", scan, "--to", "parquet", "-o", target, *force)[0] == 0
    query = f"select step, value from '{target}/*/*.parquet' where channel = 'act' and site = ? order by step, block"
    found = np.array(duckdb.execute(query, [SITES[0]]).fetchall())
    with pyscan.open(scan) as run:
        np.testing.assert_array_equal(found[:, 1].astype(np.float32), run.act(SITES[0], blocks=True).ravel())
    assert run_cli("export", scan, "--to", "parquet", "-o", target)[0] == 2


def test_a_failed_export_leaves_nothing_behind(run_cli, scan, tmp_path, monkeypatch):
    from pyscan import export

    def fail(run, file, sites, tick):
        file.write("half a table")
        raise OSError(28, "No space left on device", "out.csv")

    monkeypatch.setattr(export, "write_csv", fail)
    status, _, err = run_cli("export", scan, "--to", "csv", "-o", tmp_path / "out.csv")
    assert (status, err) == (2, "pyscan: out.csv: No space left on device\n")
    assert [path.name for path in tmp_path.iterdir()] == ["run.mscan"]


def bare(name, shape, num_blocks):
    return SiteInfo(name, "linear", shape, "float32", num_blocks)


ODD_SCHEMAS = {
    "no sites": {"sites": ()},
    "no channels": {"channels": ()},
    "no norms": {"channels": (Channel("act_max", per="site", op="max"),)},
    "act per site": {"channels": (Channel("act", per="site"), Channel("grad"))},
    "act per rows": {"channels": (Channel("act", per="row_block"), Channel("grad", per="row_block"))},
    "uint16": {"channels": (Channel("act", codec="u16"), Channel("grad", codec="u16"))},
    "no blocks": {"sites": (bare("a.0.w", (3, 0), 0), bare("a.0.v", (3, 64), 1))},
    "more blocks than features": {"sites": (bare("a.0.w", (3, 5), 4),)},
    "huge shape": {"sites": (bare("a", (2**48,) * 5, 2),)},
    "no names": {"sites": (bare("", (), 2), bare(".", (0,), 1))},
    "whole tensors": {"block": 0, "sites": (bare("a.0.w", (3, 5), 1), bare("a.0.v", (3, 7), 1))},
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("steps", [[], [1, 2, 3], [5, 4, 5]], ids=["no steps", "steps", "steps in disorder"])
@pytest.mark.parametrize("schema", ODD_SCHEMAS.values(), ids=ODD_SCHEMAS)
def test_odd_scans_give_an_answer_or_one_line(run_cli, tmp_path, schema, steps):
    path = Builder(make_schema(**schema)).steps(steps).save(tmp_path / "odd.mscan")
    assert run_cli("info", path)[0] == run_cli("check", path)[0] == 0
    assert run_cli("export", path, "--to", "csv", "-o", "-")[0] == 0
    for arguments in (["show", path], ["show", path, "--blocks", "--json"], ["diff", path, path]):
        status, out, err = run_cli(*arguments)
        assert (status, bool(out), err.count("\n")) in ((0, True, 0), (2, False, 1))


@pytest.mark.filterwarnings("error")
def test_a_scan_cut_anywhere_gives_an_answer_or_one_line(run_cli, tmp_path):
    path = Builder().steps(range(1, 70)).event("x", 3).tokens(5).index().save(tmp_path / "cut.mscan")
    whole = path.read_bytes()
    for size in range(0, len(whole), 257):
        path.write_bytes(whole[:size])
        for verb in ("info", "show", "check"):
            status, out, err = run_cli(verb, path)
            assert (status, bool(out), err.count("\n")) in ((0, True, 0), (1, True, 0), (2, False, 1))
            assert verb != "check" or status > 0 or size % 64 == 0  # a cut inside a frame is always found


def test_doctor_runs_the_doctor(run_cli, monkeypatch):
    seen = []
    doctor = types.ModuleType("pyscan.doctor")
    doctor.run = lambda json_output: seen.append(json_output) or 0
    monkeypatch.setitem(sys.modules, "pyscan.doctor", doctor)
    monkeypatch.setattr(pyscan, "doctor", doctor, raising=False)
    assert run_cli("doctor")[0] == 0
    assert run_cli("doctor", "--json")[0] == 0
    assert seen == [False, True]
