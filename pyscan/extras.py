"""Import an optional library at the moment it is needed, or say which extra brings it."""

from __future__ import annotations

import importlib
from typing import Any


class MissingExtraError(ImportError):
    """An optional library is not installed; the message names the command that installs it."""


def need(module: str, extra: str) -> Any:
    """The module, or an error such as "rich is not installed: pip install 'pyscan[cli]'"."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        library = module.partition(".")[0]
        raise MissingExtraError(f"{library} is not installed: pip install 'pyscan[{extra}]'") from error
