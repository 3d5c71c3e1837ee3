"""A scan in Weights & Biases: curves of chosen sites, the counts of gradients, heat maps.

`follow` shows a scan while it is being made, `export` a file that is there. The step of a row is logged with it, as
`pyscan/step`, and is the axis of every curve: wandb's own counter belongs to the training script.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyscan.extras import need
from pyscan.integrations.curves import Point, Selection, points
from pyscan.integrations.follow import Follower

if TYPE_CHECKING:
    from pyscan.run import Run
    from pyscan.scanner import Scanner

STEP = "pyscan/step"
# What the names of curves and heat maps begin with.
FAMILIES = ("act", "grad", "grad_out", "act_max", "grad_max", "act_bad", "grad_bad", "row", "grad_check", "heat")


def follow(
    scan: Scanner,
    run: Any = None,
    *,
    sites: str | None = None,
    channels: Sequence[str] = ("act", "grad"),
    every: int = 1,
    heat_every: int = 100,
    seconds: float = 10.0,
    **init: Any,
) -> Follower:
    """Show new rows of a scan in wandb every so many `seconds`, from a thread of its own, until it is closed.

    run         the wandb run to log to; do not log to it with `step=`, wandb refuses steps that fall behind. Without it
                a run of its own is made beside the active one, in the same project and group, with `init` for
                `wandb.init`; its id is kept in `scan.loggers`, so that a scan continued from a checkpoint continues it
    sites       regular expression searched for in the names of sites
    channels    which numbers of them
    every       rows whose step is a multiple of this
    heat_every  heat maps of rows whose step is a multiple of this; 0: none
    """
    selection = Selection(sites, tuple(channels), every, heat_every)
    if run is not None:
        return Follower(scan, WandbSink(run, finish=False), selection, seconds)
    if "wandb" in scan.loggers:
        init = {"id": scan.loggers["wandb"], "resume": "allow"} | init
    own = _own_run(init)
    scan.loggers["wandb"] = own.id
    return Follower(scan, WandbSink(own, finish=True), selection, seconds)


def export(run: Run, selection: Selection, **init: Any) -> int:
    """Log a whole run to a wandb run of its own, made with `init`; returns how many rows were shown."""
    sink, num_rows = WandbSink(_own_run(init), finish=True), 0
    try:
        for point in points(run, slice(None), selection):
            sink.push(point)
            num_rows += 1
    finally:
        sink.close()
    return num_rows


def _own_run(init: dict[str, Any]) -> Any:
    """A run of ours beside the one of the training script, which stays the active one."""
    wandb = need("wandb", "wandb")
    active = wandb.run
    if active is not None:
        init = {"project": active.project, "entity": active.entity, "group": active.group or active.id} | init
    return wandb.init(**({"job_type": "pyscan", "reinit": "create_new"} | init))


class WandbSink:
    """Logs points to a wandb run."""

    def __init__(self, run: Any, *, finish: bool) -> None:
        self._wandb = need("wandb", "wandb")
        need("PIL", "wandb")
        self._run = run
        self._finish = finish
        run.define_metric(STEP, hidden=True)
        for family in FAMILIES:
            run.define_metric(f"{family}/*", step_metric=STEP)

    def push(self, point: Point) -> None:
        pictures = {tag: self._wandb.Image(pixels) for tag, pixels in point.pictures.items()}
        self._run.log({STEP: point.step, **point.numbers, **pictures})

    def flush(self) -> None:
        """wandb sends on its own."""

    def close(self) -> None:
        if self._finish:
            self._run.finish()
