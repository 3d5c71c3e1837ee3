"""pyscan: an always-on scanner for PyTorch training.

Reading a scan needs numpy alone, so nothing here imports torch until a name that works on tensors is asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "ABSENT",
    "Run",
    "ScanError",
    "ScanFormatError",
    "Scanner",
    "Watch",
    "__version__",
    "attach",
    "check_grad_flow",
    "check_init",
    "is_absent",
    "open",
    "reduce",
    "trace_nonfinite",
]

# public name -> the module that defines it, imported at first use
_HOMES = {
    "ABSENT": "pyscan.codecs",
    "Run": "pyscan.run",
    "ScanError": "pyscan.errors",
    "ScanFormatError": "pyscan.errors",
    "Scanner": "pyscan.scanner",
    "Watch": "pyscan.watch",
    "attach": "pyscan.scanner",
    "check_grad_flow": "pyscan.flow",
    "check_init": "pyscan.init_check",
    "is_absent": "pyscan.codecs",
    "open": "pyscan.reader",
    "reduce": "pyscan.engine",
    "trace_nonfinite": "pyscan.nonfinite",
}

if TYPE_CHECKING:
    from pyscan.codecs import ABSENT, is_absent
    from pyscan.engine import reduce
    from pyscan.errors import ScanError, ScanFormatError
    from pyscan.flow import check_grad_flow
    from pyscan.init_check import check_init
    from pyscan.nonfinite import trace_nonfinite
    from pyscan.reader import open
    from pyscan.run import Run
    from pyscan.scanner import Scanner, attach
    from pyscan.watch import Watch


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pyscan' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
