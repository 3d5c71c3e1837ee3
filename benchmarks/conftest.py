"""How `pytest benchmarks` prints: a table for each file, where its benchmarks name no group, in a unit of its own."""

from collections import defaultdict
from pathlib import Path
from typing import Any


def pytest_benchmark_group_stats(benchmarks: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for benchmark in benchmarks:
        file = benchmark["fullname"].partition("::")[0]
        groups[benchmark["group"] or Path(file).stem].append(benchmark)
    return sorted(groups.items())
