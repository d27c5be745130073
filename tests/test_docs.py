"""The site builds without a warning, has every public name, and asks the network for nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

import click
import pytest

import ecc
from ecc.cli.app import VERBS

ROOT = Path(__file__).resolve().parent.parent
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert built.stderr == ""
    return folder


class Fetched(HTMLParser):
    """What a browser loads by itself when it opens a page."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name == FETCHED.get(tag)]


def fetched(page: Path) -> list[str]:
    parser = Fetched()
    parser.feed(page.read_text(encoding="utf-8"))
    return parser.addresses


@pytest.mark.slow
def test_the_site_has_all_pages(site: Path) -> None:
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"RESULTS", "DESIGN", "CONTRIBUTING", "CHANGELOG"}
    assert pages <= {path.stem for path in site.glob("*.html")}


@pytest.mark.slow
def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    addresses = [address for page in site.glob("*.html") for address in fetched(page)]
    assert addresses
    assert [address for address in addresses if re.match(r"\w+:|//", address) and "data:" not in address[:5]] == []
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", style.read_text(encoding="utf-8")), style


@pytest.mark.slow
def test_equations_are_drawn_by_the_browser(site: Path) -> None:
    text = (site / "how-it-works.html").read_text(encoding="utf-8")
    assert text.count('display="block"') == (ROOT / "docs/how-it-works.md").read_text(encoding="utf-8").count("```math")
    assert "$`" not in text
    assert not re.search(r"<m\w+>\\", text), "a command that latex2mathml does not know"


@pytest.mark.slow
def test_the_reference_has_every_public_name(site: Path) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in site.glob("api*.html"))
    headings = set(re.findall(r'class="doc doc-object-name doc-\w+-name">([\w.]+)<', text))
    assert {name for name in ecc.__all__ if name not in headings} == set()


@pytest.mark.slow
def test_the_reference_of_the_command_line_has_every_option(site: Path) -> None:
    text = (site / "cli.html").read_text(encoding="utf-8")
    assert "<!-- commands -->" not in text
    for name, verb in VERBS.items():
        assert f'id="ecc-{name}"' in text
        command = getattr(import_module(f"ecc.cli.{verb.module}"), name)
        options = [param.opts[-1] for param in command.params if isinstance(param, click.Option)]
        assert [option for option in options if option not in text] == []


@pytest.mark.slow
def test_pages_have_pictures(site: Path) -> None:
    for page in ("index", "gallery", "prunable"):
        assert "<img" in (site / f"{page}.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_equations_stand_beside_their_code(site: Path) -> None:
    text = (site / "how-it-works.html").read_text(encoding="utf-8")
    assert "<!-- code" not in text
    for name in ("proximal_keep", "step_widths", "update_width_dual", "update_energy_dual"):
        assert re.search(rf"<summary><code>{name}</code> in", text)
        assert re.search(rf'<span class="nf">{name}</span>', text)
