"""The verbs of the command line, one file and one class each; the docstring of the class is its help."""

from __future__ import annotations

from pyscan.commands.base import UserError, Verb
from pyscan.commands.check import Check
from pyscan.commands.compact import Compact
from pyscan.commands.demo import Demo
from pyscan.commands.diff import Diff
from pyscan.commands.doctor import Doctor
from pyscan.commands.export import Export
from pyscan.commands.health import HealthVerb
from pyscan.commands.import_ import Import
from pyscan.commands.info import Info
from pyscan.commands.merge import Merge
from pyscan.commands.repair import Repair
from pyscan.commands.report import Report
from pyscan.commands.run import Run
from pyscan.commands.scan import Scan
from pyscan.commands.show import Show
from pyscan.commands.view import View

__all__ = ["VERBS", "UserError", "Verb"]

VERBS: tuple[type[Verb], ...] = (
    Demo,
    Run,
    Scan,
    Info,
    Show,
    View,
    Report,
    HealthVerb,
    Diff,
    Check,
    Repair,
    Compact,
    Merge,
    Export,
    Import,
    Doctor,
)
