"""Everything `attach` takes can stand in pyscan.toml or in a variable; a mistake is named with its place."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

import pyscan
from pyscan import settings
from pyscan.settings import SettingsError, load

SEEN: list[dict[str, Any]] = []


def see(event: dict[str, Any]) -> None:
    SEEN.append(event)


def test_every_argument_of_attach_is_a_setting() -> None:
    """But those that are objects of the script."""
    arguments = set(inspect.signature(pyscan.attach).parameters) - {"model", "optimizer"}
    assert set(settings._CHECKS) == arguments


# setting -> (as a variable, as TOML, as attach gets it)
CASES: dict[str, tuple[str, str, Any]] = {
    "path": ("run.mscan", '"run.mscan"', "run.mscan"),
    "include": ("[qk]_proj", r"'[qk]_proj'", "[qk]_proj"),
    "exclude": ('["lm_head", "embed"]', '["lm_head", "embed"]', ["lm_head", "embed"]),
    "block": ("0", "0", 0),
    "rows": ("yes", "true", True),
    "every": ("4", "4", 4),
    "tokens": ("blocks", '"blocks"', "blocks"),
    "mask": ("attention_mask", '"attention_mask"', "attention_mask"),
    "budget": ("0.01", "0.01", 0.01),
    "resume": ("1", "true", True),
    "metadata": ('{"team": "a", "n": 3}', '{team = "a", n = 3}', {"team": "a", "n": 3}),
    "watch": ("off", "false", False),
}


@pytest.mark.parametrize("name", CASES)
def test_a_setting_reads_the_same_from_a_variable_and_from_the_file(tmp_path: Path, name: str) -> None:
    text, toml, want = CASES[name]
    if name == "include":  # a pattern that begins like a list is still a pattern in the file
        text, toml = "proj[qk]", "'proj[qk]'"
        want = "proj[qk]"
    assert load({f"PYSCAN_{name.upper()}": text}, tmp_path) == ({name: want}, [])
    (tmp_path / "pyscan.toml").write_text(f"{name} = {toml}\n")
    assert load({}, tmp_path) == ({name: want}, [])


def test_limits_of_the_watch_and_functions_are_made(tmp_path: Path) -> None:
    (tmp_path / "pyscan.toml").write_text('on_event = "tests.test_settings:see"\n[watch]\nspike = 32.0\n')
    found, _ = load({}, tmp_path)
    assert found["watch"] == pyscan.Watch(spike=32.0)
    found["on_event"]({"kind": "x"})
    assert SEEN == [{"kind": "x"}]


def test_a_variable_counts_more_than_the_file_and_another_file_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "pyscan.toml").write_text("every = 4\nblock = 8\n")
    (tmp_path / "other.toml").write_text("every = 9\n")
    assert load({"PYSCAN_EVERY": "2"}, tmp_path)[0] == {"every": 2, "block": 8}
    assert load({"PYSCAN_CONFIG": "other.toml"}, tmp_path)[0] == {"every": 9}


def test_nothing_is_set_by_what_is_no_setting(tmp_path: Path) -> None:
    found, remarks = load({"PATH": "/bin", "PYSCAN_ISA": "baseline", "PYSCAN_BLOK": "3", "EVERY": "3"}, tmp_path)
    assert (found, remarks) == ({}, ["PYSCAN_BLOK is no setting: did you mean PYSCAN_BLOCK?"])


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("evry = 4", "'evry' is no setting: did you mean every?"),
        ("zzz = 4", "'zzz' is no setting; these are: path, include"),
        ('every = "4"', "every must be a whole number, got '4'"),
        ("every = true", "every must be a whole number, got True"),
        ("rows = 1", "rows must be true or false, got 1"),
        ("include = [1]", "include must be a regular expression or a list of them"),
        ('on_event = "nameless"', "on_event must be a function as package.module:function, got 'nameless'"),
        ("watch = {spike = 0.5}", "spike must lie between 1 and inf, got 0.5"),
        ("watch = {spiky = 2}", "watch must be true, false or a table of limits"),
        ("every = ", "pyscan.toml: Invalid value"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, toml: str, message: str) -> None:
    (tmp_path / "pyscan.toml").write_text(toml)
    with pytest.raises(SettingsError) as error:
        load({}, tmp_path)
    assert message in str(error.value)
    assert "pyscan.toml" in str(error.value)
