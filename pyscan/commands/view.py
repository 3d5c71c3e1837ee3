"""`pyscan view`: a web page on this machine that shows one run, or two side by side, also while they are written."""

from __future__ import annotations

import argparse
import contextlib
import os
import webbrowser
from pathlib import Path
from typing import Any

from pyscan.commands.base import UserError, Verb, add_scan, open_run

DEFAULT_PORT = 8620


class View(Verb):
    """Show a run on a local web page, also while it is being written.

    The map has a row per layer, a box per module and a cell per block, at the
    step of the slider. Click a cell for its history, shift-click to compare.
    With a second run both stand side by side with their difference.

    The page is served to this machine alone and loads nothing from the net.
    From another machine: ssh -L 8620:127.0.0.1:8620 HOST, then open the address.

    examples:
      pyscan view run.mscan
      pyscan view before.mscan after.mscan --no-browser
    """

    name = "view"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_scan(parser)
        parser.add_argument("other", metavar="OTHER", type=Path, nargs="?", help="a second run to compare with")
        parser.add_argument("--port", metavar="N", type=int, help=f"port on 127.0.0.1 ({DEFAULT_PORT}, or a free one)")
        parser.add_argument("--no-browser", action="store_true", help="print the address and open nothing")
        parser.add_argument(
            "--tokenizer", metavar="PATH", type=Path, help="tokenizer.json, or its folder: shows tokens as text"
        )

    def run(self, args: argparse.Namespace) -> int:
        from pyscan.viewer.server import Viewer
        from pyscan.viewer.session import Session

        if args.port is not None and not 0 <= args.port < 65536:
            raise UserError(f"--port must be from 0 to 65535, got {args.port}")
        paths = [args.scan, *([args.other] if args.other else [])]
        for path in paths:
            open_run(path).close()  # what is no scan is told by its name
        session = Session(paths, tokenizer=_tokenizer(args.tokenizer))
        try:
            with _listen(Viewer, session, args.port) as viewer:
                print(f"showing {' and '.join(map(str, paths))} at {viewer.url}  (Ctrl-C ends it)", flush=True)
                if not args.no_browser and _has_screen():
                    webbrowser.open(viewer.url)
                with contextlib.suppress(KeyboardInterrupt):
                    viewer.serve_forever()
        finally:
            session.close()
        return 0


def _listen(kind: Any, session: Any, port: int | None) -> Any:
    """On the port asked for; without one on the usual, or any free one if that is taken."""
    if port is not None:
        return kind(session, port)
    try:
        return kind(session, DEFAULT_PORT)
    except OSError:
        return kind(session, 0)


def _has_screen() -> bool:
    """Whether a browser opened here is seen by the user: not so at the other end of ssh."""
    return "SSH_CONNECTION" not in os.environ and (os.name != "posix" or "DISPLAY" in os.environ or _is_mac())


def _is_mac() -> bool:
    return os.uname().sysname == "Darwin"


def _tokenizer(path: Path | None) -> Any:
    from pyscan.extras import need

    if path is None:
        return None
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"--tokenizer {path}: there is no {file}")
    try:
        return need("tokenizers", "demo").Tokenizer.from_file(str(file))
    except ValueError as error:
        raise UserError(f"--tokenizer {file}: {error}") from None
