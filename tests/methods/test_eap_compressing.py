from __future__ import annotations

from pathlib import Path

import pytest

from ecc.energy import parse_budgets
from ecc.methods import Compression, CompressSettings
from ecc.methods.baselines.eap import Eap
from ecc.zoo import find_task
from methods.jobs import digits_model, history_of, platform, same_result, wide_job
from methods.works import eap


def test_the_budget_is_met_on_the_scales_though_the_model_errs(tmp_path: Path) -> None:
    job = wide_job("50%", factor=2.0)
    job.method = eap()
    summary = job.run(tmp_path / "run").summary
    assert summary["met"]
    assert summary["method"] == "eap"
    row = summary["budgets"]["energy"]
    assert 0.9 * row["limit"] <= row["result"] <= row["limit"]
    assert summary["weighings"] > 1  # the targets were lowered, and it went on


class Stops(Eap):
    """Is interrupted before its third step."""

    left = 2

    def step(self) -> None:
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        super().step()


def digits_job(method: Eap) -> Compression:
    settings = CompressSettings(pretrain_steps=6, prune_steps=1, finetune_steps=3, lr=1e-3)
    return Compression(
        find_task("digits"),
        parse_budgets(("60%",)),
        digits_model(),
        meter=platform(),
        settings=settings,
        method=method,
    )


def test_digits_on_a_platform_stopped_and_taken_up_again(tmp_path: Path) -> None:
    whole = digits_job(eap()).run(tmp_path / "whole")
    assert whole.summary["met"]
    with pytest.raises(KeyboardInterrupt):
        digits_job(Stops(eap().settings)).run(tmp_path / "stopped")
    again = digits_job(eap()).run(tmp_path / "stopped")
    assert same_result(again, whole)
    assert history_of(tmp_path / "stopped") == history_of(tmp_path / "whole")
