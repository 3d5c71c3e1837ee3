"""Which rows of a large embedding's gradient can hold anything: those that were looked up.

Receives the outputs of lookups; when autograd makes the gradient of one, the reader of gradients is told its rows. If
that tensor is then the whole gradient of the weight, nobody needs to read the zeros: a vocabulary has far more rows
than a batch has tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pyscan import _C
from pyscan.gradients import GradientReader

# A smaller gradient is read sooner than autograd is asked about it.
LARGE_BYTES = 1 << 22
# It pays where a batch looks up at most one row in so many.
SPARSE = 4


def observer(see: Callable[[Any], None], site: int, gradients: GradientReader) -> Callable[[Any], None]:
    """`see`, for the outputs of a lookup of `site`, and what tells the reader of gradients about them."""
    index, state = gradients.simple_weight(site), gradients.state
    if index is None or not gradients.reads_early or not isinstance(state, _C.GradientWatch):
        return see
    parameter = gradients.weights[index].parameter
    if parameter.nbytes < LARGE_BYTES:
        return see

    def looked_up(output: Any) -> None:
        see(output)
        if type(output) is not Tensor or not state.active:
            return
        try:
            node: Any = output.grad_fn
            if node is None or node.name() != "EmbeddingBackward0":
                return
            rows = node._saved_indices
            if SPARSE * rows.numel() <= parameter.shape[0]:
                node.register_hook(state.lookup_hook(index, rows.numpy().ravel()))
        except Exception:  # inside a transform there are no numbers: all of the gradient is read, as ever
            return

    return looked_up
