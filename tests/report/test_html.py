from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

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
