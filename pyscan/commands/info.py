"""`pyscan info`: what a scan holds, without reading its values."""

from __future__ import annotations

import argparse
import datetime
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyscan.commands.base import Verb, add_json, add_scan, open_run, print_json

if TYPE_CHECKING:
    from pyscan.run import Run


class Info(Verb):
    """Say what a scan holds: steps, sites, size, rate, events, damage.

    Values are not read, so this is quick on files of any size; damage in them
    is found by `pyscan check`.

    example:
      pyscan info run.mscan
    """

    name = "info"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_scan(parser)
        add_json(parser)

    def run(self, args: argparse.Namespace) -> int:
        with open_run(args.scan) as run:
            facts = describe(run, args.scan)
        if args.json:
            print_json(facts)
        else:
            _print(facts)
        return 0


def describe(run: Run, path: Path) -> dict[str, Any]:
    """All that `info` says, as plain values; what is not known is None."""
    files = scan_files(path)
    num_bytes = sum(file.stat().st_size for file in files)
    cells = sum(site.num_cells(channel.per) for site in run.sites for channel in run.channels)
    values = cells * len(run.steps)
    return {
        "path": str(path),
        "version": run.version,
        "model": run.model,
        "files": {str(file): file.stat().st_size for file in files},
        "bytes": num_bytes,
        "bytes_per_value": num_bytes / values if values else None,
        "block": run.block,
        "every": run.every,
        "row_kind": run.row_kind,
        "steps": _steps(run),
        "sites": {"count": len(run.sites), "kinds": dict(Counter(site.kind for site in run.sites).most_common())},
        "cells_per_step": cells,
        "channels": [vars(channel) for channel in run.channels],
        "ranks": {"world": run.world, "missing": run.missing_ranks},
        "events": _events(run),
        "damage": [{"offset": offset, "reason": reason} for offset, reason in run.damage],
        "versions": dict(run.versions),
        "metadata": run.metadata,
    }


def scan_files(path: Path) -> list[Path]:
    """The files behind a name: the file and its tail, or those of all ranks."""
    mains = [path] if path.exists() else sorted(path.parent.glob(f"{path.stem}.rank[0-9]*{path.suffix}"))
    return [file for main in mains for file in (main, Path(f"{main}.tail")) if file.exists()]


def _events(run: Run) -> dict[str, Any]:
    """Of each kind of event: how many there are, and when and where the first one happened."""
    found: dict[str, Any] = {}
    for event in run.recorded_events:
        first = {"count": 0, "first_step": event["step"], "first_site": event["site"]}
        found.setdefault(event["kind"], first)["count"] += 1
    return found


def _steps(run: Run) -> dict[str, Any]:
    steps = run.steps
    if not len(steps):
        return {"rows": 0}
    seconds = (int(steps["time_ns"][-1]) - int(steps["time_ns"][0])) / 1e9
    tokens = int(steps["tokens"].sum(dtype=object))
    losses = steps["loss"][steps["loss"] == steps["loss"]]
    return {
        "rows": len(steps),
        "first": int(steps["step"][0]),
        "last": int(steps["step"][-1]),
        "started_ns": int(steps["time_ns"][0]),
        "seconds": seconds,
        "rows_per_second": (len(steps) - 1) / seconds if seconds > 0 else None,
        "tokens": tokens or None,
        "tokens_per_second": tokens / seconds if tokens and seconds > 0 else None,
        "loss": [float(losses[0]), float(losses[-1])] if len(losses) else None,
        "flags": _flags(steps["flags"]),
    }


def _flags(flags: Any) -> dict[str, int]:
    from pyscan import format as fmt

    bits = {"skipped": fmt.ROW_SKIPPED, "after_clip": fmt.ROW_AFTER_CLIP, "resumed": fmt.ROW_RESUMED}
    return {name: int(((flags & bit) != 0).sum()) for name, bit in bits.items()}


def _print(facts: dict[str, Any]) -> None:
    from pyscan import tables

    lines = [
        ("model", facts["model"] or "not named", ""),
        ("size", _size_line(facts), ""),
        *_step_lines(facts["steps"], facts["every"]),
        ("sites", _site_line(facts), ""),
        ("channels", _channel_line(facts), ""),
        _rank_line(facts["ranks"]),
        ("events", _event_line(facts["events"]), "yellow" if facts["events"] else ""),
        _damage_line(facts["damage"]),
    ]
    version = "1.1" if facts["version"] == 1 else facts["version"]
    tables.print_facts(f"{facts['path']}  (.mscan version {version})", [line for line in lines if line])


def _size_line(facts: dict[str, Any]) -> str:
    from pyscan import text

    per_value = facts["bytes_per_value"]
    parts = [text.size(facts["bytes"])]
    if len(facts["files"]) > 1:
        parts.append(f"in {len(facts['files'])} files")
    if per_value is not None:
        parts.append(f"· {per_value:.3g} bytes per value")
    return " ".join(parts)


def _step_lines(steps: dict[str, Any], every: int) -> list[tuple[str, str, str]]:
    from pyscan import text

    if not steps["rows"]:
        return [("steps", "none yet", "yellow")]
    span = f"{steps['first']:,} to {steps['last']:,}"
    every_text = f", one every {every} steps" if every > 1 else ""
    lines = [("steps", f"{text.plural(steps['rows'], 'row')}, {span}{every_text}", "")]
    flags = _counts({name: number for name, number in steps["flags"].items() if number})
    if flags:
        lines.append(("flags", flags, ""))
    if steps["started_ns"]:
        started = datetime.datetime.fromtimestamp(steps["started_ns"] / 1e9).strftime("%Y-%m-%d %H:%M:%S")
        lines.append(("time", f"from {started}, {text.duration(max(steps['seconds'], 0))}{_rate(steps)}", ""))
    if steps["tokens"]:
        per_second = f" · {steps['tokens_per_second']:,.0f} per second" if steps["tokens_per_second"] else ""
        lines.append(("tokens", f"{steps['tokens']:,}{per_second}", ""))
    if steps["loss"]:
        lines.append(("loss", f"{text.norm(steps['loss'][0])} to {text.norm(steps['loss'][1])}", ""))
    return lines


def _rate(steps: dict[str, Any]) -> str:
    rate = steps["rows_per_second"]
    if rate is None:
        return ""
    return f" · {rate:.3g} rows per second" if rate >= 1 else f" · {1 / rate:.3g} seconds per row"


def _site_line(facts: dict[str, Any]) -> str:
    kinds = _counts(facts["sites"]["kinds"])
    cells = f"{facts['cells_per_step']:,} cells per step"
    return f"{facts['sites']['count']:,} ({kinds}) · {cells}" if kinds else "none"


def _channel_line(facts: dict[str, Any]) -> str:
    of_block = f"block of {facts['block']}" if facts["block"] else "tensor" if facts["version"] > 1 else "block"
    words = {"block": of_block, "row_block": f"row {of_block}", "site": "site"}
    per: dict[str, list[str]] = {}
    for channel in facts["channels"]:
        per.setdefault(words[channel["per"]], []).append(channel["name"])
    return " · ".join(f"{', '.join(names)} per {what}" for what, names in per.items())


def _rank_line(ranks: dict[str, Any]) -> tuple[str, str, str] | None:
    if ranks["missing"]:
        missing = ", ".join(map(str, ranks["missing"]))
        return ("ranks", f"{ranks['world']}, of which missing: {missing}", "red")
    return ("ranks", str(ranks["world"]), "") if ranks["world"] > 1 else None


def _event_line(events: dict[str, Any]) -> str:
    told = []
    for kind, event in events.items():
        where = f" in {event['first_site']}" if event["first_site"] else ""
        first = "first " if event["count"] > 1 else ""
        told.append(f"{event['count']:,} {kind} ({first}at step {event['first_step']:,}{where})")
    return ", ".join(told) or "none"


def _damage_line(damage: list[dict[str, Any]]) -> tuple[str, str, str]:
    if not damage:
        return ("damage", "none seen", "")
    first = damage[0]
    more = f" and {len(damage) - 1} more" if len(damage) > 1 else ""
    return ("damage", f"{first['reason']} at byte {first['offset']:,}{more}: see pyscan check", "red")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in counts.items())
