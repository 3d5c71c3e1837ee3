"""Compare scanners on a training step; print tables, and with --keep put them under benchmarks/results.

python -m benchmarks.training --model minimind --table scanner --seconds 600 --keep
python -m benchmarks.training --model tiny --table tools --rounds 60
python -m benchmarks.training --compare          # as `make bench-compare`
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.training import report, rounds
from benchmarks.training.contestants import CONTESTANTS, TABLES
from benchmarks.training.models import MODELS


def name_of(arguments: argparse.Namespace, table: str) -> str:
    parts = ["training", arguments.model, table]
    parts += [f"accumulate{arguments.accumulate}"] if arguments.accumulate > 1 else []
    parts += ["compiled"] if arguments.compile else []
    return "-".join(parts)


def measure(arguments: argparse.Namespace, table: str) -> dict[str, Any]:
    names = arguments.contestants or TABLES[table]
    if arguments.compile:
        names = [name for name in names if CONTESTANTS[name].can_compile]
    log = Path(tempfile.gettempdir()) / "pyscan-bench.log"
    options = {"accumulate": arguments.accumulate, "compiled": arguments.compile, "threads": arguments.threads}
    return rounds.compare(
        names, arguments.model, rounds=arguments.rounds, seconds=arguments.seconds, log=log, **options
    )


def compared(name: str, result: dict[str, Any]) -> list[str]:
    kept = results.last_kept(name)
    if kept is None:
        return [f"{name}: there is no kept result to compare with; make one with --keep"]
    print(f"  compared with {kept['commit']} of {kept['date']}, {kept['machine']['processor']}")
    return [f"{name}: {line}" for line in report.slower(result, kept["result"])]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("contestants", nargs="*", metavar="CONTESTANT", help=f"of {', '.join(CONTESTANTS)}")
    parser.add_argument("--model", choices=MODELS, default="minimind")
    parser.add_argument("--table", choices=TABLES, action="append", help="may be repeated; default: scanner")
    parser.add_argument("--rounds", type=int, help="of one launch; default: until known to within 0.5 %%")
    parser.add_argument("--seconds", type=float, default=180, help="and at most so long per table")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="backwards per step")
    parser.add_argument("--compile", action="store_true", help="train the model inside torch.compile")
    parser.add_argument("--threads", type=int, default=2, help="of torch, in every contestant")
    parser.add_argument("--budget", type=float, default=0.01, help="of the contestant `pyscan budget`")
    parser.add_argument("--keep", action="store_true", help="write the result under benchmarks/results")
    parser.add_argument("--compare", action="store_true", help="fail if slower than the last kept result")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.contestants if name not in CONTESTANTS]:
        parser.error(f"no contestant is called {unknown[0]!r}; there are {', '.join(CONTESTANTS)}")
    return arguments


def main() -> None:
    arguments = parse()
    os.environ["PYSCAN_BENCH_BUDGET"] = str(arguments.budget)
    at, found, complaints = results.circumstances(), [], []
    for table in ["chosen"] if arguments.contestants else arguments.table or ["scanner"]:
        result = measure(arguments, table)
        print(report.table(result) + "\n", flush=True)
        found.append(result)
        if arguments.compare:
            complaints += compared(name_of(arguments, table), result)
        if arguments.keep:
            results.keep(name_of(arguments, table), result, at)
    if arguments.keep:
        draw(at)
    if complaints:
        sys.exit("\n".join(complaints))


def draw(at: dict[str, Any]) -> None:
    """The picture and the table of all that is kept of this commit."""
    kept = results.of_commit(at["commit"], "training-")
    machine = f"{at['machine']['processor']}, {at['machine']['cores']} cores; torch {at['versions']['torch']}"
    note = f"pyscan {at['commit']}, {at['date'][:10]}; {machine}"
    directory = results.directory(at)
    report.picture([one["result"] for one in kept], directory / "training.svg", note)
    tables = [report.markdown(one["result"]) for one in kept]
    (directory / "training.md").write_text("\n".join([f"{note}\n", *tables]))


if __name__ == "__main__":
    main()
