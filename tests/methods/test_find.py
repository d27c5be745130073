from __future__ import annotations

from pathlib import Path

import pytest

from ecc.errors import EccError
from ecc.methods.registry import METHODS, find_method
from methods.jobs import WIDE, wide_job, wide_task
from methods.small import SMALL


def test_each_name_gives_a_method_of_that_name() -> None:
    for name in METHODS:
        method = find_method(name)
        assert (method is None) if name == "ecc" else (method is not None and method.name == name)


def test_quick_methods_search_less() -> None:
    for name in METHODS:
        method, quick = find_method(name), find_method(name, quick=True)
        assert type(method) is type(quick)
        if name in ("amc", "lcp"):
            assert method is not None
            assert quick is not None
            assert method.config() != quick.config()  # so a run of one is not taken for the other


def test_an_unknown_method_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(EccError, match=r"there is no method 'magic'; there are ecc, .*uniform"):
        find_method("magic")


def test_no_method_is_left_out_of_the_matrix() -> None:
    assert set(SMALL) == set(METHODS)


@pytest.mark.parametrize("share", [pytest.param("65%", marks=pytest.mark.thorough), "35%"])
@pytest.mark.parametrize("network", WIDE)
@pytest.mark.parametrize("name", SMALL)
def test_every_method_meets_its_budget_with_the_batches_it_was_given(
    name: str, network: str, share: str, tmp_path: Path
) -> None:
    task = wide_task(
        network, evaluate_held_out=lambda net: -float(sum(p.detach().square().sum() for p in net.parameters()))
    )
    job = wide_job(share, name=network, factor=0.9, task=task)
    job.method = SMALL[name]()
    summary = job.run(tmp_path / "run").summary
    assert summary["met"]
    assert summary["method"] == name
    assert summary["batches"]["total"] == 28  # 24 to solve, 4 to tune
    assert summary["max_relative_diff"] < 1e-4
