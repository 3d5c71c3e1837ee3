"""`pyscan doctor`: is everything here that pyscan needs?"""

from __future__ import annotations

import argparse

from pyscan.commands.base import Verb, add_json


class Doctor(Verb):
    """Say what this machine gives pyscan, and what is missing.

    example:
      pyscan doctor
    """

    name = "doctor"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_json(parser)

    def run(self, args: argparse.Namespace) -> int:
        from pyscan import doctor

        return doctor.run(args.json)
