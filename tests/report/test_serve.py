"""The live page: what is served, and to whom."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ecc.errors import BadFile, EccError
from ecc.report.serve import LiveServer
from report.folders import HOSTILE, write_run


@pytest.fixture(autouse=True)
def _light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundling the plotting library takes seconds; other tests check that it is in the page."""
    monkeypatch.setattr("ecc.report.page._library", lambda: "0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", finished=False, task=HOSTILE)


@pytest.fixture
def server(folder: Path) -> Iterator[LiveServer]:
    with LiveServer(folder) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(server: LiveServer, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), data


def test_the_page_and_its_content_are_served_on_the_loopback(server: LiveServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    status, headers, data = ask(server, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"data-live" in data
    assert b"<script>window.hacked" not in data
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "Python" not in headers["Server"]
    status, headers, data = ask(server, "/content.json")
    assert status == 200
    assert json.loads(data)["data"]["running"] == 1
    status, _, data = ask(server, "/content.json", If_None_Match=headers["ETag"])
    assert (status, data) == (304, b"")


def test_a_damaged_file_is_reported_until_it_is_repaired(server: LiveServer, folder: Path) -> None:
    (folder / "summary.json").write_text("{")
    status, _, data = ask(server, "/content.json")
    assert status == 503
    assert "summary.json is not valid JSON" in json.loads(data)["error"]
    assert ask(server, "/")[0] == 503
    (folder / "summary.json").unlink()
    assert ask(server, "/content.json")[0] == 200


def test_other_paths_and_methods_are_refused(server: LiveServer) -> None:
    for path in ("/config.json", "/../../etc/passwd", "/%2e%2e/x", "/?x", "/content.json/..", "/run/summary.json"):
        assert ask(server, path)[0] == 404, path
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"):
        assert ask(server, "/", method)[0] == 501, method


def test_requests_for_other_hosts_are_refused(server: LiveServer) -> None:
    port = server.server_port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
        assert ask(server, "/", Host=host)[0] == 403, host
        assert ask(server, "/content.json", Host=host)[0] == 403, host
    for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
        assert ask(server, "/", Host=host)[0] == 200, host


def test_errors_are_reported_before_the_server_starts(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(BadFile, match="holds neither"):
        LiveServer(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(EccError, match=r"cannot serve on port \d+: .* Give another with --port"):
            LiveServer(folder, taken.getsockname()[1])
    with pytest.raises(EccError, match="cannot serve on port 70000"):
        LiveServer(folder, 70000)
