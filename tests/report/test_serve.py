from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ecc.errors import BadFile, EccError
from ecc.report import serve as serving
from ecc.report.history import History
from ecc.report.serve import LiveServer, serve
from report.folders import HOSTILE, write_run


@pytest.fixture(autouse=True)
def _light(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes seconds to put together; that it is in a page is tested elsewhere."""
    monkeypatch.setattr("ecc.report.html._library", lambda: "0")


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


def test_the_page_and_its_content(server: LiveServer) -> None:
    status, headers, data = ask(server, "/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert b"data-live" in data
    assert b"<script>window.hacked" not in data
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "Python" not in headers["Server"]
    status, headers, data = ask(server, "/content.json")
    assert status == 200
    assert json.loads(data)["facts"]["running"] == 1
    status, _, data = ask(server, "/content.json", If_None_Match=headers["ETag"])
    assert (status, data) == (304, b"")


def test_news_are_told(server: LiveServer, folder: Path) -> None:
    _, before, _ = ask(server, "/content.json")
    with (folder / "history.jsonl").open("a") as file:
        file.write('{"phase": "prune", "step": 41, "loss": 0.4, "total": 61, "lineage": 61}\n')
    status, after, data = ask(server, "/content.json", If_None_Match=before["ETag"])
    assert status == 200
    assert after["ETag"] != before["ETag"]
    assert json.loads(data)["facts"]["cells"][0]["now"]["step"] == 41


def test_a_page_that_asks_every_two_seconds_costs_only_what_is_new(
    server: LiveServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = json.loads(ask(server, "/content.json")[2])["facts"]
    read: list[object] = []
    add = History.add
    monkeypatch.setattr(History, "add", lambda self, line: (read.append(line), add(self, line)))
    assert json.loads(ask(server, "/content.json")[2])["facts"] == first
    assert read == []
    line = {"phase": "prune", "step": 50, "loss": 0.4, "total": 70, "lineage": 70}
    with (folder / "history.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    facts = json.loads(ask(server, "/content.json")[2])["facts"]
    assert read == [line]
    assert facts["cells"][0]["now"] == {"phase": "prune", "step": 50}


def test_a_damaged_file_is_told_and_may_heal(server: LiveServer, folder: Path) -> None:
    (folder / "summary.json").write_text("{")
    status, _, data = ask(server, "/content.json")
    assert status == 503
    assert "summary.json is damaged" in json.loads(data)["error"]
    assert ask(server, "/")[0] == 503
    (folder / "summary.json").unlink()
    assert ask(server, "/content.json")[0] == 200


@pytest.mark.parametrize(
    "path", ["/config.json", "/../../etc/passwd", "/%2e%2e/x", "/?x", "/content.json/..", "/run/summary.json"]
)
def test_nothing_else_is_served(server: LiveServer, path: str) -> None:
    assert ask(server, path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
def test_only_get(server: LiveServer, method: str) -> None:
    assert ask(server, "/", method)[0] == 501


def test_a_name_that_is_not_this_machine_is_refused(server: LiveServer) -> None:
    port = server.server_port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
        assert ask(server, "/", Host=host)[0] == 403, host
        assert ask(server, "/content.json", Host=host)[0] == 403, host
    for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
        assert ask(server, "/", Host=host)[0] == 200, host


def test_it_listens_on_the_loopback_alone(server: LiveServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_port}/"


def test_what_is_wrong_is_told_before_anything_is_served(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(BadFile, match="holds neither"):
        LiveServer(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(EccError, match=r"cannot serve on port \d+: .* Give another with --port"):
            LiveServer(folder, taken.getsockname()[1])
    with pytest.raises(EccError, match="cannot serve on port 70000"):
        LiveServer(folder, 70000)


def test_ctrl_c_ends_it_cleanly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = LiveServer(folder)

    def interrupted(**options: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "serve_forever", interrupted)
    serve(server)
    assert server.socket.fileno() == -1
    assert serving.ADDRESS == "127.0.0.1"


def test_a_browser_that_goes_away_is_no_error(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    for error, told in ((ConnectionResetError(), False), (ValueError("a bug"), True)):
        try:
            raise error
        except Exception:  # noqa: BLE001 - where the server calls it
            server.handle_error(None, ("127.0.0.1", 1))
        assert ("Traceback" in capsys.readouterr().err) == told
