"""Rows of cells into an `.mscan` file.

Takes a `Schema` and one float64 array per step; the compiled writer packs and writes them on a thread of its own. The
first error of the disk becomes one warning, after which every call is cheap and does nothing.
"""

from __future__ import annotations

import atexit
import itertools
import json
import math
import os
import secrets
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pyscan import _C
from pyscan.schema import Layout, Schema

SKIPPED = 1  # row flags of FORMAT.md that the caller decides about
AFTER_CLIP = 2


def encode_json(value: Mapping[str, Any]) -> bytes:
    """One line of UTF-8, the same bytes for the same value. NaN and infinity are refused: they are not JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


class Writer:
    """Writes one file; `write` may be called from the training thread at every step."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        schema: Schema,
        *,
        run_id: bytes | None = None,
        resume: bool = False,
        flush_seconds: float = 2.0,
        fsync: str = "close",
        queue_rows: int | None = None,
    ) -> None:
        self.path = Path(path)
        self._num_warnings = itertools.count()  # counts without a lock, which a fork could leave locked
        previous = _previous_schema(self.path, schema) if resume else None
        self.native = _C.Writer(
            os.fspath(self.path),
            schema.to_json(),
            Layout(schema).packing(),
            secrets.token_bytes(16) if run_id is None else run_id,
            flush_seconds=flush_seconds,
            fsync=fsync,
            queue_rows=queue_rows,
            resume=resume,
            previous_layout=[] if previous is None else Layout(previous).packing(),
        )
        # The process may end without close(); the thread must not outlive the interpreter with rows in its queue.
        self._at_exit = _close_at_exit(self)

    def write(
        self,
        step: int,
        cells: NDArray[np.float64],
        *,
        time_ns: int | None = None,
        tokens: int | None = None,
        loss: float | None = None,
        lr: float | None = None,
        grad_scale: float | None = None,
        total_norm: float | None = None,
        flags: int = 0,
    ) -> bool:
        """Hand over a row. False if it was dropped (the disk is too slow) or the writer is off."""
        now = time.time_ns() if time_ns is None else time_ns
        accepted = self.native.write(step, now, cells, tokens, loss, lr, grad_scale, total_norm, flags)
        return accepted or self.refused()

    def event(self, kind: str, step: int, *, site: str | None = None, **fields: Any) -> bool:
        """Append an event. Numbers that JSON has no word for (inf, NaN) become null."""
        event = _without_infinities({"kind": kind, "step": step, "site": site, **fields})
        return self.native.event(encode_json(event)) or self.refused()

    def tokens(self, step: int, payload: bytes, sums: Sequence[NDArray[np.float64]] = ()) -> bool:
        """Append the tokens frame of a step; FORMAT.md gives the bytes. Arrays of sums of squares follow the payload,
        packed as log2q8 by the writer's thread. False if too many wait to be written, or the writer is off."""
        return self.native.tokens(step, payload, list(sums)) or self.refused()

    def change_schema(self, schema: Schema) -> bool:
        """Close the rows so far; the rows that follow have the cells of the new schema."""
        return self.native.schema(schema.to_json(), Layout(schema).packing()) or self.refused()

    def flush(self, *, wait: bool = True) -> bool:
        """Bring every row handed over so far into a file, where a kill does not reach it."""
        return self.native.flush(wait) or self.refused()

    def close(self) -> None:
        """Write what is left and the index. Closing twice is allowed."""
        atexit.unregister(self._at_exit)
        self.native.close()
        self.refused()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def rows_accepted(self) -> int:
        return self.native.rows_accepted

    @property
    def rows_flushed(self) -> int:
        """Rows of this writer that are in a file."""
        return self.native.rows_flushed

    @property
    def rows_dropped(self) -> int:
        return self.native.rows_dropped

    @property
    def last_step(self) -> int:
        """Step of the newest row the file held when it was opened; 0 if there was none."""
        return self.native.last_step

    @property
    def run_id(self) -> bytes:
        return self.native.run_id

    @property
    def error(self) -> str | None:
        """The first error, which turned the writer off."""
        return self.native.error

    def refused(self) -> bool:
        """Warn about the first error, once; always False."""
        error = self.native.error
        if error is not None and next(self._num_warnings) == 0:
            warnings.warn(
                f"pyscan stopped recording: {error}. Training goes on; rows already written stay readable.",
                RuntimeWarning,
                stacklevel=3,
            )
        return False


def _without_infinities(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_infinities(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_infinities(item) for item in value]
    return value


def _previous_schema(path: Path, schema: Schema) -> Schema | None:
    """The schema that governs the end of the file; None if there is no file yet, or nothing in it."""
    encoded = _C.last_schema(os.fspath(path))
    if not encoded:
        return None
    previous = Schema.from_json(encoded)
    if previous.model != schema.model:
        raise ValueError(
            f"{path} holds a scan of the model {previous.model!r}, got {schema.model!r}; "
            "choose another path, or resume with the same model"
        )
    return previous


def _close_at_exit(writer: Writer) -> Callable[[], None]:
    """Register a close that does not keep the writer alive; returns what to unregister."""
    reference = weakref.ref(writer)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    return atexit.register(close)
