"""What holds for every baseline: targets, widths, resuming, random numbers, whole runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ecc.errors import InfeasibleBudget
from ecc.methods.baselines.amc import AmcSettings
from ecc.methods.baselines.lcp import LcpSettings
from ecc.methods.baselines.netadapt import NetAdaptSettings
from ecc.methods.baselines.widths import allowed_widths
from ecc.training import load_state, save_state
from methods.baselines.cases import BASELINES, amc, finish, lcp, lines_of, magnitude_score, netadapt
from methods.jobs import WIDE
from methods.works import work_of

every_method = pytest.mark.parametrize("name", BASELINES)


@pytest.mark.parametrize(
    ("name", "net", "width_multiple"),
    [(name, *case) for name in BASELINES for case in (("residual", 1), ("concat", 8))]
    + [("uniform", n, 1) for n in WIDE],
)
def test_the_targets_are_met_with_allowed_widths(name: str, net: str, width_multiple: int) -> None:
    context = work_of(net, share=0.45, width_multiple=width_multiple)
    method = BASELINES[name]()
    method.start(context)
    assert not method.is_done
    finish(method, context)
    widths = context.widths()
    assert context.constraint_violation(widths) <= 0
    assert all(width in allowed for width, allowed in zip(widths, allowed_widths(context), strict=True))
    assert [allowed[0] for allowed in allowed_widths(context)] == context.min_widths()
    assert all(torch.isfinite(parameter).all() for parameter in context.model.parameters())
    assert lines_of(context)


@every_method
def test_lower_targets_are_met_afterwards(name: str) -> None:
    context = work_of("residual", share=0.7)
    context.held_out = magnitude_score
    method = finish(BASELINES[name](), context)
    before = context.widths()
    context.targets = [0.6 * context.targets[0]]
    assert not method.is_done
    finish(method, context)
    assert sum(context.widths()) < sum(before)


@pytest.mark.parametrize("name", [name for name in BASELINES if name not in ("uniform", "greedy", "greedy_taylor")])
def test_unreachable_targets_are_refused(name: str) -> None:
    with pytest.raises(InfeasibleBudget, match="minimum width"):
        finish(BASELINES[name](), work_of(share=0.001))


@every_method
def test_resuming_after_every_step_changes_no_bit_and_no_global_random_number(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    whole, resumed = work_of("residual", share=0.4), work_of("residual", share=0.4)
    random = torch.get_rng_state()
    finish(BASELINES[name](), whole)
    assert torch.equal(torch.get_rng_state(), random)
    method: Any = BASELINES[name]()
    method.start(resumed)
    while not method.is_done:
        method.step()
        saved = {"method": method.state_dict(), "model": resumed.model.state_dict(), "stream": resumed.stream.state()}
        save_state(tmp_path / "state", saved)
        state, lines = load_state(tmp_path / "state"), lines_of(resumed)
        resumed, method = work_of("residual", share=0.4), BASELINES[name]()
        resumed.lines.extend(lines)  # type: ignore[attr-defined]
        method.start(resumed)
        method.load_state_dict(state["method"])
        resumed.model.load_state_dict(state["model"])
        resumed.stream.restore(state["stream"])
    theirs = resumed.model.state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in whole.model.state_dict().items())
    assert resumed.stream.state() == whole.stream.state()
    assert lines_of(resumed) == lines_of(whole)


@pytest.mark.parametrize("name", ["amc", "legr"])
def test_the_seed_decides(name: str) -> None:
    contexts = [work_of("residual", share=0.5, seed=seed) for seed in (0, 0, 1)]
    for context in contexts:
        finish(BASELINES[name](), context)
    first, same, other = (lines_of(context) for context in contexts)
    assert first == same != other


# ---------------------------------------------------------------- whole runs


# ---------------------------------------------------------------- settings


def test_configurations_have_the_papers_numbers_and_tell_settings_apart() -> None:
    assert "episodes_per_step" not in amc().config()
    paper = AmcSettings()
    assert (paper.episodes, paper.warm_up, paper.noise, paper.noise_decay, paper.replay) == (400, 0.25, 0.5, 0.95, 100)
    agent = paper.agent
    assert (agent.hidden, agent.actor_lr, agent.critic_lr, agent.soft_update) == (300, 1e-4, 1e-3, 0.01)
    search = LcpSettings()
    assert (search.candidates, search.population, search.tournament, search.mutation_ratio) == (400, 64, 16, 0.1)
    assert [NetAdaptSettings().rounds_to(fraction) for fraction in (1.0, 0.96, 0.5, 0.25, 0.0)] == [1, 1, 15, 24, 35]
    assert lcp(sigma=2.0).config() != lcp().config()
    assert netadapt(short_steps=7).config()["short_steps"] == 7
