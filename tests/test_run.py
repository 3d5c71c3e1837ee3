"""`pyscan run`: a script runs as python runs it, and is scanned without knowing."""

from __future__ import annotations

import atexit
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pyscan
from pyscan import format as fmt
from pyscan import scanner
from pyscan.autoattach import AutoAttach, find_owner
from tests.loop import run_python

TRAINING = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 4))
ids = torch.arange(6).view(2, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(num_steps):
    for _ in range(num_steps):
        model(ids).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def write(tmp_path: Path, text: str, name: str = "job.py") -> Path:
    (tmp_path / name).write_text(text)
    return tmp_path / name


def run(tmp_path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "pyscan", "run", *arguments, cwd=tmp_path, **variables)


def own_lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("pyscan: ")]


def others_lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if not line.startswith("pyscan: ")]


def test_a_script_is_scanned_from_its_first_step_and_torch_left_as_it_was(tmp_path: Path) -> None:
    write(
        tmp_path,
        TRAINING
        + """
before = nn.Module.__call__, torch.optim.Optimizer.__init__
with torch.no_grad():
    model(ids)
train(3)
import torch.nn.modules.module as home
assert nn.Module.__call__ is home.Module._wrapped_call_impl
assert torch.optim.Optimizer.__init__.__code__.co_filename.startswith(torch.__path__[0])
""",
    )
    ran = run(tmp_path, "job.py")
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr
    assert (
        own_lines(ran.stderr)
        == ran.stderr.splitlines()
        == [
            f"pyscan: scanning Sequential (3 sites) at each step of SGD, into {tmp_path / 'job.mscan'}",
            f"pyscan: the scan is {tmp_path / 'job.mscan'}",
        ]
    )
    scan = pyscan.open(tmp_path / "job.mscan")
    space: dict[str, object] = {}
    exec(TRAINING, space)
    with pyscan.attach(space["model"], tmp_path / "own.mscan", optimizer=space["optimizer"]):  # type: ignore[arg-type]
        space["train"](3)  # type: ignore[operator]
    own = pyscan.open(tmp_path / "own.mscan")
    assert scan.steps["step"].tolist() == own.steps["step"].tolist() == [1, 2, 3]
    assert scan.steps["tokens"].tolist() == own.steps["tokens"].tolist() == [6, 6, 6]
    for site in own.sites:
        for channel in own.channels:
            assert (scan.codes(channel.name, site.name) == own.codes(channel.name, site.name)).all()


ENDINGS = {
    "normal": "print('done')",
    "exit status": "import sys; sys.exit(7)",
    "exit text": "raise SystemExit('bad luck')",
    "error": "def f():\n    raise OSError(2, 'mine')\n\ntry:\n    f()\nexcept OSError as e:\n    raise KeyError from e",
    "broken pipe": "raise BrokenPipeError",
    "interrupt": "raise KeyboardInterrupt",
    "own signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "syntax": "x = = 1",
    "own hook": "import sys\nsys.excepthook = lambda *a: print('hook', a[0], a[2].tb_lineno)\n1 / 0",
    "at exit": "import atexit\nvalue = 3\natexit.register(lambda: print(value, __name__))",
    "encoding": "import sys\nprint(sys.stdout.errors, sys.stderr.errors, sys.stdout.encoding)",
    "names": "import sys, pickle\nclass A: pass\nprint(pickle.loads(pickle.dumps(A)), sys.modules['__main__'].A)",
    "surroundings": "import sys\nprint(__name__, __file__, sys.argv, sys.path[0], __spec__, __package__, __doc__)\n"
    "print(sorted(globals()), 'torch' in sys.modules, 'numpy' in sys.modules)",
}


@pytest.mark.parametrize("name", ENDINGS)
def test_a_script_ends_and_looks_as_under_python(tmp_path: Path, name: str) -> None:
    write(tmp_path, ENDINGS[name])
    plain = run_python("job.py", "--flag", "-o", "x", cwd=tmp_path)
    ran = run(tmp_path, "job.py", "--flag", "-o", "x")
    assert (ran.returncode, ran.stdout) == (plain.returncode, plain.stdout)
    assert others_lines(ran.stderr) == plain.stderr.splitlines()
    if name in ("normal", "error"):
        assert own_lines(ran.stderr) == [
            "pyscan: nothing was scanned: no forward with gradients came after an optimizer was built"
        ]
    expected = {"interrupt": -signal.SIGINT, "own signal": -signal.SIGTERM, "exit status": 7}
    assert plain.returncode == expected.get(name, plain.returncode)


def test_a_module_runs_as_under_python_m(tmp_path: Path) -> None:
    (tmp_path / "kit").mkdir()
    write(tmp_path / "kit", "", "__init__.py")
    write(tmp_path / "kit", "value = 5", "part.py")
    text = (
        "import sys\nfrom .part import value\nprint(value, __name__, __package__, __spec__.name, sys.argv, sys.path[0])"
    )
    write(tmp_path / "kit", text, "__main__.py")
    write(tmp_path / "kit", text, "train.py")
    for module in ("kit", "kit.train"):
        plain = run_python("-m", module, "a", cwd=tmp_path)
        ran = run(tmp_path, "-m", module, "a")
        assert plain.returncode == 0, plain.stderr
        assert (ran.returncode, ran.stdout) == (0, plain.stdout), ran.stderr


def test_an_error_in_the_first_forward_shows_no_line_of_pyscan(tmp_path: Path) -> None:
    write(tmp_path, TRAINING + "\nmodel(torch.ones(3, dtype=torch.int64) * 99)\n")
    ran = run(tmp_path, "job.py")
    assert (ran.returncode, ran.stdout) == (1, "")
    lines = others_lines(ran.stderr)
    assert lines[:2] == ["Traceback (most recent call last):", f'  File "{tmp_path / "job.py"}", line 17, in <module>']
    assert lines[-1] == "IndexError: index out of range in self"
    assert "pyscan/autoattach.py" not in ran.stderr
    assert "pyscan/script.py" not in ran.stderr


class InProcess:
    """The training above with a watch for it in this process, to spare the start of another one."""

    def __init__(self, path: Path, **settings: object) -> None:
        self.auto = AutoAttach({"path": path, **settings})
        self.auto.start()
        self.space: dict[str, Any] = {"path": path.with_name("own.mscan")}

    def run(self, code: str) -> None:
        exec(code, self.space)

    def end(self) -> None:
        """What the end of the process does, and what it would take along."""
        atexit.unregister(self.auto._finish)
        self.auto._finish()
        self.auto._end_watching()
        self.auto._leave_attach()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., InProcess]]:
    started: list[InProcess] = []

    def start(**settings: object) -> InProcess:
        started.append(InProcess(tmp_path / "job.mscan", **settings))
        started[-1].run(TRAINING)
        return started[-1]

    before = nn.Module.__call__, torch.optim.Optimizer.__init__
    yield start
    for one in started:
        one.end()
    assert (nn.Module.__call__, torch.optim.Optimizer.__init__) == before
    assert not scanner.before_attach


ASIDE = "pyscan: the program attaches pyscan by itself: `pyscan run` leaves the scan to it"
ATTACH = "import pyscan\nscan = pyscan.attach(model, path, optimizer=optimizer)\n"


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_script_that_attaches_itself_is_left_alone(
    program: Callable[..., InProcess], tmp_path: Path, capfd: pytest.CaptureFixture[str], steps_before: int
) -> None:
    job = program()
    job.run(f"train({steps_before})\n{ATTACH}train(3)\nscan.close()")
    said = capfd.readouterr().err.splitlines()
    assert said[-1] == ASIDE
    assert len(said) == (2 if steps_before else 1)
    assert pyscan.open(tmp_path / "own.mscan").steps["step"].tolist() == [1, 2, 3]
    if steps_before:
        assert pyscan.open(tmp_path / "job.mscan").steps["step"].tolist() == [1, 2], "what came before stays readable"
    else:
        assert not (tmp_path / "job.mscan").exists()


def test_settings_come_from_the_file_and_the_variables(tmp_path: Path) -> None:
    write(tmp_path, TRAINING + "\nimport os\nos.mkdir('elsewhere')\nos.chdir('elsewhere')\ntrain(4)\n")
    write(tmp_path, 'path = "named.mscan"\nevery = 4\nblock = 4\nexclude = ["^0"]\n', "pyscan.toml")
    ran = run(tmp_path, "job.py", PYSCAN_EVERY="2", PYSCAN_EVRY="3")
    assert ran.returncode == 0, ran.stderr
    assert own_lines(ran.stderr)[0] == "pyscan: PYSCAN_EVRY is no setting: did you mean PYSCAN_EVERY?"
    scan = pyscan.open(tmp_path / "named.mscan")
    assert scan.steps["step"].tolist() == [2, 4]
    assert [(site.name, site.num_blocks) for site in scan.sites] == [("1.weight", 2), ("2.weight", 2)]


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["nothing.py"], {}, "can't open file"),
        (["-m", "no.such"], {}, "no module 'no.such'"),
        (["-o", "no/where.mscan", "job.py"], {}, "no is not a directory: make it first"),
        (["-o", "job.py", "job.py"], {}, "job.py exists: name another scan with -o"),
        (["job.py"], {"PYSCAN_EVERY": "often"}, "PYSCAN_EVERY must be a whole number, got 'often'"),
        (["job.py"], {"PYSCAN_CONFIG": "other.toml"}, "PYSCAN_CONFIG names other.toml, which is not a file"),
    ],
)
def test_mistakes_are_told_before_the_script_begins(
    tmp_path: Path, arguments: list[str], variables: dict[str, str], message: str
) -> None:
    write(tmp_path, "print('began')")
    ran = run(tmp_path, *arguments, **variables)
    assert (ran.returncode, ran.stdout, ran.stderr.count("\n")) == (2, "", 1)
    assert message in ran.stderr


def test_what_attach_refuses_is_said_and_the_script_runs_on(
    program: Callable[..., InProcess], capfd: pytest.CaptureFixture[str]
) -> None:
    program(every=0).run("train(2)\nprint('trained')")
    out, err = capfd.readouterr()
    assert out == "trained\n"
    assert "not attached, the program runs on unscanned: ValueError: every must be an int >= 1, got 0" in err


class Pair(nn.Module):
    """A model of which only the parts are called."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)


def test_the_owner_is_the_outermost_module_that_has_the_parameters() -> None:
    pair, other = Pair(), nn.Linear(4, 4)
    whole = torch.optim.SGD(pair.parameters(), lr=0.1)
    assert find_owner(pair, [whole]) is pair
    assert find_owner(pair.one, [whole]) is pair, "a part is called first"
    assert find_owner(other, [whole]) is None, "a model that is not trained"
    wrapped = nn.Sequential(pair)
    assert find_owner(wrapped, [whole]) is wrapped
    assert find_owner(pair.one, [whole]) is pair, "the smallest that has them all"


def test_with_several_models_the_called_one_is_scanned() -> None:
    generator, critic = nn.Linear(4, 4), Pair()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
    assert find_owner(critic, optimizers) is critic
    assert find_owner(generator, optimizers) is generator
    halves = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (critic.one, critic.two)]
    assert find_owner(critic, halves) is critic


def test_two_models_are_told_of(program: Callable[..., InProcess], capfd: pytest.CaptureFixture[str]) -> None:
    program().run("other = nn.Linear(3, 3)\nsecond = torch.optim.Adam(other.parameters())\ntrain(2)")
    said = capfd.readouterr().err
    assert "at each step of SGD, into" in said
    assert "pyscan: 2 parameters of other modules not scanned: one run scans one model" in said


def test_an_optimizer_that_was_thrown_away_does_not_count(
    program: Callable[..., InProcess], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = program()
    job.run("optimizer = torch.optim.Adam(model.parameters())\nimport gc\ngc.collect()\ntrain(2)")
    assert "at each step of Adam, into" in capfd.readouterr().err
    job.auto._finish()
    assert pyscan.open(tmp_path / "job.mscan").steps["step"].tolist() == [1, 2]


def test_a_compiled_model_is_scanned_before_it_is_compiled(program: Callable[..., InProcess], tmp_path: Path) -> None:
    job = program()
    job.run("model = torch.compile(model, backend='eager')\ntrain(2)")
    job.auto._finish()
    run = pyscan.open(tmp_path / "job.mscan")
    assert run.steps["step"].tolist() == [1, 2]
    assert [site.name for site in run.sites] == ["0.weight", "1.weight", "2.weight"]
    assert (run.act("1.weight") > 0).all()


def test_a_job_that_restarts_goes_on_where_its_optimizer_is(
    program: Callable[..., InProcess], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint is of step 3, the file has 5 rows: two of them are taken again."""
    adam = "optimizer = torch.optim.Adam(model.parameters())\n"
    first = program()
    first.run(adam + "train(3)\nsaved = optimizer.state_dict()\nimport copy\nsaved = copy.deepcopy(saved)\ntrain(2)")
    first.auto._finish()
    second = program(resume=True)
    second.space["saved"] = first.space["saved"]
    second.run(adam + "optimizer.load_state_dict(saved)\ntrain(4)")
    second.auto._finish()
    assert "pyscan: goes on after step 3, which is as many as Adam has taken" in capfd.readouterr().err
    run = pyscan.open(tmp_path / "job.mscan")
    assert run.steps["step"].tolist() == [*range(1, 8)]
    assert (run.steps["flags"] & fmt.ROW_RESUMED).nonzero()[0].tolist() == [3]
