"""Pair the site names of two runs whose models are the same but whose names are not: wrapped, prefixed or cut.

Receives two lists of names; hands back the pairs and what stayed alone. A name is never paired on a guess: where two
names would fit, neither is taken.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

# Components that a wrapper puts into a name and that say nothing about the weight.
_WRAPPERS = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer", "original_module"}
)
_PEFT = "base_model.model."

Key = Callable[[str], str | None]
Pairs = dict[str, str]


class Matches(NamedTuple):
    pairs: list[tuple[str, str]]  # in the order of the first list
    only_a: list[str]
    only_b: list[str]


def match_names(a: Sequence[str], b: Sequence[str]) -> Matches:
    """Pair equal names; then those equal but for `.weight` and wrappers; then those that differ in a prefix alone."""
    found: Pairs = {}
    for rule in (_equal, _equal_when_bare, _equal_suffix, _renamed_prefix):
        taken = set(found.values())
        found |= rule([n for n in a if n not in found], [n for n in b if n not in taken], found)
    taken = set(found.values())
    pairs = [(name, found[name]) for name in a if name in found]
    return Matches(pairs, [n for n in a if n not in found], [n for n in b if n not in taken])


def bare_name(name: str) -> str:
    """The name without `.weight`, without `base_model.model.` in front and without components that wrappers add."""
    name = name.removesuffix(".weight").removeprefix(_PEFT)
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _equal(a: Iterable[str], b: Iterable[str], found: Pairs) -> Pairs:
    return _join(a, b, lambda name: name, lambda name: name)


def _equal_when_bare(a: Iterable[str], b: Iterable[str], found: Pairs) -> Pairs:
    return _join(a, b, bare_name, bare_name)


def _join(a: Iterable[str], b: Iterable[str], key_a: Key, key_b: Key) -> Pairs:
    """Pairs whose keys are equal; a key of several names on one side, or None, pairs nothing."""
    by_key_a, by_key_b = _by_key(a, key_a), _by_key(b, key_b)
    return {
        names[0]: by_key_b[key][0]
        for key, names in by_key_a.items()
        if key is not None and len(names) == 1 and len(by_key_b.get(key, ())) == 1
    }


def _by_key(names: Iterable[str], key: Key) -> dict[str | None, list[str]]:
    found: dict[str | None, list[str]] = defaultdict(list)
    for name in names:
        found[key(name)].append(name)
    return dict(found)


def _equal_suffix(a: Iterable[str], b: Iterable[str], found: Pairs) -> Pairs:
    """Pair by the longest common suffix, if one name on either side has it: `model.layers.0.q`, `gpt.layers.0.q`."""
    a = list(a)
    homes_a, homes_b = _suffix_homes(a), _suffix_homes(b)
    pairs = {}
    for name in a:
        common = next((suffix for suffix in _suffixes(name) if suffix in homes_b), "")
        theirs = homes_b.get(common, [])
        if len(theirs) == 1 == len(homes_a.get(common, [])) and _says_enough(common, name, theirs[0]):
            pairs[name] = theirs[0]
    return pairs


def _suffix_homes(names: Iterable[str]) -> dict[str, list[str]]:
    homes: dict[str, list[str]] = defaultdict(list)
    for name in names:
        for suffix in _suffixes(name):
            homes[suffix].append(name)
    return dict(homes)


def _suffixes(name: str) -> list[str]:
    """All suffixes of the bare name that keep its first integer, longest first: a shorter one names no layer."""
    parts = bare_name(name).split(".")
    first_integer = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return [".".join(parts[i:]) for i in range(first_integer + 1)]


def _says_enough(suffix: str, name_a: str, name_b: str) -> bool:
    """A suffix names a weight if it is all of one name, or holds a word and the integer after it (`layers.0`)."""
    parts = suffix.split(".")
    has_layer = not parts[0].isdigit() and any(part.isdigit() for part in parts)
    return has_layer or suffix in (bare_name(name_a), bare_name(name_b))


def _renamed_prefix(a: Iterable[str], b: Iterable[str], found: Pairs) -> Pairs:
    """Apply the commonest change of prefix among the pairs so far to the rest: `model.norm`, `gpt.norm`."""
    changes = Counter(_changed_prefix(bare_name(x), bare_name(y)) for x, y in found.items())
    changes.pop(("", ""), None)
    if not changes:
        return {}
    (old, new), _ = changes.most_common(1)[0]
    return _join(a, b, lambda name: _swap(bare_name(name), old, new), bare_name)


def _changed_prefix(a: str, b: str) -> tuple[str, str]:
    """What stands before the longest common suffix, in whole components with their dots."""
    parts_a, parts_b = a.split("."), b.split(".")
    same = 0
    while same < min(len(parts_a), len(parts_b)) and parts_a[-1 - same] == parts_b[-1 - same]:
        same += 1
    return "".join(f"{part}." for part in parts_a[: len(parts_a) - same]), "".join(
        f"{part}." for part in parts_b[: len(parts_b) - same]
    )


def _swap(name: str, old: str, new: str) -> str | None:
    return new + name.removeprefix(old) if name.startswith(old) else None
