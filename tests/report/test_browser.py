"""Pages in a real browser: figures are drawn and filtered, numbers equal those of the files, and names are not run.

Needs Chromium on the system (`apt-get install chromium`); skipped without it.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ecc.records import to_builtins, write_record
from ecc.report.load import load_report
from ecc.report.page import render_page
from ecc.report.serve import LiveServer
from report.folders import BATCH, GRID_SCORES, HOSTILE, make_summary, write_front, write_grid, write_run

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; apt-get install chromium"),
]

api = pytest.importorskip("playwright.sync_api", reason="no playwright here; pip install playwright")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as play:
        root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []  # as in a container
        made = play.chromium.launch(executable_path=CHROMIUM, args=root)
        yield made
        made.close()


class Tab:
    """A page, its console messages and its requests."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda said: self.complaints.append(f"{said.type}: {said.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def open(self, url: str) -> Any:
        self.page.goto(url)
        self.wait("[data-drawn]")
        return self.page

    def wait(self, state: str) -> None:
        """By a selector: the policy of the page forbids polling with evaluated strings."""
        self.page.wait_for_selector(f"html{state}", state="attached", timeout=60_000)

    def check(self) -> None:
        """No message, and no request but the page itself."""
        assert self.complaints == []
        assert len(self.requests) == 1
        assert self.page.evaluate("window.hacked") is None
        self.context.close()


def written(folder: Path) -> str:
    file = folder.with_suffix(".html")
    file.write_text(render_page(load_report(folder)), encoding="utf-8")
    return file.as_uri()


def test_a_run_is_drawn_with_the_numbers_of_its_files(browser: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    tab = Tab(browser, viewport={"width": 1200, "height": 900})
    page = tab.open(written(folder))
    summary = json.loads((folder / "summary.json").read_text())
    row = summary["budgets"]["energy"]
    numbers = [float(one.get_attribute("value")) for one in page.locator("#headline data").all()]
    scores = summary["scores"]
    energy = [row["dense"] / BATCH, row["result"] / BATCH, row["result"] / row["dense"] - 1]
    expected = [*energy, scores["dense"], scores["finetuned"], row["result"] / row["limit"]]
    assert numbers == pytest.approx(expected, rel=1e-12)
    for one in page.locator("#headline data").all():  # the text equals the number
        shown = one.inner_text().replace("\N{MINUS SIGN}", "-").split()
        factor = {"%": 0.01, "µJ": 1e-6, "mJ": 1e-3}.get(shown[1], 1.0) if len(shown) > 1 else 1.0
        assert float(shown[0]) * factor == pytest.approx(float(one.get_attribute("value")), rel=6e-3, abs=6e-4)
    assert page.locator("figure svg").count() == page.locator("figure").count() == 9
    assert {row["group"]: row["kept"] for row in rows_of(page, "widths", "text")} == summary["widths"]
    data = page.evaluate("JSON.parse(document.getElementById('content').textContent).data")
    assert data == json.loads(json.dumps(to_builtins(load_report(folder))))
    tab.check()


def rows_of(page: Any, figure: str, mark: str = "symbol") -> list[dict[str, Any]]:
    """The data of the marks of a figure, after its filters."""
    marks = (
        "([name, mark]) => window.ecc.views[name].scenegraph().root.items[0].items"
        ".filter(m => m.marktype === mark).flatMap(m => m.items.map(i => i.datum))"
    )
    found: list[dict[str, Any]] = page.evaluate(marks, [figure, mark])
    return found


def points(page: Any, figure: str = "tradeoff") -> list[dict[str, Any]]:
    return [row for row in rows_of(page, figure) if figure != "tradeoff" or "std" in row]


def test_controls_filter_the_figures(browser: Any, tmp_path: Path) -> None:
    tab = Tab(browser, viewport={"width": 1200, "height": 900})
    page = tab.open(written(write_grid(tmp_path / "runs")))
    finetuned = {(row["method"], row["budget"]): row["score"] for row in points(page)}
    assert finetuned["ecc", "65%"] == pytest.approx(statistics.fmean(GRID_SCORES["ecc"]))
    assert len(finetuned) == 6
    page.get_by_role("radio", name="before finetuning").check()
    tab.wait('[data-chosen*=\'"score":"pruned"\']')
    pruned = {(row["method"], row["budget"]): row["score"] for row in points(page)}
    assert pruned["ecc", "65%"] == pytest.approx(statistics.fmean(GRID_SCORES["ecc"]) - 0.1)
    assert page.locator("tr[data-method=ecc] [data-score=finetuned]").first.is_hidden()
    assert page.locator("tr[data-method=ecc] [data-score=pruned]").first.is_visible()
    page.get_by_role("checkbox", name="uniform").focus()
    page.keyboard.press("Space")  # by keyboard
    tab.wait('[data-chosen*=\'"hidden":["uniform"]\']')
    assert {row["method"] for row in points(page)} == {"ecc", "netadapt"}
    assert page.locator("tr[data-method=uniform]").first.is_hidden()
    assert {row["budget"] for row in points(page, "widths")} == {"40%"}
    page.get_by_role("radio", name="65%").check()
    tab.wait('[data-chosen*=\'"budget":"65%"\']')
    assert {row["budget"] for row in points(page, "widths")} == {"65%"}
    assert {row["method"] for row in points(page, "widths")} == {"ecc", "netadapt"}
    tab.check()


@pytest.mark.parametrize("kind", ["run", "grid"])
def test_names_are_shown_and_not_executed(browser: Any, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "x"
    if kind == "run":
        write_run(folder, task=HOSTILE, device=HOSTILE, note=HOSTILE, method=HOSTILE)
    else:
        write_grid(folder, task=HOSTILE)
    tab = Tab(browser)
    page = tab.open(written(folder))
    assert "<script>window.hacked=1</script>" in page.locator("h1").inner_text()
    assert page.locator("main img, main script").count() == 0
    tab.check()


def test_light_dark_phone_and_print(browser: Any, tmp_path: Path) -> None:
    url = written(write_grid(tmp_path / "runs"))
    tab = Tab(browser, color_scheme="dark", viewport={"width": 390, "height": 844})
    page = tab.open(url)
    colour = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(colour)
    assert page.evaluate("document.documentElement.scrollWidth") == 390  # nothing overflows
    tick = "getComputedStyle(document.querySelector('.plot .role-axis-label text')).fill"
    label = page.evaluate(tick)
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate(colour) != dark
    assert page.evaluate(tick) != label  # figures change too
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate(colour) == dark
    page.emulate_media(media="print")
    assert page.evaluate(colour) != dark  # paper is light
    assert len(page.pdf()) > 10_000
    tab.check()


def test_layers_are_sorted_and_unfolded(browser: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_record(folder / "summary.json", make_summary(follows={"stem.1": "stem.0", "stem.2": "stem.0"}))
    tab = Tab(browser, viewport={"width": 390, "height": 844})
    page = tab.open(written(folder))
    assert page.locator("#costs .hint").is_visible()  # the table is wider than a phone
    dual = page.locator("#figure-dual")
    assert dual.is_hidden()
    page.get_by_text("Details: the dual variables").click()
    assert dual.is_visible()
    page.wait_for_timeout(300)
    assert dual.locator("svg").bounding_box()["width"] > 300  # drawn for the width that it has now
    page.get_by_text("Table of energies").click()
    part = page.locator("tr.part").first
    assert part.is_hidden()
    page.get_by_role("button", name="Parts of stem.0").click()
    assert part.is_visible()
    page.get_by_role("radio", name="energy before").check()
    shown = [float(row.get_attribute("data-dense")) for row in page.locator("tr.layer").all()]
    assert shown == sorted(shown, reverse=True)
    stem = page.locator("tr.layer:has-text('stem.0') + tr.part")
    assert "stem.0" in stem.inner_text()  # parts stay with their layer
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    tab.check()


def test_several_budgets_are_drawn(browser: Any, tmp_path: Path) -> None:
    tab = Tab(browser, viewport={"width": 390, "height": 844})
    page = tab.open(written(write_front(tmp_path / "front")))
    assert {row["budget"]: row["score"] for row in points(page)} == pytest.approx({"80%": 0.97, "50%": 0.93})
    assert page.locator("fieldset:has-text('Methods')").is_hidden()
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    tab.check()


def test_a_figure_can_be_saved(browser: Any, tmp_path: Path) -> None:
    tab = Tab(browser)
    page = tab.open(written(write_run(tmp_path / "run")))
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Save the figure Layer widths as SVG").click()
    svg = Path(waiting.value.path()).read_text(encoding="utf-8")
    assert svg.startswith("<svg")
    assert "var(--" not in svg
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Save the data as JSON").click()
    assert json.loads(Path(waiting.value.path()).read_text(encoding="utf-8"))["task"] == "digits"
    assert tab.complaints == []


def test_a_live_page_follows_its_run(browser: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False)
    with LiveServer(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            tab = Tab(browser)
            page = tab.open(server.url)
            page.get_by_text("live", exact=True).wait_for()
            assert "not finished" in page.locator("h1").inner_text()
            other = write_run(tmp_path / "other")
            for name in ("history.jsonl", "summary.json"):
                (folder / name).write_bytes((other / name).read_bytes())
            tab.wait("[data-drawn='2']")
            assert page.locator("h1").inner_text() == "digits at 49.5\N{NO-BREAK SPACE}% of its energy"
            assert page.locator("figure svg").count() == 9
            assert tab.complaints == []
            assert all(request.startswith(server.url) for request in tab.requests)
            tab.context.close()
        finally:
            server.shutdown()
            thread.join()
