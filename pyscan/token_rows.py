"""The token rows of every step: taken from the capture when a row closes, kept for `scan.tokens()`, and written.

Sites that had a row and no tokens are told of once, and so is a disk that is too slow for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pyscan.closing import Closing
from pyscan.schema import SiteInfo
from pyscan.token_capture import TokenCapture
from pyscan.token_step import TokenStep, make_step
from pyscan.writer import Writer


class TokenRows:
    """`capture` is of the model as it is now; `announce` takes events."""

    def __init__(self, mode: bool | str, writer: Writer | None, announce: Callable[..., None]) -> None:
        self.capture: TokenCapture
        self._mode = mode
        self._writer = writer
        self._announce = announce
        self._newest: tuple[TokenStep, tuple[SiteInfo, ...]] | None = None
        self._has_dropped = False
        self._told: set[int] = set()

    def close(self, closing: Closing, sites: tuple[SiteInfo, ...]) -> None:
        """After the row of the step, with which a resume voids what came before."""
        calls, batches = self.capture.take()
        if not closing.is_due:
            return
        made = make_step(closing.step, self._mode, calls, batches, float(closing.scale))
        self._newest = made, sites
        self._tell_missing(made, sites)
        if self._writer is not None and not self._writer.tokens(made.step, *made.payload()) and not self._has_dropped:
            self._has_dropped = True
            if self._writer.error is None:
                text = "the disk is too slow for every step's tokens; some are left out"
                self._announce("tokens_dropped", text=text)

    def forget_after(self, step: int) -> None:
        """Drop the newest step if it is a later one: it belongs to an abandoned timeline."""
        if self._newest is not None and self._newest[0].step > step:
            self._newest = None

    def view(self) -> dict[str, Any]:
        return {} if self._newest is None else self._newest[0].view(self._newest[1])

    def _tell_missing(self, made: TokenStep, sites: tuple[SiteInfo, ...]) -> None:
        """Sites that had a row and no tokens, or not all of them: said once."""
        missing = {site: text for site, text in self.capture.missing(made).items() if site not in self._told}
        self._told |= set(missing)
        for text in sorted(set(missing.values())):
            names = [sites[site].name for site in sorted(missing) if missing[site] == text]
            self._announce("tokens_missing", sites=names, text=text)
