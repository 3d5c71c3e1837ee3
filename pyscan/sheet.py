"""The map of a model as one table of cells: what a heat map of a plotting library or a small picture is made of.

Receives sites and how many cells each has; hands on, for every place of the table, which cell of the run stands there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pyscan.grid import Section, arrange
from pyscan.schema import SiteInfo

EMPTY = -1


@dataclass(frozen=True)
class Sheet:
    labels: list[str]  # of the rows
    ticks: list[tuple[float, str]]  # middle and name of each column of modules
    cells: NDArray[np.intp]  # [rows, columns]: place among all cells of the run, or EMPTY
    sites: NDArray[np.intp]  # [rows, columns]: place of the site
    blocks: NDArray[np.intp]  # [rows, columns]: block of the site


def lay_out(sites: Sequence[SiteInfo], counts: Sequence[int]) -> Sheet:
    """All sections below each other; modules of a section stand side by side with a gap between them."""
    starts = np.cumsum(counts) - np.asarray(counts, np.int64)
    sections = arrange(sites)
    lefts = [_lefts(section, counts) for section in sections]
    width = max((ends[-1] for ends in lefts), default=1) or 1
    num_rows = sum(len(section.rows) for section in sections)
    found = np.full((3, num_rows, width), EMPTY, np.intp)
    labels: list[str] = []
    for section, left in zip(sections, lefts, strict=True):
        for row in section.rows:
            for column, box in row.boxes.items():
                at = left[column]
                for site in box:
                    span = np.arange(counts[site])
                    place = slice(at, at + counts[site])
                    found[:, len(labels), place] = starts[site] + span, np.full(len(span), site), span
                    at += counts[site]
            labels.append(f"{section.title}.{row.label}" if section.title else row.label)
    return Sheet(labels, _ticks(sections, lefts), *found)


def _lefts(section: Section, counts: Sequence[int]) -> list[int]:
    """Where each column begins, and behind the last one where the section ends."""
    lefts = [0]
    for column in range(len(section.columns)):
        widest = max(sum(counts[site] for site in row.boxes.get(column, [])) for row in section.rows)
        lefts.append(lefts[-1] + widest + (1 if column + 1 < len(section.columns) else 0))
    return lefts


def _ticks(sections: list[Section], lefts: list[list[int]]) -> list[tuple[float, str]]:
    """Of the section with the most columns: a table has one axis for all."""
    if not sections:
        return []
    most = max(range(len(sections)), key=lambda i: len(sections[i].columns))
    spans = zip(sections[most].columns, lefts[most], lefts[most][1:], strict=False)
    return [((left + right - 1) / 2, column) for column, left, right in spans if column]
