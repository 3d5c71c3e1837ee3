"""The viewer's web server: one page, its scripts, and the answers of api.py, for this machine alone.

Receives a session; listens on 127.0.0.1. It serves a fixed list of paths, so no path of a request ever becomes one of
the disk; it refuses hosts other than its own, so no foreign page reaches it through a name that points here.
"""

from __future__ import annotations

import json
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from pyscan.errors import ScanError
from pyscan.extras import need
from pyscan.viewer.api import QUESTIONS
from pyscan.viewer.query import BadRequestError, Query
from pyscan.viewer.session import Session

HOSTS = ("127.0.0.1", "localhost")
_MAX_TARGET = 2048
_TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_SCRIPTS = ("codes.js", "map.js", "charts.js", "page.js", "viewer.js")
_FILES = {f"/{name}": name for name in ("style.css", "icon.svg", *_SCRIPTS)}
# Plotly writes styles of its own into the page; everything else comes from this server.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@cache
def static(name: str) -> bytes:
    """A file of the page; `name` is one of those that come with pyscan."""
    return (resources.files("pyscan.viewer") / "static" / name).read_bytes()


def page() -> bytes:
    """The page with its style and scripts as files of their own."""
    head = '<title>pyscan</title><link rel="icon" href="icon.svg"><link rel="stylesheet" href="style.css">'
    scripts = "".join(f'<script src="{name}"></script>' for name in ("plotly.js", *_SCRIPTS))
    text = static("page.html").decode()
    return text.replace("<!--head-->", head).replace("<!--scripts-->", scripts).encode()


@cache
def plotly_js() -> bytes:
    script: str = need("plotly.offline", "view").get_plotlyjs()
    return script.encode()


class Viewer(ThreadingHTTPServer):
    """Serves one session; `port` 0 takes any free one."""

    daemon_threads = True

    def __init__(self, session: Session, port: int = 0) -> None:
        self.session = session
        plotly_js()  # a missing library is said at the start, not by an empty page
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: Viewer
    server_version, sys_version = "pyscan", ""
    protocol_version = "HTTP/1.1"
    timeout = 60  # seconds that a connection may keep silent

    def do_GET(self) -> None:
        try:
            self._answer()
        except BadRequestError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except (ScanError, OSError) as error:
            if not isinstance(error, ConnectionError):
                self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error))

    def _answer(self) -> None:
        if not is_own_host(self.headers.get("Host")):
            self._refuse(HTTPStatus.FORBIDDEN, "this viewer answers to 127.0.0.1 and localhost alone")
            return
        if len(self.path) > _MAX_TARGET:
            self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG, f"an address has at most {_MAX_TARGET} characters")
            return
        target = urlsplit(self.path)
        if target.path in QUESTIONS:
            query = Query(target.query)
            with self.server.session.reading(refresh=target.path == "/api/state") as session:
                found = QUESTIONS[target.path](session, query)
            self._send(json.dumps(found, allow_nan=False).encode(), "application/json")
        elif target.path == "/plotly.js":
            self._send(plotly_js(), "text/javascript", keep=True)
        elif target.path == "/":
            self._send(page(), "text/html; charset=utf-8")
        elif target.path in _FILES:
            name = _FILES[target.path]
            self._send(static(name), f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8")
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here")

    def _send(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK, keep: bool = False) -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, "max-age=86400" if keep and name == "Cache-Control" else value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self.close_connection = True
        self._send(text.encode(), "text/plain; charset=utf-8", status)

    def log_message(self, format: str, *args: Any) -> None:
        """A terminal with the address in it stays readable."""


def is_own_host(host: str | None) -> bool:
    """Whether a Host header names this machine, whatever the port: a tunnel may have another one."""
    name, colon, port = (host or "").partition(":")
    return name.lower() in HOSTS and (not colon or port.isdecimal())
