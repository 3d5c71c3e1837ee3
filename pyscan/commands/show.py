"""`pyscan show`: the sites of a run with their norms, their history and their SPS."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, NamedTuple

from pyscan.commands.base import UserError, Verb, add_json, add_scan, add_selection, open_run, print_json, select_sites
from pyscan.commands.replay import add_replay, replay_step

if TYPE_CHECKING:
    from pyscan.run import Run
    from pyscan.summary import CellSummary

JSON_BUCKETS = 24


class Show(Verb):
    """Show every site: its norms, their course over time, SPS.

    Norms (act: of the input, grad: of the weight's gradient) are those of the
    last step, or of --step. Drift is the ratio between the last and the first
    tenth of the steps. SPS compares a cell with its layer: high = strongly used
    and already settled; it is the mean over all steps, or that of --step, and
    a site has the mean of its blocks.

    A history has a logarithmic scale of its own. In it 0 is a dot, a NaN or
    infinity an exclamation mark, and what was not observed is blank.

    --map draws the whole model instead, a line per layer and a mark per block,
    in colour where the terminal can; --watch goes on drawing it as the run goes
    on, also over ssh.

    examples:
      pyscan show run.mscan --top 10
      pyscan show run.mscan --map grad --watch
      pyscan show run.mscan --site 'layers\\.0\\..*q_proj' --blocks --step 500
      pyscan show run.mscan --step 500 --tokens --by sps
    """

    name = "show"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_scan(parser)
        add_selection(parser)
        parser.add_argument("--step", metavar="N", type=int, help="norms and SPS of this step")
        parser.add_argument("--top", metavar="N", type=int, help="only the N highest and the N lowest by SPS")
        parser.add_argument("--blocks", action="store_true", help="a line for each block instead of each site")
        parser.add_argument("--scope", choices=("layer", "global"), default="layer", help="what SPS compares with")
        measures = "act, grad, sps, ratio or a channel"
        parser.add_argument("--map", metavar="WHAT", nargs="?", const="act", help=f"the map of the model: {measures}")
        parser.add_argument("--watch", action="store_true", help="follow a run that is being written")
        add_replay(parser)
        add_json(parser)

    def run(self, args: argparse.Namespace) -> int:
        from pyscan import tables
        from pyscan.commands import watch
        from pyscan.summary import norm_channels, summarize

        if args.top is not None and args.top < 1:
            raise UserError(f"--top must be >= 1, got {args.top}")
        if args.watch:
            _check_watch(args)
            return watch.watch(args)
        if args.map:
            with open_run(args.scan) as run:
                at = _row(run, args.step)
            return watch.show_map(args, at)
        with open_run(args.scan) as run:
            if args.tokens:
                return replay_step(run, args, args.step)
            if not norm_channels(run):
                others = ", ".join(channel.name for channel in run.channels) or "none"
                raise UserError(f"the scan has neither act nor grad per block; its channels: {others}")
            row = _row(run, args.step)
            sites = select_sites(run, args.site)
            with tables.progress("Reading sites") as tick:
                cells = summarize(
                    run,
                    sites if row is not None else [],
                    row=row or 0,
                    one_step=args.step is not None,
                    blocks=args.blocks,
                    scope=args.scope,
                    buckets=JSON_BUCKETS if args.json else _look(tables.width()).marks,
                    tick=tick,
                )
            step = None if row is None else int(run.steps["step"][row])
            top, bottom = _extremes(cells, args.top)
            if args.json:
                damage = [{"offset": offset, "reason": reason} for offset, reason in run.damage]
                print_json({"step": step, "sites": [_record(cell) for cell in [*top, *bottom]], "damage": damage})
            else:
                _print(run, args, step, top, bottom, cells)
                if args.step is not None and args.step in run.token_steps():
                    replay_step(run, args, args.step)
        return 0


def _check_watch(args: argparse.Namespace) -> None:
    given = [
        f"--{name}" for name in ("site", "step", "top", "blocks", "json") if getattr(args, name) not in (None, False)
    ]
    if given:
        raise UserError(f"--watch draws the map of the newest step and takes no {', '.join(given)}")


class _Look(NamedTuple):
    """What a terminal has room for beside names and norms."""

    history: bool
    drift: bool
    marks: int  # in a history


def _look(width: int) -> _Look:
    return _Look(history=width >= 70, drift=width >= 100, marks=8 if width < 100 else 12 if width < 140 else 20)


def _row(run: Run, step: int | None) -> int | None:
    """The row of the step, the last one without a step, None when the run has no rows."""
    steps = run.steps["step"]
    if step is None:
        return len(steps) - 1 if len(steps) else None
    found = (steps == step).nonzero()[0]
    if not len(found):
        known = f"its {len(steps)} rows are steps {steps[0]} to {steps[-1]}" if len(steps) else "it has no rows"
        raise UserError(f"step {step} is not in the scan: {known}")
    return int(found[0])


def _extremes(cells: list[CellSummary], count: int | None) -> tuple[list[CellSummary], list[CellSummary]]:
    """The highest and the lowest by SPS, no cell twice; all cells in their order without a count."""
    if count is None:
        return cells, []
    from pyscan.analysis import extremes

    top, bottom = extremes([cell.sps for cell in cells], count)
    lowest = [int(i) for i in reversed(bottom) if i not in set(top.tolist())]
    return [cells[i] for i in top], [cells[i] for i in lowest]


def _record(cell: CellSummary) -> dict[str, Any]:
    record: dict[str, Any] = {"site": cell.site} | ({} if cell.block is None else {"block": cell.block})
    for name, channel in cell.channels.items():
        record[name] = {"norm": channel.norm, "drift_log2": channel.drift, "dead_blocks": channel.num_dead}
        record[name]["history_log2"] = channel.history
    return record | {"sps": cell.sps}


def _print(
    run: Run,
    args: argparse.Namespace,
    step: int | None,
    top: list[CellSummary],
    bottom: list[CellSummary],
    cells: list[CellSummary],
) -> None:
    from pyscan import tables, text

    if step is None:
        tables.print_line(f"{args.scan}: {text.plural(len(run.sites), 'site')}, no steps yet")
        return
    columns, rows = _table(run, [*top, *bottom])
    tables.print_table(columns, rows, sections=[len(top) - 1] if bottom else [])
    over = f"at step {step:,}" if args.step is not None else f"over {text.plural(len(run.steps), 'step')}"
    shown = len(top) + len(bottom)
    what = "block" if args.blocks else "site"
    some = f"{shown} of {text.plural(len(cells), what)}" if shown < len(cells) else text.plural(shown, what)
    tables.print_line(f"{some} · norms at step {step:,} · SPS within the {_scope(args.scope)} {over}", "dim")
    if any(channel.codec == "u16" for channel in run.channels):
        tables.print_line("values are uint16 codes of version 1.1, without a unit", "dim")
    if run.damage:
        places = text.plural(len(run.damage), "damaged place")
        tables.print_line(f"{places}: the cells there count as not observed; see pyscan check", "red")
    for line, style in _remarks(cells):
        tables.print_line(line, style)


def _scope(scope: str) -> str:
    return "layer" if scope == "layer" else "model"


def _table(run: Run, cells: list[CellSummary]) -> tuple[list[Any], list[list[str]]]:
    from pyscan import tables, text
    from pyscan.summary import norm_channels

    channels, bars = norm_channels(run), tables.bars()
    with_block = any(cell.block is not None for cell in cells)
    columns = [tables.Column("site", right=False, is_name=True), *([tables.Column("block")] if with_block else [])]
    look = _look(tables.width())
    for name, style in zip(channels, ("cyan", "magenta"), strict=False):
        columns.append(tables.Column(name))
        columns += [tables.Column("over time", right=False, style=style)] if look.history else []
        columns += [tables.Column("drift")] if look.drift else []
    columns.append(tables.Column("SPS"))
    rows = []
    for cell in cells:
        row = [cell.site, *([str(cell.block)] if with_block else [])]
        for part in cell.channels.values():
            row.append(text.norm(part.norm))
            row += [text.sparkline(part.history, bars)] if look.history else []
            row += [text.factor(part.drift)] if look.drift else []
        rows.append([*row, text.signed(cell.sps)])
    return columns, rows


def _remarks(cells: list[CellSummary]) -> list[tuple[str, str]]:
    """What a reader should not have to find alone: the farthest drift and the blocks that are dead."""
    from pyscan import text

    remarks = []
    for name in cells[0].channels if cells else ():
        moved = [cell for cell in cells if abs(cell.channels[name].drift) > 0]
        if moved:
            most = max(moved, key=lambda cell: abs(cell.channels[name].drift))
            block = "" if most.block is None else f" block {most.block}"
            remarks.append((f"{name} moved most: {most.site}{block} {text.factor(most.channels[name].drift)}", ""))
        dead = sum(cell.channels[name].num_dead for cell in cells)
        if dead:
            sites = len({cell.site for cell in cells if cell.channels[name].num_dead})
            where = f"in {text.plural(sites, 'site')}"
            remarks.append((f"{name} is 0 or absent in every step: {text.plural(dead, 'block')} {where}", "yellow"))
    return remarks
