"""Put tables, facts and progress bars on a terminal with rich, or on a pipe as plain lines that are never cut.

Receives rows of finished text; hands nothing on. rich is imported at first use: `--json` works without it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from pyscan.extras import need
from pyscan.text import ASCII_BARS, BARS, fit, printable

if TYPE_CHECKING:
    from rich.console import Console

Tick = Callable[[int, int], None]  # (done, total), in any unit

# Wide enough that rich never wraps or cuts a line that goes to a pipe.
_PIPE_WIDTH = 100_000
# A bar for something shorter than this would only flicker.
_BAR_AFTER_SECONDS = 0.5


class Column(NamedTuple):
    title: str
    right: bool = True
    style: str = ""
    is_name: bool = False  # gives way when the terminal is narrow: names are shortened, numbers never


def console() -> Console:
    """stdout as rich sees it; a pipe gets no colour and all the width it needs, unless COLUMNS says otherwise."""
    is_pipe = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    made: Console = need("rich.console", "cli").Console(
        width=_PIPE_WIDTH if is_pipe else None, highlight=False, markup=False, emoji=False
    )
    return made


def width() -> int:
    """Columns of the terminal; of a pipe, more than any line needs."""
    return console().width


def bars() -> str:
    """The characters for sparklines that stdout can show."""
    return BARS if (sys.stdout.encoding or "").lower().startswith("utf") else ASCII_BARS


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]], sections: Sequence[int] = ()) -> None:
    """Print rows of text under their titles; a line is drawn after each row whose number is in `sections`."""
    screen = console()
    box = need("rich.box", "cli").SIMPLE_HEAD
    look = {"box": box, "padding": (0, 1, 0, 0), "pad_edge": False, "show_edge": False, "header_style": "bold"}
    table = need("rich.table", "cli").Table(**look)
    for column in columns:
        justify = "right" if column.right else "left"
        table.add_column(column.title, justify=justify, style=column.style, no_wrap=True, overflow="ellipsis")
    for number, row in enumerate(_fitted(columns, rows, screen.width)):
        table.add_row(*row, end_section=number in sections)
    _print(screen, table)
    print()


def _print(screen: Console, thing: Any, soft_wrap: bool = False) -> None:
    """Print; what goes to a pipe is written here, because rich would answer a broken pipe by leaving the program."""
    if screen.is_terminal:
        screen.print(thing, soft_wrap=soft_wrap)
        return
    with screen.capture() as capture:
        screen.print(thing, soft_wrap=soft_wrap)
    sys.stdout.write("\n".join(line.rstrip() for line in capture.get().split("\n")))


def _fitted(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """The rows with names shortened to what the other columns leave; 2 characters stand between columns."""
    clean = [[printable(cell) for cell in row] for row in rows]
    widest = [max([len(c.title), *(len(row[i]) for row in clean)]) for i, c in enumerate(columns)]
    names = [i for i, column in enumerate(columns) if column.is_name]
    rest = width - sum(w for i, w in enumerate(widest) if i not in names) - 2 * (len(columns) - 1)
    share = max(12, rest // max(len(names), 1))
    for i in names:
        for row, name in zip(clean, fit([row[i] for row in clean], share), strict=True):
            row[i] = name
    return clean


def print_facts(title: str, facts: Sequence[tuple[str, str, str]]) -> None:
    """A title, then one `label  text` line per fact; the third part is a style ("" for plain)."""
    text = need("rich.text", "cli").Text
    grid = need("rich.table", "cli").Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value, style in facts:
        grid.add_row(f"  {label}", text(printable(value), style=style))
    screen = console()
    _print(screen, text(printable(title), style="bold"))
    _print(screen, grid)


def print_line(line: str, style: str = "") -> None:
    """One line of text, wrapped by the terminal alone."""
    _print(console(), need("rich.text", "cli").Text(printable(line), style=style), soft_wrap=True)


def print_text(line: Any) -> None:
    """One line of rich's Text."""
    _print(console(), line, soft_wrap=True)


@contextmanager
def progress(label: str) -> Iterator[Tick]:
    """A bar on stderr for work that lasts; on a pipe, without rich, or while it is short, the ticks do nothing."""
    bar: Any = None
    started = time.monotonic()

    def tick(done: int, total: int) -> None:
        nonlocal bar
        if bar is None and time.monotonic() - started > _BAR_AFTER_SECONDS:
            bar = _start_bar(label)
        if bar:
            bar.update(bar.task_ids[0], completed=done, total=total)

    try:
        yield tick if _wants_bar() else _no_tick
    finally:
        if bar:
            bar.stop()


def _no_tick(done: int, total: int) -> None:
    pass


def _wants_bar() -> bool:
    if not sys.stderr.isatty():
        return False
    try:
        import rich.progress  # noqa: F401
    except ImportError:
        return False
    return True


def _start_bar(label: str) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(label, total=None)
    bar.start()
    return bar
