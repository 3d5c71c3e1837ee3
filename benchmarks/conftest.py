"""What `pytest benchmarks --benchmark-only` means, and how it prints."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Who wants benchmarks only wants them timed; as tests they are not (see pyproject.toml)."""
    config.option.benchmark_enable |= config.option.benchmark_only


def pytest_benchmark_group_stats(benchmarks: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """A table for each file, where its benchmarks name no group, in a unit of its own."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for benchmark in benchmarks:
        file = benchmark["fullname"].partition("::")[0]
        groups[benchmark["group"] or Path(file).stem].append(benchmark)
    return sorted(groups.items())
