"""Debian's Chromium under Playwright, for tests and pictures: every page reports its errors and its requests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MISSING = "there is no Chromium here; `make browser` installs Debian's"


@contextmanager
def browsing() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    options = ["--no-sandbox"] if os.name == "posix" and os.getuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


class Watched:
    """A page, what went wrong on it, and where it asked for something."""

    def __init__(self, browser: Any, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        scheme = "dark" if dark else "light"
        self.page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", lambda message: self._hear(message))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(_place(request.url)))
        self.page.on("requestfailed", lambda request: self.errors.append(f"failed: {request.url[:200]}"))

    def open(self, url: str) -> Any:
        self.page.goto(url)
        self.page.wait_for_selector("body[data-ready]", timeout=30_000)
        return self.page

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)


def _place(url: str) -> str:
    """Host of an address; of what has none, its scheme."""
    parts = urlsplit(url)
    return parts.hostname or parts.scheme
