import csv
import io
import math
import sys

import numpy as np
import pytest

import pyscan
from pyscan import codecs, export
from pyscan.extras import MissingExtraError
from pyscan.schema import Channel
from tests.make_scan import Builder, make_cells, make_rows, make_schema, site

pa = pytest.importorskip("pyarrow")

ODD_NAMES = ('a,"b"\n.weight', "模型.层.0.ü.weight", "experts.up[3]")


@pytest.fixture
def run(tmp_path):
    """70 steps, three sites, every special value, and one block that is absent throughout."""
    schema = make_schema(sites=tuple(site(name, n) for name, n in zip(ODD_NAMES, (3, 1, 2), strict=True)))
    builder = Builder(schema)
    for steps in (range(1, 65), range(65, 71)):
        cells = make_cells(schema, steps)
        cells[0][1] = codecs.CODE_ABSENT
        cells[1][0, :4] = [codecs.CODE_ZERO, codecs.CODE_ABSENT, codecs.CODE_NAN, codecs.CODE_INFINITY]
        builder.writer.steps(make_rows(steps), cells)
    with pyscan.open(builder.index().save(tmp_path / "run.mscan")) as opened:
        yield opened


def lines_of(run):
    """The long table by the plainest reading of its definition."""
    lines = []
    for channel in run.channels:
        for where in run.sites:
            values = run.get(channel.name, where.name, blocks=True)
            for row, step in enumerate(run.steps["step"].tolist()):
                for block, value in enumerate(values[row]):
                    if not codecs.is_absent(value):
                        lines.append((step, where.name, channel.name, block, float(value)))
    return lines


def same(found, expected):
    """Equal as sets of lines, where NaN equals NaN."""

    def key(line):
        return (*line[:4], "nan" if math.isnan(line[4]) else line[4])

    return sorted(map(key, found), key=str) == sorted(map(key, expected), key=str)


def arrow_lines(table):
    return list(zip(*(table[name].to_pylist() for name in export.COLUMNS), strict=True))


def test_arrow_table_has_a_line_for_every_observed_cell(run):
    table = run.to_arrow()
    assert table.column_names == ["step", "site", "channel", "block", "value"]
    expected = lines_of(run)
    # 70 rows of 6 + 6 block cells and 3 + 3 site cells, less one absent block of 70 and 2 absent cells (one per frame)
    assert len(expected) == 70 * 18 - 70 - 2
    assert same(arrow_lines(table), expected)


def test_a_stream_of_small_batches_is_the_same_table(run, monkeypatch):
    whole = lines_of(run)
    monkeypatch.setattr(export, "PIECE_CELLS", 100)
    batches = list(run.to_arrow(stream=True))
    assert len(batches) > 10
    # a piece is never larger than asked for, or than 64 rows of the widest site
    assert max(batch.num_rows for batch in batches) <= max(100, 64 * 3)
    assert same(arrow_lines(pa.Table.from_batches(batches)), whole)


def test_many_small_sites_share_a_batch(tmp_path):
    schema = make_schema(sites=tuple(site(f"l.{i}.w", 1) for i in range(500)), channels=(Channel("act"),))
    path = Builder(schema).steps(range(1, 4)).save(tmp_path / "wide.mscan")
    with pyscan.open(path) as wide:
        batches = list(wide.to_arrow(stream=True))
        assert [batch.num_rows for batch in batches] == [1500]
        assert same(arrow_lines(pa.Table.from_batches(batches)), lines_of(wide))


def test_pandas_frame_is_the_same_table(run):
    frame = run.to_pandas()
    assert list(frame.columns) == ["step", "site", "channel", "block", "value"]
    assert frame["value"].dtype == np.float32
    assert same(list(frame.itertuples(index=False, name=None)), lines_of(run))


def test_a_run_without_steps_gives_an_empty_table(tmp_path):
    with pyscan.open(Builder().save(tmp_path / "empty.mscan")) as empty:
        assert empty.to_arrow().num_rows == 0
        assert empty.to_arrow().schema == export.arrow_schema()
        assert len(empty.to_pandas()) == 0


def test_duckdb_reads_the_parquet_data_set_as_it_is(run, tmp_path, monkeypatch):
    duckdb = pytest.importorskip("duckdb")
    monkeypatch.setattr(export, "FILE_CELLS", 100)  # 64 rows to a file
    assert export.write_parquet(run, tmp_path / "out") == len(lines_of(run))
    files = sorted(str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*.parquet"))
    assert files[:2] == [
        "channel=act/steps-000000000001-000000000064.parquet",
        "channel=act/steps-000000000065-000000000070.parquet",
    ]
    assert len(files) == 8
    table = f"'{tmp_path}/out/**/*.parquet'"
    found = duckdb.sql(f"select step, site, channel, block, value from {table}").fetchall()
    assert same(found, lines_of(run))
    for where in run.sites:
        query = f"select step, value from {table} where site = ? and channel = 'grad' and block = 0 order by step"
        steps, values = zip(*duckdb.execute(query, [where.name]).fetchall(), strict=True)
        norms = run.grad(where.name, blocks=True)[:, 0]
        seen = ~codecs.is_absent(norms)
        assert list(steps) == run.steps["step"][seen].tolist()
        np.testing.assert_array_equal(np.array(values, np.float32), norms[seen])


def test_duckdb_sums_blocks_to_the_norm_of_the_site(run, tmp_path):
    duckdb = pytest.importorskip("duckdb")
    export.write_parquet(run, tmp_path / "out")
    query = f"""select sqrt(sum(value::double ** 2)) from '{tmp_path}/out/*/*.parquet'
                where channel = 'act' and site = ? group by step order by step"""
    for where in run.sites:
        norms = [value for (value,) in duckdb.execute(query, [where.name]).fetchall()]
        np.testing.assert_allclose(norms, run.act(where.name), rtol=1e-6)


def test_parquet_types_are_those_every_reader_knows(run, tmp_path):
    import pyarrow.dataset as ds
    import pyarrow.parquet as pq

    export.write_parquet(run, tmp_path / "out")
    file = next((tmp_path / "out").rglob("*.parquet"))
    columns = [pq.ParquetFile(file).schema.column(i) for i in range(4)]
    kinds = [(c.name, c.physical_type, c.logical_type.type) for c in columns]
    assert kinds == [
        ("step", "INT64", "NONE"),
        ("site", "BYTE_ARRAY", "STRING"),
        ("block", "INT32", "NONE"),
        ("value", "FLOAT", "NONE"),
    ]
    assert same(arrow_lines(ds.dataset(tmp_path / "out", partitioning="hive").to_table()), lines_of(run))


def test_a_data_set_without_steps_can_be_read(tmp_path):
    duckdb = pytest.importorskip("duckdb")
    with pyscan.open(Builder().save(tmp_path / "empty.mscan")) as empty:
        assert export.write_parquet(empty, tmp_path / "out") == 0
    assert duckdb.sql(f"select count(*) from '{tmp_path}/out/*/*.parquet'").fetchall() == [(0,)]


def test_a_channel_name_cannot_leave_the_directory(tmp_path):
    schema = make_schema(channels=(Channel("../../act"), Channel("..")))
    with pyscan.open(Builder(schema).steps(range(1, 3)).save(tmp_path / "run.mscan")) as hostile:
        (tmp_path / "deep").mkdir()
        export.write_parquet(hostile, tmp_path / "deep" / "out")
    written = [file.relative_to(tmp_path) for file in tmp_path.rglob("*.parquet")]
    assert len(written) == 2
    assert all(file.parts[:2] == ("deep", "out") and len(file.parts) == 4 for file in written)


def test_csv_gives_every_float32_back(run):
    out = io.StringIO()
    assert export.write_csv(run, out) == len(lines_of(run))
    header, *lines = csv.reader(io.StringIO(out.getvalue()))
    assert tuple(header) == export.COLUMNS
    found = [(int(a), b, c, int(d), float(np.float32(e))) for a, b, c, d, e in lines]
    assert same(found, lines_of(run))


def test_a_selection_of_sites_leaves_the_others_out(run):
    out = io.StringIO()
    export.write_csv(run, out, run.sites[2:])
    _, *lines = csv.reader(io.StringIO(out.getvalue()))
    assert {line[1] for line in lines} == {"experts.up[3]"}


@pytest.mark.parametrize("to", ["parquet", "csv"])
def test_progress_counts_the_lines_up_to_the_cells_there_are(run, tmp_path, to):
    seen = []
    write, target = (export.write_parquet, tmp_path / "out") if to == "parquet" else (export.write_csv, io.StringIO())
    lines = write(run, target, tick=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1] == (lines, 70 * 18)


def test_a_step_that_no_table_can_hold_is_refused(tmp_path):
    path = Builder().steps([2**63]).save(tmp_path / "far.mscan")
    with (
        pyscan.open(path) as far,
        pytest.raises(pyscan.ScanError, match=r"steps below 2\*\*63, got 9223372036854775808"),
    ):
        far.to_pandas()


@pytest.mark.parametrize(
    ("library", "extra", "call"), [("pyarrow", "arrow", "to_arrow"), ("pandas", "pandas", "to_pandas")]
)
def test_a_missing_library_is_named_with_its_extra(run, monkeypatch, library, extra, call):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=rf"{library} is not installed: pip install 'pyscan\[{extra}\]'"):
        getattr(run, call)()


def test_pandas_needs_no_pyarrow_of_ours(run, monkeypatch):
    monkeypatch.setattr(export, "_record_batch", None)
    assert len(run.to_pandas()) == len(lines_of(run))
