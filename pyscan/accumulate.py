"""The row of one step: every observation of a site goes to its cells, in the order of the file.

Receives tensors with the slot they belong to, has the engine add them up where they are, and hands on one float64 row
per step. Here what engines have in common, and the CPU engine; device_buffer.py is that of GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd import Variable

from pyscan import _C
from pyscan.closing import Closing, Finished
from pyscan.engine import DTYPES
from pyscan.schema import Channel, Layout, Merge, Schema, SiteInfo
from pyscan.shards import Range
from pyscan.sites import Site

ROWS = "grad_out"
CHANNELS = (
    Channel("act", per="block"),
    Channel("grad", per="block"),
    Channel(ROWS, per="row_block"),
    Channel("act_max", per="site", transform="plain", op="max"),
    Channel("grad_max", per="site", transform="plain", op="max"),
    Channel("act_bad", per="site", transform="plain", op="add"),
    Channel("grad_bad", per="site", transform="plain", op="add"),
)


def channels(rows: bool) -> tuple[Channel, ...]:
    """What is recorded of a site; `rows` adds the gradient per block of output rows."""
    return CHANNELS if rows else tuple(channel for channel in CHANNELS if channel.name != ROWS)


def site_info(site: Site, names: Iterable[str] = (), merge: Mapping[str, Merge] | None = None) -> SiteInfo:
    """A site as the file describes it; with several ranks, how they merge each of the channels `names`."""
    return SiteInfo(
        name=site.name,
        kind=site.kind,
        shape=site.shape,
        dtype=site.dtype,
        num_blocks=site.num_blocks,
        num_row_blocks=site.num_row_blocks,
        tied_to=site.tied_to,
        offset=(site.held.rows.start, site.held.cells.start) if site.block else (0, 0),
        merge={} if merge is None else {name: merge[name] for name in names},
    )


class RowCells:
    """Where the cells of a row are, and the slots that fill them. Site i has slot i for its input; gradients follow."""

    def __init__(self, sites: Sequence[Site], schema: Schema) -> None:
        self.layout = Layout(schema)
        self.num_threads = torch.get_num_threads()  # of the CPU
        self._firsts = np.concatenate([[0], np.cumsum(self.layout.num_cells)]).tolist()
        self.num_cells = int(self._firsts[-1])
        self._num_sites = len(sites)
        self._num_features = [site.held.inputs.length for site in sites]
        self._has_rows = ROWS in self.layout.channel_index
        self._slots = [self._slot(i, site, "act") for i, site in enumerate(sites)]
        self._slots += [self._slot(i, site, "grad") for i, site in enumerate(sites)]
        if self._has_rows:
            self._slots += [self._slot(i, site, ROWS) for i, site in enumerate(sites)]
        self._tied = [
            (i, self.layout.site_index[site.tied_to]) for i, site in enumerate(sites) if site.tied_to is not None
        ]

    def cells(self, channel: str, site: int) -> slice:
        """Where the site's cells of a channel stand in a row."""
        index = self.layout.channel_index[channel]
        begin, end = self.layout.cells(index, site)
        return slice(self._firsts[index] + begin, self._firsts[index] + end)

    def _slot(self, index: int, site: Site, channel: str) -> _C.SlotTuple:
        cells, block, held = self.cells(channel, index), site.block, site.held
        part = held.rows if channel == ROWS else held.inputs if channel == "act" else held.cols
        of_cells = held.rows if channel == ROWS else held.cells
        start = cells.start + part.first_block(block) - of_cells.first_block(block)
        width, first = (block, part.start % block) if block else (max(part.length, 1), 0)
        axis = 1 if channel == "act" else site.in_axis
        by_rows = axis == 0 if channel != ROWS else axis == 1
        pass_name = "act" if channel == "act" else "grad"
        absmax, bad = (
            (-1, -1) if channel == ROWS else (self.cells(f"{pass_name}_{x}", index).start for x in ("max", "bad"))
        )
        return width, first, by_rows, _num_cells(part, block), start, absmax, bad, pass_name == "grad"

    def grad_slots(self, site: int) -> list[int]:
        """The slots that a gradient of the site fills."""
        first = self._num_sites + site
        return [first, first + self._num_sites] if self._has_rows else [first]

    def observed(self, row: NDArray[np.float64], channel: str, site: int) -> bool:
        """Whether a finished row has the site in this channel."""
        return not (row[self.cells(channel, site)] < 0).all()

    def has_grads(self, row: NDArray[np.float64]) -> bool:
        """Whether a finished row has any gradient."""
        return any(self.observed(row, "grad", site) for site in range(self._num_sites))

    def ties(self) -> list[tuple[int, int, int]]:
        """Cells of tied weights: the first, the first of those they are equal to, how many."""
        named = ("grad", "grad_max", "grad_bad", *([ROWS] if self._has_rows else []))
        pairs = [(self.cells(name, site), self.cells(name, source)) for site, source in self._tied for name in named]
        return [(to.start, source.start, to.stop - to.start) for to, source in pairs]

    def _tie(self, row: NDArray[np.float64]) -> NDArray[np.float64]:
        """A tied weight has the gradient of the one it is tied to."""
        for to, source, count in self.ties():
            row[to : to + count] = row[source : source + count]
        return row


class StepBuffer(RowCells):
    """The CPU engine: reads each tensor as it comes."""

    def __init__(self, sites: Sequence[Site], schema: Schema) -> None:
        super().__init__(sites, schema)
        self._native = _C.StepBuffer(self.num_cells, self._slots)

    def observer(
        self, state: _C.CaptureState, site: int, careful: Callable[[Any], None]
    ) -> Callable[[torch.Tensor], None]:
        """What adds plain inputs of a site by itself and gives every other to `careful`."""
        state.num_threads = self.num_threads
        return _C.make_observer(self._native, state, site, max(self._num_features[site], 1), careful)

    def reads(self, x: torch.Tensor) -> bool:
        """Whether x is where this engine can read it: not if the model was moved away, or is an outline of one."""
        return x.is_cpu

    def flush(self) -> None:
        """The forward is over; here everything is read by then."""

    def masked(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The rows of x where the mask is true."""
        return x[mask]

    def add_input(self, site: int, x: torch.Tensor, *, at_once: bool = False) -> None:
        """Add the rows of x, whose last dimension is the site's input; this engine always reads at once."""
        if self.reads(x):
            x = readable(x)
            self._native.add(site, *matrix_of(x), self.num_threads)

    def add_ranges(self, site: int, x: torch.Tensor, ends: torch.Tensor) -> None:
        """Add row ranges of x to sites site, site + 1, ...; range e ends before row ends[e]."""
        if not self.reads(x):
            return
        x = readable(x)
        self._native.add_ranges(site, *matrix_of(x), ends.to(torch.int32).numpy(), self.num_threads)

    def watch_gradients(
        self,
        weights: list[tuple[torch.nn.Parameter, list[int], int, int, bool]],
        early: bool,
        ended: Callable[[], None] | None,
        begins: Callable[[int], None],
        careful: Callable[[int, torch.Tensor, int, int], tuple[int, int]],
        gone: Callable[[int], None],
        failed: Callable[[Exception], None],
    ) -> _C.GradientWatch:
        """What reads plain gradients of (parameter, slots, rows, columns, at once) by itself; `early`: nothing changes
        a gradient after autograd has added to it. It settles each backward at its end and calls `ended`; where that is
        None, `begins` is called at the first gradient of each, and whoever is told settles it."""
        queue = Variable._execution_engine.queue_callback
        return _C.GradientWatch(self._native, weights, early, queue, ended, begins, careful, gone, failed)

    def plain_step(
        self,
        capture: _C.CaptureState,
        gradients: _C.GradientWatch,
        places: _C.ModelPlaces,
        writer: _C.Writer | None,
        glance: _C.Glance | None,
        pass_by: Callable[[tuple[Any, ...]], None] | None,
    ) -> _C.PlainStep:
        """What ends a step without peculiarities by itself."""
        return _C.PlainStep(self._native, capture, gradients, places, writer, glance, pass_by, self.ties())

    def set_grad(self, site: int, grad: torch.Tensor) -> None:
        """Take the matrix `grad` for the site's gradient, in the place of what was there."""
        grad = readable(grad)
        matrix = matrix_of(grad)
        for slot in self.grad_slots(site):
            self._native.set(slot, *matrix, self.num_threads)

    def take(self, grad_scale: float) -> NDArray[np.float64]:
        """The finished row, gradients divided by `grad_scale`; absent cells are negative. The buffer starts anew."""
        row = np.empty(self.num_cells)
        self._native.take(grad_scale, row)
        return self._tie(row) if self._tied else row

    def close_row(self, closing: Closing) -> Iterable[Finished]:
        """The row of this step, finished; other engines give earlier ones."""
        values = [value.item() for value in closing.tensors]
        scale = 1.0 if closing.scaling is None else float(closing.scaling.scale)
        return (Finished(closing, self.take(scale), values),)

    def wait_rows(self) -> Iterable[Finished]:
        """Rows that are still to come: none."""
        return ()

    def complaints(self) -> Iterable[tuple[str, int | None, str]]:
        """What users must know and was not said yet: kind, site, text."""
        return ()


def _num_cells(part: Range, block: int) -> int:
    """The cells a part of a weight fills; without features it fills none, with blocks or without."""
    return part.num_blocks(block) if part.length else 0


def readable(x: torch.Tensor) -> torch.Tensor:
    """x as the engine can address it: of one of its dtypes, contiguous or a matrix. Maybe a copy: keep it alive."""
    if x.dtype not in DTYPES:
        x = x.float()
    return x if x.is_contiguous() or x.ndim == 2 else x.reshape(-1, x.shape[-1])


def matrix_of(x: torch.Tensor) -> tuple[int, int, int, int, int, int]:
    """(address, dtype, rows, cols, row stride, column stride) of a readable x with its leading dimensions flattened."""
    cols = x.shape[-1]
    if x.is_contiguous():
        return x.data_ptr(), DTYPES[x.dtype], x.numel() // cols if cols else 0, cols, cols, 1
    row_stride, col_stride = x.stride()
    return x.data_ptr(), DTYPES[x.dtype], x.shape[0], cols, row_stride, col_stride
