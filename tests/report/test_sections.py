from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ecc.report.figures import figures_of
from ecc.report.page import page_facts
from ecc.report.sections import body_of, swatch
from report.folders import HOSTILE, write_grid, write_run


def body(folder: Path) -> str:
    facts = page_facts(folder)
    return str(body_of(facts, figures_of(facts)))


class Tags(HTMLParser):
    """What a browser would make of it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.open: list[str] = []
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, Any]]) -> None:
        self.names.append(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag != "input":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("kind", ["run", "grid", "running", "old", "rival"])
def test_every_page_is_whole_html(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x"
    if kind == "grid":
        write_grid(path, task=HOSTILE)
    else:
        options = {
            "running": {"finished": False},
            "old": {"model": False, "command": False},
            "rival": {"method": HOSTILE},
        }
        write_run(path, task=HOSTILE, device=HOSTILE, note=HOSTILE, **options.get(kind, {}))
    parser = Tags()
    parser.feed(body(path))
    assert parser.open == []
    assert not {"script", "img"} & set(parser.names)
    assert not any(name.startswith("on") for name in parser.attributes)
    assert parser.names.count("h1") == 1
    assert {"section", "h2", "h3", "table", "caption"} <= set(parser.names)


def test_an_old_folder_says_what_is_missing(tmp_path: Path) -> None:
    text = body(write_run(tmp_path / "run", model=False, command=False))
    assert text.count("Not shown: ") == 3
    assert "did not keep the energy model" in text
    assert "did not write its command down" in text


def test_controls_for_grids_alone(tmp_path: Path) -> None:
    text = body(write_grid(tmp_path / "runs"))
    assert re.findall(r'type="checkbox" name="method" value="(\w+)" checked', text) == ["ecc", "netadapt", "uniform"]
    assert re.findall(r'name="budget" value="([^"]+)"', text) == ["65%", "40%"]
    assert '<tr data-method="uniform">' in text
    assert "no &lt;luck&gt;" in text
    assert "<form" not in body(write_run(tmp_path / "run"))


def test_the_best_of_each_budget_stands_out(tmp_path: Path) -> None:
    text = body(write_grid(tmp_path / "runs"))
    best = re.findall(r'<b><data value="([^"]+)"', text)
    assert [float(value) for value in best] == pytest.approx([0.96, 0.86, 0.86, 0.76])


def test_links_lead_somewhere(tmp_path: Path) -> None:
    text = body(write_run(tmp_path / "run"))
    for name in re.findall(r'href="#([^"]+)"', text):
        assert f'id="{name}"' in text
    assert "ecc compress digits --budget 50% -o run" in text


def test_marks_of_known_and_unknown_methods() -> None:
    assert "m-ecc" in swatch("ecc")
    assert "m-other" in swatch(HOSTILE)
