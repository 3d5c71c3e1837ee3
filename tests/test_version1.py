"""Version 1.1 files: the same interface, every uint16 value both ways, and hostile ones refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import pyscan
from pyscan.check import check
from pyscan.convert import export_version1, import_version1
from pyscan.errors import ScanError
from pyscan.reader import open_buffer
from pyscan.schema import Channel
from pyscan.version1 import HEADER, RECORD_DTYPE
from tests.make_scan import Builder, make_schema

EVERY_VALUE = Path(__file__).parent / "data" / "every_value_v1.1.mscan"
REAL = Path(__file__).parent.parent.parent / "shared" / "data" / "qwen3-1.7b_v1.1.mscan"


def make(
    records: np.ndarray, num_tokens: tuple[int, ...] = (3, 2), *, claimed: int | None = None, **header: object
) -> bytes:
    raw = {
        "format_version": "1.1",
        "model_name": "m",
        "id_to_param_name_map": {"0": "a", "7": "b.weight", "9": "no.records"},
        "sequences": [{"sequence_id": i, "num_tokens": n, "source": f"text {i}"} for i, n in enumerate(num_tokens)],
        "timestamp": "20250714_091836",
        **header,
    }
    text = json.dumps(raw).encode()
    count = len(records) if claimed is None else claimed
    return HEADER.pack(b"MSCAN", 1, HEADER.size + len(text), count) + text + records.tobytes()


def dense(num_tokens: int = 5) -> np.ndarray:
    """Two blocks of `a` and one of `b` for every token."""
    cells = [(token, param, block) for token in range(num_tokens) for param, block in ((0, 0), (0, 1), (7, 0))]
    records = np.zeros(len(cells), RECORD_DTYPE)
    for i, (token, param, block) in enumerate(cells):
        records[i] = (token, param, block, 1000 * token + 10 * param + block, 60000 + i)
    return records


def assert_same(one: pyscan.Run, other: pyscan.Run) -> None:
    assert [(s.name, s.num_blocks) for s in one.sites] == [(s.name, s.num_blocks) for s in other.sites]
    assert one.steps.tobytes() == other.steps.tobytes()
    assert one.events == other.events
    for channel in ("act", "grad"):
        for site in one.sites:
            values = [run.get(channel, site.name, blocks=True).copy().view(np.uint32) for run in (one, other)]
            assert np.array_equal(*values), (channel, site.name)


def round_trip(path: Path, tmp_path: Path) -> Path:
    import_version1(path, tmp_path / "two.mscan")
    export_version1(tmp_path / "two.mscan", tmp_path / "one.mscan")
    import_version1(tmp_path / "one.mscan", tmp_path / "again.mscan")
    runs = [pyscan.open(p) for p in (path, tmp_path / "two.mscan", tmp_path / "one.mscan", tmp_path / "again.mscan")]
    assert [run.version for run in runs] == [1, 2, 1, 2]
    for run in runs[1:]:
        assert_same(runs[0], run)
    assert check(tmp_path / "two.mscan") == []
    return tmp_path / "one.mscan"


def test_a_step_per_token_and_a_site_per_parameter_with_records() -> None:
    run = open_buffer(make(dense()))
    assert run.version == 1
    assert run.steps["step"].tolist() == [1, 2, 3, 4, 5]
    assert [(s.name, s.num_blocks) for s in run.sites] == [("a", 2), ("b.weight", 1)]
    assert run.codes("act", "a").tolist() == [[0, 1], [1000, 1001], [2000, 2001], [3000, 3001], [4000, 4001]]
    assert run.act("b").tolist() == [70, 1070, 2070, 3070, 4070]
    assert run.grad("a.weight", blocks=True)[0].tolist() == [60000, 60001]
    assert run.codes("grad", "a").dtype == np.uint16
    assert [(e["kind"], e["step"], e["source"]) for e in run.events] == [
        ("sequence", 1, "text 0"),
        ("sequence", 4, "text 1"),
    ]
    assert run.damage == []


def test_the_number_of_tokens_is_that_of_the_sequences_and_missing_records_are_absent() -> None:
    run = open_buffer(make(dense(2), (4,)))
    act = run.act("a", blocks=True)
    assert act.shape == (4, 2)
    assert pyscan.is_absent(act).tolist() == [[False] * 2] * 2 + [[True] * 2] * 2


def test_records_in_any_order_are_read_alike() -> None:
    records = dense()
    shuffled = records[np.random.default_rng(0).permutation(len(records))]
    assert_same(open_buffer(make(records)), open_buffer(make(shuffled)))


def test_every_uint16_value_survives_import_and_export(tmp_path: Path) -> None:
    records = pyscan.open(EVERY_VALUE).records
    assert len(set(records["activation"].tolist())) == len(set(records["grad_norm"].tolist())) == 65536
    round_trip(EVERY_VALUE, tmp_path)
    with pyscan.open(tmp_path / "two.mscan") as two:
        assert two.channel("act").codec == "u16"


def test_missing_records_survive_import_and_export(tmp_path: Path) -> None:
    records = dense()
    path = tmp_path / "sparse.mscan"
    path.write_bytes(make(np.delete(records, [1, 5, 9])))
    exported = round_trip(path, tmp_path)
    assert len(pyscan.open(exported).records) == len(records) - 3


@pytest.mark.skipif(not REAL.exists(), reason="the real version 1.1 file is not beside the repository")
def test_a_real_file_survives_import_and_export_record_by_record(tmp_path: Path) -> None:
    run = pyscan.open(REAL)
    assert (len(run.steps), len(run.sites), sum(s.num_blocks for s in run.sites)) == (1, 196, 5376)
    assert run.model == "Qwen/Qwen3-1.7B"
    assert all((run.grad(site.name) == 0).all() for site in run.sites)
    exported = round_trip(REAL, tmp_path)
    one, two = REAL.read_bytes(), exported.read_bytes()
    records = [np.frombuffer(data, RECORD_DTYPE, offset=HEADER.unpack_from(data)[2]) for data in (one, two)]
    assert np.array_equal(np.sort(records[0], order=RECORD_DTYPE.names), np.sort(records[1], order=RECORD_DTYPE.names))
    headers = [json.loads(data[HEADER.size : HEADER.unpack_from(data)[2]]) for data in (one, two)]
    assert headers[0] == headers[1]


def test_log2q8_codes_are_exported_with_an_offset_that_the_json_names(tmp_path: Path) -> None:
    builder = Builder().steps(range(1, 70))
    path = builder.save(tmp_path / "run.mscan")
    export_version1(path, tmp_path / "one.mscan")
    data = (tmp_path / "one.mscan").read_bytes()
    header = json.loads(data[HEADER.size : HEADER.unpack_from(data)[2]])
    assert header["codec"] == "log2q8+32768"
    run, one = pyscan.open(path), pyscan.open(tmp_path / "one.mscan")
    for channel, field in (("act", "activation"), ("grad", "grad_norm")):
        codes = run.codes(channel, run.sites[0].name)
        assert np.array_equal(one.codes(channel, run.sites[0].name), codes)
        stored = one.records[one.records["param_id"] == 0][field].astype(int) - 32768
        assert np.array_equal(stored.reshape(codes.shape), codes)
    import_version1(tmp_path / "one.mscan", tmp_path / "two.mscan")
    assert np.array_equal(pyscan.open(tmp_path / "two.mscan").act(run.sites[1].name), run.act(run.sites[1].name))


@pytest.mark.parametrize(("act", "grad"), [("site", "block"), ("block", "site")])
def test_act_and_grad_of_different_grain_are_refused_with_the_rule(tmp_path: Path, act: str, grad: str) -> None:
    schema = make_schema((3, 1), (Channel("act", per=act), Channel("grad", per=grad)))
    path = Builder(schema).steps([1, 2]).save(tmp_path / "run.mscan")
    with pytest.raises(ScanError, match=f"this run has act per {act} and grad per {grad}"):
        export_version1(path, tmp_path / "one.mscan")
    assert not (tmp_path / "one.mscan").exists()


def test_act_and_grad_per_site_give_one_record_per_site_and_row(tmp_path: Path) -> None:
    schema = make_schema((3, 1), (Channel("act", per="site"), Channel("grad", per="site")))
    path = Builder(schema).steps([1, 2]).save(tmp_path / "run.mscan")
    export_version1(path, tmp_path / "one.mscan")
    with pyscan.open(path) as run, pyscan.open(tmp_path / "one.mscan") as exported:
        for site in run.sites:
            assert np.array_equal(exported.act(site.name, blocks=True), run.act(site.name, blocks=True))
            assert np.array_equal(exported.grad(site.name, blocks=True), run.grad(site.name, blocks=True))


@pytest.mark.parametrize("cut", [0, 5, 7, 14, 15, 40, 200])
def test_a_file_cut_in_its_header_is_refused(cut: int) -> None:
    with pytest.raises(pyscan.ScanFormatError):
        open_buffer(make(dense())[:cut])


def test_a_file_cut_in_its_records_gives_the_whole_ones_and_says_so() -> None:
    data = make(dense())
    run = open_buffer(data[:-5])
    assert len(run.records) == 14
    assert "claims 15 records" in run.damage[0][1]


def test_records_that_point_nowhere_are_left_out_and_reported() -> None:
    records = dense()
    records["token_idx"][3], records["param_id"][5] = 4_000_000_000, 8
    run = open_buffer(make(records))
    assert len(run.records) == 13
    assert [reason.split(",")[0] for _, reason in run.damage] == [
        "1 records of tokens beyond the sequences",
        "1 records of parameters without a name",
    ]


@pytest.mark.parametrize(
    "header",
    [
        {"sequences": [{"num_tokens": 4_000_000_000}]},
        {"sequences": [{"num_tokens": -1}]},
        {"sequences": [{"num_tokens": True}]},
        {"sequences": [{}]},
        {"sequences": 7},
        {"id_to_param_name_map": []},
        {"id_to_param_name_map": {"-1": "a"}},
        {"id_to_param_name_map": {"70000": "a"}},
        {"id_to_param_name_map": {"0": "a", "1": "a"}},
        {"id_to_param_name_map": {"0": None}},
        {"id_to_param_name_map": {"٣": "a"}},
    ],
)
def test_hostile_json_is_refused(header: dict) -> None:
    with pytest.raises(pyscan.ScanFormatError):
        open_buffer(make(dense(), **header))


def test_a_record_that_claims_a_far_block_does_not_take_the_memory() -> None:
    records = dense(1)
    records["block_idx"][0] = 65535
    run = open_buffer(make(records, (60000,)))
    with pytest.raises(pyscan.ScanFormatError, match="cannot come from a file"):
        run.act("a", blocks=True)


def test_tokens_say_what_to_use_instead_and_refresh_sees_a_rewritten_file(tmp_path: Path) -> None:
    path = tmp_path / "one.mscan"
    path.write_bytes(make(dense(), (5,)))
    run = pyscan.open(path)
    with pytest.raises(pyscan.ScanError, match=r"act\(\)"):
        run.tokens(1)
    path.write_bytes(make(dense(9), (9,)))
    assert run.refresh() == 4
    path.write_bytes(b"MSCAN\x01\x00")
    assert run.refresh() == 0
    assert len(run.steps) == 9
