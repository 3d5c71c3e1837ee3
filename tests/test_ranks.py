"""The files of many ranks as one run: merged by the rules of FORMAT.md; missing ranks and unequal replicas are told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import pyscan
from pyscan import cli, codecs, rank_files
from pyscan.check import check
from pyscan.ranks import rank_path
from pyscan.schema import Channel, Merge, Mesh, Schema
from tests.make_scan import Builder, make_rows, site

CHANNELS = (
    Channel("act"),
    Channel("grad"),
    Channel("act_max", "site", "log2q8", "plain", "max"),
    Channel("act_bad", "site", "f32", "plain", "add"),
)


def write_rank(
    path: Path, rank: int, world: int, sites: list, values: dict[str, np.ndarray], steps: range, **schema: object
) -> Path:
    """One rank's file; `values` are per channel [cells, steps] before the codec."""
    builder = Builder(Schema("m", CHANNELS, tuple(sites), rank=rank, world=world, **schema), run_id=bytes([rank] * 16))
    sections = [codecs.encode(values[channel.name], channel.codec) for channel in CHANNELS]
    for start in range(0, len(steps), 64):
        part = slice(start, start + 64)
        builder.writer.steps(make_rows(steps[part]), [cells[:, part] for cells in sections])
    builder.event("hello", steps[0])
    return builder.save(Path(rank_path(str(path), rank)))


def random_values(rng: np.random.Generator, blocks: int, sites: int, steps: int) -> dict[str, np.ndarray]:
    shapes = {"act": blocks, "grad": blocks, "act_max": sites, "act_bad": sites}
    return {name: np.exp2(rng.uniform(-8, 8, (cells, steps))) for name, cells in shapes.items()}


def ddp(rank: int, world: int) -> tuple[Mesh, dict[str, Merge]]:
    rules = {name: Merge(("dp",)) for name in ("act", "act_max", "act_bad")} | {"grad": Merge((), ("dp",))}
    return Mesh(("dp",), (world,), (rank,)), rules


def write_ddp(path: Path, world: int = 3, steps: range = range(1, 101), skip: tuple[int, ...] = ()) -> list[dict]:
    rng = np.random.default_rng(1)
    shared = random_values(rng, 5, 2, len(steps))["grad"]
    written = []
    for rank in range(world):
        mesh, rules = ddp(rank, world)
        sites = [site("a.weight", 2, merge=rules), site("b.weight", 3, merge=rules)]
        values = random_values(rng, 5, 2, len(steps)) | {"grad": shared}
        written.append(values)
        if rank not in skip:
            write_rank(path, rank, world, sites, values, steps, mesh=mesh)
    return written


def decoded(values: np.ndarray, codec: str = "log2q8") -> np.ndarray:
    return codecs.decode(codecs.encode(values, codec), codec).astype(np.float64)


def test_data_parallel_ranks_add_squares_of_activations_and_take_one_gradient(tmp_path: Path) -> None:
    written = write_ddp(tmp_path / "run.mscan")
    with pyscan.open(tmp_path / "run.mscan") as run:
        assert (run.world, run.missing_ranks, len(run.steps)) == (3, (), 100)
        assert [(s.name, s.num_blocks) for s in run.sites] == [("a.weight", 2), ("b.weight", 3)]
        act = np.sqrt(sum(decoded(v["act"][2:]) ** 2 for v in written)).T
        assert np.array_equal(run.act("b", blocks=True), act.astype(np.float32))
        assert np.array_equal(run.grad("b", blocks=True), decoded(written[0]["grad"][2:]).T.astype(np.float32))
        assert np.array_equal(run.get("act_max", "a"), np.max([decoded(v["act_max"][0]) for v in written], axis=0))
        bad = sum(decoded(v["act_bad"][1], "f32") for v in written)
        assert np.array_equal(run.get("act_bad", "b"), bad.astype(np.float32))
        assert [(event["kind"], event["rank"]) for event in run.recorded_events] == [("hello", r) for r in range(3)]
        assert run.damage == []
        assert np.array_equal(run.act("a", steps=slice(60, 70)), run.act("a")[60:70])
    assert check(tmp_path / "run.mscan") == []


def test_shards_that_begin_and_end_inside_a_block_add_up_to_whole_blocks(tmp_path: Path) -> None:
    """130 columns in blocks of 64 over two ranks: columns 0 to 96 and 96 to 130; block 1 belongs to both."""
    rng = np.random.default_rng(2)
    whole = site("a.weight", 3)
    shards = [replace(whole, num_blocks=2), replace(whole, num_blocks=2, offset=(0, 96))]
    written = []
    for rank, shard in enumerate(shards):
        values = random_values(rng, 2, 1, 10)
        written.append(values)
        mesh = Mesh(("fsdp",), (2,), (rank,))
        write_rank(tmp_path / "run.mscan", rank, 2, [shard], values, range(1, 11), mesh=mesh)
    run = pyscan.open(tmp_path / "run.mscan")
    assert run.sites[0].num_blocks == 3
    first, second = (decoded(v["grad"]) for v in written)
    want = np.stack([first[0], np.hypot(first[1], second[0]), second[1]], axis=1)
    assert np.allclose(run.grad("a", blocks=True), want, rtol=1e-6)


def hybrid(rank: int) -> tuple[Mesh, dict[str, Merge]]:
    """Two replicas of two shards each."""
    rules = {c.name: Merge(("shard",), ("replicate",)) for c in CHANNELS}
    return Mesh(("replicate", "shard"), (2, 2), (rank // 2, rank % 2)), rules


def write_hybrid(path: Path, *, skip: tuple[int, ...] = (), differ: float = 1.0) -> list[dict]:
    rng = np.random.default_rng(3)
    shards = [random_values(rng, 2, 1, 70) for _ in range(2)]
    for rank in range(4):
        mesh, rules = hybrid(rank)
        values = {name: array.copy() for name, array in shards[rank % 2].items()}
        if rank == 3:
            values["grad"][1, 66] *= differ
        if rank not in skip:
            write_rank(path, rank, 4, [site("a.weight", 2, merge=rules)], values, range(1, 71), mesh=mesh)
    return shards


def test_hybrid_sharding_adds_over_shards_and_takes_one_replica(tmp_path: Path) -> None:
    shards = write_hybrid(tmp_path / "run.mscan")
    run = pyscan.open(tmp_path / "run.mscan")
    want = np.sqrt(sum(decoded(shard["grad"]) ** 2 for shard in shards)).T
    assert np.array_equal(run.grad("a", blocks=True), want.astype(np.float32))
    assert [event for event in run.events if event["kind"] == "replicas_differ"] == []


def test_replicas_that_differ_are_an_event_at_the_first_such_step(tmp_path: Path) -> None:
    write_hybrid(tmp_path / "run.mscan", differ=1.5)
    run = pyscan.open(tmp_path / "run.mscan")
    told = [event for event in run.events if event["kind"] == "replicas_differ"]
    assert "ranks 0 and 2" in told[0].pop("text")
    where = {"site": "a.weight", "channel": "grad", "cell": 1, "ranks": [0, 2]}
    assert told == [{"kind": "replicas_differ", "step": 67, **where}]


def test_replicas_that_differ_by_one_code_are_the_same(tmp_path: Path) -> None:
    write_hybrid(tmp_path / "run.mscan", differ=2 ** (1 / 256))
    assert "replicas_differ" not in {event["kind"] for event in pyscan.open(tmp_path / "run.mscan").events}


def test_a_missing_rank_is_told_and_its_cells_come_from_the_other_replica(tmp_path: Path) -> None:
    shards = write_hybrid(tmp_path / "run.mscan", skip=(0,))
    run = pyscan.open(tmp_path / "run.mscan")
    assert run.missing_ranks == (0,)
    assert (run.events[0]["kind"], run.events[0]["rank"]) == ("rank_missing", 0)
    assert run.damage == [(0, "rank 0: no file")]
    want = np.sqrt(sum(decoded(shard["grad"]) ** 2 for shard in shards)).T
    assert np.array_equal(run.grad("a", blocks=True), want.astype(np.float32))


def test_what_only_a_missing_rank_could_complete_is_absent_and_not_guessed(tmp_path: Path) -> None:
    written = write_ddp(tmp_path / "run.mscan", skip=(1,))
    run = pyscan.open(tmp_path / "run.mscan")
    assert run.missing_ranks == (1,)
    assert pyscan.is_absent(run.act("a")).all()
    assert np.array_equal(run.grad("a", blocks=True), decoded(written[0]["grad"][:2]).T.astype(np.float32))
    assert check(tmp_path / "run.mscan")[0] == (0, "rank 1: no file")


def test_a_shorter_rank_gives_the_steps_all_have_and_is_told(tmp_path: Path) -> None:
    write_ddp(tmp_path / "run.mscan")
    mesh, rules = ddp(2, 3)
    rng = np.random.default_rng(5)
    sites = [site("a.weight", 2, merge=rules), site("b.weight", 3, merge=rules)]
    write_rank(tmp_path / "run.mscan", 2, 3, sites, random_values(rng, 5, 2, 90), range(1, 91), mesh=mesh)
    run = pyscan.open(tmp_path / "run.mscan")
    assert run.steps["step"].tolist() == list(range(1, 91))
    short = next(event for event in run.events if event["kind"] == "rank_shorter")
    assert (short["rank"], short["step"], short["longest"]) == (2, 90, 100)
    assert len(run.act("a")) == 90


def test_an_unreadable_rank_is_a_missing_one(tmp_path: Path) -> None:
    write_ddp(tmp_path / "run.mscan")
    Path(rank_path(str(tmp_path / "run.mscan"), 1)).write_bytes(b"MSCAN\x02")
    run = pyscan.open(tmp_path / "run.mscan")
    assert run.missing_ranks == (1,)
    assert "header of 64 bytes" in run.damage[0][1]
    for rank in (0, 2):
        Path(rank_path(str(tmp_path / "run.mscan"), rank)).write_bytes(b"")
    with pytest.raises(pyscan.ScanFormatError, match="no rank"):
        pyscan.open(tmp_path / "run.mscan")


def test_a_pipeline_stage_holds_its_sites_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    values = [random_values(rng, 2, 1, 5) for _ in range(2)]
    rules = {c.name: Merge(()) for c in CHANNELS}
    for rank in range(2):
        sites = [site(f"stage{rank}.weight", 2, merge=rules)]
        mesh = Mesh(("pp",), (2,), (rank,))
        write_rank(tmp_path / "run.mscan", rank, 2, sites, values[rank], range(1, 6), mesh=mesh)
    run = pyscan.open(tmp_path / "run.mscan")
    assert [s.name for s in run.sites] == ["stage0.weight", "stage1.weight"]
    for rank in range(2):
        assert np.array_equal(run.act(f"stage{rank}", blocks=True), decoded(values[rank]["act"]).T.astype(np.float32))


def test_refresh_takes_new_rows_and_new_ranks(tmp_path: Path) -> None:
    path = tmp_path / "run.mscan"
    write_ddp(path, skip=(2,), steps=range(1, 51))
    run = pyscan.open(path)
    assert run.missing_ranks == (2,)
    write_ddp(tmp_path / "other.mscan", steps=range(1, 51))
    Path(rank_path(str(tmp_path / "other.mscan"), 2)).rename(rank_path(str(path), 2))
    run.refresh()
    assert run.missing_ranks == ()
    assert not pyscan.is_absent(run.act("a")).any()


def test_one_rank_can_be_opened_alone(tmp_path: Path) -> None:
    written = write_ddp(tmp_path / "run.mscan")
    run = pyscan.open(rank_path(str(tmp_path / "run.mscan"), 1))
    assert (run.rank, run.world) == (1, 3)
    assert np.array_equal(run.act("a", blocks=True), decoded(written[1]["act"][:2]).T.astype(np.float32))


def test_a_hostile_offset_takes_no_memory(tmp_path: Path) -> None:
    far = site("a.weight", 2, offset=(0, 2**47))
    values = random_values(np.random.default_rng(0), 2, 1, 5)
    for rank in range(2):
        write_rank(tmp_path / "run.mscan", rank, 2, [far], values, range(1, 6))
    with pytest.raises(pyscan.ScanFormatError, match="cannot come from a file"):
        pyscan.open(tmp_path / "run.mscan").act("a")


def test_codes_of_a_merged_run_are_the_merged_values_in_the_codec_of_the_channel(tmp_path: Path) -> None:
    write_ddp(tmp_path / "run.mscan")
    run = pyscan.open(tmp_path / "run.mscan")
    codes = run.codes("act", "a")
    assert codes.dtype == np.int16
    assert np.array_equal(codes, codecs.encode(run.act("a", blocks=True), "log2q8"))


def export_parquet(path: Path, table: Path) -> None:
    assert cli.main(["export", str(path), "--to", "parquet", "-o", str(table)]) == 0


def test_an_export_by_rank_gives_the_numbers_of_the_merged_run_in_duckdb_and_dask(tmp_path: Path) -> None:
    from examples import ranks_dask, ranks_duckdb

    path = tmp_path / "run.mscan"
    write_hybrid(path)
    export_parquet(path, tmp_path / "table")
    names = sorted(str(p.relative_to(tmp_path / "table")) for p in (tmp_path / "table").glob("*/channel=act/*"))
    assert names == [f"rank={rank}/channel=act/steps-000000000001-000000000070.parquet" for rank in range(4)]
    with pyscan.open(path) as run:
        want = {(c, "a.weight", s): v for c in ("act", "grad") for s, v in enumerate(run.get(c, "a"), start=1)}
    by_sql = {(channel, name, step): norm for channel, name, step, norm in ranks_duckdb.norms(str(tmp_path / "table"))}
    by_dask = ranks_dask.norms(str(tmp_path / "table")).to_dict()
    for found in (by_sql, by_dask):
        assert sorted(found) == sorted(want)
        assert all(abs(found[key] - value) <= 1e-6 * value for key, value in want.items())


def test_a_missing_rank_is_named_by_info_and_merge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.mscan"
    write_ddp(path, skip=(1,))
    assert cli.main(["info", str(path)]) == 0
    assert "missing: 1" in capsys.readouterr().out
    assert cli.main(["merge", str(path), "-o", str(tmp_path / "whole.mscan")]) == 0
    told = capsys.readouterr()
    assert "rank missing: rank 1, no file" in told.out + told.err
    with pyscan.open(tmp_path / "whole.mscan") as run:
        assert [(e["kind"], e["rank"]) for e in run.events if e["kind"] == "rank_missing"] == [("rank_missing", 1)]


def write_worlds(path: Path, stretches: dict[int, list[tuple[int, range]]]) -> None:
    """Per rank its stretches of (world, steps); each but the first begins with a resume."""
    for rank, parts in stretches.items():
        for number, (world, steps) in enumerate(parts):
            mesh, rules = ddp(rank, world)
            schema = Schema("m", CHANNELS, (site("a.weight", 1, merge=rules),), rank=rank, world=world, mesh=mesh)
            if number == 0:
                builder = Builder(schema, run_id=bytes([rank] * 16))
            else:
                builder.writer.schema(schema)
            cells = [codecs.encode(np.full((1, len(steps)), 2.0), channel.codec) for channel in CHANNELS]
            builder.writer.steps(make_rows(steps, resumed=number > 0), cells)
        builder.save(Path(rank_path(str(path), rank)))


def test_a_run_whose_world_shrinks_and_grows_has_every_step_once_with_the_ranks_it_had(tmp_path: Path) -> None:
    """Three ranks to step 10; two from step 8 to 15; three again from step 13: rank 2 still has its steps 8 to 10."""
    path = tmp_path / "run.mscan"
    both = [(3, range(1, 11)), (2, range(8, 16)), (3, range(13, 21))]
    write_worlds(path, {0: both, 1: both, 2: [(3, range(1, 11)), (3, range(13, 21))]})
    with pyscan.open(path) as run:
        assert run.steps["step"].tolist() == list(range(1, 21))
        assert (run.world, run.missing_ranks) == (3, ())
        ranks_per_step = np.rint((run.act("a") / 2.0) ** 2).astype(int).tolist()
        assert ranks_per_step == [3] * 7 + [2] * 5 + [3] * 8
        told = [(e["kind"], e["step"], e.get("world")) for e in run.events if e["kind"].startswith(("world", "rank_s"))]
        assert told == [("world_changed", 8, 2), ("world_changed", 13, 3)]


def test_rows_a_rank_wrote_before_the_world_changed_do_not_stand_in_for_those_it_has_yet_to_write(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.mscan"
    write_worlds(path, {0: [(3, range(1, 11)), (2, range(8, 16))], 1: [(3, range(1, 11))], 2: [(3, range(1, 11))]})
    with pyscan.open(path) as run:
        assert run.steps["step"].tolist() == list(range(1, 8))
        assert [(e["rank"], e["step"]) for e in run.events if e["kind"] == "rank_shorter"] == [(1, 10)]


def test_a_rank_that_left_is_neither_missing_nor_shorter(tmp_path: Path) -> None:
    path = tmp_path / "run.mscan"
    parts = [(2, range(1, 11)), (1, range(6, 16))]
    write_worlds(path, {0: parts, 1: parts[:1]})
    with pyscan.open(path) as run:
        assert run.steps["step"].tolist() == list(range(1, 16))
        assert (run.world, run.missing_ranks) == (1, ())
        assert [e["kind"] for e in run.events if e["kind"] in ("rank_missing", "rank_shorter", "rank_late")] == []


def test_the_first_rank_with_a_bad_value_is_named(tmp_path: Path) -> None:
    path, steps = tmp_path / "run.mscan", range(1, 11)
    for rank in range(3):
        mesh, rules = ddp(rank, 3)
        values = {name: np.ones((2, 10)) for name in ("act", "grad", "act_max")} | {"act_bad": np.zeros((2, 10))}
        values["act_bad"][1, 6 if rank == 2 else 8] = 4
        sites = [site("a.weight", 1, merge=rules), site("b.weight", 1, merge=rules)]
        write_rank(path, rank, 3, sites, values, steps, mesh=mesh)
    with pyscan.open(path) as run:
        told = [e for e in run.events if e["kind"] == "rank_nonfinite"]
    assert [(e["step"], e["rank"], e["site"], e["also"]) for e in told] == [(7, 2, "b.weight", [])]


def test_a_rank_that_goes_another_way_is_named_and_healthy_ranks_are_not(tmp_path: Path) -> None:
    rng, steps = np.random.default_rng(0), range(1, 81)
    bias = np.exp2(rng.normal(0, 2, (4, 2, 1)))  # what is different about a rank all the time
    acts = bias * np.exp2(rng.normal(0, 0.03, (4, 2, 80)))
    for name, factor in (("healthy", 1.0), ("broken", 4.0)):
        acts[3, 1, 40] *= factor
        for rank in range(4):
            mesh, rules = ddp(rank, 4)
            values = {"act": acts[rank], "act_max": acts[rank], "grad": np.ones((2, 80)), "act_bad": np.zeros((2, 80))}
            sites = [site("a.weight", 1, merge=rules), site("b.weight", 1, merge=rules)]
            write_rank(tmp_path / f"{name}.mscan", rank, 4, sites, values, steps, mesh=mesh)
    with pyscan.open(tmp_path / "healthy.mscan") as run:
        assert [e for e in run.events if e["kind"] == "rank_differs"] == []
    with pyscan.open(tmp_path / "broken.mscan") as run:
        told = [e for e in run.events if e["kind"] == "rank_differs"]
    assert [(e["step"], e["rank"], e["site"]) for e in told[:1]] == [(41, 3, "b.weight")]


def test_more_ranks_than_may_be_open_are_read_and_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_files, "OPEN_FILES", 2)
    written = write_ddp(tmp_path / "run.mscan", world=7)
    with pyscan.open(tmp_path / "run.mscan") as run:
        act = np.sqrt(sum(decoded(v["act"][2:]) ** 2 for v in written)).T
        assert np.array_equal(run.act("b", blocks=True), act.astype(np.float32))
        assert len(run.ranks._open) == 2
