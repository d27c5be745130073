from __future__ import annotations

import re
from pathlib import Path

from ecc.report.headline import headline_of_grid, headline_of_run
from ecc.report.page import page_facts
from report.folders import BATCH, energy_model, write_grid, write_run


def words(html: str) -> str:
    return re.sub(r"<[^>]+>", "|", html).replace("\N{NO-BREAK SPACE}", " ")


def test_three_numbers_of_a_run(tmp_path: Path) -> None:
    made = headline_of_run(page_facts(write_run(tmp_path / "run"))["cells"][0])
    numbers = [float(value) for value in re.findall(r'<data value="([^"]+)"', made)]
    dense = energy_model().dense
    assert numbers == [
        dense / BATCH,
        0.99 * (0.5 * dense) / BATCH,
        0.99 * (0.5 * dense) / dense - 1,
        0.98,
        0.95,
        1 - 0.99 * (0.5 * dense) / (0.5 * dense),
    ]
    text = words(made)
    assert "digits at 49.5 % of its energy" in text
    assert "estimated" in text
    assert "|met|, |1.0 % to spare|" in text
    assert "before fine-tuning 0.8500" in text


def test_a_missed_budget_is_said_as_loudly(tmp_path: Path) -> None:
    made = headline_of_run(page_facts(write_run(tmp_path / "run", met=False, note="too <tight>"))["cells"][0])
    assert "|not met|, |5.0 % over|" in words(made)
    assert 'data-mood="bad"' in made
    assert "too &lt;tight&gt;" in made


def test_a_run_at_work_and_one_without_scores(tmp_path: Path) -> None:
    text = words(headline_of_run(page_facts(write_run(tmp_path / "run", finished=False))["cells"][0]))
    assert "digits, not finished" in text
    assert "solve, step 40" in text
    assert "predicted" in text
    folder = write_run(tmp_path / "new", finished=False)
    (folder / "history.jsonl").write_text("")
    assert "starting" in words(headline_of_run(page_facts(folder)["cells"][0]))
    text = words(headline_of_run(page_facts(write_run(tmp_path / "blind", scores={}))["cells"][0]))
    assert "the task has no evaluation" in text


def test_a_grid_counts_its_runs(tmp_path: Path) -> None:
    root = write_grid(tmp_path / "runs")
    text = words(headline_of_grid(page_facts(root)))
    assert "digits: 3 methods at 2 budgets" in text
    assert "12 of 12" in text
    assert "|13||2 seeds||1 failed|" in text.replace("|||", "||")
