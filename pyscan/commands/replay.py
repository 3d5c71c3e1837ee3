"""What `pyscan show --tokens` prints: the text of a step, each token coloured by what it did."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pyscan.commands.base import UserError, print_json, select_sites
from pyscan.errors import ScanError

if TYPE_CHECKING:
    from pyscan.replay import Line
    from pyscan.run import Run

MEASURES = ("contribution", "act", "grad", "sps")
# From little to much; dark enough for white text.
_SHADES = ("grey23", "#1b3a5c", "#1f5673", "#2a7a5b", "#7a7a1f", "#9c5a14", "#a5281b")


def add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", action="store_true", help="the text of the step, token by token (tokens mode)")
    parser.add_argument("--by", choices=MEASURES, default=MEASURES[0], help="what --tokens colours by")
    parser.add_argument("--tokenizer", metavar="DIR", help="decodes the token ids; default: metadata['tokenizer']")
    parser.add_argument("--no-color", action="store_true", help="numbers instead of colours")


def replay_step(run: Run, args: argparse.Namespace, step: int | None) -> int:
    """Print the tokens of a step, or of the last one that has any."""
    from pyscan.replay import replay

    steps = run.token_steps()
    if not steps:
        raise UserError(f"{args.scan} holds no tokens: attach(..., tokens=True) records them")
    step = steps[-1] if step is None else step
    sites = None if args.site is None else {site.name for site in select_sites(run, args.site)}
    try:
        lines = replay(run, step, by=args.by, sites=sites)
    except ScanError as error:
        raise UserError(str(error)) from error
    words = _decoder(run, args.tokenizer)
    if args.json:
        sequences = [{"ids": line.ids, "tokens": [*map(words, line.ids)], "values": line.values} for line in lines]
        print_json({"step": step, "by": args.by, "sequences": sequences})
    elif args.no_color or not sys.stdout.isatty():
        _print_numbers(lines, words)
    else:
        _print_colours(lines, words, args.by, step)
    return 0


def _decoder(run: Run, given: str | None) -> Callable[[int], str]:
    """From an id to its text; the id itself where there is no tokenizer."""
    said = run.metadata.get("tokenizer") if isinstance(run.metadata, dict) else None
    name = given or said
    if not isinstance(name, str):
        return str
    try:
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(name, local_files_only=True)
    except Exception as error:
        if given:
            raise UserError(f"--tokenizer {name}: {error}") from error
        return str
    return lambda token: str(tokenizer.decode([token]))


def _print_numbers(lines: Sequence[Line], words: Callable[[int], str]) -> None:
    from pyscan import text

    for number, line in enumerate(lines):
        for place, (token, value) in enumerate(zip(line.ids, line.values, strict=True)):
            print(f"{number}\t{place}\t{value:.6g}\t{text.printable(words(token))}")


def _print_colours(lines: Sequence[Line], words: Callable[[int], str], by: str, step: int) -> None:
    from pyscan import tables
    from pyscan.extras import need
    from pyscan.text import printable

    screen, rich_text = tables.console(), need("rich.text", "cli").Text
    for line in lines:
        shown = rich_text()
        for token, shade in zip(line.ids, _shades(line.values), strict=True):
            word = words(token)
            shown.append(f"{word} " if word == str(token) else printable(word), style=f"white on {shade}")
        screen.print(shown)
    legend = rich_text(f"step {step:,} · {by}: little ")
    for shade in _SHADES:
        legend.append("  ", style=f"on {shade}")
    screen.print(legend.append(" much"))


def _shades(values: Sequence[float]) -> list[str]:
    """A shade for each value, by its rank in the line: a few large ones must not leave all others dark."""
    import numpy as np

    given = np.asarray(values, np.float64)
    ranks = np.argsort(np.argsort(np.nan_to_num(given, nan=-np.inf), kind="stable"), kind="stable")
    steps = ranks * len(_SHADES) // max(len(given), 1)
    return [_SHADES[int(step)] for step in steps]
