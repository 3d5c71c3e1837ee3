"""Put kept results into docs/performance.md: the instruction counts, and the newest growth and training tables.

python -m benchmarks.document --write
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.training import report

DOCUMENT = results.ROOT / "docs" / "performance.md"
TRAININGS = [f"training-{model}-{table}" for model in ("minimind", "tiny", "small", "wide") for table in report.TABLES]
TRAININGS += ["training-minimind-alone-accumulate4", "training-small-alone-compiled"]


def counts() -> str:
    kept = json.loads((results.RESULTS / "instructions.json").read_text())
    ours, plain = (kept["counts"][f"per site: {name}"] for name in ("pyscan", "plain torch"))
    lines = ["| path | instructions |", "|---|---|"]
    lines += [f"| {name} | {round(count):,} |" for name, count in sorted(kept["counts"].items())]
    where = ", ".join(f"{name} {value}" for name, value in sorted(kept["circumstances"].items()))
    return "\n".join([*lines, "", f"The same capture in plain torch takes {plain / ours:.1f} times as many. ({where})"])


def growth() -> str:
    kept = results.last_kept("growth")
    if kept is None:
        return "Not kept yet."
    lines = ["| axis | values | us longer per step | slope | explained |", "|---|---|---|---|---|"]
    for axis in kept["result"]["axes"]:
        is_read = axis["against"] == "bytes"
        slope = f"{1e-9 / axis['slope']:.1f} GB/s" if is_read else f"{axis['slope'] * 1e9:.1f} ns a cell"
        values, extra = (", ".join(f"{v:.0f}" for v in axis[key]) for key in ("values", "extra_us"))
        lines.append(f"| {axis['axis']} | {values} | {extra} | {slope} | {axis['explained']:.1%} |")
    steps = kept["result"]["steps"]
    hand_over = ", ".join(f"{us:.0f}" for us in steps["hand_over_us"])
    counts = ", ".join(map(str, steps["steps"]))
    tail = [
        f"A plain read takes {kept['result']['read_gb_per_s']:.1f} GB/s. After {counts} steps "
        f"handing over a row takes {hand_over} us; the file grows by {steps['bytes_per_value']:.3f} bytes a value.",
        "",
        f"![growth]({_path(kept)}/growth.svg)",
        "",
        _where(kept),
    ]
    return "\n".join([*lines, "", *tail])


def training() -> str:
    kept = [found for name in TRAININGS if (found := results.last_kept(name)) is not None]
    if not kept:
        return "Not kept yet."
    tables = [f"{report.markdown(one['result'])}\n{_where(one)}\n" for one in kept]
    pictures = {f"![training step]({_path(one)}/training.svg)" for one in kept}
    return "\n".join([*tables, *sorted(pictures)])


def _path(kept: dict[str, Any]) -> str:
    return os.path.relpath(results.RESULTS / kept["commit"], DOCUMENT.parent)


def _where(kept: dict[str, Any]) -> str:
    machine, versions = kept["machine"], kept["versions"]
    return (
        f"({kept['date'][:10]}, commit {kept['commit']}: {machine['processor']}, {machine['cores']} cores, "
        f"torch {versions['torch']}, {versions['compiler']})"
    )


def document() -> str:
    """docs/performance.md with what is kept now."""
    text = DOCUMENT.read_text()
    for name, made in (("counts", counts()), ("growth", growth()), ("training", training())):
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        text = text[: text.index(begin) + len(begin)] + f"\n{made}\n" + text[text.index(end) :]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.document", description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="put it into docs/performance.md")
    if parser.parse_args().write:
        Path(DOCUMENT).write_text(document())
    else:
        print(document())


if __name__ == "__main__":
    main()
