"""Make the pictures of README.md from a run: the viewer in a light and a dark room, on a phone, and the report.

`make pictures` calls it with the demo's run; it needs Chromium.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from PIL import Image

from pyscan.viewer.server import Viewer
from pyscan.viewer.session import Session
from tests.browser import Watched, browsing

FOLDER = Path(__file__).parent / "pictures"
MAX_BYTES = 150_000
# A cell of the map that is clicked, and one that is clicked with shift held.
PICK = "pyscan.page.pick(pyscan.maps[0].cells[{}], {}, pyscan.maps[0])"


def main(scan: str) -> None:
    FOLDER.mkdir(exist_ok=True)
    session = Session([scan])
    with Viewer(session) as viewer, browsing() as browser, tempfile.TemporaryDirectory() as folder:
        threading.Thread(target=viewer.serve_forever, daemon=True).start()
        _viewer(browser, viewer.url, "viewer", ["grad"], height=1190)
        _viewer(browser, viewer.url, "viewer_dark", ["sps"], height=650, dark=True)
        _viewer(browser, viewer.url, "viewer_phone", ["act"], width=390, height=860)
        report = Path(folder) / "report.html"
        subprocess.run([sys.executable, "-m", "pyscan", "report", scan, "-o", str(report)], check=True)
        page = Watched(browser, width=1000, height=760).open(report.as_uri())
        _save(page, "report")
        viewer.shutdown()


def _viewer(browser: Any, url: str, name: str, press: list[str], *, width: int = 1000, **look: Any) -> None:
    page = Watched(browser, width=width, **look).open(url)
    for value in press:
        page.click(f"#controls button[value={value}]")
    if name == "viewer":
        page.evaluate(PICK.format(70, "false"))
        page.evaluate(PICK.format(300, "true"))
    _save(page, name)


def _save(page: Any, name: str) -> None:
    page.wait_for_timeout(1500)
    path = FOLDER / f"{name}.png"
    page.screenshot(path=str(path))
    Image.open(path).convert("RGB").save(path, optimize=True)
    assert path.stat().st_size < MAX_BYTES, f"{path} has {path.stat().st_size} bytes, at most {MAX_BYTES} are allowed"
    page.close()


if __name__ == "__main__":
    main(sys.argv[1])
