"""The norms of a run over many ranks by SQL, on one machine: the numbers of `pyscan.open`, from Parquet files.

pyscan export run.mscan --to parquet -o table
python examples/ranks_duckdb.py table
"""

from __future__ import annotations

import sys
from typing import Any

import duckdb

QUERY = """
select channel, site, cast(step as bigint) as step, sqrt(sum(cast(value as double) * value)) as norm
from read_parquet('{table}/*/*/*.parquet', hive_partitioning = true)
where channel in ('act', 'grad') and replica = 0
group by channel, site, step order by channel, site, step
"""


def norms(table: str) -> list[tuple[Any, ...]]:
    """(channel, site, step, norm) of the whole model: shards are added, of copies one is taken."""
    found: list[tuple[Any, ...]] = duckdb.sql(QUERY.format(table=table.replace("'", "''"))).fetchall()
    return found


if __name__ == "__main__":
    for line in norms(sys.argv[1])[:20]:
        print(*line)
