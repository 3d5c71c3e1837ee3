"""The norms of a run over many ranks with Dask, on one machine or a cluster: the numbers of `pyscan.open`.

pyscan export run.mscan --to parquet -o table
python examples/ranks_dask.py table          # a dask.distributed.Client before it makes it a cluster's work
"""

from __future__ import annotations

import sys

import dask.dataframe as dd
import pandas as pd


def norms(table: str) -> pd.Series:
    """The norm of the whole model by (channel, site, step): shards are added, of copies one is taken."""
    lines = dd.read_parquet(f"{table}/*/*/*.parquet", columns=["step", "site", "value", "replica", "channel"])
    lines = lines[lines["channel"].isin(["act", "grad"]) & (lines["replica"] == 0)]
    lines = lines.assign(squares=lines["value"].astype("float64") ** 2)
    lines = lines.astype({"channel": "string", "site": "string"})
    found: pd.Series = lines.groupby(["channel", "site", "step"])["squares"].sum().compute() ** 0.5
    return found


if __name__ == "__main__":
    print(norms(sys.argv[1]).head(20))
