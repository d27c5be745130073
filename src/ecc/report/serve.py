"""`ecc report --live`: the page of a run that is not finished, served to this machine only.

The server answers GET requests for two paths on the loopback interface. It checks the Host header: a website could
resolve its own name to this machine (DNS rebinding) and would then be able to read the page.
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
from .load import load_report
from .page import page_content, render_page
from .records import Report

ADDRESS = "127.0.0.1"


class LiveServer(ThreadingHTTPServer):
    """A server for the page of one folder, which is read for each request. Port 0 selects a free port."""

    daemon_threads = True

    def __init__(self, folder: str | Path, port: int = 0) -> None:
        self.folder = Path(folder)
        self._follower, self._lock = Follower(), Lock()
        render_page(self.report(), live=True)  # errors are reported before the server starts
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            why = error.strerror if isinstance(error, OSError) else "ports are 0 to 65535"
            raise EccError(f"cannot serve on port {port}: {why}. Give another with --port.") from None

    def report(self) -> Report:
        """The present content of the folder."""
        with self._lock:  # each request has its own thread
            return load_report(self.folder, self._follower)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that closed the connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """Address of the page."""
        return f"http://{ADDRESS}:{self.server_port}/"

    @property
    def hosts(self) -> set[str]:
        """Accepted values of the Host header."""
        return {f"{name}:{self.server_port}" for name in (ADDRESS, "localhost")}


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    server_version = "ecc"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout = 30  # seconds to wait for a request

    def do_GET(self) -> None:
        """The page, or its content as JSON."""
        try:
            if self.headers.get("Host") not in self.server.hosts:
                self._answer(HTTPStatus.FORBIDDEN, b"use localhost\n", "text/plain")
            elif self.path == "/":
                self._answer(HTTPStatus.OK, render_page(self.server.report(), live=True).encode(), "text/html")
            elif self.path == "/content.json":
                self._content()
            else:
                self._answer(HTTPStatus.NOT_FOUND, b"not found\n", "text/plain")
        except EccError as error:  # a file that is being written may be complete in a moment
            data = json.dumps({"error": str(error)}).encode()
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, data, "application/json")

    def _content(self) -> None:
        data = json.dumps(page_content(self.server.report()), allow_nan=False).encode()
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
        """Log nothing: the terminal belongs to the user."""


def serve(server: LiveServer) -> None:
    """Serve until Ctrl-C."""
    with server:
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return
