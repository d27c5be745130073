from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from ecc.errors import EccError
from ecc.methods import CompressSettings, PaperSettings
from ecc.options import options_of, settings_from
from ecc.training import Cosine


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prune_steps": -1}, "prune_steps is -1"),
        ({"lr_schedule": "step"}, "lr_schedule is 'step'; choose one of constant, cosine"),
        ({"lr_schedule": "cosine", "finetune_lr": 1e-4}, "lr_schedule 'cosine' has no separate finetune_lr"),
        ({"lr_schedule": "cosine", "solver": "paper"}, "lr_schedule has no effect with solver 'paper'"),
        ({"uniform_floor": 0.5, "solver": "admm"}, "uniform_floor has no effect with solver 'admm'"),
        ({"solver": "magic"}, "solver is 'magic'; choose one of scheduled, admm, paper"),
        ({"paper_width_lr": math.inf}, "paper_width_lr is inf"),
        ({"paper_width_lr": 3.5, "solver": "admm"}, "are constants of solver 'paper'"),
        ({"paper_width_lr": 3.5}, "are constants of solver 'paper'"),
        ({"precision": "fp8"}, "precision is 'fp8'"),  # nested settings are checked too
        ({"kd_weight": 1.5}, "kd_weight is 1.5"),
        ({"prune_step": 5}, "unknown setting 'prune_step'; did you mean 'prune_steps'?"),
    ],
)
def test_a_bad_setting_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(EccError) as error:
        settings_from(CompressSettings, values)
    assert message in str(error.value)


def test_options_have_unique_names_and_few_are_common() -> None:
    options = options_of(CompressSettings)
    assert len({one.name for one in options}) == len(options)
    common = {one.name for one in options if one.option.common}
    assert {"pretrain_steps", "prune_steps", "finetune_steps", "lr"} <= common
    assert len(common) <= 10
    assert all(one.option.help.endswith(".") for one in options)


def test_pruning_has_a_constant_rate_and_other_phases_a_cosine() -> None:
    made = CompressSettings(lr=1e-3, pretrain_lr=1e-2, pretrain_steps=1, prune_steps=2, finetune_steps=3)
    assert made.phase_steps == {"pretrain": 1, "prune": 2, "finetune": 3}
    assert made.schedule("prune") is None
    assert made.schedule("pretrain") == Cosine(start_lr=1e-2)
    assert made.schedule("finetune") == Cosine(start_lr=1e-3)
    assert CompressSettings(finetune_lr=1e-5).schedule("finetune") == Cosine(start_lr=1e-5)
    assert made.joint_schedule("prune", 0.5) is None


@pytest.mark.parametrize("reduction", [0.0, 0.5, 1.0])
def test_one_cosine_spans_pruning_and_finetuning(reduction: float) -> None:
    made = CompressSettings(lr=1e-4, prune_steps=60, finetune_steps=40, lr_schedule="cosine")
    rates = []
    for phase, steps in (("prune", 60), ("finetune", 40)):
        schedule = made.joint_schedule(phase, reduction)
        assert schedule is not None
        rates += [schedule.lr(1e-4, step, steps) for step in range(steps)]
    hold = int(100 * reduction**2)
    assert all(rate == pytest.approx(1e-4) for rate in rates[:hold])
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[hold:]))


def test_the_preset_of_the_paper() -> None:
    paper = CompressSettings.paper(prune_steps=7, paper_width_lr=10.0)
    assert (paper.solver, paper.importance, paper.min_width_ratio, paper.width_multiple) == (
        "paper",
        "adam_norm",
        0.0,
        1,
    )
    assert (paper.lr, paper.finetune_lr, paper.train.clip_norm, paper.distill.temperature) == (1e-5, 3e-5, 1.0, None)
    assert (paper.prune_steps, paper.paper_constants) == (7, PaperSettings(width_lr=10.0))
