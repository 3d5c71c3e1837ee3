"""Triton's interpreter made quick enough for tests, and strict about promises that it ignores by itself.

Importing this patches the interpreter of this process, which must have been started with TRITON_INTERPRET=1: the
decorator decides at import. Relies on private names of triton.runtime.interpreter (3.9.0).
"""

import os
import types
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

if os.environ.get("TRITON_INTERPRET") != "1":
    raise ImportError("start the process with TRITON_INTERPRET=1: it decides when a kernel is defined")


class FalsePromiseError(AssertionError):
    """A tl.multiple_of that does not hold: on a device, a misaligned address."""


def _multiple_of(x: Any, values: Any) -> Any:
    promised = values.value if isinstance(values, tl.constexpr) else values
    if isinstance(x, tl.tensor):
        for value in x.handle.data.reshape(-1):
            if int(value) % promised:
                raise FalsePromiseError(f"tl.multiple_of({promised}) of {int(value):#x}")
    return x


class _Nothing:
    def restore(self) -> None:
        """The language stays patched: no kernel of this process is ever compiled."""


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.rewrite()(*args, **kwargs)


# Patching the language costs a millisecond, and the interpreter does it for every call of one kernel function by
# another. Once is enough.
_language = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
interpreter._patch_lang(_language)
tl.multiple_of = _multiple_of
interpreter._patch_lang = lambda fn: _Nothing()
interpreter.InterpretedFunction.__call__ = _call
