"""The verdicts on ECC beside its baselines, on made-up records: what is held, what is missed, and what cannot be said."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORD = {
    "environment": {"cpu": "made up", "date": "2026-01-01", "command": "benchmarks/evidence.py"},
    "device": "a card",
    "measured_batch": 4,
    "fit": {"mean": 0.01},
    "full_widths": {"a": 16, "b": 32},
    "recalibration_batches": 2,
    "held_out_images": 512,
    "width_multiple": 8,
    "settings": {"min_width_ratio": 0.1},
}


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.fixture
def facts(benchmarks: None) -> ModuleType:
    return importlib.import_module("evidence_data")


@pytest.fixture
def page(benchmarks: None) -> ModuleType:
    return importlib.import_module("evidence_page")


def row(
    method: str, budget: str, after: float, *, seed: int = 0, before: float = 0.5, of_budget: float | None = 0.99
) -> dict[str, Any]:
    """A cell as evidence.py writes it; dense scores 0.9 and takes 2 J."""
    found: dict[str, Any] = {"method": method, "budget": budget, "seed": seed, "widths": {"a": 8, "b": 24}}
    found["scores"] = {"dense": 0.9, "pruned": before, "finetuned": after}
    found["predicted"] = {"limit": 1.0, "result": 0.98}
    if of_budget is not None:
        joules = 2.0 * float(budget.rstrip("%")) / 100 * of_budget
        found["measured"] = {"joules": joules, "dense_joules": 2.0, "label": "measured"}
    return found


def gap(method: str, budget: str, reason: str, seed: int = 0) -> dict[str, Any]:
    return {"method": method, "budget": budget, "seed": seed, "missing": reason}


def recorded(folder: Path, name: str, rows: Sequence[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({**RECORD, "rows": list(rows)}), encoding="utf-8")


def verdict(facts: ModuleType, folder: Path, goal: str, where: str = "E1") -> Any:
    found = facts.verdicts(facts.experiments(folder))
    (one,) = [one for one in found if goal in one.goal and one.where.startswith(where)]
    return one


# ---------------------------------------------------------------- one variant of ECC beside another


def formed(variant: str, *args: Any, **named: Any) -> dict[str, Any]:
    return {**row(*args, **named), "variant": variant}


def test_a_form_is_compared_seed_by_seed_where_joules_are_alike(facts: ModuleType, tmp_path: Path) -> None:
    rows = [row("ecc", "50%", 0.85), row("ecc", "50%", 0.80, seed=1), row("ecc", "35%", 0.7)]
    rows += [formed("steady", "ecc", "50%", 0.84), formed("steady", "ecc", "50%", 0.70, seed=1, of_budget=1.2)]
    recorded(tmp_path, "e1", [*rows, formed("steady", "ecc", "35%", 0.72, of_budget=None)])
    (found,) = facts.experiments(tmp_path)
    points = facts.gains(found, "ecc (steady)")
    assert points == {"50%": [pytest.approx(1.0)], "35%": [pytest.approx(-2.0)]}


@pytest.mark.parametrize(("other", "said"), [(0.84, "it helps everywhere"), (0.86, "it is not the default")])
def test_the_page_says_whether_the_fall_of_the_rate_helps(
    page: ModuleType, tmp_path: Path, other: float, said: str
) -> None:
    recorded(tmp_path, "e1", [row("ecc", "50%", 0.85), formed("steady", "ecc", "50%", 0.84)])
    recorded(tmp_path, "e2", [row("ecc", "50%", 0.85), formed("steady", "ecc", "50%", other)])
    text = page.section(tmp_path)
    assert said in text
    assert "- E1: MobileNet v1 on Imagenette: +1.00 (1 pair; 50% +1.00)" in text


@pytest.mark.parametrize(
    ("others", "said"),
    [((0.86, 0.87), "it helps everywhere"), ((0.86, 0.84), "it is not the default"), ((0.86,), "not run everywhere")],
)
def test_the_page_says_whether_cutting_more_evenly_helps(
    page: ModuleType, tmp_path: Path, others: tuple[float, ...], said: str
) -> None:
    for name, other in zip(("e1", "e2"), (*others, None), strict=False):
        rows = [] if other is None else [formed("even", "ecc", "50%", other)]
        recorded(tmp_path, name, [row("ecc", "50%", 0.85), *rows])
    text = page.section(tmp_path)
    assert said in text
    assert "- E1: MobileNet v1 on Imagenette: +1.00 (1 pair; 50% +1.00)" in text


def test_the_page_says_whether_meeting_mild_budgets_early_helps(page: ModuleType, tmp_path: Path) -> None:
    recorded(tmp_path, "e1", [row("ecc", "80%", 0.85), formed("soon", "ecc", "80%", 0.86)])
    text = page.section(tmp_path)
    assert "it helps everywhere" in text
    assert "- E1: MobileNet v1 on Imagenette: +1.00 (1 pair; 80% +1.00)" in text


def test_the_page_names_widths_at_which_the_energy_model_fails(page: ModuleType, tmp_path: Path) -> None:
    recorded(tmp_path, "e4", [row("ecc", "50%", 0.85)])
    assert "channels in conv1" not in page.section(tmp_path)
    shutil.copy(ROOT / "results" / "evidence" / "e4.profile.gz", tmp_path)
    assert "with 12 channels in conv1 (" in page.section(tmp_path)


def test_the_page_tells_where_netadapt_has_little_to_choose_from(page: ModuleType) -> None:
    described = dict(zip(("", "E1", "E2", "E3", "E4"), page.section().split("\n### "), strict=True))
    assert [name for name, text in described.items() if "a first round of NetAdapt asks for" in text] == ["E2", "E4"]
    assert "1 of 28 groups can alone save the 4% that a first round of NetAdapt asks for" in described["E4"]


def test_the_page_names_networks_that_scattered_on_the_scales(page: ModuleType, tmp_path: Path) -> None:
    steady, unsteady = row("ecc", "50%", 0.85), row("amc", "50%", 0.85, seed=1)
    steady["measured"]["relative_ci"], unsteady["measured"]["relative_ci"] = 0.01, 0.2
    recorded(tmp_path, "e1", [steady, unsteady])
    assert "On the scales these scattered by over 5%: amc at 50% of seed 1." in page.section(tmp_path)


def test_without_such_a_form_the_page_says_nothing_of_it(page: ModuleType, tmp_path: Path) -> None:
    recorded(tmp_path, "e1", [row("ecc", "50%", 0.85)])
    assert "falling" not in page.section(tmp_path)


# ---------------------------------------------------------------- at or above every baseline


def test_held_where_ecc_leads_at_every_budget(facts: ModuleType, tmp_path: Path) -> None:
    rows = [row("ecc", "50%", 0.85), row("amc", "50%", 0.84), row("ecc", "35%", 0.8), row("amc", "35%", 0.8)]
    recorded(tmp_path, "e1", rows)
    one = verdict(facts, tmp_path, "at or above")
    assert one.verdict == "held"
    assert one.numbers == "least at 35%: +0.00 (ECC 80.00 %, amc 80.00 %, 1 seed)"


def test_missed_where_one_rival_leads_at_one_budget(facts: ModuleType, tmp_path: Path) -> None:
    rows = [row("ecc", "50%", 0.85), row("amc", "50%", 0.84), row("ecc", "35%", 0.8)]
    recorded(tmp_path, "e1", [*rows, row("amc", "35%", 0.7), row("lcp", "50%", 0.1), row("lcp", "35%", 0.812)])
    one = verdict(facts, tmp_path, "at or above")
    assert one.verdict == "missed"
    assert one.numbers == "35%: -1.20 (ECC 80.00 %, lcp 81.20 %, 1 seed)"


def test_open_where_a_rival_has_no_score(facts: ModuleType, tmp_path: Path) -> None:
    recorded(tmp_path, "e1", [row("ecc", "50%", 0.85), row("amc", "50%", 0.84), gap("lcp", "50%", "not finished")])
    one = verdict(facts, tmp_path, "at or above")
    assert one.verdict == "open"
    assert one.numbers.endswith("without lcp)")


def test_a_lead_that_is_lost_is_missed_even_where_cells_are_missing(facts: ModuleType, tmp_path: Path) -> None:
    recorded(tmp_path, "e1", [row("ecc", "50%", 0.83), row("amc", "50%", 0.84), gap("lcp", "50%", "not finished")])
    assert verdict(facts, tmp_path, "at or above").verdict == "missed"


def test_open_where_ecc_has_no_score(facts: ModuleType, tmp_path: Path) -> None:
    recorded(tmp_path, "e1", [gap("ecc", "50%", "too little"), row("amc", "50%", 0.84)])
    one = verdict(facts, tmp_path, "at or above")
    assert (one.verdict, one.numbers) == ("open", "50%: no score of ecc")


def test_only_seeds_that_both_have_are_compared(facts: ModuleType, tmp_path: Path) -> None:
    """The second seed is easier for all: a baseline that lacks the first would lead by luck."""
    ours = [row("ecc", "50%", 0.80), row("ecc", "50%", 0.90, seed=1)]
    recorded(tmp_path, "e1", [*ours, gap("amc", "50%", "not finished"), row("amc", "50%", 0.88, seed=1)])
    one = verdict(facts, tmp_path, "at or above")
    assert one.verdict == "held"
    assert "+2.00 (ECC 90.00 %, amc 88.00 %, 1 seed)" in one.numbers


def test_another_form_of_ecc_is_no_rival(facts: ModuleType, tmp_path: Path) -> None:
    ours, theirs, paper = row("ecc", "50%", 0.85), row("amc", "50%", 0.84), row("ecc", "50%", 0.86)
    recorded(tmp_path, "e1", [ours, theirs, {**paper, "variant": "paper"}])
    (found,) = facts.experiments(tmp_path)
    assert found.methods == ["ecc", "amc", "ecc (paper)"]
    assert found.baselines == ["amc"]
    assert verdict(facts, tmp_path, "at or above").verdict == "held"


# ---------------------------------------------------------------- margins


@pytest.mark.parametrize(("ours", "word"), [(0.810, "held"), (0.8099, "missed")])
def test_a_point_ahead_at_35(facts: ModuleType, tmp_path: Path, ours: float, word: str) -> None:
    for name in ("e1", "e2", "e3"):
        recorded(tmp_path, name, [row("ecc", "35%", ours), row("amc", "35%", 0.8)])
    assert [verdict(facts, tmp_path, "1 point ahead", where).verdict for where in ("E1", "E2")] == [word, word]
    assert sum("1 point ahead" in one.goal for one in facts.verdicts(facts.experiments(tmp_path))) == 2


@pytest.mark.parametrize(("ours", "word"), [(0.65, "held"), (0.64, "missed")])
def test_five_points_ahead_before_tuning(facts: ModuleType, tmp_path: Path, ours: float, word: str) -> None:
    recorded(tmp_path, "e3", [row("ecc", "50%", 0.7, before=ours), row("amc", "50%", 0.9, before=0.6)])
    assert verdict(facts, tmp_path, "5 points ahead", "E3").verdict == word


@pytest.mark.parametrize(("after", "word"), [(0.897, "held"), (0.896, "missed")])
def test_near_dense(facts: ModuleType, tmp_path: Path, after: float, word: str) -> None:
    recorded(tmp_path, "e4", [row("ecc", "50%", after), row("amc", "50%", 0.5)])
    assert verdict(facts, tmp_path, "of dense", "E4").verdict == word


def test_a_goal_about_a_budget_that_was_not_run_is_open(facts: ModuleType, tmp_path: Path) -> None:
    recorded(tmp_path, "e4", [row("ecc", "65%", 0.89), row("amc", "65%", 0.5)])
    assert verdict(facts, tmp_path, "of dense", "E4").verdict == "open"
    assert verdict(facts, tmp_path, "5 points ahead", "E4").verdict == "open"


# ---------------------------------------------------------------- pages


def test_without_records_there_is_no_page(page: ModuleType, tmp_path: Path) -> None:
    assert page.section(tmp_path) == ""
    assert page.long_page(tmp_path / "not there") == ""


def test_tables_tell_means_seeds_and_gaps(page: ModuleType, tmp_path: Path) -> None:
    ours = [row("ecc", "50%", 0.80), row("ecc", "50%", 0.82, seed=1), row("ecc", "35%", 0.7)]
    theirs = [row("amc", "50%", 0.79), gap("amc", "50%", "ran out of time", 1), gap("amc", "35%", "cannot be met")]
    recorded(tmp_path, "e2", [*ours, gap("ecc", "35%", "not finished", 1), *theirs])
    text = page.section(tmp_path)
    assert "| ecc | **81.00 ± 1.41** | **70.00 (1 of 2)** |" in text
    assert "| amc | 79.00 (1 of 2) | missing |" in text
    assert "| ecc | 81.0, 0.99 J | 70.0, 0.693 J |" in text  # the paper's Table 2
    assert "Missing, 3 of 7 cells:" in text
    assert "- amc at 50% of seed 1: ran out of time." in text
    assert "results/evidence/e2.json" in text


def test_a_goal_is_held_so_far_where_cells_are_missing(page: ModuleType, tmp_path: Path) -> None:
    recorded(tmp_path, "e1", [row("ecc", "50%", 0.80), row("amc", "50%", 0.79), gap("amc", "50%", "not finished", 1)])
    assert "**held so far**" in page.section(tmp_path)
    recorded(tmp_path, "e1", [row("ecc", "50%", 0.80), row("amc", "50%", 0.79)])
    assert "so far" not in page.section(tmp_path)


def test_the_page_begins_with_who_is_ahead_where(page: ModuleType, tmp_path: Path) -> None:
    rows = [row("ecc", "80%", 0.80), row("amc", "80%", 0.79), row("ecc", "50%", 0.70), row("amc", "50%", 0.75)]
    recorded(tmp_path, "e1", [*rows, row("uniform", "50%", 0.60)])
    recorded(tmp_path, "e2", [row("ecc", "80%", 0.80), row("eap", "80%", 0.80), gap("ecc", "50%", "cannot be met")])
    text = page.section(tmp_path)
    assert "| 80% | ahead, +1.00 (+1.00) | ahead, +0.00 (+0.00) |" in text
    assert "| 50% | behind, -5.00 (-5.00) | no score |" in text


def test_who_is_ahead_is_left_open_where_seeds_disagree(page: ModuleType, tmp_path: Path) -> None:
    rows = [row(name, "50%", 0.80 + shift, seed=seed) for name, seed, shift in (("ecc", 0, 0.02), ("ecc", 1, 0.0))]
    recorded(tmp_path, "e1", [*rows, row("amc", "50%", 0.80), row("amc", "50%", 0.81, seed=1)])
    assert "| 50% | level, +0.50 (+0.50) |" in page.section(tmp_path)


def test_at_equal_joules_rivals_have_what_their_curves_have(facts: ModuleType, tmp_path: Path) -> None:
    ours = row("ecc", "50%", 0.80, of_budget=1.1)  # 55 % of the dense joules
    theirs = [row("amc", "50%", 0.70, of_budget=1.0), row("amc", "80%", 0.88, of_budget=1.0)]
    recorded(tmp_path, "e1", [ours, *theirs, row("uniform", "80%", 0.60)])
    (found,) = facts.experiments(tmp_path)
    assert facts.at_equal_joules(found, "50%") == pytest.approx(100 * (0.80 - (0.70 + 0.18 * 5 / 30)))
    assert facts.at_equal_joules(found, "80%") is None
    low = row("ecc", "35%", 0.6, of_budget=1.0)
    recorded(tmp_path, "e1", [low, *theirs])
    (found,) = facts.experiments(tmp_path)
    assert facts.at_equal_joules(found, "35%") == pytest.approx(-10.0)  # baselines have no network as small


def test_methods_that_miss_the_same_cells_for_one_reason_are_told_together(page: ModuleType, tmp_path: Path) -> None:
    rows = [gap(name, "35%", "cannot be met.", seed) for name in ("ecc", "amc") for seed in (0, 1)]
    recorded(tmp_path, "e1", [row("ecc", "50%", 0.80), row("amc", "50%", 0.79), *rows])
    text = page.section(tmp_path)
    assert "- ecc, amc at 35% of seed 0, 1: cannot be met.\n" in text
    assert "so far" not in text  # nothing more will come


def test_one_seed_has_no_spread(page: ModuleType, tmp_path: Path) -> None:
    recorded(tmp_path, "e1", [row("ecc", "50%", 0.80), row("amc", "50%", 0.79)])
    assert "| ecc | **80.00** |" in page.section(tmp_path)


def test_joules_are_counted_within_the_band(page: ModuleType, tmp_path: Path) -> None:
    shares = {"amc": 0.96, "lcp": 0.97, "uniform": 1.0, "eap": 1.02}
    rows = [row(name, "50%", 0.8, of_budget=share) for name, share in shares.items()]
    recorded(tmp_path, "e1", [*rows, row("ecc", "50%", 0.8, of_budget=None)])
    text = page.section(tmp_path)
    assert (
        "2 of 4 networks are within 97% and 100% of their budget; the farthest is at 102.0%. Not measured: 1." in text
    )
    assert "| eap | 1 | 0 | 1 | 102.0% | 102.0% |" in text
    assert "| ecc | 0 | 0 | 0 |  |  |" in text


def test_the_long_page_has_every_finished_cell(page: ModuleType, tmp_path: Path) -> None:
    recorded(tmp_path, "e1", [row("ecc", "50%", 0.80), gap("amc", "50%", "not finished")])
    text = page.long_page(tmp_path)
    assert "| ecc | 50% | 0 | 90.00 | 50.00 | 80.00 | 98.0% | 0.99 | 49.5% | 99.0% |" in text
    assert "| amc |" not in text
    assert "- amc at 50% of seed 0: not finished." in text


@pytest.mark.parametrize("known", [True, False])
def test_figures_are_drawn_of_what_there_is(facts: ModuleType, tmp_path: Path, known: bool) -> None:
    pytest.importorskip("matplotlib")
    figures = importlib.import_module("evidence_figures")
    rows = [row("ecc", "65%", 0.8), row("ecc", "65%", 0.82, seed=1), row("scratch", "65%", 0.1)]
    rows += [gap("amc", "65%", "not finished"), row("lcp", "65%", 0.7, of_budget=None)]
    recorded(tmp_path, "e1", [*rows, formed("paper", "ecc", "65%", 0.6), formed("even", "ecc", "65%", 0.7)])
    (found,) = facts.experiments(tmp_path)
    assert figures.middle(found) == "65%"
    assert figures.drawn(found) == ["ecc", "scratch", "amc", "lcp", "ecc (paper)"]
    full = RECORD["full_widths"] if known else {}
    assert figures.kept(found, "ecc", "65%", full) == ([50, 75] if known else [8, 24])
    assert figures._point(found, "ecc", "65%", "finetuned") == pytest.approx((64.35, 81, 1, 1))
    assert figures._point(found, "lcp", "65%", "finetuned") is None  # never measured
    assert [path.stat().st_size > 0 for path in figures.draw(found, tmp_path / "new")] == [True, True]


def test_what_spends_too_much_is_marked_and_never_the_best(page: ModuleType, facts: ModuleType, tmp_path: Path) -> None:
    unmeasured = {**row("lcp", "50%", 0.88, of_budget=None), "predicted": {"limit": 1.0, "result": 1.2}}
    recorded(tmp_path, "e1", [row("ecc", "50%", 0.85), row("amc", "50%", 0.87, of_budget=1.05), unmeasured])
    (found,) = facts.experiments(tmp_path)
    text = page.scores_table(found, facts.AFTER)
    assert "| ecc | **85.00** |" in text
    assert "| amc | 87.00 † |" in text
    assert "| lcp | 88.00 † |" in text
    recorded(tmp_path, "e1", [row("amc", "50%", 0.87, of_budget=1.05), {**row("ecc", "50%", 0.9), "variant": "long"}])
    (found,) = facts.experiments(tmp_path)
    assert "**" not in page.scores_table(found, facts.AFTER), "neither what spends too much nor a variant of ECC"
    recorded(tmp_path, "e1", [row("ecc", "50%", 0.85), row("amc", "50%", 0.87, of_budget=1.05), unmeasured])
    (found,) = facts.experiments(tmp_path)
    assert "† spends over 103% of its budget" in page.one_experiment(found)


def test_forms_say_what_they_are_and_have_no_cell_where_none_was_asked_for(
    page: ModuleType, facts: ModuleType, tmp_path: Path
) -> None:
    rows = [row("ecc", "50%", 0.85), row("ecc", "65%", 0.9), {**row("ecc", "50%", 0.8), "variant": "paper"}]
    recorded(tmp_path, "e1", rows)
    (found,) = facts.experiments(tmp_path)
    found.record["variants"] = {"paper": {"solver": "admm", "penalty": 5.0}}
    assert "| ecc (paper) |  | 80.00 |" in page.scores_table(found, facts.AFTER)
    assert "*ecc (paper)* has dynamics = paper, penalty = 5.0." in page.one_experiment(found)


def test_the_size_of_the_test_set_is_told_where_scores_are_shares_of_it(page: ModuleType, tmp_path: Path) -> None:
    described = (
        "There are 3,600 test images: on other ones as many, a score like the dense network's would differ by 0.50"
    )
    for name in ("e1", "e2"):
        recorded(tmp_path / name, name, [row("ecc", "50%", 0.85)])
        assert described not in page.section(tmp_path / name)
        file = tmp_path / name / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"test_images": 3600}), encoding="utf-8")
        assert (described in page.section(tmp_path / name)) == (name == "e1")  # a mean IoU is no share


def test_cells_of_several_days_are_told(page: ModuleType, tmp_path: Path) -> None:
    rows = [{**row("ecc", "50%", 0.85), "date": "2026-01-01"}, {**row("amc", "50%", 0.84), "date": "2026-01-02"}]
    recorded(tmp_path, "e1", rows)
    assert "Cells of this grid are of 2026-01-01, 2026-01-02." in page.section(tmp_path)
    recorded(tmp_path, "e1", [rows[0], {**rows[1], "date": "2026-01-01"}])
    assert "Cells of this grid are of" not in page.section(tmp_path)
