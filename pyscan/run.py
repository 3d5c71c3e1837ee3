"""`Run`: what every scan looks like to its reader, whatever the file behind it.

A kind of file (version 2, version 1.1, many ranks) hands in its sites, channels and row table and says how the cells of
one site are read for a range of rows; everything users call is built on that here.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from pyscan import codecs
from pyscan.codecs import Array, Floats
from pyscan.errors import ScanError, ScanFormatError, ScanNameError
from pyscan.payloads import Event
from pyscan.schema import Channel, SiteInfo

# cells decoded at once where a result is smaller than what it is made of
_WINDOW_CELLS = 1 << 22


_Self = TypeVar("_Self", bound="Run")


class Run(ABC):
    """A scan opened for reading: sites, channels, and per step one number for each (channel, site, block)."""

    path: str
    version: int
    model: str
    block: int
    every: int
    rank: int
    world: int
    metadata: Any
    versions: Mapping[str, Any]
    sites: list[SiteInfo]
    channels: list[Channel]
    missing_ranks: tuple[int, ...] = ()
    row_kind: str = "step"  # or "sequence": what a row is of
    _named: tuple[list[SiteInfo], dict[str, SiteInfo]] | None = None

    @property
    @abstractmethod
    def steps(self) -> Array:
        """A record per row: step, time_ns, tokens, loss, lr, grad_scale, total_norm, flags. Not known is NaN, or 0."""

    @property
    @abstractmethod
    def events(self) -> list[Event]:
        """What happened, in the order it was written: dicts with at least `kind`, `step` and `site`."""

    @property
    def recorded_events(self) -> list[Event]:
        """The events that were written, without those that are found by reading the values."""
        return self.events

    @property
    @abstractmethod
    def damage(self) -> list[tuple[int, str]]:
        """What was found damaged so far, as (offset, reason). Bytes nobody has read yet are not in it: see `check`.

        In a file that is being written, the frame at its end may be seen unfinished; the next `refresh` sees it whole.
        """

    @abstractmethod
    def _cells(self, channel: Channel, site: SiteInfo, start: int, stop: int) -> Floats:
        """The values of the rows [start, stop) as float32 [rows, cells]."""

    @abstractmethod
    def _codes(self, channel: Channel, site: SiteInfo, start: int, stop: int) -> Array:
        """The same as stored."""

    @abstractmethod
    def tokens(self, step: int) -> dict[str, Any]:
        """The rows of one step token by token: {"ids": array, site name: {"act", "grad", "contribution"}}."""

    def token_steps(self) -> list[int]:
        """The steps that `tokens` has rows for."""
        return []

    @abstractmethod
    def refresh(self) -> int:
        """Look at the file again; returns how many rows there are now that were not there before."""

    @abstractmethod
    def close(self) -> None: ...

    @property
    @abstractmethod
    def _num_bytes(self) -> int:
        """Size of what was opened; no result is allowed to be out of all proportion to it."""

    def site(self, name: str) -> SiteInfo:
        """The site of that name, given with or without `.weight`."""
        by_name = self._sites_by_name()
        for candidate in (name, f"{name}.weight", name.removesuffix(".weight")):
            if candidate in by_name:
                return by_name[candidate]
        raise ScanNameError("site", name, by_name)

    def _sites_by_name(self) -> dict[str, SiteInfo]:
        """Made once for each list of sites: a run may have a million, and every read looks one up."""
        if self._named is None or self._named[0] is not self.sites:
            self._named = self.sites, {site.name: site for site in self.sites}
        return self._named[1]

    def channel(self, name: str) -> Channel:
        by_name = {channel.name: channel for channel in self.channels}
        if name not in by_name:
            raise ScanNameError("channel", name, by_name)
        return by_name[name]

    def act(self, name: str, blocks: bool = False, *, steps: slice | None = None) -> Floats:
        """The norm of the input of a site, step by step."""
        return self.get("act", name, blocks, steps=steps)

    def grad(self, name: str, blocks: bool = False, *, steps: slice | None = None) -> Floats:
        """The norm of the gradient of a site, step by step."""
        return self.get("grad", name, blocks, steps=steps)

    def get(self, channel: str, name: str, blocks: bool = False, *, steps: slice | None = None) -> Floats:
        """A channel of a site as float32 [steps], or [steps, blocks].

        Without `blocks` the cells of a step are combined in float64: norms as the root of the sum of squares, maxima as
        the largest, counts as the sum. Absent cells are left out; all absent gives absent; any other NaN gives NaN.
        `steps` picks rows by their place in `run.steps`: `slice(-1000, None)` is the last thousand.
        """
        what, site = self.channel(channel), self.site(name)
        start, stop, stride = self._rows(steps)
        num_cells = self._num_cells(what, site)
        if blocks:
            self._refuse_monster(stop - start, num_cells)
            return self._cells(what, site, start, stop)[::stride]
        size = max(_WINDOW_CELLS // max(num_cells, 1), 64)
        self._refuse_monster(min(size, stop - start), num_cells)
        windows = [(at, min(at + size, stop)) for at in range(start, stop, size)]
        parts = [codecs.combine(self._cells(what, site, *window), what.op, axis=1) for window in windows]
        return np.concatenate(parts)[::stride] if parts else np.zeros(0, np.float32)

    def codes(self, channel: str, name: str, *, steps: slice | None = None) -> Array:
        """A channel of a site as stored, [steps, blocks]. Where nothing is stored: the codec's absent, for u16 0."""
        what, site = self.channel(channel), self.site(name)
        start, stop, stride = self._rows(steps)
        self._refuse_monster(stop - start, self._num_cells(what, site))
        return self._codes(what, site, start, stop)[::stride]

    def cells(self, channel: str, *, steps: slice | None = None) -> Floats:
        """A channel of all sites side by side, float32 [steps, cells]: site after site, block after block.

        Made to be read in windows: a slice of a long run at a time.
        """
        what = self.channel(channel)
        start, stop, stride = self._rows(steps)
        self._refuse_monster(stop - start, sum(self._num_cells(what, site) for site in self.sites))
        return self._all_cells(what, start, stop)[::stride]

    def _all_cells(self, channel: Channel, start: int, stop: int) -> Floats:
        parts = [self._cells(channel, site, start, stop) for site in self.sites]
        return np.concatenate(parts or [np.zeros((stop - start, 0), np.float32)], axis=1)

    def to_arrow(self, *, stream: bool = False) -> Any:
        """A long table (step, site, channel, block, value) without absent cells; a stream of record batches for runs
        that are larger than memory. Needs pyarrow."""
        from pyscan import export

        return export.to_arrow_stream(self) if stream else export.to_arrow(self)

    def to_pandas(self) -> Any:
        """The same long table as a pandas data frame."""
        from pyscan import export

        return export.to_pandas(self)

    def grad_check(self) -> dict[str, Array]:
        """For every row, how many weights had a gradient, one of 0, none, or one that is not finite.

        The names are those of dashboards: `grad_check/ok_params`, `zero_params`, `none_params`, `nan_params`.
        """
        from pyscan import grad_check

        return grad_check.run_counts(self)

    def follow(self, poll_seconds: float = 1.0) -> Iterator[slice]:
        """Yield the rows there are now, then new ones as they come, as slices for `steps=`. It never ends."""
        seen = len(self.steps)
        yield slice(0, seen)
        while True:
            added = self.refresh()
            now = len(self.steps)
            if added or now != seen:
                yield slice(min(now - added, now), now)
            seen = now
            time.sleep(poll_seconds)

    def _num_cells(self, channel: Channel, site: SiteInfo) -> int:
        return site.num_cells(channel.per)

    def _rows(self, steps: slice | None) -> tuple[int, int, int]:
        start, stop, stride = (steps or slice(None)).indices(len(self.steps))
        if stride < 1:
            raise ScanError(f"the stride of steps must be >= 1, got {stride}; reverse the result instead")
        return start, max(start, stop), stride

    def _refuse_monster(self, rows: int, cells: int) -> None:
        """A few bytes of schema can claim a table that no memory holds; what a real file holds is far below this."""
        if rows * cells > (1 << 22) + 64 * self._num_bytes:
            raise ScanFormatError(f"{rows} rows of {cells} cells cannot come from a file of {self._num_bytes} bytes")

    def plot(self, *names: str, channel: str = "act", blocks: bool = False, points: int = 1000) -> Any:
        """The history of some sites as a Plotly figure; without names, of the loss and of the sites that moved most."""
        from pyscan import plots

        return plots.curves(self, names, channel=channel, blocks=blocks, points=points)

    def heatmap(self, step: int | None = None, *, measure: str = "act", colour: str = "log") -> Any:
        """The whole model at one step (default: the last) as a Plotly figure: a row per layer, modules side by side.

        `measure` is a channel, "sps" or "ratio" (grad / act); `colour` is "log" or "z", within the layer.
        """
        from pyscan import plots

        return plots.heatmap(self, step, measure=measure, colour=colour)

    def _repr_html_(self) -> str:
        from pyscan import notebook

        found: str = notebook.html(self)
        return found

    def __len__(self) -> int:
        return len(self.steps)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.path!r}: {len(self.steps)} rows, {len(self.sites)} sites>"
