"""Tells compiled code where to ask torch about tensors and its own state; importing this is enough.

Where torch's libraries export what is needed, compiled code asks them and no Python; everything else is asked of the
Python functions given here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pyscan import _C
from pyscan.engine import DTYPES


def use_torch(*, is_native: bool = True) -> None:
    """With `is_native` what the libraries export, where they do; else Python's functions alone."""
    _C.use_torch(
        Tensor,
        torch.is_grad_enabled,
        torch._C._current_graph_task_id,
        torch._C._get_tracing_state,
        tuple(DTYPES),
        getattr(Tensor, "__dlpack_c_exchange_api__", None) if is_native else None,
        is_native,
    )


def use_handles(*, is_native: bool = True) -> bool:
    """Look at gradients without their Python objects, if compiled code finds the same in one as Python does."""
    parameter = nn.Parameter(torch.zeros(2, 3, dtype=torch.float32, device="cpu"))
    parameter.grad = torch.ones_like(parameter)
    make_handle = getattr(getattr(torch._C, "_aoti", None), "unsafe_alloc_void_ptr_from_tensor", None)
    return _C.use_handles(parameter, make_handle if is_native else None)


use_torch()
use_handles()
