from __future__ import annotations

from pathlib import Path

import pytest

from ecc.methods import Uniform
from methods.jobs import WIDE, wide_job
from methods.works import work_of


@pytest.mark.parametrize("width_multiple", [1, 8])
@pytest.mark.parametrize("name", WIDE)
def test_all_groups_keep_about_the_same_share_and_no_larger_one_would_do(name: str, width_multiple: int) -> None:
    work, method = work_of(name, share=0.4, width_multiple=width_multiple), Uniform()
    method.start(work)
    assert not method.is_done
    method.step()
    assert method.is_done
    widths, full = work.widths(), [group.width for group in work.graph.groups]
    share = work.lines[-1]["share"]  # type: ignore[attr-defined]
    assert widths == work.round_widths([share * width for width in full])
    larger = work.round_widths([(share + 1e-6) * width + (1e-6 if share < 1 else 0) for width in full])
    assert larger == widths or work.constraint_violation(larger) > 0


def test_it_prunes_from_dense_from_the_dense_network_when_it_is_asked_again() -> None:
    work, method = work_of(share=0.6), Uniform()
    method.start(work)
    method.step()
    first = work.widths()
    work.targets = [0.5 * work.targets[0]]
    assert not method.is_done
    method.step()
    fresh = work_of(share=0.3)
    again = Uniform()
    again.start(fresh)
    again.step()
    assert work.widths() == fresh.widths() != first


def test_a_budget_is_met_on_the_scales_though_the_model_errs(tmp_path: Path) -> None:
    job = wide_job("50%", factor=0.8)
    job.method = Uniform()
    summary = job.run(tmp_path / "run").summary
    assert summary["met"]
    assert summary["method"] == "uniform"
    row, model = summary["budgets"]["energy"], job.energy_models["energy"]
    assert row["result"] <= row["limit"]
    assert model.at(summary["widths"]) < 0.9 * row["limit"]  # the model would have let it stop far above the budget
