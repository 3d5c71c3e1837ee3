"""`pyscan run`: a training script, scanned without a change to it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyscan.commands.base import UserError, Verb


class Run(Verb):
    """Run a training script and scan it, without touching its code.

    Attaches at the first forward with gradients after the script has built an
    optimizer, to the outermost module that owns the optimizer's parameters, and
    says so. A script that calls pyscan.attach itself is left alone.

    Settings are the arguments of pyscan.attach: in pyscan.toml in the current
    directory (every = 4), or as variables (PYSCAN_EVERY=4), which count more.
    The scan is PATH, or the setting path, or the name of the script with .mscan.

    A job that restarts goes on in its scan with PYSCAN_RESUME=1, after as many
    steps as its optimizer has counted.

    Exit status and output are those of the script; what pyscan says goes to
    stderr. Processes that the script starts are not scanned.

    examples:
      pyscan run train.py --lr 1e-4
      pyscan run -o runs/a.mscan -m package.train
      PYSCAN_EVERY=10 torchrun --nproc-per-node 2 -m pyscan run train.py
    """

    name = "run"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("-o", "--output", metavar="PATH", type=Path, help="where the scan goes")
        parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module")
        parser.add_argument("script", metavar="SCRIPT", help="what python would run")
        parser.add_argument("arguments", metavar="...", nargs=argparse.REMAINDER, help="its arguments")

    def run(self, args: argparse.Namespace) -> Callable[[], int]:
        """Check everything, and hand back what runs the script: its errors are not ours to catch."""
        from pyscan import script
        from pyscan.autoattach import AutoAttach, say
        from pyscan.settings import SettingsError, load

        try:
            settings, remarks = load(os.environ)
            script.set_search_path(None if args.is_module else args.script)
            program = script.load_module(args.script) if args.is_module else script.load_script(args.script)
        except (SettingsError, script.ProgramError) as error:
            raise UserError(str(error)) from None
        settings["path"] = _output(args, settings)
        for remark in remarks:
            say(remark)
        auto = AutoAttach(settings)

        def run_script() -> int:
            auto.start()
            script.run(program, args.arguments)
            return 0

        return run_script


def _output(args: argparse.Namespace, settings: dict[str, Any]) -> Path:
    """Where the scan goes: not over another one, unless it is to be continued."""
    named = args.output or settings.get("path")
    last = args.script.rpartition(".")[2] if args.is_module else Path(args.script).stem
    path = Path(named or f"{last}.mscan")
    if path.exists() and not settings.get("resume"):
        raise UserError(f"{path} exists: name another scan with -o, or continue it with PYSCAN_RESUME=1")
    if not path.parent.is_dir():
        raise UserError(f"{path.parent} is not a directory: make it first")
    return path.absolute()  # the script may go to another directory
