"""The watch over a scan that is running: gives each finished row to the rules and announces what they find.

Receives rows, and the order in which the step met its sites and got their gradients; hands on events, and says which
steps are to be recorded in more detail after an alarm. The order itself is announced once, so that whoever reads the
file can tell what came first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pyscan import _C
from pyscan.alarms import Event
from pyscan.first_bad import Orders
from pyscan.latest import Row
from pyscan.levels import Seen
from pyscan.schema import SiteInfo
from pyscan.watch import RowWatch, Watch

ORDER = "execution_order"


class Meetings(Protocol):
    """Who notes the sites in the order in which a forward meets them: the capture state of the scanner."""

    @property
    def order(self) -> list[int]: ...


class Lookout:
    """Rules, or none (`watch=False`), over the rows of one list of sites."""

    def __init__(
        self,
        sites: Sequence[SiteInfo],
        watch: Watch | bool,
        *,
        meetings: Meetings,
        arrivals: Callable[[], list[int]],
        announce: Callable[[Event], None],
    ) -> None:
        self._meetings = meetings
        self._arrivals = arrivals
        self._announce = announce
        limits = watch if isinstance(watch, Watch) else Watch()
        self._rules = RowWatch(sites, limits, self._orders, _C.Glance) if watch else None
        self._detail = limits.detail
        self._detail_until = -1
        self._known: Orders | None = None  # as of the first row with gradients

    @property
    def glance(self) -> _C.Glance | None:
        """What takes the first look at each row; None where nobody looks."""
        glance = None if self._rules is None else self._rules.glance
        return glance if isinstance(glance, _C.Glance) else None

    @property
    def pass_by(self) -> Callable[[tuple[Any, ...]], None] | None:
        """What takes a row that the glance has looked at and that needs no second look."""
        return None if self._rules is None else self._rules.before.append

    def row(self, row: Row, seen: Seen | None = None) -> None:
        """Look at a finished row; with `seen` the glance has looked already."""
        if self._known is None and (backward := self._arrivals()):
            self._known = Orders(self._meetings.order, backward)
            self._announce({"kind": ORDER, "step": row.step, "site": None, **self._known._asdict()})
        if self._rules is not None:
            events = self._rules.see(row.step, row.cells, row.loss, row.flags, seen)
            if events:
                self._tell(events)

    def finish(self, step: int) -> None:
        """No row will follow that of `step`."""
        if self._rules is not None:
            self._tell(self._rules.finish(step))

    def wants(self, step: int) -> bool:
        """Whether an alarm asks for a row of this step, whatever `every` says."""
        return step <= self._detail_until

    def _orders(self) -> Orders:
        """Of the step whose row is looked at; at the end of a run there is none, and the first one serves."""
        now = Orders(self._meetings.order, self._arrivals())
        return now if now.forward or self._known is None else self._known

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            self._detail_until = event["step"] + self._detail
            self._announce(event)
