"""The arguments of `pyscan.attach` from a `pyscan.toml` and `PYSCAN_*` variables, for jobs whose code stays as it is.

Receives a file and an environment; hands on keyword arguments for `attach`, checked, with every mistake named after the
place it stands in. A variable counts more than the file.
"""

from __future__ import annotations

import difflib
import importlib
import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PREFIX = "PYSCAN_"
FILE = "pyscan.toml"
# Variables that are no arguments of attach.
_OTHERS = {"PYSCAN_CONFIG", "PYSCAN_ISA", "PYSCAN_BUILD_TYPE", "PYSCAN_VERSION"}


class SettingsError(ValueError):
    """A setting that cannot be used; the message says where it stands."""


def load(environment: Mapping[str, str], directory: Path = Path()) -> tuple[dict[str, Any], list[str]]:
    """Arguments for `attach`, and remarks for people: variables that look like settings and are none."""
    file = environment.get("PYSCAN_CONFIG")
    path = directory / (file or FILE)
    if file is not None and not path.is_file():
        raise SettingsError(f"PYSCAN_CONFIG names {file}, which is not a file")
    found = _from_file(path) if path.is_file() else {}
    variables, remarks = _from_environment(environment)
    return found | variables, remarks


def _from_file(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: {error}") from None
    for name in table:
        if name not in _CHECKS:
            raise SettingsError(f"{path}: {name!r} is no setting{_near(name, _CHECKS)}")
    return {name: _checked(name, value, f"{path}: {name}") for name, value in table.items()}


def _from_environment(environment: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    found, remarks = {}, []
    variables = {f"{PREFIX}{name.upper()}": name for name in _CHECKS}
    for variable, text in environment.items():
        if variable in variables:
            name = variables[variable]
            found[name] = _checked(name, _value(name, text), variable)
        elif variable.startswith(PREFIX) and variable not in _OTHERS:
            remarks.append(f"{variable} is no setting{_near(variable, variables)}")
    return found, remarks


def _near(name: str, known: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f": did you mean {close[0]}?" if close else f"; these are: {', '.join(known)}"


def _value(name: str, text: str) -> Any:
    """What a variable says: names and patterns are text, switches are words or 0 and 1, the rest is JSON."""
    if name in _TEXTS and not text.startswith("["):
        return text
    if name in _SWITCHES and text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _checked(name: str, value: Any, where: str) -> Any:
    check, wanted = _CHECKS[name]
    try:
        return check(value)
    except (TypeError, ValueError, KeyError, ImportError, AttributeError) as error:
        told = f" ({error})" if str(error) else ""
        raise SettingsError(f"{where} must be {wanted}, got {value!r}{told}") from None


def _is(*types: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise TypeError
        return value

    return check


def _token_mode(value: Any) -> Any:
    from pyscan.config import TOKEN_MODES

    if not isinstance(value, bool) and value not in TOKEN_MODES:
        raise TypeError
    return value


def _patterns(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, str) for one in value)):
        return value
    raise TypeError


def _function(value: Any) -> Any:
    """`package.module:function`, imported when it is called first: its module may import torch."""
    module, _, name = value.partition(":")
    if not module or not name:
        raise ValueError

    def call(event: dict[str, Any]) -> None:
        getattr(importlib.import_module(module), name)(event)

    return call


def _watch(value: Any) -> Any:
    """A switch, or the limits of a pyscan.Watch."""
    from pyscan.watch import Watch

    return value if isinstance(value, bool) else Watch(**value)


# For each argument of attach: the check, and what it wants, in words.
_CHECKS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "path": (_is(str), "the name of a file"),
    "include": (_patterns, "a regular expression or a list of them"),
    "exclude": (_patterns, "a regular expression or a list of them"),
    "block": (_is(int), "a whole number"),
    "rows": (_is(bool), "true or false"),
    "every": (_is(int), "a whole number"),
    "tokens": (_token_mode, "true, false, blocks or sequences"),
    "mask": (_is(str), "the name of a keyword of the model's forward"),
    "budget": (_is(float, int), "a share of the step time such as 0.01"),
    "resume": (_is(bool), "true or false"),
    "metadata": (_is(dict), "a table"),
    "on_event": (_function, "a function as package.module:function"),
    "live": (_is(bool, int, float), "true, false or a number of seconds"),
    "watch": (_watch, "true, false or a table of limits as pyscan.Watch takes them"),
}
_SWITCHES = {"rows", "resume", "watch", "tokens", "live"}
_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_TEXTS = {"path", "include", "exclude", "mask", "on_event"}
