"""A run as long tables (step, site, channel, block, value): Arrow, pandas, a Parquet data set, CSV.

Receives an open run; reads it in pieces of bounded size and hands on one line per observed cell. Absent cells have no
line; a channel with one cell per site has block 0. pyarrow and pandas are imported where they are used.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from pyscan.batching import batches
from pyscan.codecs import is_absent
from pyscan.errors import ScanError
from pyscan.extras import need
from pyscan.rank_merge import Replicas

if TYPE_CHECKING:
    import pandas
    import pyarrow

    from pyscan.ranks import RankedRun
    from pyscan.run import Run
    from pyscan.schema import Channel, SiteInfo

Tick = Callable[[int, int], None]

# Cells read at once: 4 MB of values, some 30 MB with the columns made of them.
PIECE_CELLS = 1 << 20
# Cells in one Parquet file: files of some 50 MB, which every reader of a data set likes.
FILE_CELLS = 1 << 25
COLUMNS = ("step", "site", "channel", "block", "value")


def _no_tick(done: int, total: int) -> None:
    """The progress of those who do not ask for it."""


class Piece(NamedTuple):
    """Lines of one channel; `site` counts from the first of `names`."""

    channel: str
    names: list[str]
    step: NDArray[np.int64]
    site: NDArray[np.int32]
    block: NDArray[np.int32]
    value: NDArray[np.float32]


def pieces(
    run: Run,
    sites: Sequence[SiteInfo] | None = None,
    channels: Sequence[Channel] | None = None,
    rows: slice | None = None,
) -> Iterator[Piece]:
    """The observed cells channel by channel, site by site, in pieces near PIECE_CELLS."""
    sites = run.sites if sites is None else sites
    start, stop, _ = (rows or slice(None)).indices(len(run.steps))
    steps = _signed(run.steps["step"])
    for channel in run.channels if channels is None else channels:
        for group in batches(sites, lambda site: site.num_cells(channel.per) * (stop - start), PIECE_CELLS):  # noqa: B023
            cells = sum(site.num_cells(channel.per) for site in group)
            window = max(PIECE_CELLS // max(cells, 1), 64)
            for at in range(start, stop, window):
                yield _piece(run, channel, group, slice(at, min(at + window, stop)), steps)


def _piece(run: Run, channel: Channel, group: list[SiteInfo], rows: slice, steps: NDArray[np.int64]) -> Piece:
    values = [run.get(channel.name, site.name, blocks=True, steps=rows) for site in group]
    widths = [part.shape[1] for part in values]
    value = np.concatenate([part.ravel() for part in values])
    seen = ~is_absent(value)
    num_rows = rows.stop - rows.start
    site = np.repeat(np.arange(len(group), dtype=np.int32), [width * num_rows for width in widths])
    step = np.concatenate([np.repeat(steps[rows], width) for width in widths])
    block = np.concatenate([np.tile(np.arange(width, dtype=np.int32), num_rows) for width in widths])
    return Piece(channel.name, [s.name for s in group], step[seen], site[seen], block[seen], value[seen])


def _signed(steps: NDArray[Any]) -> NDArray[np.int64]:
    """Steps as int64, the one integer that every reader of tables knows."""
    if len(steps) and int(steps.max()) >= 2**63:
        raise ScanError(f"a table holds steps below 2**63, got {int(steps.max())}: this is no step number")
    return steps.astype(np.int64)


def arrow_schema(with_channel: bool = True) -> pyarrow.Schema:
    """The columns of the Arrow tables; a Parquet data set has the channel in its directory names instead."""
    pa = need("pyarrow", "arrow")
    text = pa.dictionary(pa.int32(), pa.string())
    types = {"step": pa.int64(), "site": text, "channel": text, "block": pa.int32(), "value": pa.float32()}
    return pa.schema([(name, types[name]) for name in COLUMNS if with_channel or name != "channel"])


def _record_batch(piece: Piece, schema: pyarrow.Schema) -> pyarrow.RecordBatch:
    pa = need("pyarrow", "arrow")
    channel = pa.DictionaryArray.from_arrays(np.zeros(len(piece.step), np.int32), [piece.channel])
    columns = {
        "step": pa.array(piece.step),
        "site": pa.DictionaryArray.from_arrays(piece.site, pa.array(piece.names, pa.string())),
        "channel": channel,
        "block": pa.array(piece.block),
        "value": pa.array(piece.value),
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def to_arrow_stream(run: Run, sites: Sequence[SiteInfo] | None = None) -> pyarrow.RecordBatchReader:
    """The run as a stream of record batches: memory stays that of one piece, whatever the size of the run."""
    schema = arrow_schema()
    batches = (_record_batch(piece, schema) for piece in pieces(run, sites))
    return need("pyarrow", "arrow").RecordBatchReader.from_batches(schema, batches)


def to_arrow(run: Run) -> pyarrow.Table:
    """The run as one Arrow table: 20 bytes per observed cell. For runs larger than memory see `to_arrow_stream`."""
    return to_arrow_stream(run).read_all().unify_dictionaries()


def to_pandas(run: Run) -> pandas.DataFrame:
    """The run as one data frame, site and channel as categories; needs no pyarrow."""
    pd = need("pandas", "pandas")
    names = {site.name: i for i, site in enumerate(run.sites)}
    channels = [channel.name for channel in run.channels]
    parts = list(pieces(run))
    site = [np.array([names[n] for n in part.names], np.int32)[part.site] for part in parts]
    channel = [np.full(len(part.step), channels.index(part.channel), np.int32) for part in parts]
    return pd.DataFrame(
        {
            "step": _joined([part.step for part in parts], np.int64),
            "site": pd.Categorical.from_codes(_joined(site, np.int32), list(names)),
            "channel": pd.Categorical.from_codes(_joined(channel, np.int32), channels),
            "block": _joined([part.block for part in parts], np.int32),
            "value": _joined([part.value for part in parts], np.float32),
        }
    )


def _joined(parts: list[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def write_parquet(run: Run, directory: Path, sites: Sequence[SiteInfo] | None = None, tick: Tick = _no_tick) -> int:
    """Write `channel=NAME/steps-FIRST-LAST.parquet` under the directory, which must be new; returns the lines written.

    Hive partitioning by channel, one file per range of steps, sorted by site, then step: DuckDB, Polars and Spark read
    the directory as one table and skip what a query does not ask for.
    """
    pq = need("pyarrow.parquet", "arrow")
    sites = run.sites if sites is None else sites
    schema, steps, total = arrow_schema(with_channel=False), run.steps["step"], _num_cells(run, sites)
    lines = 0
    directory.mkdir()
    for channel in run.channels:
        target = directory / f"channel={quote(channel.name, safe='')}"
        target.mkdir()
        for rows in _file_windows(len(steps), sites, channel):
            with pq.ParquetWriter(target / _file_name(steps[rows]), schema, compression="zstd") as out:
                for piece in pieces(run, sites, [channel], rows):
                    out.write_batch(_record_batch(piece, schema))
                    lines += len(piece.step)
                    tick(lines, total)
    return lines


def write_ranks(run: RankedRun, directory: Path, sites: Sequence[SiteInfo] | None = None, tick: Tick = _no_tick) -> int:
    """Write `rank=R/channel=NAME/steps-FIRST-LAST.parquet`: the lines of every rank by itself.

    `block` counts over the whole weight. Column `replica` numbers the copies of what a line is part of: the lines of
    replica 0 of a step, site, channel and block, combined by the channel's op, are what the merged run has.
    """
    pq = need("pyarrow.parquet", "arrow")
    pa = need("pyarrow", "arrow")
    schema = arrow_schema(with_channel=False).append(pa.field("replica", pa.int32()))
    wanted = {site.name for site in (run.sites if sites is None else sites)}
    lines = 0
    directory.mkdir()
    replicas = Replicas(run)
    for done, (rank, of_rank) in enumerate(run.ranks.items()):
        steps = of_rank.steps["step"]
        own = [site for site in of_rank.sites if site.name in wanted]
        for channel in of_rank.channels:
            target = directory / f"rank={rank}" / f"channel={quote(channel.name, safe='')}"
            target.mkdir(parents=True)
            for rows in _file_windows(len(steps), own, channel):
                with pq.ParquetWriter(target / _file_name(steps[rows]), schema, compression="zstd") as out:
                    for piece in pieces(of_rank, own, [channel], rows):
                        out.write_batch(_rank_batch(piece, schema, replicas.of(rank, channel, piece.names), run.block))
                        lines += len(piece.step)
        tick(done + 1, len(run.ranks))
    return lines


def _rank_batch(piece: Piece, schema: pyarrow.Schema, places: list[tuple[int, int]], block: int) -> pyarrow.RecordBatch:
    pa = need("pyarrow", "arrow")
    firsts, replicas = (np.array(column, np.int32)[piece.site] for column in zip(*places, strict=True))
    columns = [
        pa.array(piece.step),
        pa.DictionaryArray.from_arrays(piece.site, pa.array(piece.names, pa.string())),
        pa.array(piece.block + firsts),
        pa.array(piece.value),
        pa.array(replicas),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _num_cells(run: Run, sites: Sequence[SiteInfo]) -> int:
    """Lines there are at most; absent cells have none."""
    return sum(site.num_cells(channel.per) for site in sites for channel in run.channels) * len(run.steps)


def _file_windows(num_rows: int, sites: Sequence[SiteInfo], channel: Channel) -> list[slice]:
    """Rows of each file of a channel; one file without rows where there are none, so that the table can be read."""
    cells = sum(site.num_cells(channel.per) for site in sites)
    window = max(FILE_CELLS // max(cells, 1) // 64 * 64, 64)
    return [slice(at, min(at + window, num_rows)) for at in range(0, max(num_rows, 1), window)]


def _file_name(steps: NDArray[Any]) -> str:
    return f"steps-{steps[0]:012}-{steps[-1]:012}.parquet" if len(steps) else "steps-none.parquet"


def write_csv(run: Run, file: IO[str], sites: Sequence[SiteInfo] | None = None, tick: Tick = _no_tick) -> int:
    """Write a header and a line per observed cell; floats have the fewest digits that give the same float32 back."""
    sites = run.sites if sites is None else sites
    lines, total = 0, _num_cells(run, sites)
    digits = functools.lru_cache(1 << 17)(lambda value: str(np.float32(value)))
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for piece in pieces(run, sites):
        names = [piece.names[i] for i in piece.site.tolist()]
        values = map(digits, piece.value.tolist())
        columns = piece.step.tolist(), names, [piece.channel] * len(names), piece.block.tolist(), values
        writer.writerows(zip(*columns, strict=True))
        lines += len(names)
        tick(lines, total)
    return lines
