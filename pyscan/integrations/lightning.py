"""`Trainer(callbacks=[ScanCallback("run.mscan")])`: a scan of what Lightning trains.

The callback attaches when training begins, tells the scan the loss of every backward, keeps the scan's place in
Lightning's checkpoints and continues the file from there, and gives the loggers a few figures when Lightning logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pyscan.extras import MissingExtraError, need
from pyscan.integrations.session import Follow, Session
from pyscan.scanner import Scanner


def _library() -> Any:
    """Lightning under the name it is installed by; the older package holds the same classes."""
    try:
        return need("lightning.pytorch", "lightning")
    except MissingExtraError as missing:
        try:
            return need("pytorch_lightning", "lightning")
        except MissingExtraError:
            raise missing from None


class ScanCallback(_library().Callback):  # type: ignore[misc]
    """Scans into `path` (None: into memory); `options` are those of `pyscan.attach`.

    module   name of the submodule to scan; default: the only one that holds weights, so that names are those of the
             bare model, or the LightningModule itself if there are several
    follow   called with the scan once it is attached, such as `lambda scan: tensorboard.follow(scan, "runs/scan")`;
             what it returns is closed when training ends
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        module: str | None = None,
        follow: Follow | None = None,
        **options: Any,
    ) -> None:
        self._session = Session(path, follow, options)
        self._module = module
        self._state: dict[str, Any] | None = None  # of the checkpoint that training is about to continue from
        self._logged_step = 0

    @property
    def scan(self) -> Scanner | None:
        """The scan; None before training begins."""
        return self._session.scan

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        optimizers = trainer.optimizers
        state, self._state = self._state, None
        # Lightning counts the steps of all optimizers together, a scan closes one row for all of them.
        step = state["step"] if state and trainer.global_step else trainer.global_step // max(len(optimizers), 1)
        self._session.begin(self._choose(pl_module), optimizers, step, state)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        if self._session.scan is not None:
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            scale = scaler.get_scale() if scaler is not None else 1.0
            self._session.scan.note(loss=loss.detach() * (trainer.accumulate_grad_batches / scale))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        step, every = trainer.global_step, trainer.log_every_n_steps
        if every and step != self._logged_step and step % every == 0 and (figures := self._session.figures()):
            self._logged_step = step
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._session.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._session.end()

    def state_dict(self) -> dict[str, Any]:
        """Kept by Lightning's checkpoints; the rows up to here are in the file when this returns."""
        if self._session.scan is None:
            return {}
        self._session.scan.flush()
        return self._session.scan.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._state = dict(state_dict) or None

    def _choose(self, pl_module: nn.Module) -> nn.Module:
        if self._module is not None:
            return pl_module.get_submodule(self._module)
        children = [child for child in pl_module.children() if next(child.parameters(), None) is not None]
        has_own = next(pl_module.parameters(recurse=False), None) is not None
        return children[0] if len(children) == 1 and not has_own else pl_module
