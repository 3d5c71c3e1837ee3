"""What tests/test_ranks_live.py starts under torchrun: tiny models trained in every way that ranks can share them.

Each case runs without the scanner, with its rows in memory, and with files; rank 0 puts the rows of all ranks together
by the merge rules, compares them with one process that has the whole batch, and writes what it found as JSON.

    torchrun --nproc-per-node 2 -m tests.ranks_worker OUT CASE...
"""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import pyscan
from pyscan.check import check
from tests.gloo import leave

BLOCK = 64
VOCAB, WIDTH, INNER = 50, 96, 160  # halves of 48 and 80 split a block
STEPS = 3
BATCH, LENGTH = 8, 6


class Transposed(nn.Module):
    """A weight stored [in, out], as in GPT-2: sharding its rows cuts the inputs."""

    is_transposed = True

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.nf = num_out
        self.weight = nn.Parameter(torch.randn(num_in, num_out) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


Conv1D = type("Conv1D", (Transposed,), {})  # pyscan knows it by this name


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.mix = Conv1D(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        x = x + self.down(torch.relu(self.up(x)))
        return self.head(x + self.mix(x))


class First(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.embed, self.norm, self.up, self.down = net.embed, net.norm, net.up, net.down

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.embed(ids))
        return x + self.down(torch.relu(self.up(x)))


class Last(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.mix, self.head = net.mix, net.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.mix(x))


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.float().flatten(0, 1), target.flatten())


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(7)
    draw = lambda: torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)  # noqa: E731
    return [(draw(), draw()) for _ in range(STEPS)]


def new_net() -> Net:
    torch.manual_seed(3)
    return Net()


class Case:
    """One way to share a model: how it is wrapped, and how a step's backward runs on this rank's rows."""

    def __init__(self) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def wrap(self, net: Net) -> nn.Module:
        raise NotImplementedError

    def shard(self) -> tuple[int, int]:
        """(which, of how many) parts of the batch this rank sees."""
        return self.rank, self.world

    def rows(self, x: Tensor) -> Tensor:
        which, number = self.shard()
        return x.chunk(number)[which]

    def backward(self, model: nn.Module, ids: Tensor, target: Tensor) -> Tensor:
        loss = loss_of(model(self.rows(ids)), self.rows(target))
        loss.backward()
        return loss.detach()


class Ddp(Case):
    options: ClassVar[dict[str, Any]] = {}

    def wrap(self, net: Net) -> nn.Module:
        return DistributedDataParallel(net, **self.options)


class DdpStatic(Ddp):
    options: ClassVar[dict[str, Any]] = {"static_graph": True, "gradient_as_bucket_view": True}


class DdpNoSync(Ddp):
    """Two micro-batches, of which the first is not synchronised."""

    def backward(self, model: nn.Module, ids: Tensor, target: Tensor) -> Tensor:
        halves = list(zip(self.rows(ids).chunk(2), self.rows(target).chunk(2), strict=True))
        with model.no_sync():
            first = loss_of(model(halves[0][0]), halves[0][1]) / 2
            first.backward()
        second = loss_of(model(halves[1][0]), halves[1][1]) / 2
        second.backward()
        return (first + second).detach()


class Fsdp(Case):
    options: ClassVar[dict[str, Any]] = {}

    def mesh(self) -> Any:
        return init_device_mesh("cpu", (self.world,), mesh_dim_names=("dp",))

    def wrap(self, net: Net) -> nn.Module:
        mesh = self.mesh()
        for part in (net.up, net.down):
            fully_shard(part, mesh=mesh, **self.options)
        return fully_shard(net, mesh=mesh, **self.options)


class FsdpKept(Fsdp):
    options: ClassVar[dict[str, Any]] = {"reshard_after_forward": False}


class FsdpAccumulated(Fsdp):
    """Two micro-batches; gradients are reduced after the second."""

    def backward(self, model: nn.Module, ids: Tensor, target: Tensor) -> Tensor:
        total = torch.zeros(())
        pairs = list(zip(self.rows(ids).chunk(2), self.rows(target).chunk(2), strict=True))
        for i, (x, y) in enumerate(pairs):
            model.set_requires_gradient_sync(i == 1)
            loss = loss_of(model(x), y) / 2
            loss.backward()
            total += loss.detach()
        return total


class FsdpBf16(Fsdp):
    options: ClassVar[dict[str, Any]] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    }


class Hsdp(Fsdp):
    def mesh(self) -> Any:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


class Tp(Case):
    """All ranks see all rows."""

    def shard(self) -> tuple[int, int]:
        return 0, 1

    def mesh(self) -> Any:
        return init_device_mesh("cpu", (self.world,), mesh_dim_names=("tp",))

    def plan(self) -> dict[str, Any]:
        return {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }

    def wrap(self, net: Net) -> nn.Module:
        return parallelize_module(net, self.mesh(), self.plan())


class SequenceTp(Tp):
    """The norm runs on a part of the sequence; what follows gathers it, and `down` hands on such parts again."""

    def plan(self) -> dict[str, Any]:
        return {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
            "norm": SequenceParallel(use_local_output=True),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
            "mix": SequenceParallel(use_local_output=True),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }


class FsdpTp(Case):
    """Two by two: rows of the weight over dp, and over tp what the plan says."""

    def shard(self) -> tuple[int, int]:
        return self.rank // 2, 2

    def wrap(self, net: Net) -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(net, mesh["tp"], Tp.plan(self))  # type: ignore[arg-type]
        fully_shard(net.up, mesh=mesh["dp"])
        return fully_shard(net, mesh=mesh["dp"])


class Pipeline(Case):
    """Two stages, four micro-batches; with four ranks, two such pipelines whose stages are sharded."""

    def shard(self) -> tuple[int, int]:
        return self.rank % (self.world // 2), self.world // 2

    def wrap(self, net: Net) -> nn.Module:
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        self.mesh = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("pp", "dp"))
        stage_index = self.mesh.get_local_rank("pp")
        stage: nn.Module = Last(net) if stage_index else First(net)
        if self.world > 2:
            stage = fully_shard(stage, mesh=self.mesh["dp"])
        pipe = PipelineStage(stage, stage_index, 2, torch.device("cpu"), group=self.mesh.get_group("pp"))
        self.schedule = ScheduleGPipe(pipe, 4, loss_fn=loss_of)
        self.stage_index = stage_index
        return stage

    def backward(self, model: nn.Module, ids: Tensor, target: Tensor) -> Tensor:
        losses: list[Tensor] = []
        if self.stage_index:
            self.schedule.step(target=self.rows(target), losses=losses)
        else:
            self.schedule.step(self.rows(ids))
        return torch.stack(losses).mean().detach() if losses else torch.zeros(())


CASES: dict[str, type[Case]] = {
    "ddp": Ddp,
    "ddp_static": DdpStatic,
    "ddp_no_sync": DdpNoSync,
    "fsdp": Fsdp,
    "fsdp_kept": FsdpKept,
    "fsdp_accumulated": FsdpAccumulated,
    "fsdp_bf16": FsdpBf16,
    "hsdp": Hsdp,
    "tp": Tp,
    "sequence_tp": SequenceTp,
    "fsdp_tp": FsdpTp,
    "pipeline": Pipeline,
}


# One process that has the whole batch


def block_sums(matrix: Tensor, dim: int) -> Tensor:
    """Sums of squares of blocks of columns (dim 1) or rows (dim 0), in float64."""
    squares = matrix.detach().double().square().sum(dim=1 - dim)
    return torch.stack([part.sum() for part in squares.split(BLOCK)])


def truth() -> list[dict[tuple[str, str], np.ndarray]]:
    """Per step the sums of squares (maxima, counts) of every (channel, site), by plain hooks in plain torch."""
    net, found = new_net(), []
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    inputs: dict[str, Tensor] = {}
    for name in ("up", "down", "mix", "head"):
        getattr(net, name).register_forward_pre_hook(lambda m, args, name=name: inputs.update({name: args[0].detach()}))
    net.embed.register_forward_hook(lambda m, args, out: inputs.update(embed=out.detach()))
    for ids, target in batches():
        optimizer.zero_grad()
        loss_of(net(ids), target).backward()
        row: dict[tuple[str, str], np.ndarray] = {}
        for name, x in inputs.items():
            grad = getattr(net, name).weight.grad
            grad = grad.t() if name == "mix" else grad
            site = f"{name}.weight"
            row["act", site] = block_sums(x.flatten(0, -2), 1).numpy()
            row["grad", site] = block_sums(grad, 1).numpy()
            row["grad_out", site] = block_sums(grad, 0).numpy()
            row["act_max", site] = np.array([float(x.abs().max())])
            row["grad_max", site] = np.array([float(grad.abs().max())])
            row["act_bad", site] = row["grad_bad", site] = np.zeros(1)
        found.append(row)
        optimizer.step()
    return found


# All ranks together, by the rules their schemas give


def merged(schemas: list[Any], rows: list[Any]) -> dict[tuple[str, str], np.ndarray]:
    """One step: the cells of every rank put together as FORMAT.md says, written anew for this test."""
    parts: dict[tuple[str, str], dict[tuple[int, ...], list[tuple[int, np.ndarray]]]] = {}
    sizes: Counter[tuple[str, str]] = Counter()
    for schema, cells in zip(schemas, rows, strict=True):
        at = 0
        for channel in schema.channels:
            for site in schema.sites:
                number = site.num_cells(channel.per)
                rule = site.merge[channel.name]
                assert set(rule.over) | set(rule.replicas) == set(schema.mesh.dims), (site.name, rule)
                key = tuple(c for d, c in zip(schema.mesh.dims, schema.mesh.coords, strict=True) if d not in rule.over)
                first = {"site": 0, "block": site.offset[1] // BLOCK, "row_block": site.offset[0] // BLOCK}[channel.per]
                place = channel.name, site.name
                parts.setdefault(place, {}).setdefault(key, []).append((first, cells[at : at + number]))
                sizes[place] = max(sizes[place], first + number)
                at += number
        assert at == len(cells)
    ops = {channel.name: channel.op for channel in schemas[0].channels}
    return {place: _one(groups, sizes[place], ops[place[0]]) for place, groups in parts.items()}


def _one(groups: dict[Any, list[tuple[int, np.ndarray]]], size: int, op: str) -> np.ndarray:
    results = []
    for shards in groups.values():
        total, seen = np.zeros(size), np.zeros(size, bool)
        for first, values in shards:
            place = slice(first, first + len(values))
            there = values >= 0
            total[place] = np.maximum(total[place], values * there) if op == "max" else total[place] + values * there
            seen[place] |= there
        results.append(np.where(seen, total, np.nan))
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], rtol=1e-5, atol=1e-12)
    return results[0]


def worst(found: np.ndarray, want: np.ndarray) -> float:
    """The largest relative error of norms; infinite where shapes differ or something is absent."""
    if found.shape != want.shape or not np.isfinite(found).all():
        return float("inf")
    scale = np.maximum(np.abs(want), 1e-12)
    return float(np.max(np.abs(found - want) / scale, initial=0.0))


# Runs


def train(case: Case, attach: Callable[[nn.Module, Any], Any] | None, counts: list[Any] | None = None) -> Any:
    """Losses and weights of a run, and the scanner that watched it."""
    model = case.wrap(new_net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scan = attach(model, optimizer) if attach else None
    losses = []
    for ids, target in batches():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            optimizer.zero_grad()
            losses.append(case.backward(model, ids, target))
            optimizer.step()
        if counts is not None:
            counts.append(collectives(profile))
    weights = [(p.to_local() if hasattr(p, "to_local") else p).detach().clone() for p in model.parameters()]
    if scan is not None:
        scan.close()
    return losses, weights, scan


ITEM_BYTES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "int": 4, "unsigned char": 1}


def collectives(profile: Any) -> list[tuple[str, int]]:
    """Every transfer of a step with the bytes it was given."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name().startswith("gloo:")]
    return sorted((event.name(), num_bytes(event)) for event in events)


def num_bytes(event: Any) -> int:
    """Of all tensors of a profiler's event; of lists of them it has the shapes of each."""
    total = 0
    for shape, dtype in zip(event.shapes(), event.dtypes(), strict=True):
        if dtype:
            total += math.prod(shape) * ITEM_BYTES[dtype]
    return total


def gathered(value: Any) -> list[Any]:
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out


def run_case(name: str, out: Path, want: list[dict[tuple[str, str], np.ndarray]]) -> dict[str, Any]:
    case = CASES[name]()
    bare_counts: list[Any] = []
    counts: list[Any] = []
    bare = train(case, None, bare_counts)
    in_memory = train(case, lambda model, opt: pyscan.attach(model, optimizer=opt, rows=True, watch=False), counts)
    path = out / f"{name}.mscan"
    train(case, lambda model, opt: pyscan.attach(model, path, optimizer=opt, rows=True))
    result: dict[str, Any] = {
        "identical": all(map(torch.equal, [*bare[0], *bare[1]], [*in_memory[0], *in_memory[1]])),
        "collectives": sum(map(len, counts)),
        "bytes_sent": sum(size for step in counts for _, size in step),
        "same_collectives": counts == bare_counts,
        "events": [e for e in in_memory[2].events if e["kind"] in ("off", "model_changed", "note")],
    }
    scan = in_memory[2]
    every = gathered((scan.schema, [row.cells for row in scan.rows], [row.flags for row in scan.rows]))
    flags = [row for _, _, of_rank in every for row in of_rank]
    dist.barrier()
    results = gathered(result)
    own = gathered(own_error(case)) if name == "fsdp_bf16" else []
    if dist.get_rank() == 0:
        result = {
            "identical": all(r["identical"] for r in results),
            "same_collectives": all(r["same_collectives"] for r in results),
            "collectives": sum(r["collectives"] for r in results),
            "bytes_sent": sum(r["bytes_sent"] for r in results),
            "events": [e for r in results for e in r["events"]],
            "late": sum(bool(flag & 2) for flag in flags),
            "num_rows": len(scan.rows),
        }
        if name == "fsdp_bf16":
            result["own"] = max(own)
        else:
            try:
                result |= compare([e[0] for e in every], [e[1] for e in every], want, path)
            except Exception:
                result["error"] = traceback.format_exc()
    return result


def own_error(case: Case) -> float:
    """The largest relative error of this rank's norms against float64 reductions of its own inputs and gradients."""
    model = case.wrap(new_net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inputs: dict[str, Tensor] = {}
    names = ("up", "down", "mix", "head")
    with pyscan.attach(model, optimizer=optimizer, watch=False) as scan:
        for name in names:
            keep = lambda m, args, name=name: inputs.update({name: args[0].detach().clone()})  # noqa: E731
            getattr(model, name).register_forward_pre_hook(keep)
        error = 0.0
        for ids, target in batches():
            optimizer.zero_grad()
            case.backward(model, ids, target)
            grads = {name: getattr(model, name).weight.grad.to_local() for name in names}
            optimizer.step()
            stats = scan.latest()["param_stats"]
            for name in names:
                assert inputs[name].dtype == torch.bfloat16
                blocks = stats[f"{name}.weight"]["blocks"]
                act = [block["activation_norm"] for block in blocks]
                error = max(error, worst(np.array(act), block_sums(inputs[name].flatten(0, -2), 1).sqrt().numpy()))
                if name != "mix":  # the rows of which are cut, and with them its blocks
                    grad = [block["grad_norm"] for block in blocks]
                    error = max(error, worst(np.array(grad), block_sums(grads[name], 1).sqrt().numpy()))
    return error


def corrupt(out: Path) -> None:
    """Rank 2 of a DDP run finds another weight in its memory before step 6."""
    case = Ddp()
    model = case.wrap(new_net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pyscan.attach(model, out / "corrupt.mscan", optimizer=optimizer):
        for step in range(1, 9):
            if step == 6 and case.rank == 2:
                model.module.up.weight.data[3, 5] = 1e3
            ids, target = batches()[step % STEPS]
            optimizer.zero_grad()
            case.backward(model, ids, target)
            optimizer.step()


def compare(schemas: list[Any], rows: list[Any], want: list[Any], path: Path) -> dict[str, Any]:
    in_memory, in_file, sites = {}, {}, set()
    for step, expected in enumerate(want):
        found = merged(schemas, [of_rank[step] for of_rank in rows])
        sites = {site for _, site in found}
        for place, value in expected.items():
            error = worst(found.get(place, np.zeros(0)), value)
            if place[0] in ("act", "grad", "grad_out"):
                error /= 2  # of norms, not of their squares
            in_memory["/".join(place)] = max(error, in_memory.get("/".join(place), 0.0))
    with pyscan.open(path) as run:
        for channel, site in want[0]:
            root = np.sqrt if channel in ("act", "grad", "grad_out") else np.asarray
            expected = np.stack([root(row[channel, site]) for row in want])
            in_file[f"{channel}/{site}"] = worst(run.get(channel, site, blocks=True).astype(float), expected)
        kinds = sorted({event["kind"] for event in run.events})
        steps = run.steps["step"].tolist()
    damage = [reason for _, reason in check(path)]
    return {
        "in_memory": in_memory,
        "in_file": in_file,
        "sites": sorted(sites),
        "kinds": kinds,
        "steps": steps,
        "damage": damage,
    }


def main() -> None:
    out, names = Path(sys.argv[1]), sys.argv[2:]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    want = truth()
    results: dict[str, Any] = {}
    for name in names:
        try:
            results[name] = corrupt(out) if name == "corrupt" else run_case(name, out, want)
        except Exception:
            results[name] = {"error": traceback.format_exc()}
            print(results[name]["error"], file=sys.stderr, flush=True)
            if dist.get_world_size() > 1:
                break  # the others wait for this rank in vain
    if dist.get_rank() == 0:
        (out / "results.json").write_text(json.dumps(results))
    leave()


if __name__ == "__main__":
    main()
