"""`pyscan scan` with a model: rows are each sequence's own, whatever its company, its process or its interruptions."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pyscan
from pyscan import cli, corpus, corpus_model
from pyscan.analysis import levels
from pyscan.check import check
from pyscan.corpus_generate import answer
from pyscan.corpus_norms import Meter
from pyscan.corpus_plan import WINDOW_BATCHES
from pyscan.corpus_tokens import Encoder, Sequence
from pyscan.permutation import PermutationTest, adjusted
from tests.corpus_cases import CORPORA, TOPICS, texts, write_lines
from tests.loop import ROOT, assert_same_cells

pytest.importorskip("transformers")

FILES = [CORPORA / f"{topic}.jsonl" for topic in TOPICS]
BATCH_TOKENS = 512


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def loaded(trained: Path) -> corpus_model.Loaded:
    return corpus_model.load(str(trained), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def beginnings(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """25 sequences of each corpus."""
    room = tmp_path_factory.mktemp("beginnings")
    for path in FILES:
        (room / path.name).write_text("".join(path.read_text().splitlines(keepends=True)[:25]))
    return [room / path.name for path in FILES]


@pytest.fixture(scope="module")
def small(trained: Path, beginnings: list[Path], tmp_path_factory: pytest.TempPathFactory) -> pyscan.Run:
    """The scan of `beginnings`."""
    torch.set_num_threads(1)
    return scanned(trained, tmp_path_factory.mktemp("small") / "run.mscan", *beginnings)


@pytest.fixture(scope="module")
def whole(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> pyscan.Run:
    """The scan of all three corpora."""
    torch.set_num_threads(1)
    return scanned(trained, tmp_path_factory.mktemp("whole") / "run.mscan", *FILES)


def arguments(model: Path, output: Path, *data: Path, **options: Any) -> list[str]:
    named = {"block": 16, "batch_tokens": BATCH_TOKENS, "dtype": "float32", "device": "cpu"} | options
    flags = itertools.chain(*([f"--{k.replace('_', '-')}", str(v)] for k, v in named.items()))
    return ["scan", "--model", str(model), "--data", *map(str, data), "-o", str(output), *flags]


def scan(model: Path, output: Path, *data: Path, also: tuple[str, ...] = (), **options: Any) -> int:
    return cli.main([*arguments(model, output, *data, **options), *also])


def scanned(model: Path, output: Path, *data: Path, **options: Any) -> pyscan.Run:
    assert scan(model, output, *data, **options) == 0
    assert check(output) == []
    return pyscan.open(output)


def sequences(tokenizer: Any, path: Path, **options: Any) -> list[Sequence]:
    encoder = Encoder(tokenizer, **({"loss": "response", "max_length": 96} | options))
    return [encoder.encode(record) for record in corpus.records([path], generate=True)]


def test_the_corpora_are_what_their_script_writes(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, ROOT / "examples" / "make_corpora.py", tmp_path], check=True)
    assert done.returncode == 0
    for path in FILES:
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
        assert 60 <= corpus.survey([path]).num_records <= 100


# Rows


def oracle(model: Any, sequence: Sequence, block: int) -> dict[str, np.ndarray]:
    """A sequence alone, without the scanner: its mean loss as transformers computes it, and the gradients in .grad."""
    ids = torch.tensor([sequence.ids])
    labels = torch.where(torch.tensor([sequence.is_target]), ids, -100)
    model.zero_grad()
    loss = model(input_ids=ids, labels=labels).loss
    loss.backward()
    parts = {name: p.grad.double().split(block, 1) for name, p in model.named_parameters() if p.ndim > 1}
    model.zero_grad()
    return {"loss": loss.item()} | {n: np.array([float(x.norm()) for x in found]) for n, found in parts.items()}


LINES = [
    {"text": "x = 1"},
    {"prompt": "def f(a):", "response": " return a + 1"},
    {"text": "for i in range(10): print(i)"},
]
LINES += [{"prompt": "a", "response": "b"}, {"text": "import os\n\nprint(os.path.join('a', 'b', 'c', 'd', 'e'))" * 2}]


def test_rows_of_a_batch_are_those_of_each_sequence_alone(loaded: corpus_model.Loaded, tmp_path: Path) -> None:
    """Of unequal length, some with masked prompts; the embedding is tied to the output layer."""
    members = sequences(loaded.tokenizer, write_lines(tmp_path / "d.jsonl", *LINES))
    assert len({len(one.ids) for one in members}) == len(members)
    meter = Meter(loaded.model, block=16)
    assert meter._together
    rows = meter.measure(members)
    sites = meter.schema().sites
    meter.close()
    half = sum(site.num_blocks for site in sites)
    assert {site.name for site in sites} == {
        "lm_head.weight",
        *(n for n, p in loaded.model.named_parameters() if p.ndim > 1),
    }
    for row, member in zip(rows, members, strict=True):
        want = oracle(loaded.model, member, 16)
        assert row.loss == pytest.approx(want["loss"], rel=1e-6)
        at = half
        for site in sites:
            got = np.sqrt(row.cells[at : at + site.num_blocks])
            assert np.allclose(got, want[site.tied_to or site.name], rtol=1e-5), site.name
            at += site.num_blocks
    one_by_one = Meter(loaded.model, block=16)
    one_by_one._separate()
    alone = np.stack([row.cells for row in one_by_one.measure(members)])
    one_by_one.close()
    assert np.allclose(np.stack([row.cells for row in rows]), alone, rtol=2e-5), (
        "inputs as well: padding does not count"
    )


def test_a_weight_that_is_used_twice_is_scanned_one_sequence_at_a_time(
    loaded: corpus_model.Loaded, tmp_path: Path
) -> None:
    import copy

    model = copy.deepcopy(loaded.model)
    model.model.layers[1].mlp.up_proj = model.model.layers[0].mlp.up_proj
    members = sequences(loaded.tokenizer, write_lines(tmp_path / "d.jsonl", *LINES))[:3]
    meter = Meter(model, block=16)
    rows = meter.measure(members)
    assert not meter._together
    assert meter.take_events() == [], "nothing is missing from the rows, so there is nothing to tell"
    name = "model.layers.0.mlp.up_proj.weight"
    sites = meter.schema().sites
    meter.close()
    at = sum(site.num_blocks for site in sites) + sum(
        site.num_blocks for site in itertools.takewhile(lambda site: site.name != name, sites)
    )
    for row, member in zip(rows, members, strict=True):
        assert np.allclose(np.sqrt(row.cells[at : at + 4]), oracle(model, member, 16)[name], rtol=1e-5)


def test_rows_in_the_file_do_not_depend_on_the_size_of_batches(
    trained: Path,
    tmp_path: Path,
) -> None:
    few = texts(tmp_path / "d.jsonl", *(json.loads(line)["text"] for line in FILES[1].read_text().splitlines()[:20]))
    many = scanned(trained, tmp_path / "many.mscan", few, batch_tokens=2000)
    alone = scanned(trained, tmp_path / "alone.mscan", few, batch_tokens=1)
    assert many.steps["step"].tolist() == alone.steps["step"].tolist() == list(range(1, 21))
    for channel, site in itertools.product(("act", "grad"), many.sites):
        difference = many.codes(channel, site.name).astype(int) - alone.codes(channel, site.name)
        assert np.abs(difference).max() <= 1, "the rounding of one code"


# Generation


def test_nothing_is_recorded_while_answers_are_generated_and_they_are_the_same(
    loaded: corpus_model.Loaded, tmp_path: Path
) -> None:
    prompts = write_lines(
        tmp_path / "d.jsonl", {"prompt": "def run(self"}, {"prompt": "import"}, {"prompt": "x = [1, 2"}
    )
    members = sequences(loaded.tokenizer, prompts, generate=8)
    plain = answer(loaded.model, loaded.tokenizer, members, num_tokens=8, loss="response")
    meter = Meter(loaded.model, block=16)
    seen = answer(loaded.model, loaded.tokenizer, members, num_tokens=8, loss="response")
    meter._scan.step()
    silent = meter._scan.rows.pop()
    meter.close()
    assert [one.ids for one in seen] == [one.ids for one in plain]
    assert all(len(one.ids) > len(prompt.ids) for one, prompt in zip(seen, members, strict=True))
    assert [one.num_targets for one in seen] == [len(b.ids) - len(a.ids) for a, b in zip(members, seen, strict=True)]
    cells = silent.cells[: meter._num_cells]
    assert (cells < 0).all(), "every cell is absent"


def test_the_teacher_forced_pass_meets_the_inputs_of_generation(loaded: corpus_model.Loaded, tmp_path: Path) -> None:
    """Generation sees every token but the last, and the output layer only the newest of them."""
    model = loaded.model
    prompt = sequences(
        loaded.tokenizer, write_lines(tmp_path / "d.jsonl", {"prompt": "class Run:\n    def "}), generate=8
    )
    sums: dict[str, float] = {}

    def see(name: str) -> Any:
        def hook(module: Any, args: tuple[Any, ...]) -> None:
            sums[name] = sums.get(name, 0.0) + float(args[0].double().square().sum())

        return hook

    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    handles = [module.register_forward_pre_hook(see(f"{name}.weight")) for name, module in linears]
    [made] = answer(model, loaded.tokenizer, prompt, num_tokens=8, loss="response")
    for handle in handles:
        handle.remove()
    meter = Meter(model, block=0)
    [row] = meter.measure([replace(made, ids=made.ids[:-1], is_target=made.is_target[:-1])])
    meter.close()
    found = dict(zip((site.name for site in meter.schema().sites), np.sqrt(row.cells), strict=False))
    assert len(sums) == 14
    for name, total in sums.items():
        assert found[name] == pytest.approx(np.sqrt(total), rel=1e-5), name


def test_prompts_are_answered_and_scanned(trained: Path, tmp_path: Path) -> None:
    data = write_lines(
        tmp_path / "d.jsonl", {"prompt": "def"}, {"prompt": "import os", "response": "ignored"}, {"text": "x"}
    )
    run = scanned(trained, tmp_path / "run.mscan", data, generate=6)
    told = [event for event in run.events if event["kind"] == "sequence"]
    assert [event["text"][: len(start)] for event, start in zip(told, ("def", "import os", "x"), strict=True)]
    assert all(1 <= event["num_targets"] <= 6 for event in told)
    assert all(event["num_tokens"] > event["num_targets"] for event in told)
    assert "ignored" not in told[1]["text"]


# Trouble


def test_losses_that_say_nothing_are_told_and_do_not_touch_their_company(
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = write_lines(tmp_path / "d.jsonl", *LINES, {"prompt": "only a prompt", "response": ""})
    clean = scanned(trained, tmp_path / "clean.mscan", data)
    losses = Meter._losses

    def spoiled(meter: Meter, ids: Any, mask: Any, labels: Any) -> torch.Tensor:
        is_hit = mask.sum(1) == mask.sum(1).max()
        return losses(meter, ids, mask, labels) * torch.where(is_hit, float("nan"), 1.0)

    monkeypatch.setattr(Meter, "_losses", spoiled)
    capsys.readouterr()
    run = scanned(trained, tmp_path / "run.mscan", data)
    out = capsys.readouterr().out
    assert "no_targets in 1 sequence (6)" in out
    assert "nonfinite_loss in 1 sequence (5)" in out
    assert [(e["kind"], e["step"]) for e in run.events if e["kind"] != "sequence"] == [
        ("nonfinite_loss", 5),
        ("no_targets", 6),
    ]
    assert np.isnan(run.steps["loss"]).tolist() == [False] * 4 + [True, True]
    for site in run.sites:
        assert np.array_equal(run.codes("grad", site.name)[:4], clean.codes("grad", site.name)[:4])
        assert np.isnan(run.grad(site.name)[4])
        assert pyscan.is_absent(run.get("grad", site.name)[5:]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: (m / "config.json").unlink(), "is not a model: it has no config.json"),
        (lambda m: (m / "model.safetensors").unlink(), "no weights: there is no *.safetensors"),
        (lambda m: [p.unlink() for p in m.glob("tokenizer*")], "has no tokenizer: save it there too"),
        (lambda m: quantise(m, load_in_4bit=True, quant_method="bitsandbytes"), "is stored in 4-bit (bitsandbytes)"),
        (lambda m: quantise(m, bits=4, quant_method="gptq"), "is stored in 4-bit (gptq)"),
        (lambda m: quantise(m, quant_method="fp8"), "is stored quantised (fp8)"),
        (lambda m: (m / "model.safetensors").write_bytes(b"junk"), "the weights of the model"),
    ],
)
def test_a_model_that_cannot_be_scanned_is_refused_with_the_reason(
    trained: Path,
    tmp_path: Path,
    change: Any,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = tmp_path / "model"
    shutil.copytree(trained, model)
    change(model)
    assert scan(model, tmp_path / "run.mscan", texts(tmp_path / "d.jsonl", "a b c")) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    if "stored" in message:
        assert "no gradient" in error
        assert "unquantised, in bf16" in error
    assert not (tmp_path / "run.mscan").exists()


def quantise(model: Path, **settings: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))


@pytest.mark.parametrize(
    ("data", "also", "message"),
    [
        ('{"text": 1}\n', (), "d.jsonl:1: text must be text, got int (--skip-bad leaves them out)"),
        ("\n\n", (), "there is no sequence in"),
        ('{"text": "a"}\n', ("--generate", "-1"), "--generate must be >= 0, got -1"),
        ('{"text": "a"}\n', ("--batch-tokens", "0"), "--batch-tokens must be >= 1, got 0"),
        ('{"text": "a"}\n', ("--max-length", "1"), "--max-length must be >= 2, got 1"),
        ('{"text": "a"}\n', ("--generate", "200"), "--generate 200 leaves no room in 96 tokens"),
        ('{"text": "a"}\n', ("--include", "nothing"), "include=['nothing'] leave none of 16 weights"),
        ('{"text": "a"}\n', ("--include", "("), "--include '(' is not a regular expression"),
        (
            '{"messages": [{"role": "user", "content": "a"}]}\n',
            (),
            "d.jsonl:1 has messages, and the tokenizer has no chat",
        ),
    ],
)
def test_mistakes_are_answered_in_one_line(
    trained: Path,
    tmp_path: Path,
    data: str,
    also: tuple[str, ...],
    message: str,
    capsys: Any,
) -> None:
    (tmp_path / "d.jsonl").write_text(data)
    assert scan(trained, tmp_path / "run.mscan", tmp_path / "d.jsonl", also=also) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_an_output_that_exists_is_left_alone_unless_told(trained: Path, tmp_path: Path, capsys: Any) -> None:
    data = write_lines(tmp_path / "d.jsonl", {"text": "a b"}, {"text": 1}, {"text": "c d"})
    assert scan(trained, tmp_path / "run.mscan", data, also=("--skip-bad",)) == 0
    assert "left out" in (said := capsys.readouterr().err)
    assert "d.jsonl:2: text must be text" in said
    assert scan(trained, tmp_path / "run.mscan", data, also=("--skip-bad",)) == 2
    assert "exists: go on with --resume, name another output or add --force" in capsys.readouterr().err
    assert scan(trained, tmp_path / "run.mscan", data, also=("--skip-bad", "--force")) == 0
    assert scan(trained, tmp_path / "none" / "run.mscan", data, also=("--skip-bad",)) == 2


# Interruption


class Counted:
    """How often each sequence went through the model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stop_after: int | None = None) -> None:
        self.numbers: list[int] = []
        measure, calls = Meter.measure, itertools.count(1)

        def counted(meter: Meter, members: list[Sequence]) -> Any:
            if stop_after is not None and next(calls) > stop_after:
                raise KeyboardInterrupt
            self.numbers += [one.number for one in members]
            return measure(meter, members)

        monkeypatch.setattr(Meter, "measure", counted)


@pytest.mark.parametrize("stop_after", [0, 11])
def test_an_interrupted_scan_goes_on_to_the_same_bits(
    trained: Path,
    small: pyscan.Run,
    beginnings: list[Path],
    tmp_path: Path,
    stop_after: int,
    monkeypatch: Any,
    capsys: Any,
) -> None:
    output = tmp_path / "run.mscan"
    with monkeypatch.context() as patch:
        Counted(patch, stop_after)
        assert scan(trained, output, *beginnings) == 130
    assert "go on with the same command and --resume" in capsys.readouterr().err
    assert check(output) == [], "a clean file"
    assert not Path(f"{output}.tail").exists()
    with pyscan.open(output) as run:
        before = len(run)
        assert run.steps["step"].tolist() == list(range(1, before + 1)), "what is there is a beginning of the corpus"
    assert (before > 0) == (stop_after > 0)
    again = Counted(monkeypatch)
    assert scan(trained, output, *beginnings, also=("--resume",)) == 0
    assert check(output) == []
    finished = np.searchsorted(np.cumsum(small.steps["tokens"]), WINDOW_BATCHES * BATCH_TOKENS) + 1
    assert stop_after == 0 or min(again.numbers) > finished, "of the first window no sequence is run again"
    with pyscan.open(output) as run:
        assert_same_cells(run, small)
        told = [event["step"] for event in run.events if event["kind"] == "sequence"]
        assert sorted(told) == list(range(1, 76))
    count = len(again.numbers)
    assert scan(trained, output, *beginnings, also=("--resume",)) == 0
    assert len(again.numbers) == count, "a scan that is complete is left as it is"


def test_a_scan_of_other_weights_is_not_continued(trained: Path, tmp_path: Path, capsys: Any) -> None:
    from safetensors.torch import load_file, save_file

    data = texts(tmp_path / "d.jsonl", "a b c")
    model = tmp_path / "model"
    shutil.copytree(trained, model)
    assert scan(model, tmp_path / "run.mscan", data) == 0
    tensors = load_file(model / "model.safetensors")
    save_file({name: value * 1.01 for name, value in tensors.items()}, model / "model.safetensors", {"format": "pt"})
    assert scan(model, tmp_path / "run.mscan", data, also=("--resume",)) == 2
    assert "was scanned with weights" in capsys.readouterr().err


# Topics


def test_topics_differ_and_halves_of_one_topic_do_not(trained: Path, tmp_path: Path, capsys: Any) -> None:
    paths = [tmp_path / f"{topic}.mscan" for topic in ("arithmetic", "prose")]
    for path in paths:
        scanned(trained, path, CORPORA / f"{path.stem}.jsonl")
    capsys.readouterr()
    assert cli.main(["diff", *map(str, paths), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sequences"] == {"a": 80, "b": 80}
    assert found["tested"] == 160, "act and grad of every block"
    assert found["significant"] > found["tested"] / 2
    assert all(cell["q"] <= 0.05 for cell in found["cells"])
    assert cli.main(["diff", *map(str, paths), "--top", "3"]) == 0
    out = capsys.readouterr().out
    assert f"{found['significant']:,} of {found['tested']:,} blocks differ, the 3 strongest shown" in out
    for path in paths:
        hits = sum(split_differs(pyscan.open(path), seed) for seed in range(20))
        assert hits <= 1, f"at a rate of 0.05, one of 20 splits of {path.stem}"


def split_differs(run: pyscan.Run, seed: int) -> bool:
    """Whether any block of any site differs between two random halves of a scan."""
    order = np.random.default_rng(seed).permutation(len(run))
    half = len(run) // 2
    test = PermutationTest(half, len(run) - half, seed=seed)
    tokens = 0.5 * np.log2(run.steps["tokens"])[:, None]
    act, grad = (
        np.concatenate([levels(run.get(channel, site.name, blocks=True)) for site in run.sites], axis=1)
        for channel in ("act", "grad")
    )
    test.add(*np.split(np.concatenate([act - tokens, grad], axis=1)[order], [half]))
    return bool((adjusted(test.finish().p) <= 0.05).any())


def test_runs_of_two_kinds_are_not_compared_unasked(small: pyscan.Run, tmp_path: Path, capsys: Any) -> None:
    from pyscan.schema import Channel, Schema
    from tests.make_scan import Builder, make_cells, make_rows

    schema = Schema("m", (Channel("act"), Channel("grad")), tuple(small.sites), block=16)
    builder = Builder(schema)
    builder.writer.steps(make_rows(range(1, 11)), make_cells(schema, range(1, 11)))
    training = str(builder.save(tmp_path / "training.mscan"))
    assert cli.main(["diff", training, small.path]) == 2
    assert "is a training run and" in (said := capsys.readouterr().err)
    assert "say --by step or --by sequence" in said
    assert cli.main(["diff", training, small.path, "--by", "step"]) == 0
    assert "common step" in capsys.readouterr().out
    assert cli.main(["diff", training, small.path, "--by", "sequence"]) == 0
    assert "blocks differ" in capsys.readouterr().out
    few = Builder(replace(schema, row_kind="sequence")).save(tmp_path / "few.mscan")
    assert cli.main(["diff", str(few), small.path]) == 2
    assert "at least 8 samples in each group, a has 0" in capsys.readouterr().err


# Programs of their own


def start(command: list[str], **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | variables
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([sys.executable, *command], env=environment, **pipes)


@pytest.mark.slow
def test_a_killed_scan_is_resumed_with_every_sequence_once(
    trained: Path,
    whole: pyscan.Run,
    tmp_path: Path,
) -> None:
    output = tmp_path / "run.mscan"
    command = ["-m", "pyscan", *arguments(trained, output, *FILES)]
    killed = []
    for flag in ([], ["--resume"]):
        process = start([*command, *flag])
        deadline = time.monotonic() + 120
        while num_rows(output) <= (killed[-1] if killed else 0) + 20 and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, process.communicate()[0]
        killed.append(num_rows(output))
    assert 0 < killed[0] < killed[1] < 240, "in the middle, twice"
    done = start([*command, "--resume"])
    said, _ = done.communicate(timeout=200)
    assert done.returncode == 0, said
    assert check(output) == []
    with pyscan.open(output) as run:
        assert run.steps["step"].tolist() == list(range(1, 241))
        assert sorted(e["step"] for e in run.events if e["kind"] == "sequence") == list(range(1, 241))
        assert_same_cells(run, whole)


def num_rows(path: Path) -> int:
    try:
        with pyscan.open(path) as run:
            return len(run)
    except (OSError, pyscan.ScanError):
        return 0


@pytest.mark.slow
def test_two_processes_give_what_one_gives(trained: Path, whole: pyscan.Run, tmp_path: Path) -> None:
    output = tmp_path / "run.mscan"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pyscan"]
    done = start([*launch, *arguments(trained, output, *FILES)])
    said, _ = done.communicate(timeout=250)
    assert done.returncode == 0, said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.rank00000.mscan", "run.rank00001.mscan"]
    assert check(output) == []
    with pyscan.open(output) as run:
        assert min(len(part) for part in run.ranks.values()) > 60, "each took its share"  # type: ignore[attr-defined]
        assert_same_cells(run, whole)
        assert sorted(e["step"] for e in run.events if e["kind"] == "sequence") == list(range(1, 241))
