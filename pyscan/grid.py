"""Where each site stands on the map of a model: sections of layers, a row per layer, a column per module.

Receives the sites of a run; hands on plain lists of their places. Sites that differ in an inner number alone (the
experts of a layer) share one box, so that a model of thousands of weights still is one picture.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from pyscan.analysis import layer_of
from pyscan.schema import SiteInfo

_NUMBER = re.compile(r"\[\d+\]|(?<=\.)\d+(?=\.|$)")
_LAST_INTEGER = re.compile(r"(\d+)\]?$")


@dataclass
class Row:
    """One layer, or a site that belongs to none; `boxes` has the places of its sites for each column."""

    label: str
    number: int
    boxes: dict[int, list[int]] = field(default_factory=dict)


@dataclass
class Section:
    """Layers of one kind. `title` is their common name, empty for sites outside of layers."""

    title: str
    columns: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


def arrange(sites: Sequence[SiteInfo]) -> list[Section]:
    """All sites, each exactly once, in sections by first appearance and in layers by their number."""
    sections: dict[str, Section] = {}
    rows: dict[str, Row] = {}
    singles = 0
    for place, site in enumerate(sites):
        layer = layer_of(site.name)
        found = _LAST_INTEGER.search(layer) if layer != site.name else None
        if found is None:
            singles += not _ends_with_single(sections)
            key, label, module, number = f" {singles}", site.name.removesuffix(".weight"), "", place
        else:
            key, label, number = layer[: found.start()].rstrip(".["), found[1], int(found[1])
            module = _module(site.name[len(layer) :])
        section = sections.setdefault(key, Section("" if found is None else key))
        if layer not in rows:
            rows[layer] = Row(label, number)
            section.rows.append(rows[layer])
        if module not in section.columns:
            section.columns.append(module)
        rows[layer].boxes.setdefault(section.columns.index(module), []).append(place)
    for section in sections.values():
        section.rows.sort(key=lambda row: row.number)
    return list(sections.values())


def _ends_with_single(sections: dict[str, Section]) -> bool:
    return bool(sections) and list(sections.values())[-1].title == ""


def _module(rest: str) -> str:
    """What follows the layer in a name, with every number in it as a star."""
    return _NUMBER.sub(lambda found: "[*]" if found[0][0] == "[" else "*", rest.removesuffix(".weight")).strip(".")
