from __future__ import annotations

import base64
import copy
import hashlib
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from ecc.errors import EccError
from ecc.report.html import content_of, embedded, page_of, style
from ecc.report.page import page_facts
from report.folders import HOSTILE, write_run


def test_embedded_json_cannot_end_its_element() -> None:
    safe = embedded({HOSTILE: [HOSTILE]})
    assert not set("<>&\u2028\u2029") & set(safe)
    assert json.loads(safe) == {HOSTILE: [HOSTILE]}
    with pytest.raises(ValueError, match="JSON compliant"):
        embedded(float("nan"))


def test_the_style_has_every_colour_twice_and_no_address() -> None:
    text = style()
    assert text.count("--ecc:") == 3  # light, dark because the system is, dark because the reader says so
    assert "@media print" in text
    assert "url(" not in text
    assert "http" not in text


@pytest.mark.slow
def test_the_page_is_one_file_whose_programs_alone_may_run(tmp_path: Path) -> None:
    facts = page_facts(write_run(tmp_path / "run", task=HOSTILE))
    page = page_of(facts)
    assert "<script>window.hacked" not in page
    assert len(page) < 1_500_000
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)[0]
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    assert "unsafe-eval" not in policy
    programs = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    assert len(programs) == 2
    for program in programs:
        assert base64.b64encode(hashlib.sha256(program.encode()).digest()).decode() in policy
    assert not re.search(r'<(link|img|iframe)\b|src="|href="(?!#)', page.partition("<script>")[0])
    held = re.findall(r'<script type="application/json" id="content">(.*?)</script>', page, flags=re.DOTALL)
    assert json.loads(held[0])["facts"] == json.loads(json.dumps(facts))
    live = page_of(facts, live=True)
    assert "connect-src 'self'" in live
    assert '<html lang="en" data-live>' in live
    assert page_of(facts) == page  # equal folders give equal pages


def test_content_has_body_figures_and_facts(tmp_path: Path) -> None:
    facts = page_facts(write_run(tmp_path / "run"))
    content = content_of(facts)
    assert set(content) == {"body", "figures", "facts"}
    assert content["figures"]["widths"]["width"] == "container"


FILES = ("summary.json", "config.json", "environment.json", "energy.json", "history.jsonl")
WRONG = (None, "x", [], {}, 0, -1, 1e308, -1e308, True, float("nan"), "</script>", [1, 2], {"a": 1}, 1e-300)


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, item in items for place in [(value, key), *places(item)]]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_wrong_in_a_file_there_is_a_page_or_one_line(tmp_path: Path, seed: int) -> None:
    folder = write_run(tmp_path / "run", finished=seed % 4 != 0)
    dice = random.Random(seed)
    whole = {name: (folder / name).read_text() for name in FILES if (folder / name).exists()}
    pages, refused = 0, []
    for _ in range(30):
        name = dice.choice(list(whole))
        lines = [json.loads(line) for line in (whole[name].splitlines() if name.endswith("l") else [whole[name]])]
        container, key = dice.choice(places(lines))
        if dice.random() < 0.25 and isinstance(container, dict):
            del container[key]
        else:
            container[key] = copy.deepcopy(dice.choice(WRONG))
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        try:
            embedded(content_of(page_facts(folder)))
            pages += 1
        except EccError as error:
            refused.append(str(error))
        (folder / name).write_text(whole[name])
    assert pages
    assert refused
    assert not any("\n" in line for line in refused)
