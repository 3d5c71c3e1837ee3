"""The loop that people copy: the same with and without pyscan, exact in its numbers, and resumed without a seam."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import pyscan
from pyscan import format as fmt
from pyscan.cli import main as pyscan_main
from tests.loop import OPTIONS, ROOT, assert_same_cells, make_job, run_python, train_scanned

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    """Sums are added in one order, as in the programs that are started with OMP_NUM_THREADS=1."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def code_lines(name: str) -> list[str]:
    source = (EXAMPLES / name).read_text()
    lines = source[source.index("from __future__") :].splitlines()
    return [line for line in lines if line.strip()]


def test_the_plain_example_differs_in_the_lines_that_say_scan_only() -> None:
    scanned = code_lines("train.py")
    assert [line for line in scanned if "scan" not in line] == code_lines("train_plain.py")
    assert 4 <= sum("scan" in line for line in scanned) <= 6


def test_the_default_model_has_the_shape_of_minimind() -> None:
    from pyscan.demo import load_example

    example = load_example()
    with torch.device("meta"):
        model = example.make_model(example.parse_arguments(["--device", "meta"]))
    config = model.config
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (512, 8, 6400)
    assert 25e6 < sum(p.numel() for p in model.parameters()) < 27e6


class Oracle:
    """Gradients as the loop hands them to the clipping: read from .grad by a plain call, without any hook."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []
        clip = torch.nn.utils.clip_grad_norm_

        def recorded(parameters: Any, limit: float) -> Any:
            grads = {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.ndim > 1}
            self.steps.append(grads)
            return clip(parameters, limit)

        monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", recorded)


OVERFLOW, NUM_STEPS, CLIP = 3, 6, 0.01
FP16 = f"--steps {NUM_STEPS} --dtype float16 --accumulate 4 --clip {CLIP}".split()


def fp16_job(output: Path) -> Any:
    """The loop in fp16 with a scaler; in one micro-batch of step 3 the scaled loss is infinite."""
    example, job = make_job(output, *FP16)
    scale, calls = job.scaler.scale, []

    def overflowing(loss: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        is_hit = len(calls) == 4 * (OVERFLOW - 1) + 2
        return scale(loss) * float("inf") if is_hit else scale(loss)

    job.scaler.scale = overflowing
    return example, job


def test_gradients_of_the_fp16_loop_equal_an_oracle_without_hooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example, job = fp16_job(tmp_path)
    with monkeypatch.context() as patch:
        oracle = Oracle(patch, job.model)
        example.train(job)
    plain = {name: p.detach().clone() for name, p in job.model.named_parameters()}
    assert len(oracle.steps) == NUM_STEPS
    largest = max(float(g.norm()) for i, grads in enumerate(oracle.steps) for g in grads.values() if i != OVERFLOW - 1)
    assert largest > CLIP, "clipping has something to do"

    def scanned(path: Path | None) -> pyscan.Scanner:
        example, job = fp16_job(tmp_path)
        with pyscan.attach(job.model, path, optimizer=job.optimizer, block=16) as scan:
            example.train(job)
        assert all(torch.equal(plain[name], p) for name, p in job.model.named_parameters()), "training is unchanged"
        return scan

    memory = scanned(None)
    file = pyscan.open(scanned(tmp_path / "run.mscan").path)  # type: ignore[arg-type]
    sites = {site.name: site for site in memory.schema.sites}
    assert set(sites) == {"lm_head.weight", *oracle.steps[0]}
    assert [row.step for row in memory.rows] == file.steps["step"].tolist() == [*range(1, NUM_STEPS + 1)]
    for number, grads in enumerate(oracle.steps):
        is_skipped = number + 1 == OVERFLOW
        assert bool(memory.rows[number].flags & fmt.ROW_SKIPPED) == is_skipped
        assert bool(file.steps["flags"][number] & fmt.ROW_SKIPPED) == is_skipped
        for index, (name, site) in enumerate(sites.items()):
            grad = grads[site.tied_to or name].double()
            want = torch.tensor([part.norm() for part in grad.split(16, 1)], dtype=torch.float64)
            cells = memory.rows[number].cells[memory.buffer.cells("grad", index)]
            got, stored = torch.tensor(cells).sqrt(), torch.tensor(file.grad(name, blocks=True)[number]).double()
            if is_skipped:
                assert got.isnan().any(), "the overflow is seen"
                continue
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-12)
            torch.testing.assert_close(stored, want, rtol=2e-3, atol=1e-12)


def test_run_gives_the_plain_loop_the_cells_of_the_scanned_one(tmp_path: Path) -> None:
    want = train_scanned(tmp_path / "scanned", "--steps", "5")
    script = str(EXAMPLES / "train_plain.py")
    options = [*OPTIONS, "--steps", "5", "-o", str(tmp_path / "plain")]
    run = run_python("-m", "pyscan", "run", "-o", str(tmp_path / "auto.mscan"), script, *options)
    assert run.returncode == 0, run.stderr
    assert "scanning LlamaForCausalLM (16 sites) at each step of AdamW" in run.stderr
    assert_same_cells(pyscan.open(tmp_path / "auto.mscan"), want)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.loop import make_job
import pyscan

output = Path(sys.argv[1])
example, job = make_job(output, "--steps", "12", "--save-every", "5")
scan = pyscan.attach(job.model, output / "run.mscan", optimizer=job.optimizer)
job.parts["scan"] = scan


def die(*args):
    if job.step == 8:
        scan.state_dict()  # whose rows are in the file when it returns
        os.kill(os.getpid(), signal.SIGKILL)


job.optimizer.register_step_post_hook(die)
example.train(job)
"""


def test_a_killed_run_resumed_from_an_older_checkpoint_has_no_seam(tmp_path: Path) -> None:
    whole = train_scanned(tmp_path / "whole", "--steps", "12")
    killed = run_python("-c", KILLED, str(tmp_path / "killed"), cwd=ROOT)
    assert killed.returncode == -9, killed.stderr
    left = pyscan.open(tmp_path / "killed" / "run.mscan")
    assert left.steps["step"].tolist() == [*range(1, 9)], "three rows after the checkpoint"
    left.close()
    resumed = train_scanned(tmp_path / "killed", "--steps", "12", "--save-every", "5", "--resume")
    assert resumed.steps["step"].tolist() == [*range(1, 13)]
    assert_same_cells(resumed, whole)
    marks = resumed.steps["flags"] & fmt.ROW_RESUMED
    assert marks.nonzero()[0].tolist() == [5], "step 6 is where it went on"
    events = [(event["step"], event["after_step"]) for event in resumed.events if event["kind"] == "resumed"]
    assert events == [(6, 5)]
    assert pyscan_main(["check", str(tmp_path / "killed" / "run.mscan")]) == 0


def test_rows_of_the_abandoned_part_are_gone_from_the_cells_too(tmp_path: Path) -> None:
    """The continued part is trained with another learning rate: every one of its rows can be told from the old ones."""
    train_scanned(tmp_path, "--steps", "5").close()
    kept = (tmp_path / "checkpoint.pt").read_bytes()
    before = train_scanned(tmp_path, "--steps", "8", "--resume")
    site = before.sites[-1].name
    old = before.codes("grad", site).copy()
    (tmp_path / "checkpoint.pt").write_bytes(kept)
    resumed = train_scanned(tmp_path, "--steps", "8", "--resume", "--lr", "0.05")
    new = resumed.codes("grad", site)
    assert resumed.steps["step"].tolist() == [*range(1, 9)]
    assert (new[:5] == old[:5]).all()
    assert (new[6:] != old[6:]).any(axis=1).all(), "step 7 is the first that sees the other learning rate"


@pytest.mark.slow
def test_the_demo_command_trains_reports_and_resumes(tmp_path: Path) -> None:
    home = tmp_path / "demo"
    run = run_python("-m", "pyscan", "demo", "--steps", "24", "-o", str(home), "--", *OPTIONS, "--save-every", "12")
    assert run.returncode == 0, run.stderr
    for part in ("the most and the least active sites", "overhead ", "loss ", "healthy in", "try next"):
        assert part in run.stdout, run.stdout
    scan = home / "run.mscan"
    for verb in ("info", "check", "show", "health"):
        assert pyscan_main([verb, str(scan)]) == 0, verb
    paused = set(range(1, 25)) - set(pyscan.open(scan).steps["step"].tolist())
    assert paused == {5, 8, 11, 14, 17, 20, 23}
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (kind.from_pretrained(home / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer("def main():", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == "def main():"
    assert model(ids).logits.shape == (*ids.shape, 280)
    again = run_python("-m", "pyscan", "demo", "--steps", "30", "-o", str(home), "--resume", "--", *OPTIONS)
    assert again.returncode == 0, again.stderr
    assert pyscan.open(scan).steps["step"][-1] == 30
    taken = run_python("-m", "pyscan", "demo", "-o", str(home))
    assert (taken.returncode, "add --resume" in taken.stderr) == (2, True)


def test_without_its_libraries_the_demo_names_the_extra(tmp_path: Path) -> None:
    code = "import sys; sys.modules['tokenizers'] = None; from pyscan.cli import main; sys.exit(main(['demo']))"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                         env={"PYTHONPATH": str(ROOT)})  # fmt: skip
    assert (run.returncode, run.stderr.splitlines()[-1]) == (
        2,
        "pyscan: tokenizers is not installed: pip install 'pyscan[demo]'",
    )
