"""The HTML page: self-contained, safe, and made from whatever the files hold."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from ecc.errors import BadFile
from ecc.records import to_builtins, write_record
from ecc.report.load import load_report
from ecc.report.page import embedded, page_content, render_page
from ecc.run_records import DenseAndResult
from report.folders import HOSTILE, full_widths, make_summary, write_front, write_grid, write_run


def text_of(folder: Path) -> str:
    """The words of the body."""
    body = page_content(load_report(folder))["body"]
    plain = re.sub(r"<[^>]+>", " ", body).replace("\N{NO-BREAK SPACE}", " ").replace("\N{MINUS SIGN}", "-")
    return " ".join(plain.replace("\N{EN DASH}", "--").split())


def test_embedded_json_cannot_close_its_element() -> None:
    safe = embedded({HOSTILE: [HOSTILE]})
    assert not set("<>&\u2028\u2029") & set(safe)
    assert json.loads(safe) == {HOSTILE: [HOSTILE]}


@pytest.mark.slow
def test_the_page_is_one_file_whose_scripts_alone_may_run(tmp_path: Path) -> None:
    report = load_report(write_run(tmp_path / "run", task=HOSTILE))
    page = render_page(report)
    assert "<script>window.hacked" not in page
    assert len(page) < 1_500_000
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)[0]
    assert "default-src 'none'" in policy
    assert not re.search("connect-src|unsafe-eval|script-src[^;]*unsafe", policy)
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert re.findall(r"'sha256-([^']+)'", policy) == hashes
    assert not re.search(r'<(link|img|iframe)\b|src="|href="(?!#)', page.partition("<script>")[0])
    (data,) = re.findall(r'<script type="application/json" id="content">(.*?)</script>', page, flags=re.DOTALL)
    assert json.loads(data)["data"] == json.loads(json.dumps(to_builtins(report)))
    live = render_page(report, live=True)
    assert "connect-src 'self'" in live
    assert '<html lang="en" data-live>' in live
    assert render_page(report) == page  # the same folder gives the same page


def test_a_finished_run_in_words(tmp_path: Path) -> None:
    words = text_of(write_run(tmp_path / "run", relative_ci=0.004, note="see <b>"))
    for part in (
        "digits at 49.5 % of its energy",
        "ECC · NVIDIA Jetson TX2 · batch 256",
        "95 % CI ±0.40 %",
        "0.9800 → 0.9500",
        "before finetuning 0.8500",
        "met , 99.0 % used",
        "Note: see &lt;b&gt;",
        "energy estimated 19.0 mJ 9.40 mJ -50.5 % 9.49 mJ 99.0 % met",
        "MACs counted 200 M 50.0 M -75.0 %",
        "Verified: the outputs of the masked and the slim network differ by at most 2e-09",
        "model mean p90 max bias dense",
        "physical (selected)",
        "15 estimated 9.49 mJ 10.4 mJ +10.00 % --",
        "items per second estimated 64.0 k 85.3 k +33.3 %",
        "ecc compress digits --budget 50% -o run",
        "finetune_steps 10",
    ):
        assert part in words


def test_other_runs_in_words(tmp_path: Path) -> None:
    words = text_of(write_run(tmp_path / "over", met=False, scores={}))
    assert "not met , 105.0 % used" in words
    assert "the task has no evaluation" in words
    words = text_of(write_run(tmp_path / "running", finished=False))
    assert "digits, not finished" in words
    assert "prune, step 40" in words
    words = text_of(write_run(tmp_path / "baseline", method="amc", model=False))
    assert "this run has no energy model" in words
    assert "this method does not record it" in words
    unstructured = write_run(tmp_path / "unstructured", model=False, unstructured=True)
    assert "The estimate assumes: the hardware skips zeros." in text_of(unstructured)
    write_record(unstructured / "summary.json", make_summary(budgets={}, measured={}, macs=None, parameters=None))
    assert "digits" in text_of(unstructured)  # a run without any cost still has a page


def test_a_grid_in_words(tmp_path: Path) -> None:
    words = text_of(write_grid(tmp_path / "runs"))
    for part in (
        "digits: 3 methods at 2 budgets",
        "Budget met 12 of 12",
        "Runs 13 2 seeds 1 failed",
        "● ecc 0.9600 ±0.0141 0.8600 ±0.0141",
        "amc 65% 1 no &lt;luck&gt;",
    ):
        assert part in words
    body = page_content(load_report(tmp_path / "runs"))["body"]
    assert body.count("<b>") == 4  # the best score of two budgets, before and after finetuning


def test_several_budgets_in_words(tmp_path: Path) -> None:
    words = text_of(write_front(tmp_path / "front"))
    for part in (
        "digits at 2 budgets",
        "Next: export",
        "dense network -- -- 19.0 mJ 100.0 % -- 0.9800 200 M",
        "energy 80% of dense estimated 15.2 mJ 15.0 mJ 79.2 % 99.0 % 0.9700 160 M -- 70 met",
    ):
        assert part in words
    rows = json.loads((tmp_path / "front" / "front.json").read_text())
    rows["rows"][0]["folder"] = "../other"
    (tmp_path / "front" / "front.json").write_text(json.dumps(rows))
    with pytest.raises(BadFile, match="not the name of a folder"):
        load_report(tmp_path / "front")


def test_counted_costs_have_a_name_and_no_device(tmp_path: Path) -> None:
    folder = write_front(tmp_path / "front")
    for path in folder.glob("*/*"):
        if path.name == "summary.json":
            facts = json.loads(path.read_text())
            macs = {"budget": "macs 50%", "unit": "", "label": "counted", "dense": 2e8, "result": 1e8, "limit": 1e8}
            facts.update(budgets={"macs": {**facts["budgets"]["energy"], **macs}}, measured={}, device="")
            path.write_text(json.dumps(facts))
        if path.name == "energy.json":
            path.unlink()
    words = text_of(folder)
    assert "Dense network 200 M MACs counted" in words
    assert "device none, the costs are counted" in words


def test_a_score_that_rises_is_explained(tmp_path: Path) -> None:
    assert "also train the network, for 50 batches" in text_of(write_run(tmp_path / "higher", score=0.99))
    assert "also train the network" not in text_of(write_run(tmp_path / "lower", score=0.97))
    perplexity = write_run(tmp_path / "text")
    scores = {"dense": -2.0, "finetuned": -2.5}
    write_record(perplexity / "summary.json", make_summary(scores=scores, metric="perplexity"))
    assert "Test perplexity 7.39 → 12.2" in text_of(perplexity)


def test_layers_heads_branches_and_size(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    summary = make_summary(
        widths={**{name: width // 2 for name, width in full_widths().items()}, "residual.conv1": 0},
        weight_bytes=DenseAndResult(dense=160e3, result=24e3),
        unit_channels={"stem.0": 8},
        branches={"residual": True, "strided": False},
        follows={"stem.1": "stem.0", "stem.2": "stem.0", "gone": "nowhere"},
    )
    write_record(folder / "summary.json", summary)
    words = text_of(folder)
    assert "Removed residual branches: residual. 1 other branches" in words
    assert "model size counted 160 kB 24.0 kB -85.0 %" in words
    assert "residual.conv1 16 removed 0.0 % 1" in words
    assert "stem.0 16 8 50.0 % 8" in words
    run = load_report(folder).runs[0]
    stem = next(row for row in run.layers if row.layer == "stem.0")
    assert [part.layer for part in stem.parts] == ["stem.0", "stem.1", "stem.2"]
    assert stem.dense == pytest.approx(sum(part.dense for part in stem.parts))
    assert "stem.1" not in {row.layer for row in run.layers}
