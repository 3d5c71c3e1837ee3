"""`pyscan check`: every byte against its checksum."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pyscan.commands.base import Verb, add_json, add_scan, print_json, require_scan


class Check(Verb):
    """Read every byte of a scan and say where it is damaged.

    Exit status 0: whole. 1: damaged; each line names a byte offset and what is
    wrong there. What is whole can still be read, and `pyscan repair` keeps it.

    example:
      pyscan check run.mscan && echo whole
    """

    name = "check"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_scan(parser)
        add_json(parser)

    def run(self, args: argparse.Namespace) -> int:
        from pyscan import tables
        from pyscan.check import check

        require_scan(args.scan)
        with tables.progress("Checking") as tick:
            damage = check(args.scan, tick)
        found = [{"offset": offset, "reason": reason} for offset, reason in damage]
        if args.json:
            print_json({"path": str(args.scan), "whole": not found, "damage": found})
        else:
            _print(args.scan, found)
        return 1 if found else 0


def _print(path: Path, found: list[dict[str, Any]]) -> None:
    from pyscan import tables, text

    if not found:
        tables.print_line(f"{path} is whole", "green")
        return
    columns = [tables.Column("byte"), tables.Column("damage", right=False)]
    tables.print_table(columns, [[f"{place['offset']:,}", place["reason"]] for place in found])
    places = text.plural(len(found), "damaged place")
    tables.print_line(f"{path}: {places}; pyscan repair writes a new file from what is whole", "red")
