"""`Trainer(callbacks=[ScanCallback("run.mscan")])`: a scan of what the transformers Trainer trains.

The callback attaches when training begins, after the Trainer has wrapped model and optimizer, numbers rows as the
Trainer numbers its steps, continues the file when training continues from a checkpoint, and adds a few figures to what
the Trainer logs.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from pyscan.extras import need
from pyscan.integrations.session import Follow, Session
from pyscan.scanner import Scanner

_callbacks = need("transformers.trainer_callback", "transformers")


class ScanCallback(_callbacks.TrainerCallback):  # type: ignore[misc,name-defined]
    """Scans into `path` (None: into memory); `options` are those of `pyscan.attach`.

    follow   called with the scan once it is attached, such as `lambda scan: tensorboard.follow(scan, "runs/scan")`;
             what it returns is closed when training ends

    Rows hold the step's loss as the Trainer counts it, the learning rate of the step and the tokens of its inputs. With
    a loss of your own (`compute_loss_func`, label smoothing) the model does not say its loss, and rows have none.
    """

    def __init__(self, path: str | Path | None = None, *, follow: Follow | None = None, **options: Any) -> None:
        self._session = Session(path, follow, options)
        _speak_before_reporters()

    @property
    def scan(self) -> Scanner | None:
        """The scan; None before training begins."""
        return self._session.scan

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        self._session.begin(model, optimizer, state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Rows up to a checkpoint must be there when training continues from it."""
        if self._session.scan is not None:
            self._session.scan.flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._session.end()

    def add_figures(self, state: Any, logs: dict[str, Any]) -> None:
        """Put the figures of the newest row into what is about to be reported; only into the logs of training steps."""
        if "loss" in logs and state.log_history:
            figures = self._session.figures()
            logs.update(figures)
            state.log_history[-1].update(figures)


def _speak_before_reporters() -> None:
    """The Trainer asks its reporters before the callbacks it was given: by our `on_log` they have reported already.

    So the handler's own `on_log` is watched, once for the process.
    """
    original = _callbacks.CallbackHandler.on_log
    if getattr(original, "_pyscan", False):
        return

    @functools.wraps(original)
    def on_log(self: Any, args: Any, state: Any, control: Any, logs: dict[str, Any]) -> Any:
        for callback in self.callbacks:
            if isinstance(callback, ScanCallback):
                callback.add_figures(state, logs)
        return original(self, args, state, control, logs)

    on_log._pyscan = True  # type: ignore[attr-defined]
    _callbacks.CallbackHandler.on_log = on_log
