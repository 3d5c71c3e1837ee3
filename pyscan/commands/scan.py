"""`pyscan scan`: a corpus through a model, one row per sequence."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyscan.commands.base import UserError, Verb, open_run

if TYPE_CHECKING:
    from pyscan.corpus import Survey
    from pyscan.corpus_scan import Settings

SHOWN = 5  # bad lines that are named


class Scan(Verb):
    """Scan a corpus: one row per sequence, from one forward and backward each batch.

    A row holds, for every weight, the norm of the sequence's own inputs and the
    norm of its own gradient: that of its mean loss over its target tokens,
    whatever other sequences share its batch. Nothing is trained.

    DATA is JSON lines: {"text": ...}, or {"messages": [...]} for the chat
    template of the tokenizer, or {"prompt": ..., "response": ...}. Only the
    response carries loss, of a text all tokens. With --generate N the model
    first answers each prompt by itself; prompt and answer are then scanned.

    A scan that was interrupted goes on with --resume and scans no sequence
    again. Under torchrun every process takes its share of the batches; the
    common name opens all their rows as one scan.

    examples:
      pyscan scan --model runs/demo/model --data code.jsonl -o code.mscan
      pyscan scan --model NAME --data a.jsonl b.jsonl -o ab.mscan --generate 64
      torchrun --nproc-per-node 2 -m pyscan scan --model DIR --data a.jsonl -o a.mscan
      pyscan diff code.mscan prose.mscan
    """

    name = "scan"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--model", metavar="MODEL", required=True, help="a directory of save_pretrained, or a name of the hub")
        add("--data", metavar="FILE", type=Path, nargs="+", required=True, help="JSON lines")
        add("-o", "--output", metavar="PATH", type=Path, required=True, help="where the scan goes")
        add("--resume", action="store_true", help="go on with a scan that was interrupted")
        add("--force", action="store_true", help="replace the output if it exists")
        add("--loss", choices=("response", "all"), default="response", help="which tokens carry loss (response)")
        add("--generate", metavar="N", type=int, default=0, help="answer each prompt with at most N tokens first")
        add(
            "--max-length",
            metavar="N",
            type=int,
            help="cut sequences to N tokens (what the model allows)",
        )
        add("--batch-tokens", metavar="N", type=int, default=4096, help="tokens of a batch with its padding (4096)")
        add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto", help="of the weights (auto)")
        add("--device", default="auto", help="such as cpu or cuda:1 (auto)")
        add("--include", metavar="REGEX", action="append", default=[], help="only weights whose name it finds")
        add("--exclude", metavar="REGEX", action="append", default=[], help="not the weights whose name it finds")
        add("--block", metavar="N", type=int, default=64, help="input features per cell; 0: one cell per weight (64)")
        add("--skip-bad", action="store_true", help="leave out lines that cannot be used instead of stopping")

    def run(self, args: argparse.Namespace) -> int:
        from pyscan.corpus import survey
        from pyscan.corpus_tokens import CorpusError

        try:
            settings = _settings(args)
            _make_room(args, settings)
            found = survey(settings.data, generate=bool(settings.generate))
            _check_data(args, found)
            return _scan(settings, found)
        except CorpusError as error:
            raise UserError(str(error)) from error


def _settings(args: argparse.Namespace) -> Settings:
    from pyscan.corpus_scan import Settings

    return Settings(
        model=args.model,
        data=tuple(args.data),
        output=args.output,
        loss=args.loss,
        generate=args.generate,
        max_length=args.max_length,
        batch_tokens=args.batch_tokens,
        dtype=args.dtype,
        device=args.device,
        include=tuple(args.include),
        exclude=tuple(args.exclude),
        block=args.block,
        resume=args.resume,
        rank=int(os.environ.get("RANK", 0)),  # as torchrun gives them
        world=int(os.environ.get("WORLD_SIZE", 1)),
    )


def _make_room(args: argparse.Namespace, settings: Settings) -> None:
    """The output is free, or to be continued, or allowed to be replaced."""
    from pyscan.corpus_file import own_path

    path = own_path(settings.output, settings.rank, settings.world)
    if not path.parent.is_dir():
        raise UserError(f"{path.parent} is not a directory: make it first")
    for file in (path, Path(f"{path}.tail")):
        if file.exists() and args.force and not args.resume:
            file.unlink()
        elif file.exists() and not args.resume:
            raise UserError(f"{file} exists: go on with --resume, name another output or add --force")


def _check_data(args: argparse.Namespace, found: Survey) -> None:
    bad = [str(line) for line in found.bad]
    if bad and not args.skip_bad:
        more = f"; {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise UserError(f"{'; '.join(bad[:SHOWN])}{more} (--skip-bad leaves them out)")
    for line in bad:
        print(f"pyscan: left out {line}", file=sys.stderr)
    if not found.num_records:
        raise UserError(f"there is no sequence in {', '.join(map(str, args.data))}")


def _scan(settings: Settings, found: Survey) -> int:
    from pyscan.corpus_scan import CorpusScan

    scan = CorpusScan(settings, found)
    share = -(-found.num_records // settings.world)  # about: shares are of batches
    try:
        with _progress(share, shown=settings.rank == 0) as tick:
            path = scan.run(tick)
    except KeyboardInterrupt:
        print("pyscan: stopped; go on with the same command and --resume", file=sys.stderr)
        raise
    _summarize(path, settings)
    return 0


@contextlib.contextmanager
def _progress(total: int, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr with the rate and the time that is left; nothing on a pipe, or without rich."""
    from pyscan.tables import _wants_bar

    if not shown or not _wants_bar():
        yield lambda sequences, tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("sequences", total=total)
        done = 0

        def tick(sequences: int, tokens: int) -> None:
            nonlocal done
            done += tokens
            seconds = bar.tasks[0].elapsed or 0
            rate = f" · {done / seconds:,.0f} tokens/s" if seconds else ""
            bar.update(task, advance=sequences, description=f"sequences{rate}")

        yield tick


def _summarize(path: Path, settings: Settings) -> None:
    """What the file holds, earlier sessions included."""
    from pyscan import tables, text
    from pyscan.corpus_file import TROUBLES

    with open_run(path) as run:
        cells = sum(site.num_blocks for site in run.sites) * len(run.channels)
        rows, tokens = len(run.steps), int(run.steps["tokens"].sum())
        events: list[dict[str, Any]] = run.events
    size = text.size(path.stat().st_size)
    tables.print_line(f"{path}: {text.plural(rows, 'sequence')}, {tokens:,} tokens, {cells:,} values each · {size}")
    sequences = [event for event in events if event["kind"] == "sequence"]
    for source, count in Counter(event["source"] for event in sequences).items():
        tables.print_line(f"  {source}: {count:,}", "dim")
    cut = sum("num_cut" in event for event in sequences)
    if cut:
        tables.print_line(f"{text.plural(cut, 'sequence')} cut to {settings.max_length or 'the length of the model'}")
    for kind in TROUBLES:
        hit = [event for event in events if event["kind"] == kind]
        if hit:
            numbers = ", ".join(str(event["step"]) for event in hit[:5])
            tables.print_line(f"{kind} in {text.plural(len(hit), 'sequence')} ({numbers}): {hit[0]['text']}", "yellow")
