"""A page that follows a run: served to this machine alone, and to a browser that means this machine.

Only GET, only two addresses, only on the loopback. The Host header is checked, since a website may point a name of its
own at this machine (DNS rebinding) and would then read the page as if it were its own.
"""

from __future__ import annotations

import hashlib
import json
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

from ecc.errors import EccError

from .history import Follower
from .html import content_of, page_of
from .page import page_facts

ADDRESS = "127.0.0.1"


class LiveServer(ThreadingHTTPServer):
    """Serves the page of one folder.

    Args:
        folder: Of a run or a grid of runs; it is read for each answer, of histories what is new.
        port: 0 takes any that is free.

    Raises:
        BadFile: If the folder holds neither, or the plotting library is not installed.
        EccError: If the port is taken.
    """

    daemon_threads = True

    def __init__(self, folder: str | Path, port: int = 0) -> None:
        self.folder = Path(folder)
        self._follower, self._lock = Follower(), Lock()
        page_of(self.facts(), live=True)  # what is wrong is told before anything is served
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) else "there is no such port"
            raise EccError(f"cannot serve on port {port}: {why}. Give another with --port.") from None

    def facts(self) -> dict[str, Any]:
        """What the folder says now.

        Raises:
            BadFile: If a file in it is damaged.
        """
        with self._lock:  # each answer has a thread of its own
            return page_facts(self.folder, self._follower)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away is no error; anything else is told as usual."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """Where to look."""
        return f"http://{ADDRESS}:{self.server_port}/"

    @property
    def hosts(self) -> set[str]:
        """The names under which a browser may ask."""
        return {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    server_version = "ecc"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 30  # a browser that says nothing is not waited for

    def do_GET(self) -> None:
        """The page, or its content as JSON."""
        if self.headers.get("Host") not in self.server.hosts:
            self._answer(HTTPStatus.FORBIDDEN, b"ask for localhost\n", "text/plain")
        elif self.path == "/":
            self._page()
        elif self.path == "/content.json":
            self._content()
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"there is nothing here\n", "text/plain")

    def _page(self) -> None:
        try:
            page = page_of(self.server.facts(), live=True)
        except EccError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode(), "text/plain")
        else:
            self._answer(HTTPStatus.OK, page.encode(), "text/html")

    def _content(self) -> None:
        try:
            content = content_of(self.server.facts())
        except EccError as error:  # a file that is damaged now may be whole in a moment
            data = json.dumps({"error": str(error)}).encode()
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, data, "application/json")
            return
        data = json.dumps(content, allow_nan=False).encode()
        etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
        if self.headers.get("If-None-Match") == etag:
            self._answer(HTTPStatus.NOT_MODIFIED, b"", "application/json", etag)
        else:
            self._answer(HTTPStatus.OK, data, "application/json", etag)

    def _answer(self, status: HTTPStatus, data: bytes, kind: str, etag: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        if etag:
            self.send_header("ETag", etag)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name that http.server has
        """Says nothing: the terminal is the user's."""


def serve(server: LiveServer) -> None:
    """Until Ctrl-C."""
    with server:
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return
