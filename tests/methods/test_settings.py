from __future__ import annotations

import itertools
import math
from dataclasses import fields
from typing import Any

import pytest

from ecc.errors import EccError
from ecc.methods import CompressSettings
from ecc.methods.ecc.admm import AdmmSettings
from ecc.options import settings_from
from ecc.training import Cosine

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prune_steps": 0}, "steps=0 is below 1"),
    ({"pretrain_steps": -1}, "pretrain_steps=-1 is below 0"),
    ({"finetune_steps": -5}, "finetune_steps=-5 is below 0"),
    ({"prune_steps": 2.5}, "steps is 2.5; give a whole number"),
    ({"lr": 0.0}, "lr=0.0 is outside 0..1"),
    ({"falling": True, "finetune_lr": 1e-4}, "falling=True is not for a tuning with a rate of its own"),
    ({"falling": True, "solver": "admm"}, "nor for solver='admm'"),
    ({"lr": math.nan}, "lr=nan is outside 0..1"),
    ({"pretrain_lr": 1.0}, "pretrain_lr=1.0 is outside 0..1"),
    ({"finetune_lr": 0.0}, "finetune_lr=0.0 is outside 0..1"),
    ({"solver": "magic"}, "solver='magic' is unknown; there are scheduled, admm"),
    ({"importance": "magic"}, "importance='magic' is unknown; there are taylor, adam_norm"),
    ({"penalty": 0.0}, "penalty=0.0 is not a number above 0"),
    ({"width_lr": math.inf}, "width_lr=inf is not a number above 0"),
    ({"weight_decay": -1e-4}, "weight_decay=-0.0001 is not a number of at least 0"),
    ({"weight_decay": math.nan}, "weight_decay=nan"),
    ({"distill": 1.5}, "weight of distillation is 1.5"),
    ({"distill": -0.1}, "weight of distillation is -0.1"),
    ({"temperature": 0.0}, "temperature of distillation is 0.0"),
    ({"min_width_ratio": -0.1}, "min_width_ratio=-0.1 is a share"),
    ({"min_width_ratio": 1.1}, "min_width_ratio=1.1 is a share"),
    ({"min_width_ratio": math.nan}, "min_width_ratio=nan is a share"),
    ({"uniform_floor": 1.0}, "uniform_floor=1.0 is not a share from 0 to below 1"),
    ({"uniform_floor": math.nan}, "uniform_floor=nan is not a share"),
    ({"uniform_floor": 0.5, "solver": "admm"}, "uniform_floor=0.5 is not for solver='admm'"),
    ({"width_multiple": 0}, "width_multiple=0 is below 1"),
    ({"precision": "fp8"}, "precision is 'fp8'; choose one of fp32, bf16, fp16"),
    ({"clip_norm": 0.0}, "clip_norm is 0.0"),
    ({"micro_batch": 0}, "micro_batch is 0"),
    ({"log_every": 0}, "log_every is 0"),
    ({"cuda_graph": True, "precision": "fp16"}, "cuda_graph does not go with precision fp16"),
    ({"checkpoint_steps": 0}, "checkpoint_steps is 0"),
    ({"checkpoint_seconds": 0.0}, "checkpoint_seconds is 0.0"),
]


@pytest.mark.parametrize(("values", "message"), REFUSED)
def test_a_value_out_of_its_range_is_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(EccError) as error:
        settings_from(CompressSettings, values)
    assert message in str(error.value)


def test_every_number_is_checked_somewhere() -> None:
    free = {"ignore_index", "seed", "channels_last"}  # any value does
    refused = {name for values, _ in REFUSED for name in values}
    assert {field.name for field in fields(CompressSettings)} - free == refused


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"pretrain_steps": 0, "prune_steps": 1, "finetune_steps": 0},
        {"min_width_ratio": 0.0},
        {"min_width_ratio": 1.0, "width_multiple": 1, "distill": 1.0},
        {"checkpoint_seconds": None, "weight_decay": 0.0},
    ],
)
def test_what_lies_at_the_edge_is_allowed(values: dict[str, Any]) -> None:
    made = settings_from(CompressSettings, values)
    assert all(getattr(made, name) == value for name, value in values.items())


def test_each_phase_has_its_own_steps_and_rate_and_all_else_in_common() -> None:
    settings = settings_from(
        CompressSettings,
        dict(
            pretrain_steps=3,
            prune_steps=5,
            finetune_steps=7,
            lr=1e-4,
            pretrain_lr=1e-2,
            seed=9,
            clip_norm=2.0,
            micro_batch=4,
            log_every=6,
        ),
    )
    assert settings.phase_steps == {"dense": 3, "solve": 5, "tune": 7}
    assert settings.schedule("solve") is None
    for phase, start in (("dense", 1e-2), ("tune", 1e-4)):
        schedule = settings.schedule(phase)
        assert schedule == Cosine(start_lr=start)
        assert schedule.lr(start, 0, 100) == pytest.approx(start)
        assert schedule.lr(start, 100, 100) == pytest.approx(0, abs=1e-9)
    one = settings.train
    assert (one.seed, one.clip_norm, one.micro_batch, one.log_every) == (9, 2.0, 4, 6)


@pytest.mark.parametrize(("cut", "held"), [(0.0, 0), (0.2, 4), (0.5, 25), (0.8, 64), (1.0, 100)])
def test_the_rate_falls_once_over_solve_and_tuning_and_later_the_more_goes(cut: float, held: int) -> None:
    settings = CompressSettings(lr=1e-4, prune_steps=60, finetune_steps=40, lr_schedule="cosine")
    solve, tune = settings.fall("solve", cut), settings.fall("tune", cut)
    assert solve is not None
    assert tune is not None
    rates = [solve.lr(1.0, step, 60) for step in range(60)] + [tune.lr(1.0, step, 40) for step in range(40)]
    assert rates[: held + 1] == [1e-4] * min(held + 1, 100)
    assert all(now < before for before, now in itertools.pairwise(rates[held:]))
    assert held == 100 or rates[-1] < 0.02 * 1e-4 * (100 / (100 - held)) ** 2


@pytest.mark.parametrize("changes", [{}, {"finetune_lr": 3e-5}, {"solver": "admm"}])
def test_otherwise_the_solve_keeps_its_rate_and_tuning_starts_anew(changes: Any) -> None:
    settings = CompressSettings(lr=1e-4, **changes)
    assert settings.fall("solve", 0.5) is None
    assert settings.fall("tune", 0.5) is None
    assert settings.schedule("solve") is None
    assert settings.schedule("tune") == Cosine(start_lr=changes.get("finetune_lr", 1e-4))


def test_the_paper_is_one_word_and_its_constants_can_be_changed() -> None:
    paper = CompressSettings.paper(penalty=5.0, steps=7)
    assert (paper.solver, paper.importance, paper.width_multiple, paper.lr, paper.finetune_lr) == (
        "admm",
        "adam_norm",
        1,
        1e-5,
        3e-5,
    )
    assert (paper.penalty, paper.steps, paper.temperature) == (5.0, 7, None)
    assert CompressSettings.paper(lr=1e-3).lr == 1e-3


def test_the_papers_dynamics_have_the_papers_constants_and_all_steps() -> None:
    assert CompressSettings().solver_options() == {"importance": None, "uniform_floor": 0.0}
    told = CompressSettings(solver="admm", penalty=1.0, width_lr=2.0).solver_options()
    constants = AdmmSettings(width_lr=2.0, width_penalty=1.0, energy_penalty=1.0)
    assert told == {"importance": None, "solver": constants, "warm_up": 0.0, "ramp": 1.0}
