"""What is compared: each contestant attaches to a model and optimizer and may do something after a step.

Receives a `Training` and a directory to write to, hands on an `Attached`. All record every step unless their name says
otherwise, and are set to the least work that gives activation and weight-gradient norms, where they have such a choice.
Contestants of other projects are imported when they attach; one that is missing raises ImportError.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pyscan
from benchmarks.training.models import Training, nothing
from pyscan.budget import WINDOW


@dataclass
class Attached:
    """`after_step` is called between the optimizer's step and zero_grad."""

    values_per_step: int = 0
    after_step: Callable[[], None] = nothing
    close: Callable[[], None] = nothing
    begin_turn: Callable[[], None] = nothing
    overhead: Callable[[], float] | None = None  # what it says of itself


def weights(model: nn.Module) -> list[nn.Parameter]:
    return [m.weight for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def bare(training: Training, directory: Path) -> Attached:
    return Attached()


def plain_torch(training: Training, directory: Path) -> Attached:
    """What a careful engineer writes: norms of inputs in hooks, of all gradients in one call, one row in memory."""
    watched, params = list(linears(training.network).values()), weights(training.network)
    norms: dict[int, torch.Tensor] = {}
    rows: list[torch.Tensor] = []

    def watch(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            norms[index] = torch.linalg.vector_norm(args[0].detach(), dtype=torch.float32)

        return hook

    handles = [linear.register_forward_pre_hook(watch(index)) for index, linear in enumerate(watched)]

    @torch.no_grad()
    def after_step() -> None:
        grads = torch._foreach_norm([p.grad for p in params if p.grad is not None])
        rows.append(torch.stack([*norms.values(), *grads]))

    def close() -> None:
        for handle in handles:
            handle.remove()
        torch.save(torch.stack(rows) if rows else None, directory / "rows.pt")

    return Attached(len(watched) + len(params), after_step, close)


def naive_torch(training: Training, directory: Path) -> Attached:
    """What is found in most repositories: `.norm().item()` for every input and every gradient, as a line of JSON."""
    named, params = linears(training.network), dict(training.network.named_parameters())
    norms: dict[str, float] = {}
    log = open(directory / "norms.jsonl", "w")  # noqa: SIM115  closed with the contestant

    def watch(name: str) -> Callable[..., None]:
        return lambda module, args: norms.__setitem__(name, args[0].detach().float().norm().item())

    for name, linear in named.items():
        linear.register_forward_pre_hook(watch(name))
    matrices = {name: p for name, p in params.items() if p.ndim >= 2}

    def after_step() -> None:
        grads = {f"{name}.grad": p.grad.float().norm().item() for name, p in matrices.items() if p.grad is not None}
        log.write(json.dumps(norms | grads) + "\n")

    return Attached(len(named) + len(matrices), after_step, log.close)


def msprobe(training: Training, directory: Path) -> Attached:
    """mindstudio-probe, the lighter of its two monitors: norms of inputs, outputs and their gradients, as CSV."""
    from msprobe.core.monitor_v2.trainer import TrainerMonitorV2

    out = directory / "monitor"
    out.mkdir()  # it makes files, not directories
    named = [name for name, m in training.network.named_modules() if isinstance(m, nn.Linear | nn.Embedding)]
    settings = {
        "framework": "pytorch", "output_dir": str(out), "format": "csv", "step_interval": 1,
        "step_count_per_record": 1, "patch_optimizer_step": False,
        "monitors": {
            "module": {"enabled": True, "ops": ["norm"], "targets": named},
            "weight_grad": {"enabled": True, "ops": ["norm"]},
        },
    }  # fmt: skip
    path = directory / "monitor.json"
    path.write_text(json.dumps(settings))
    path.chmod(0o640)  # it refuses a file that others may write
    monitor = TrainerMonitorV2(str(path), fr="pytorch")
    monitor.start(model=training.network, optimizer=training.optimizer, grad_acc_steps=1)
    return Attached(4 * len(named) + len(list(training.network.parameters())), monitor.step, monitor.stop)


NVDLFW_SETTINGS = """
norms:
  enabled: True
  layers:
    layer_name_regex_pattern: .*
  LogTensorStats:
    enabled: True
    tensors_struct:
      - {tensor: activation, stats: [l2_norm], freq: 1}
      - {tensor: wgrad, stats: [l2_norm], freq: 1}
"""


def nvdlfw(training: Training, directory: Path) -> Attached:
    """nvdlfw_inspect: it has statistics and a log, but no hooks outside TransformerEngine; these are the least."""
    import nvdlfw_inspect.api as inspect_api

    path = directory / "settings.yaml"
    path.write_text(NVDLFW_SETTINGS)
    inspect_api.initialize(config_file=str(path), log_dir=str(directory), default_logging_enabled=True)

    def log(name: str, tensor: torch.Tensor, kind: str) -> None:
        inspect_api.log_tensor_stats(name, tensor=tensor, tensor_name=kind, skip_reduction=True)

    count = 0
    for name, module in training.network.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda m, args, name=name: log(name, args[0].detach(), "activation"))
            count += 1
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.register_post_accumulate_grad_hook(lambda p, name=name: log(name, p.grad, "wgrad"))
            count += 1
    return Attached(count, inspect_api.step, inspect_api.end_debug)


def wandb_watch(training: Training, directory: Path) -> Attached:
    """wandb.watch at every step, offline: a histogram of every gradient; no activations."""
    import wandb

    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
    run = wandb.init(mode="offline", project="bench", dir=str(directory), settings=settings)
    run.watch(training.network, log="gradients", log_freq=1)
    count = len(list(training.network.parameters()))
    return Attached(64 * count, lambda: run.log({}), run.finish)


def hf_debug(training: Training, directory: Path) -> Attached:
    """transformers' DebugUnderflowOverflow: extremes of every weight, input and output, forward only, kept for 21
    modules."""
    from transformers.debug_utils import DebugUnderflowOverflow

    DebugUnderflowOverflow(training.network)
    return Attached(2 * sum(1 for _ in training.network.modules()))


def scanner(**options: Any) -> Callable[[Training, Path], Attached]:
    def attach(training: Training, directory: Path) -> Attached:
        missing = [name for name in options if name not in inspect.signature(pyscan.attach).parameters]
        if missing:
            raise ImportError(f"this version of pyscan.attach has no {missing[0]}")
        scan = pyscan.attach(training.model, directory / "run.mscan", optimizer=training.optimizer, **options)

        def begin_turn() -> None:  # the turns of others are no time of its step
            scan._steps.state.begin_row()

        return Attached(
            scan.buffer.num_cells, close=scan.close, begin_turn=begin_turn, overhead=lambda: float(scan.overhead)
        )

    return attach


def scanner_budget(training: Training, directory: Path) -> Attached:
    return scanner(budget=float(os.environ.get("PYSCAN_BENCH_BUDGET", "0.01")))(training, directory)


def scanner_off(training: Training, directory: Path) -> Attached:
    """Attached and paused: what the hooks alone cost."""
    scan = pyscan.attach(training.model, directory / "run.mscan", optimizer=training.optimizer)
    pause = contextlib.ExitStack()
    pause.enter_context(scan.paused())

    def close() -> None:
        pause.close()
        scan.close()

    return Attached(0, close=close)


@dataclass(frozen=True)
class Contestant:
    attach: Callable[[Training, Path], Attached]
    records: str
    can_compile: bool = True  # it sees something of a compiled model
    is_alone: bool = False  # it changes more of its process than its model, and gets one of its own
    steps_per_turn: int = 1  # at least, so that a turn holds scanned and other steps in their proportion
    warmup_steps: int = 4  # until it takes its steps as it always will


def foreign(attach: Callable[[Training, Path], Attached], records: str, *, is_alone: bool = False) -> Contestant:
    return Contestant(attach, records, can_compile=False, is_alone=is_alone)


BLOCKS = "norms of inputs and weight gradients per 64 features, maxima, bad values"
CONTESTANTS = {
    "bare": Contestant(bare, "nothing"),
    "bare again": Contestant(bare, "nothing: the noise of the run"),
    "pyscan": Contestant(scanner(), BLOCKS),
    "pyscan per tensor": Contestant(scanner(block=0), "norms of inputs and weight gradients, maxima, bad values"),
    "pyscan tokens": Contestant(scanner(tokens=True), BLOCKS + "; per token: input and gradient norm of every weight"),
    "pyscan every 10th": Contestant(scanner(every=10), BLOCKS + "; every 10th step", steps_per_turn=10),
    "pyscan budget": Contestant(
        scanner_budget, BLOCKS + "; as often as the budget allows", steps_per_turn=WINDOW, warmup_steps=3 * WINDOW
    ),
    "pyscan off": Contestant(scanner_off, "nothing: attached and paused"),
    "plain torch": foreign(plain_torch, "norms of inputs and weight gradients, in memory"),
    "naive torch": foreign(naive_torch, "norms of inputs and weight gradients, as text"),
    "msprobe": foreign(msprobe, "norms of inputs, outputs, their gradients, weight gradients", is_alone=True),
    "nvdlfw-inspect": foreign(nvdlfw, "norms of inputs and weight gradients, 4 decimals", is_alone=True),
    "wandb.watch": foreign(wandb_watch, "histograms of gradients, no activations", is_alone=True),
    "HF debug": foreign(hf_debug, "extremes of weights, inputs, outputs; not kept; no gradients"),
}

# Few in a table, so that each gets many rounds.
TABLES = {
    "alone": ["pyscan"],
    "scanner": ["pyscan", "pyscan tokens", "plain torch"],
    "modes": ["pyscan", "pyscan per tensor"],
    "sampling": ["pyscan every 10th", "pyscan off"],
    "budget": ["pyscan", "pyscan budget"],
    "scripts": ["pyscan", "naive torch", "HF debug"],
    "tools": ["pyscan", "nvdlfw-inspect", "msprobe", "wandb.watch"],
}
os.environ.setdefault("WANDB_SILENT", "true")
