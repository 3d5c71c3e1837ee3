"""`pyscan show --map` and `--watch`: the map of the model on a terminal, once or while the run goes on."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from pyscan.commands.base import UserError, open_run
from pyscan.text import printable

if TYPE_CHECKING:
    from pyscan.run import Run

POLL_SECONDS = 1.0
_LAST_EVENTS = 4


def show_map(args: argparse.Namespace, row: int | None) -> int:
    """The map at a row, once."""
    from pyscan import tables

    with open_run(args.scan) as run:
        for line in _screen(run, row, args.map or "act", tables.console()):
            tables.print_text(line)
    return 0


def watch(args: argparse.Namespace) -> int:
    """The map at the newest row, drawn anew when there are more; on a pipe, a line whenever there are more."""
    from pyscan import tables

    screen = tables.console()
    with open_run(args.scan) as run:
        if screen.is_terminal:
            _watch_screen(run, args.map or "act", screen)
        else:
            _watch_lines(run)
    return 0


def _watch_screen(run: Run, measure: str, screen: Any) -> None:
    from pyscan.extras import need

    group = need("rich.console", "cli").Group
    with need("rich.live", "cli").Live(console=screen, screen=True, auto_refresh=False) as live:
        for _ in _changes(run):
            live.update(group(*_screen(run, None, measure, screen)[: screen.height - 1]), refresh=True)


def _watch_lines(run: Run) -> None:
    told = 0
    for _ in _changes(run):
        events = run.events
        print(_summary(run), flush=True)
        for event in events[told:]:
            if event.get("text"):
                print(printable(f"  step {event['step']:,}: {event['kind']}: {event['text']}"), flush=True)
        told = len(events)


def _changes(run: Run) -> Any:
    """Now, and whenever the run has other rows; a file caught in the middle of a change is looked at next time."""
    from pyscan.errors import ScanError

    seen = None
    while True:
        now = len(run.steps), len(run.events)
        if now != seen:
            seen = now
            yield now
        time.sleep(POLL_SECONDS)
        try:
            run.refresh()
        except ScanError as error:
            if "open it anew" in str(error):
                raise UserError(str(error)) from None


def _screen(run: Run, row: int | None, measure: str, screen: Any) -> list[Any]:
    """Head, map, scale and last events as lines of rich."""
    from pyscan import tables
    from pyscan.extras import need
    from pyscan.heat_text import heat_lines
    from pyscan.overview import Overview

    text = need("rich.text", "cli").Text
    known = Overview(run).measures
    if measure not in known:
        raise UserError(f"--map shows one of {', '.join(known)}, got {measure!r}")
    lines = [text(_summary(run, row), style="bold")]
    if not len(run.steps):
        return lines
    is_coloured = screen.is_terminal and screen.color_system in ("256", "truecolor")  # 16 are no scale
    at = len(run.steps) - 1 if row is None else row
    found = heat_lines(run, at, measure, width=min(screen.width, 160), colour=is_coloured, bars=tables.bars())
    for pieces in found:
        line = text()
        for piece in pieces:
            back = f"on rgb({','.join(map(str, piece.background))})" if piece.background else ""
            line.append(piece.text, style=back)
        lines.append(line)
    told = [event for event in run.events if event.get("text")][-_LAST_EVENTS:]
    words = [printable(f"step {event['step']:,}: {event['kind']}: {event['text']}") for event in told]
    return [*lines, *(text(line, style="yellow", no_wrap=True, overflow="ellipsis") for line in words)]


def _summary(run: Run, row: int | None = None) -> str:
    from pyscan import text

    steps = run.steps
    if not len(steps):
        return f"{run.path}: {text.plural(len(run.sites), 'site')}, no steps yet"
    last = steps[len(steps) - 1 if row is None else row]
    loss = "" if last["loss"] != last["loss"] else f" · loss {text.norm(float(last['loss']))}"
    times = steps["time_ns"][-100:]
    seconds = (int(times[-1]) - int(times[0])) / 1e9
    rate = f" · {(len(times) - 1) / seconds:.3g} rows per second" if seconds > 0 else ""
    return f"{text.printable(run.path)}: step {int(last['step']):,}{loss} · {text.plural(len(steps), 'row')}{rate}"
