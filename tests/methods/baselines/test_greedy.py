from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ecc.methods import Greedy
from ecc.methods.base import magnitudes
from methods.jobs import WIDE, wide_job
from methods.works import work_of


@pytest.mark.parametrize("width_multiple", [1, 8])
@pytest.mark.parametrize("name", WIDE)
def test_the_aims_are_met_and_floors_kept(name: str, width_multiple: int) -> None:
    work, method = work_of(name, share=0.4, width_multiple=width_multiple), Greedy()
    method.start(work)
    method.step()
    assert method.is_done
    assert all(width >= floor for width, floor in zip(work.widths(), work.min_widths(), strict=True))
    if width_multiple == 1:
        assert (
            work.constraint_violation(work.widths()) > -0.1
        )  # and not far below; a block of eight is much of a small network


def test_it_is_plain_removal_of_the_least_magnitude_per_joule() -> None:
    work, method = work_of("chain", share=0.5), Greedy()
    scores = {name: values.tolist() for name, values in magnitudes(work).items()}
    method.start(work)
    method.step()
    widths = dict(work.graph.full_widths)
    floors = dict(zip(work.graph.full_widths, work.min_widths(), strict=True))
    left = {name: sorted(values) for name, values in scores.items()}
    cost = work.costs[0]
    while work.constraint_violation(list(widths.values())) > 0:
        vector = torch.tensor(list(widths.values()), dtype=torch.float64)
        slope = dict(zip(widths, cost.gradient(vector).tolist(), strict=True))
        least = min((n for n in left if widths[n] > floors[n]), key=lambda name: left[name][0] / slope[name])
        left[least].pop(0)
        widths[least] -= 1
    found = dict(zip(work.graph.full_widths, work.widths(), strict=True))
    for name, width in widths.items():  # the slope is renewed 50 times on the way, not at every channel
        assert abs(found[name] - width) <= 2


def test_a_budget_is_met_on_the_scales_though_the_model_errs(tmp_path: Path) -> None:
    job = wide_job("50%", factor=1.25)
    job.method = Greedy()
    summary = job.run(tmp_path / "run").summary
    assert summary["met"]
    assert (summary["method"], summary["batches"]["total"]) == (
        "greedy",
        28,
    )  # all that were given: 24 to solve, 4 to tune
