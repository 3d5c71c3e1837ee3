"""The scanner: finds the sites of a model, watches them, and writes one row per optimizer step.

`attach` puts the parts together: sites say what there is, hooks and functional deliver inputs, capture decides about
them, gradients reads what the backward left, the step buffer adds it all up, and the writer takes the finished row.
After `attach` has returned nothing here stops a training run: the first error turns the scanner off and warns once.
"""

from __future__ import annotations

import contextlib
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import pyscan
from pyscan import _C, attached, hook_cost, hooks, lookups, threads, wrappers
from pyscan.accumulate import StepBuffer, channels, site_info
from pyscan.alarms import ADVICE
from pyscan.budget import Budget
from pyscan.capture import Capture
from pyscan.checkpoint import Checkpoint
from pyscan.closing import Closing, Finished, Scaling
from pyscan.config import Event, ScanConfig
from pyscan.engines import Buffer, device_of, make_buffer
from pyscan.figures import row_figures
from pyscan.forward import ForwardWatch
from pyscan.functional import FunctionalCapture
from pyscan.grad_check import row_counts
from pyscan.gradients import GradientReader, nothing
from pyscan.init_check import judge_init, weight_gains
from pyscan.latest import ABSENT_SUM, Row, param_stats
from pyscan.levels import Seen
from pyscan.lookout import Lookout
from pyscan.pipeline import watch_stages, wrap_stages
from pyscan.placement import find_placements
from pyscan.process import is_distributed, own_path, rank_and_world, start_live
from pyscan.schema import Schema, SiteInfo
from pyscan.silence import Silence
from pyscan.sites import Inventory, Site, find_sites
from pyscan.steps import StepWatch, unwrap_all
from pyscan.token_capture import TokenCapture
from pyscan.token_rows import TokenRows
from pyscan.upkeep import ModelState
from pyscan.watch import Watch
from pyscan.writer import Writer

_clock = time.perf_counter

# Called with the model of each `attach` before it looks at it: `pyscan run` steps aside where a script scans by itself.
before_attach: list[Callable[[nn.Module], None]] = []


def attach(
    model: nn.Module,
    path: str | Path | None = None,
    *,
    optimizer: Any = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    block: int = 64,
    rows: bool = False,
    every: int = 1,
    tokens: bool | str = False,
    mask: str | None = None,
    budget: float | None = None,
    resume: bool = False,
    metadata: Mapping[str, Any] | None = None,
    on_event: Callable[[Event], None] | None = None,
    watch: Watch | bool = True,
    live: bool | float = False,
) -> Scanner:
    """Scan every weight of `model` at every step, into the file `path` (None: into memory, as `scan.rows`).

    optimizer   one or several; a row closes at the step of the last one. Without it the loop calls `scan.step()`.
    include, exclude   regular expressions searched for in parameter names
    block       input features per cell; 0: one cell per weight
    rows        also record the gradient per block of output rows (channel `grad_out`)
    every       scan steps whose number is a multiple of this
    tokens      also record every token: True, per "blocks", or per "sequences"; see `Scanner.tokens`
    mask        forward keyword, for instance "attention_mask": rows where it is 0 do not count
    budget      share of the step time the scanner may take, for instance 0.01; raises `every` until it holds
    resume      continue an existing file
    on_event    called with each event (a dict) as it happens
    watch       alarms about finished rows, as events; False: none, or a `pyscan.Watch` with other limits
    live        of many ranks, keep `<path>.live.mscan` merged every so many seconds (True: 10), beside the training
    """
    config = ScanConfig(
        include, exclude, block, rows, every, mask, budget, resume, metadata, on_event, watch, tokens, live
    )
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for step_aside in before_attach[:]:
        step_aside(model)
    threads.borrow()
    return Scanner(model, path, unwrap_all(optimizer), config)


class Scanner:
    """One scan of one model; made by `attach`."""

    def __init__(
        self, model: nn.Module, path: str | Path | None, optimizers: list[torch.optim.Optimizer], config: ScanConfig
    ) -> None:
        self.config = config
        self.events: list[Event] = []
        self.rows: list[Row] = []  # every finished row, when there is no file
        self.loggers: dict[str, str] = {}  # name of a logger -> the id of its run, kept by checkpoints
        self._model = model
        self._device = device_of(model)
        if config.tokens is not False and self._device.type != "cpu":
            raise ValueError(
                f"tokens={config.tokens!r} reads models on the CPU, this one is on {self._device}: leave it out"
            )
        self._off = False
        self._paused = 0
        self._latest: tuple[Row, Buffer] | None = None  # with the buffer that knows its cells
        self._endings: list[Callable[[], None]] = []
        self._late: list[int] = []  # sites whose gradient was read only when the optimizer stepped
        self._late_unscaled = False
        self._resumed: Event | None = None  # until the first row after a checkpoint: what to say about it
        self._judged = False
        # An optimizer calls two.
        self._num_step_hooks = 2 * len(optimizers)
        self._seconds_per_hook = hook_cost.seconds_per_call()
        self._budget = Budget(config.every, config.budget)
        self._placements = find_placements(model)
        self._inventory = self._find()
        self._refuse_second_scan()
        self.schema = self._schema()
        self.path = None if path is None else own_path(Path(path), resume=config.resume)
        self._writer = None if self.path is None else Writer(self.path, self.schema, resume=config.resume)
        self._steps = StepWatch(
            optimizers,
            self._step_begins,
            self._step_ends,
            on_late=self._were_late,
            on_row=self._tell,
            on_error=self._fail,
        )
        self._step = (self._writer.last_step if self._writer else 0) + 1
        self._is_unplaced = self._step > 1 and self._placements is not None  # until somebody says at which step it is
        self._tokens = TokenRows(config.tokens, self._writer, self._event) if config.tokens is not False else None
        self._watch_sites()
        self._steps.start()
        self._steps.state.begin_row()
        attached.add(self)
        self._announce()
        self._end_live = self._start_live(path)

    @property
    def _step(self) -> int:
        """The number of the row that is being filled."""
        return self._steps.state.step

    @_step.setter
    def _step(self, step: int) -> None:
        self._steps.state.step = step

    # What users call

    def step(self, *, loss: float | None = None, tokens: int | None = None, step: int | None = None) -> None:
        """Close the row of this step; for loops that give `attach` no optimizer, or number their steps themselves."""
        if step is not None and step < 0:
            raise ValueError(f"step must be >= 0, got {step}")
        try:
            if step is not None:
                self._step, self._is_unplaced = step, False
            self._were_late(self._gradients.state.read_rest())
            self._close_row(None, loss=loss, tokens=tokens)
        except Exception as error:
            self._fail(error)

    def note(self, *, loss: torch.Tensor | float | None = None, tokens: int | None = None) -> None:
        """Tell the loss and the tokens of a micro-batch, where the model's own output or input does not.

        Called before the optimizer steps; the row gets the mean of the losses and the sum of the tokens.
        """
        try:
            self._forward.note(loss, tokens)
        except Exception as error:
            self._fail(error)

    def latest(self) -> dict[str, Any]:
        """The newest finished row: step, token_count and, per site, activation and gradient norm and their blocks."""
        if (newest := self._newest()) is None:
            return {"step": None, "seq_id": None, "token_count": None, "param_stats": {}}
        row, buffer = newest
        stats = param_stats(buffer, row.cells)
        return {"step": row.step, "seq_id": row.step, "token_count": row.tokens, "param_stats": stats}

    def tokens(self) -> dict[str, Any]:
        """The newest finished step token by token, exact, in float64; what `run.tokens(step)` reads from the file.

        {"ids": int64 [sequences, length], or flat where micro-batches are not equally long; None without ids,
         "mask": bool like ids, the attention mask the forward was given; None without one,
         "sequences": int64 [num_sequences, 2], first token and number of tokens (padding included) of each sequence,
         site name: {"act", "grad", "contribution"}, ...}

        tokens=True: arrays like ids: act ||x_t||, grad ||g_t|| (of the gradient of the weight's output), contribution
        their product (of an embedding, ||g_t||): the norm of what position t adds to the weight's gradient. A site that
        does not meet every token once has flat arrays, one value per row in the order of calls; an expert has
        "positions" with them, the flat token of each row.
        tokens="blocks": act [..., input blocks], grad [..., output blocks], contribution [..., output, input blocks].
        tokens="sequences": act and grad are [num_sequences, input blocks]; grad is the norm of that sequence's own
        part of dW[:, block]. A sequence is a row of the batch, or, where `position_ids` start again at 0 inside one
        (or cumulative lengths are given), each packed part of it. Padded rows count in act unless `mask=` names them.

        Gradients carry whatever factor the loss has (a mean over tokens, the division by accumulation steps); a
        GradScaler's scale is divided out. Without "grad": it never came. Before the first row: {}.
        """
        return {} if self._tokens is None else self._tokens.view()

    def grad_check(self) -> dict[str, int]:
        """How many weights of the newest row have a gradient, one of 0, none, or one that is not finite.

        Made for dashboards: `wandb.log(scan.grad_check())` logs `grad_check/ok_params` and its three companions.
        """
        if (newest := self._newest()) is None:
            return {}
        row, buffer = newest
        return row_counts(buffer.layout.schema.sites, row.cells)

    def figures(self) -> dict[str, float]:
        """A handful of numbers about the newest row, for a logger: those of `grad_check` and `pyscan/grad_norm` (of all
        weights together, before clipping), `.../act_max`, `grad_max`, `bad_values`, `alarms` and `overhead`."""
        if (newest := self._newest()) is None:
            return {}
        row, buffer = newest
        sites = buffer.layout.schema.sites
        alarms = sum(event["kind"] in ADVICE for event in self.events)
        figures = row_figures(sites, row.cells) | {"pyscan/alarms": float(alarms), "pyscan/overhead": self.overhead}
        return figures | row_counts(sites, row.cells)

    def coverage(self) -> dict[str, str]:
        """For every parameter of two or more dimensions: "scanned", or what is not recorded of it and why."""
        return dict(self._inventory.coverage)

    @property
    def model(self) -> nn.Module:
        """The model that is scanned."""
        return self._model

    @property
    def overhead(self) -> float:
        """How much longer a step takes because of the scanner, as it measures itself: 0.01 is 1 %."""
        # Where `every` may change, that is decided between two steps: steps not counted yet wait until then.
        if self._plain is not None and self._budget.is_every_step:
            spent, elapsed, num_quiet = self._plain.take_figures()
            if num_quiet:
                seconds, hooks = self._take_cost(num_quiet)
                self._budget.step(spent + seconds, elapsed, True, hooks, num_quiet)
        return self._budget.overhead

    def _take_cost(self, num_steps: int) -> tuple[float, float]:
        """Of so many steps: the seconds that the model's own hooks and those of its optimizer have spent, and what it
        took to call all hooks."""
        num_forwards, seconds = self._forward.take_cost()
        seconds += self._steps.state.seconds
        self._steps.state.seconds = 0.0
        # A forward calls each hook once, the optimizer's are called once in a step.
        num_hooks = self._num_hooks * num_forwards + self._num_step_hooks * num_steps
        return seconds, num_hooks * self._seconds_per_hook

    @property
    def every(self) -> int:
        """One row every so many steps; a budget may have raised it."""
        return self._budget.every

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing inside; steps taken meanwhile have no rows."""
        self._paused += 1
        self._set_active()
        try:
            yield
        finally:
            self._paused -= 1
            self._set_active()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs to continue this scan; the rows up to here are in the file when this returns."""
        self._settle()
        return self._checkpoint().to_state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the step of a checkpoint; later rows of the abandoned timeline are void.

        The first step from here on has a row in any case, of absent cells if it is not scanned: it is what voids them.
        """
        saved = Checkpoint.from_state(state)
        self._settle()  # what is still on its way belongs to the abandoned timeline
        differences = saved.differences(self._checkpoint())
        self._resumed = {"after_step": saved.step, "differences": differences}
        self._step, self._is_unplaced = saved.step + 1, False
        self.loggers |= saved.loggers
        if self.config.budget is not None:
            self._budget.every = max(saved.every, self.config.every)
        self.rows = [row for row in self.rows if row.step <= saved.step]
        if (newest := self._newest()) is not None and newest[0].step > saved.step:
            self._latest = None
        if self._tokens is not None:
            self._tokens.forget_after(saved.step)
        self._discard_open_row()
        self._set_active()
        for text in differences:
            warnings.warn(f"pyscan: {text}. It continues at step {self._step}.", RuntimeWarning, stacklevel=2)

    def _settle(self) -> None:
        """Bring all rows and events so far into the file."""
        self._wait_rows()
        if self._writer is not None:
            self._writer.flush()

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(
            step=self._step - 1,
            path=None if self.path is None else str(self.path),
            run_id=self._writer.run_id.hex() if self._writer else None,
            world=self.schema.world,
            every=self._budget.every,
            loggers=dict(self.loggers),
        )

    def _discard_open_row(self) -> None:
        self._forward.take()
        if self._tokens is not None:
            self._tokens.capture.take()
        for finished in self.buffer.close_row(Closing(self._step, is_due=False)):
            self._finish_row(finished)

    def flush(self) -> None:
        """Bring every finished row into the file, where readers see it and a kill does not reach it."""
        if not self._off:
            self._wait_rows()
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Take all hooks away and finish the file. Closing twice is allowed."""
        self._wait_rows()
        if not self._off:
            try:
                newest = self._newest()
                step = newest[0].step if newest else 0
                self._lookout.finish(step)
                if self._writer is not None:
                    self._writer.event("closed", step, overhead=self.overhead)
            except Exception as error:
                self._fail(error)
        self._off = True
        attached.discard(self)
        self._steps.remove()
        self._unwatch_sites()
        if self._writer is not None:
            self._writer.close()
        self._end_live()

    def __enter__(self) -> Scanner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Putting the parts together

    def _find(self) -> Inventory:
        config = self.config
        found = find_sites(
            self._model, include=config.include, exclude=config.exclude, block=config.block, rows=config.rows
        )
        if self._placements is not None:
            found.sites[:] = map(self._placements.place, found.sites)
        return found

    def _refuse_second_scan(self) -> None:
        if any(hooks.is_watched(site.module) for site in self._inventory.sites):
            raise ValueError("this model is being scanned already: close that scan first")

    def _schema(self) -> Schema:
        name = getattr(getattr(self._model, "config", None), "_name_or_path", None)
        rank, world = rank_and_world()
        return Schema(
            model=name or type(_bare(self._model)).__name__,
            channels=channels(self.config.rows),
            sites=tuple(map(self._site_info, self._inventory.sites)),
            block=self.config.block,
            every=self._budget.every,
            rank=rank,
            world=world,
            mesh=None if self._placements is None else self._placements.mesh,
            versions={"pyscan": pyscan.__version__, "torch": torch.__version__, "python": platform.python_version()},
            metadata=dict(self.config.metadata) if self.config.metadata else None,
        )

    def _site_info(self, site: Site) -> SiteInfo:
        merge = None if self._placements is None else self._placements.merge(site)
        return site_info(site, [channel.name for channel in channels(self.config.rows)], merge)

    def _watch_sites(self) -> None:
        sites = self._inventory.sites
        self.buffer = make_buffer(sites, self.schema, self._device)
        self._capture = Capture(self.buffer, sites, self._fail, self._placements)
        self._functional = FunctionalCapture(sites, self._capture.rows, on_error=self._fail)
        self._endings.append(self._functional.remove)
        self._silence = Silence(self._inventory, self.buffer, self._functional.problems, self._event)
        self._gradients = GradientReader(
            sites,
            self.buffer,
            early=not is_distributed(),
            waits=wrappers.is_deepspeed(self._model),
            on_backward=self._capture.state.forget,
            on_error=self._fail,
            on_unreduced=self._is_unreduced,
        )
        self._endings.append(self._gradients.remove)
        for index, site in enumerate(sites):
            see, see_compiled = self._capture.observer(index), self._capture.compiled_observer(index)
            if site.observe == "module_input":
                self._endings.append(hooks.watch_input(site.module, see, see_compiled))
            elif site.observe == "lookup":
                see = lookups.observer(see, index, self._gradients)
                self._endings.append(hooks.watch_output(site.module, see, see_compiled))
        if is_distributed():
            self._endings.append(watch_stages(self._model, self._stage_ends, self.paused))
        self._lookout = Lookout(
            self.schema.sites,
            self.config.watch,
            meetings=self._capture.state,
            arrivals=self._gradients.order,
            announce=lambda event: self._event(**event),
        )
        self._watch_tokens()
        self._forward = ForwardWatch(
            self._model,
            self.config.mask,
            on_begin=self._forward_begins,
            on_batch=self._tokens.capture.forward_begins if self._tokens else None,
            on_end=self._capture.state.forget if self._ends_at_once() else self._forward_ends,
            on_error=self._fail,
            plain=self._capture.state if self._is_forward_plain() else None,
        )
        self._endings.append(self._forward.remove)
        # One for each gradient. Those of the model, its lookups and inputs are called by the shortcut of hooks.py,
        # which is timed with what it brings.
        self._num_hooks = len(self._gradients.weights)
        self._state = ModelState(self._model, sites)
        self._plain = self._plain_step()
        self._steps.state.use(self._forward.state, self._gradients.state, self._plain)
        self._num_threads = 0
        self._use_threads()
        self._set_active()
        _forget_compiled_code()

    def _is_forward_plain(self) -> bool:
        """Whether nobody but the capture needs to know when a forward begins and ends."""
        return self._ends_at_once() and self._placements is None and self.config.mask is None

    def _ends_at_once(self) -> bool:
        """Whether all of a forward has been read when it ends."""
        return isinstance(self.buffer, StepBuffer) and self._tokens is None

    def _plain_step(self) -> _C.PlainStep | None:
        buffer, gradients = self.buffer, self._gradients.state
        if not isinstance(buffer, StepBuffer) or not isinstance(gradients, _C.GradientWatch):
            return None
        writer = None if self._writer is None else self._writer.native
        watch = self._lookout.glance, self._lookout.pass_by
        return buffer.plain_step(self._capture.state, gradients, self._state.places, writer, *watch)

    def _watch_tokens(self) -> None:
        if self._tokens is None:
            return
        self._tokens.capture = TokenCapture(
            self._inventory.sites,
            self._capture,
            mode=self.config.tokens,
            block=self.config.block,
            mask=self.config.mask,
            on_error=self._fail,
        )
        self._endings.append(self._tokens.capture.remove)

    def _unwatch_sites(self) -> None:
        while self._endings:
            self._endings.pop()()

    def _announce(self) -> None:
        sites = self._inventory.sites
        left_out = {name: reason for name, reason in self._inventory.coverage.items() if reason != "scanned"}
        num_cells = self.buffer.num_cells
        told = {"bytes_per_step": 2 * num_cells, "sites": len(sites), "not_scanned": left_out}
        self._event("attached", cells=num_cells, **dict[str, Any](told))
        for site in sites:
            if site.note and not site.expert:
                self._event("note", site=site.name, text=site.note)
        for text in wrappers.remarks(self._model):
            self._warn(f"{text}.")

    def _start_live(self, path: str | Path | None) -> Callable[[], None]:
        try:
            return start_live(path, self.config.live_seconds)
        except OSError as error:
            self._warn(f"the ranks' files are not merged while the run lasts: {error}.")
            return nothing

    # Called from hooks

    def _forward_begins(self, mask: torch.Tensor | None) -> None:
        if self._placements is not None:
            wrap_stages()
        if self.config.mask is not None:
            self._capture.set_mask(mask)
        self._capture.state.forward_begins()

    def _forward_ends(self) -> None:
        self._capture.forget()
        if self._tokens is not None:
            self._tokens.capture.forward_ends()
        self.buffer.flush()

    def _stage_ends(self) -> None:
        try:
            if self._gradients.state.active:
                self._gradients.read_again()
        except Exception as error:
            self._fail(error)

    def _is_unreduced(self, site: Site) -> None:
        """The true gradient would need a sum over ranks, which is not ours to ask for."""
        reason = "its gradient is not complete on any rank, nobody has added it up (Partial): recording its input only"
        if self._inventory.coverage.get(site.name) == "scanned":
            self._inventory.coverage[site.name] = f"activation only: {reason}"
            self._event("note", site=site.name, text=f"{site.name!r}: {reason}.")

    def _step_begins(self, unscaled: bool) -> None:
        start = _clock()
        try:
            gradients = self._gradients
            if gradients.state.active and (late := gradients.state.read_rest()):
                self._were_late(late)
                self._late_unscaled = unscaled
        except Exception as error:
            self._fail(error)
        self._steps.state.seconds += _clock() - start

    def _were_late(self, weights: list[int]) -> None:
        """The gradients of these were read only when the optimizer stepped."""
        self._late += self._gradients.sites_of(weights)
        self._steps.state.has_late = bool(self._late)

    def _step_ends(self, scaling: Scaling | None) -> None:
        try:
            self._close_row(scaling)
        except Exception as error:
            self._fail(error)

    # The row

    def _tell(self, seconds: float, is_taken: bool, seen: Seen | None) -> None:
        """What there is to say of a plain row that was closed, so many seconds ago, by the optimizer's hook."""
        start = _clock() - seconds
        newest, plain = self._newest(), self._plain
        assert newest is not None
        assert plain is not None
        if self._writer is None:
            self.rows.append(newest[0])
        elif not is_taken:
            self._writer.refused()
        if seen is not None:
            self._lookout.row(newest[0], seen)
        self._end_step(start, 0.0, plain.end())

    def _newest(self) -> tuple[Row, Buffer] | None:
        """The newest finished row, with the buffer that knows its cells."""
        if self._plain is not None and (last := self._plain.take_last()) is not None:
            step, cells, tokens, loss, lr = last
            self._latest = Row(step, np.frombuffer(cells), tokens, loss, lr, None, 0), self.buffer
        return self._latest

    def _close_row(self, scaling: Scaling | None, *, loss: float | None = None, tokens: int | None = None) -> None:
        if self._off:
            self._unwatch_sites()
            return
        start = _clock()
        if self._is_unplaced:
            self._is_unplaced = False
            self._warn(
                f"resumed at step {self._step} without scan.load_state_dict: ranks that ended at different steps go on "
                "with different numbers, and their rows do not fit together."
            )
        if self._placements is not None and self._placements.is_news:
            self._say_placements()
        seen = self._forward.take()
        # What came before a pause, or before the loop gave the step another number, must not reach the next row.
        if self._capture.state.active or self._paused:
            rate, late = self._steps.learning_rate(), frozenset(self._late)
            closing = Closing(
                step=self._step,
                is_due=self._is_due(),
                seen=seen,
                loss=loss,
                tokens=tokens,
                lr=rate,
                scaling=scaling,
                late=late,
                late_unscaled=self._late_unscaled,
                resumed=self._resumed,
            )
            self._resumed = None
            for finished in self.buffer.close_row(closing):
                self._finish_row(finished)
            if self._tokens is not None:
                self._tokens.close(closing, self.schema.sites)
            for kind, site, text in self.buffer.complaints():
                self._event(kind, site=None if site is None else self._inventory.sites[site].name, text=text)
        self._late, self._late_unscaled, self._steps.state.has_late = [], False, False
        spent = self._capture.state.end_step() + self._gradients.state.next_step()
        self._end_step(start, spent, self._state.changed())
        self._set_active()
        self._steps.state.is_plain = self._may_be_plain()
        self._steps.state.next_row = self._next_row() if self._may_be_left_out() else 0

    def _may_be_plain(self) -> bool:
        """Whether nothing but a pause, a checkpoint or the end can make the next step differ from the last one."""
        is_scanned = self._budget.is_every_step and not self._off and not self._paused and self._resumed is None
        is_known = self._judged and self._silence.done and self._placements is None and self._tokens is None
        return is_scanned and is_known

    def _may_be_left_out(self) -> bool:
        """Whether the next step has no row, and nothing of it matters to a later one."""
        is_free = not self._capture.state.active and not self._off and not self._paused
        return is_free and self._placements is None and self._tokens is None

    def _say_placements(self) -> None:
        """Inputs have shown how the ranks' cells merge: the last schema of a file holds for all its rows."""
        assert self._placements is not None
        self._placements.is_news = False
        self.schema = self._schema()
        if self._writer is not None:
            self._writer.change_schema(self.schema)

    def _use_threads(self) -> None:
        """As many as torch has; a loop may change that."""
        num_threads = torch.get_num_threads()
        if num_threads == self._num_threads:
            return
        self._num_threads = self.buffer.num_threads = num_threads
        self._capture.state.num_threads = self._gradients.state.num_threads = num_threads

    def _finish_row(self, finished: Finished) -> None:
        """A row is there: on the CPU that of the step that ends, on a GPU one of an earlier step."""
        closing, cells, values = finished
        row = closing.row(cells, values)
        if not closing.is_due and closing.resumed is None:
            return
        if not closing.is_due:
            cells.fill(ABSENT_SUM)
        elif row.grad_scale is not None and closing.late_unscaled:
            self._undo_scale(cells, closing.late, row.grad_scale)
        self._keep(row)
        if closing.resumed is not None:  # before its row it would count as part of the abandoned timeline
            self._event("resumed", step=row.step, **closing.resumed)
        if closing.is_due:
            self._look_at(row)

    def _look_at(self, row: Row) -> None:
        self._lookout.row(row)
        if not self._silence.done:
            self._silence.explain(row.cells)
        if not self._judged:
            self._judge_start(row.cells)

    def _wait_rows(self) -> None:
        """Finish the rows that are still to come."""
        try:
            for finished in self.buffer.wait_rows():
                self._finish_row(finished)
        except Exception as error:
            self._fail(error)

    def _judge_start(self, cells: NDArray[np.float64]) -> None:
        """Say once, at the first row that has gradients, what is wrong with the weights the run started with."""
        if not self.buffer.has_grads(cells):
            return
        self._judged = True
        for finding in judge_init(weight_gains(self._inventory.sites), self._forward.targets or []).findings:
            self._event("init", site=finding.site, text=finding.text, value=finding.value, limit=finding.limit)

    def _undo_scale(self, cells: NDArray[np.float64], late: frozenset[int], scale: float) -> None:
        """Gradients that were read after the scaler had unscaled them must not be divided again."""
        sites = self._inventory.sites
        names = {sites[index].name for index in late}
        for index, site in enumerate(sites):
            if (site.tied_to or site.name) in names:
                for channel in ("grad", "grad_out") if self.config.rows else ("grad",):
                    cells[self.buffer.cells(channel, index)] *= scale * scale
                cells[self.buffer.cells("grad_max", index)] *= scale

    def _keep(self, row: Row) -> None:
        self._latest = row, self.buffer
        if self._writer is None:
            self.rows.append(row)
            return
        self._writer.write(
            row.step,
            row.cells,
            tokens=row.tokens,
            loss=row.loss,
            lr=row.lr,
            grad_scale=row.grad_scale,
            flags=row.flags,
        )

    def _end_step(self, start: float, spent: float, has_changed: bool) -> None:
        """The row is closed, which began at `start`; the hooks took `spent` seconds, and the model may have changed.
        Steps of which there was nothing to say are counted with the next one of which there is."""
        was_active = self._capture.state.active
        before, elapsed, num_quiet = (0.0, 0.0, 0) if self._plain is None else self._plain.take_figures()
        if has_changed:
            self._follow_model()
        self._use_threads()
        self._step += 1
        seconds, hooks = self._take_cost(num_quiet + 1)
        spent += before + seconds + _clock() - start
        elapsed += self._steps.state.row_seconds
        change = self._budget.step(spent, elapsed, was_active, hooks, num_quiet + 1)
        self._steps.state.begin_row()
        if change is not None:
            self._event("every", **dict[str, Any](change))

    def _is_due(self) -> bool:
        """Whether the step being filled is to have a row."""
        return not self._off and not self._paused and self._is_chosen(self._step)

    def _is_chosen(self, step: int) -> bool:
        return step % self._budget.every == 0 or self._resumed is not None or self._lookout.wants(step)

    def _next_row(self) -> int:
        """The first step from the one being filled on that is to have a row, unless something happens before."""
        every, step = self._budget.every, self._step
        return step if self._is_chosen(step) else step + every - step % every

    def _set_active(self) -> None:
        self._steps.state.is_plain, self._steps.state.next_row = False, 0
        self._capture.state.active = self._gradients.state.active = self._is_due()
        self._forward.state.active = not self._paused

    def _follow_model(self) -> None:
        """The model has changed: find its sites again and go on with a new schema."""
        old = {site.name for site in self._inventory.sites}
        self._newest()  # while the buffer that knows its cells is there
        self._wait_rows()
        self._unwatch_sites()
        self._device = device_of(self._model)
        self._placements = find_placements(self._model)
        self._inventory = self._find()
        self.schema = self._schema()
        self._watch_sites()
        if self._writer is not None:
            self._writer.change_schema(self.schema)
        new = {site.name for site in self._inventory.sites}
        self._event("model_changed", added=sorted(new - old), removed=sorted(old - new))

    # Events and errors

    def _event(self, kind: str, *, site: str | None = None, step: int | None = None, **fields: Any) -> None:
        event = {"kind": kind, "step": self._step if step is None else step, "site": site, **fields}
        self.events.append(event)
        if self._writer is not None:
            self._writer.event(**event)
        if self.config.on_event is not None:
            try:
                self.config.on_event(event)
            except Exception as error:
                self._fail(error)

    def _warn(self, text: str) -> None:
        """Something that makes the scan less than it could be; training is not concerned."""
        self._event("note", text=text)
        with contextlib.suppress(Warning):  # warnings are errors here, and errors are not ours to raise
            warnings.warn(f"pyscan: {text}", RuntimeWarning, stacklevel=2)

    def _fail(self, error: Exception) -> None:
        """Turn off and say so, once. Hooks are taken away later: this may run inside one."""
        if self._off:
            return
        self._off = True
        self._set_active()
        text = f"pyscan turned itself off at step {self._step}: {type(error).__name__}: {error}. Training goes on."
        with contextlib.suppress(Exception):
            self._event("off", text=text)
        try:
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        except Warning:  # warnings are errors here, and errors are not ours to raise
            print(text, file=sys.stderr)


def _bare(model: nn.Module) -> nn.Module:
    """The model inside a wrapper of torch.compile or data parallelism."""
    for name in ("_orig_mod", "module"):
        inner = getattr(model, name, None)
        if isinstance(inner, nn.Module):
            return _bare(inner)
    return model


def _forget_compiled_code() -> None:
    """Code that was compiled before these hooks existed does not run them: let it be compiled again."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
