"""Inside the transformers Trainer, Lightning and Accelerate a row means what it means in a plain loop."""

import csv
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import pyscan
from pyscan.extras import MissingExtraError
from pyscan.integrations.curves import Selection
from pyscan.integrations.follow import Follower
from pyscan.steps import unwrap
from tests.test_integrations_dashboards import Recorder
from tests.test_scanner import Products, batch, llama

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
pl = pytest.importorskip("lightning.pytorch")

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import accelerate_train  # noqa: E402
import lightning_train  # noqa: E402
import transformers_train  # noqa: E402

from pyscan.integrations.lightning import ScanCallback as LightningScan  # noqa: E402
from pyscan.integrations.transformers import ScanCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

QUIET = {"enable_progress_bar": False, "enable_model_summary": False}


def samples(count: int = 32) -> list[dict[str, torch.Tensor]]:
    """Sequences of which some labels do not count, so that micro-batches weigh differently."""
    found = []
    for seed in range(count):
        ids = batch(seed)["input_ids"][0]
        labels = ids.clone()
        labels[: seed % 4] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


class Oracle(transformers.Trainer):
    """Takes gradient norms where the Trainer is about to clip, and input norms from the products themselves."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.grads: list[dict[str, float]] = []
        self.acts: list[dict[str, float]] = []
        self.clipped: list[float] = []
        self.products = Products(self.model)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        with self.products:
            return super().compute_loss(*args, **kwargs)

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        named = [(name, p) for name, p in self.model.named_parameters() if p.ndim > 1]
        self.grads.append({name: p.grad.double().norm().item() for name, p in named})
        self.acts.append({name: total**0.5 for name, total in self.products.sums.items()})
        self.products.sums.clear()
        result = super()._clip_grad_norm(model)
        self.clipped.append(sum(p.grad.double().square().sum().item() for _, p in named) ** 0.5)
        return result


def trainer(
    out: Path, *callbacks: Any, kind: type = transformers.Trainer, eval_dataset: Any = None, **options: Any
) -> transformers.Trainer:
    torch.manual_seed(0)
    settings = {
        "max_steps": 5,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.01,
        "gradient_checkpointing": True,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    arguments = transformers.TrainingArguments(str(out), **(settings | options))
    model = llama(attention_dropout=0.1).model
    return kind(model, arguments, train_dataset=samples(), eval_dataset=eval_dataset, callbacks=list(callbacks))


def figures_of_training(trained: transformers.Trainer) -> list[tuple[float, float]]:
    return [(log["loss"], log["grad_norm"]) for log in trained.state.log_history if "loss" in log]


def cells(run: pyscan.Run) -> dict[tuple[str, str], Any]:
    return {(channel.name, s.name): run.codes(channel.name, s.name) for channel in run.channels for s in run.sites}


def assert_same_rows(one: Path, other: Path, max_codes: int = 0, loss: float = 0.0) -> None:
    """The same sites, steps, losses, rates, tokens, flags and cells; `max_codes` is how far codes may differ."""
    a, b = pyscan.open(one), pyscan.open(other)
    assert [s.name for s in a.sites] == [s.name for s in b.sites]
    assert a.sites == b.sites
    for name in ("step", "tokens", "lr", "flags"):
        assert a.steps[name].tolist() == b.steps[name].tolist(), name
    np.testing.assert_allclose(a.steps["loss"], b.steps["loss"], rtol=loss, atol=0)
    mine, theirs = cells(a), cells(b)
    assert mine.keys() == theirs.keys()
    for key in mine:
        assert np.abs(mine[key].astype(int) - theirs[key].astype(int)).max() <= max_codes, key


def test_trainer_rows_are_pre_clip_norms_of_the_whole_step(tmp_path: Path) -> None:
    callback = ScanCallback(block=16)
    scanned = trainer(tmp_path, callback)
    scanned.train()
    oracle = trainer(tmp_path, kind=Oracle, gradient_checkpointing=False)
    oracle.train()
    rows, sites = callback.scan.rows, callback.scan.schema.sites
    assert [row.step for row in rows] == [1, 2, 3, 4, 5]
    totals = [sum(norm**2 for norm in grads.values()) ** 0.5 for grads in oracle.grads]
    assert max(oracle.clipped) < 0.0101 < 1 < min(totals), "the clip changes every gradient by two orders of magnitude"
    for row, acts, grads in zip(rows, oracle.acts, oracle.grads, strict=True):
        assert set(grads) == {site.name for site in sites}
        for index, site in enumerate(sites):
            for channel, want in (("act", acts.get(site.name)), ("grad", grads[site.name])):
                found = row.cells[callback.scan.buffer.cells(channel, index)].sum() ** 0.5
                assert want is None or found == pytest.approx(want, rel=1e-5), (row.step, channel, site.name)
        assert row.flags == 0, "read before the clip"


def test_trainer_losses_and_weights_are_bit_equal_with_and_without_the_callback(tmp_path: Path) -> None:
    plain = trainer(tmp_path)
    plain.train()
    scanned = trainer(tmp_path, ScanCallback(tmp_path / "run.mscan", budget=0.5))
    scanned.train()
    assert figures_of_training(plain) == figures_of_training(scanned)
    for one, other in zip(plain.model.parameters(), scanned.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_trainer_rows_hold_loss_rate_and_tokens(tmp_path: Path) -> None:
    run = trainer(tmp_path, ScanCallback(tmp_path / "run.mscan"), lr_scheduler_type="linear", warmup_steps=2)
    run.train()
    logs = [log for log in run.state.log_history if "loss" in log]
    steps = pyscan.open(tmp_path / "run.mscan").steps
    np.testing.assert_allclose(steps["loss"], [log["loss"] for log in logs], rtol=1e-6)
    np.testing.assert_allclose(steps["lr"], [log["learning_rate"] for log in logs], rtol=1e-6)
    assert steps["tokens"].tolist() == [2 * 2 * 8] * 5


def test_trainer_resumed_from_a_checkpoint_continues_the_file(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 4}
    trainer(tmp_path / "whole", ScanCallback(tmp_path / "whole.mscan"), max_steps=8).train()
    trainer(tmp_path / "out", ScanCallback(tmp_path / "run.mscan"), max_steps=6, **saving).train()
    assert pyscan.open(tmp_path / "run.mscan").steps["step"].tolist() == [1, 2, 3, 4, 5, 6]
    again = trainer(tmp_path / "out", ScanCallback(tmp_path / "run.mscan"), max_steps=8, **saving)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
    resumed = pyscan.open(tmp_path / "run.mscan")
    assert resumed.steps["step"].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert resumed.steps["flags"].tolist().count(resumed.steps["flags"][4]) == 1, "row 5 is the first of the new part"
    assert resumed.damage == []
    whole = pyscan.open(tmp_path / "whole.mscan")
    assert whole.steps["loss"].tolist() == resumed.steps["loss"].tolist()
    for key, codes in cells(whole).items():
        assert (codes == cells(resumed)[key]).all(), key


def test_trainer_that_resumes_without_a_file_begins_one_at_its_step(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    again = trainer(tmp_path, ScanCallback(tmp_path / "run.mscan"), max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert pyscan.open(tmp_path / "run.mscan").steps["step"].tolist() == [3, 4]


def test_trainer_figures_reach_reporters_that_come_before_the_callback(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    callback = ScanCallback()
    evaluation = {"eval_dataset": samples(4), "eval_strategy": "steps", "eval_steps": 2}
    run = trainer(tmp_path, callback, report_to=["tensorboard"], **evaluation)
    run.train()
    events = EventAccumulator(str(next((tmp_path / "runs").iterdir()))).Reload()
    shown = [event.value for event in events.Scalars("train/pyscan/grad_norm")]
    index = callback.scan.buffer.cells
    sites = range(len(callback.scan.schema.sites))
    want = [sum(row.cells[index("grad", i)].sum() for i in sites) ** 0.5 for row in callback.scan.rows]
    np.testing.assert_allclose(shown, want, rtol=1e-6)
    logs = [log for log in run.state.log_history if "loss" in log]
    assert [log["grad_check/ok_params"] for log in logs] == [len(sites)] * 5
    figures = ("grad_norm", "act_max", "grad_max", "bad_values", "alarms", "overhead")
    assert {f"pyscan/{name}" for name in figures} <= set(logs[0])
    others = [log for log in run.state.log_history if "loss" not in log]
    assert any("eval_loss" in log for log in others)
    assert not [log for log in others if "pyscan/grad_norm" in log], "figures of training are not those of evaluation"
    assert [row.step for row in callback.scan.rows] == [1, 2, 3, 4, 5], "and evaluation is not recorded"


def test_trainer_begun_anew_does_not_overwrite_a_finished_scan(tmp_path: Path) -> None:
    run = trainer(tmp_path, ScanCallback(tmp_path / "run.mscan"), max_steps=2)
    run.train()
    with pytest.raises(FileExistsError, match="resume=True"):
        run.train()
    assert pyscan.open(tmp_path / "run.mscan").steps["step"].tolist() == [1, 2]


def test_trainer_that_failed_and_begins_anew_replaces_its_own_rows(tmp_path: Path) -> None:
    """As with auto_find_batch_size: the loop dies in the middle and starts again from step 0."""

    class Fails(transformers.Trainer):
        calls = 0

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            type(self).calls += 1
            if self.calls == 6:
                raise MemoryError("planted")
            return super().training_step(*args, **kwargs)

    run = trainer(tmp_path, ScanCallback(tmp_path / "run.mscan"), kind=Fails, max_steps=3)
    with pytest.raises(MemoryError):
        run.train()
    run.train()
    assert pyscan.open(tmp_path / "run.mscan").steps["step"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", [ScanCallback, LightningScan])
def test_callbacks_refuse_bad_options_before_training(kind: type) -> None:
    with pytest.raises(TypeError, match="optimizer is the trainer's own"):
        kind(optimizer=1)
    with pytest.raises(ValueError, match="every must be an int >= 1, got 0"):
        kind(every=0)
    with pytest.raises(TypeError, match="blocks"):
        kind(blocks=3)


def test_a_logger_that_fails_in_the_figures_turns_the_scan_off_and_not_the_run(tmp_path: Path) -> None:
    callback = ScanCallback()
    run = trainer(tmp_path, callback)

    class Plant(transformers.TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            callback.scan.figures = None

    run.add_callback(Plant())
    with pytest.warns(RuntimeWarning, match="turned itself off"):
        run.train()
    assert run.state.global_step == 5


def test_a_follower_is_shown_every_row_and_closed_when_training_ends(tmp_path: Path) -> None:
    sinks = Recorder(), Recorder()

    def follow(sink: Recorder) -> Any:
        return lambda scan: Follower(scan, sink, Selection(), 60)

    trainer(tmp_path, ScanCallback(tmp_path / "one.mscan", follow=follow(sinks[0]))).train()
    fit(Small(), tmp_path, LightningScan(tmp_path / "other.mscan", follow=follow(sinks[1])))
    assert [[point.step for point in sink.points] for sink in sinks] == [[1, 2, 3, 4, 5], [1, 2, 3, 4]]
    assert all(sink.is_closed for sink in sinks)


# The same model in four loops


def plain_loop(path: Path, steps: int, accumulation: int, hidden: int) -> None:
    torch.manual_seed(0)
    model = accelerate_train.make_model(hidden).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = iter(accelerate_train.make_data(steps * accumulation))
    with pyscan.attach(model, path, optimizer=optimizer):
        for _ in range(steps):
            for _ in range(accumulation):
                ids = next(batches)
                (model(input_ids=ids, labels=ids).loss / accumulation).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


SIZE = {"steps": 4, "accumulation": 2, "hidden": 64}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "plain.mscan"
    plain_loop(path, **SIZE)
    run = pyscan.open(path)
    assert run.steps["step"].tolist() == [1, 2, 3, 4]
    assert (run.steps["tokens"] == 2 * 4 * 64).all()
    assert np.isfinite(run.steps["loss"]).all()
    return path


def test_accelerate_example_records_what_the_plain_loop_records(plain: Path, tmp_path: Path) -> None:
    accelerate_train.train(str(tmp_path / "run.mscan"), **SIZE)
    assert_same_rows(plain, tmp_path / "run.mscan")


def test_lightning_example_records_what_the_plain_loop_records(plain: Path, tmp_path: Path) -> None:
    lightning_train.train(str(tmp_path / "run.mscan"), **SIZE, **QUIET)
    assert_same_rows(plain, tmp_path / "run.mscan")


def test_transformers_example_records_what_the_plain_loop_records(plain: Path, tmp_path: Path) -> None:
    """It divides by the tokens of the step in another order: a last bit, which three steps of AdamW may carry on."""
    transformers_train.train(str(tmp_path / "run.mscan"), str(tmp_path / "out"), **SIZE)
    assert_same_rows(plain, tmp_path / "run.mscan", max_codes=3, loss=2e-5)


# Accelerate


def test_the_optimizer_inside_accelerates_wrapper_is_found() -> None:
    inner = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert unwrap(accelerate.Accelerator(cpu=True).prepare(inner)) is inner


def test_accelerate_checkpoints_keep_the_place_of_the_scan(tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*_model_and_optimizer())
    with pyscan.attach(model, tmp_path / "run.mscan", optimizer=optimizer) as scan:
        accelerator.register_for_checkpointing(scan)
        for k in range(5):
            if k == 3:
                accelerator.save_state(str(tmp_path / "state"))
            accelerator.backward(model(torch.ones(2, 8)).sum())
            optimizer.step()
            optimizer.zero_grad()
    with pyscan.attach(model, tmp_path / "run.mscan", optimizer=optimizer, resume=True) as scan:
        accelerator._custom_objects.clear()
        accelerator.register_for_checkpointing(scan)
        accelerator.load_state(str(tmp_path / "state"))
        accelerator.backward(model(torch.ones(2, 8)).sum())
        optimizer.step()
    assert pyscan.open(tmp_path / "run.mscan").steps["step"].tolist() == [1, 2, 3, 4]


def _model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


# Lightning


class Small(pl.LightningModule):
    """Its loss is its own, which no output of the model tells."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        self.seen: list[float] = []
        self.norms: list[float] = []

    def training_step(self, x: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.net(x).square().mean()
        self.seen.append(loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscaled and before the clip, says Lightning."""
        self.norms.append(self.net[0].weight.grad.double().norm().item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TwoOptimizers(Small):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 2)
        self.automatic_optimization = False

    def training_step(self, x: torch.Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer, module in ((first, self.net), (second, self.other)):
            self.manual_backward(module(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net, self.other)]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass


def rows_of_data(count: int = 24) -> torch.utils.data.DataLoader:
    data = torch.randn(count, 4, 8, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader(data, batch_size=None)


def fit(module: pl.LightningModule, root: Path, *callbacks: Any, ckpt_path: Any = None, **options: Any) -> pl.Trainer:
    torch.manual_seed(0)
    settings = {"max_steps": 4, "logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    run = pl.Trainer(default_root_dir=root, callbacks=list(callbacks), **QUIET, **(settings | options))
    run.fit(module, rows_of_data(), ckpt_path=ckpt_path)
    return run


def test_lightning_rows_hold_the_pre_clip_norm_and_the_mean_loss(tmp_path: Path) -> None:
    module, callback = Small(), LightningScan()
    fit(module, tmp_path, callback, accumulate_grad_batches=3, gradient_clip_val=1e-3)
    scan = callback.scan
    assert [site.name for site in scan.schema.sites] == ["0.weight", "2.weight"], "names of the bare model"
    assert [row.step for row in scan.rows] == [1, 2, 3, 4]
    grads = [row.cells[scan.buffer.cells("grad", 0)].sum() ** 0.5 for row in scan.rows]
    assert min(module.norms) > 1e-2
    np.testing.assert_allclose(grads, module.norms, rtol=1e-6)
    np.testing.assert_allclose([row.loss for row in scan.rows], np.reshape(module.seen, (4, 3)).mean(1), rtol=1e-6)
    assert [row.lr for row in scan.rows] == [0.1] * 4


def test_lightning_training_is_bit_equal_with_and_without_the_callback(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Small()
    torch.manual_seed(0)
    scanned = Small()
    fit(plain, tmp_path, gradient_clip_val=0.1)
    fit(scanned, tmp_path, LightningScan(tmp_path / "run.mscan"), gradient_clip_val=0.1)
    assert plain.seen == scanned.seen
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), scanned.parameters(), strict=True))


def test_lightning_resumed_from_a_checkpoint_continues_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Small()
    first = fit(module, tmp_path, LightningScan(tmp_path / "run.mscan"), max_steps=3)
    first.save_checkpoint(tmp_path / "three.ckpt")
    first.fit_loop.epoch_loop.max_steps = 5
    first.fit(module, rows_of_data())
    assert pyscan.open(tmp_path / "run.mscan").steps["step"].tolist() == [1, 2, 3, 4, 5]
    again = LightningScan(tmp_path / "run.mscan")
    fit(Small(), tmp_path, again, max_steps=6, ckpt_path=tmp_path / "three.ckpt")
    assert pyscan.open(tmp_path / "run.mscan").steps["step"].tolist() == [1, 2, 3, 4, 5, 6]
    assert pyscan.open(tmp_path / "run.mscan").damage == []


def test_lightning_closes_one_row_for_several_optimizers_and_continues_their_count(tmp_path: Path) -> None:
    first = fit(TwoOptimizers(), tmp_path, LightningScan(tmp_path / "run.mscan"), max_steps=6)
    assert first.global_step == 6
    run = pyscan.open(tmp_path / "run.mscan")
    assert run.steps["step"].tolist() == [1, 2, 3]
    assert [site.name for site in run.sites] == ["net.0.weight", "net.2.weight", "other.weight"]
    first.save_checkpoint(tmp_path / "three.ckpt")
    fit(
        TwoOptimizers(), tmp_path, LightningScan(tmp_path / "run.mscan"), max_steps=8, ckpt_path=tmp_path / "three.ckpt"
    )
    assert pyscan.open(tmp_path / "run.mscan").steps["step"].tolist() == [1, 2, 3, 4]


def test_lightning_scans_the_named_submodule(tmp_path: Path) -> None:
    callback = LightningScan(module="net.2")
    fit(Small(), tmp_path, callback)
    assert [site.name for site in callback.scan.schema.sites] == ["weight"]


def test_lightning_loggers_get_figures_as_often_as_lightning_logs(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    callback = LightningScan()
    logger = CSVLogger(tmp_path)
    fit(Small(), tmp_path, callback, logger=logger, log_every_n_steps=2, max_steps=5)
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        shown = [(int(row["step"]), float(row["pyscan/grad_norm"])) for row in csv.DictReader(file)]
    index = callback.scan.buffer.cells
    want = [sum(callback.scan.rows[k].cells[index("grad", i)].sum() for i in (0, 1)) ** 0.5 for k in (1, 3)]
    assert [step for step, _ in shown] == [2, 4]
    np.testing.assert_allclose([value for _, value in shown], want, rtol=1e-6)
    fit(Small(), tmp_path, LightningScan(), logger=CSVLogger(tmp_path / "none"), log_every_n_steps=0)


def test_lightning_closes_the_file_when_training_fails(tmp_path: Path) -> None:
    class Fails(Small):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fit(Fails(), tmp_path, LightningScan(tmp_path / "run.mscan"))
    assert pyscan.open(tmp_path / "run.mscan").steps["step"].tolist() == [1, 2, 3]
    assert not (tmp_path / "run.mscan.tail").exists()


# What a loop tells by itself


def test_noted_losses_and_tokens_go_before_those_of_the_model() -> None:
    model = llama().model.train()
    with pyscan.attach(model) as scan:
        for k, (loss, tokens) in enumerate([(torch.tensor(2.0), 3), (4.0, 5)]):
            model(**batch(k)).loss.backward()
            scan.note(loss=loss, tokens=tokens)
        scan.step()
        model(**batch(1)).loss.backward()
        scan.step()
    assert (scan.rows[0].loss, scan.rows[0].tokens) == (3.0, 8)
    assert scan.rows[1].tokens == 16
    assert scan.rows[1].loss == pytest.approx(model(**batch(1)).loss.item())


@pytest.mark.parametrize(("module", "extra"), [("transformers", "transformers"), ("lightning", "lightning")])
def test_a_missing_trainer_is_named_with_its_extra(module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("transformers.trainer_callback", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"pyscan.integrations.{module}")
    with pytest.raises(MissingExtraError, match=rf"{extra} is not installed: pip install 'pyscan\[{extra}\]'"):
        __import__(f"pyscan.integrations.{module}")
