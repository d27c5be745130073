from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecc.errors import EccError, InfeasibleBudget
from ecc.graph import Role, live_masks
from ecc.methods import PruningContext
from ecc.methods.base import magnitudes
from ecc.methods.baselines.eap import Eap, EapSettings
from ecc.methods.baselines.refit import sampled
from ecc.training import load_state, save_state
from methods.jobs import WIDE
from methods.nets import macs_cost
from methods.works import eap, work_of


def started(work: PruningContext, **settings: Any) -> Eap:
    method = eap(**settings)
    method.start(work)
    return method


def done(method: Eap, most: int = 200) -> Eap:
    for _ in range(most):
        if method.is_done:
            return method
        method.step()
    raise AssertionError("it does not end")


def lines_of(work: PruningContext) -> list[Mapping[str, Any]]:
    return work.lines  # type: ignore[attr-defined,no-any-return]


def cuts_of(work: PruningContext) -> list[Mapping[str, Any]]:
    return [line for line in lines_of(work) if "group" in line]


# ---------------------------------------------------------------- budgets, floors, width_remainders


@pytest.mark.parametrize(("cut", "width_multiple"), [(0.3, 1), (None, 8)])
@pytest.mark.parametrize("name", WIDE)
def test_the_aims_are_met_on_the_lattice_above_the_floors(name: str, width_multiple: int, cut: float | None) -> None:
    work = work_of(name, share=0.4, width_multiple=width_multiple)
    done(started(work, cut=cut))
    widths, floors = work.widths(), work.min_widths()
    left = work.graph.structure.width_remainders(width_multiple)
    for group, width, floor, rest in zip(work.graph.groups, widths, floors, left, strict=True):
        assert floor <= width <= group.width
        assert width in (group.width, floor) or (width - rest) % width_multiple == 0
    assert all(torch.isfinite(parameter).all() for parameter in work.model.parameters())


def test_the_last_group_is_cut_no_further_than_needed() -> None:
    work = work_of(share=0.5)
    done(started(work))
    last = list(work.graph.full_widths).index(cuts_of(work)[-1]["group"])
    widths = work.widths()
    assert (
        work.constraint_violation(widths)
        <= 0
        < work.constraint_violation([w + (k == last) for k, w in enumerate(widths)])
    )


def test_a_pass_cuts_every_group_by_its_share() -> None:
    work = work_of(share=0.2)
    method = started(work, cut=0.25)
    for _ in work.graph.prunable:
        method.step()
    for group, width in zip(work.graph.groups, work.widths(), strict=True):
        assert width == (math.floor(0.75 * group.width) if group.frozen is None else group.width)


def test_one_pass_is_enough_at_the_even_share() -> None:
    work = work_of(share=0.4)
    done(started(work, cut=None))
    assert {line["pass"] for line in lines_of(work)} == {1}
    shares = [
        width / group.width
        for group, width in zip(work.graph.groups, work.widths(), strict=True)
        if group.frozen is None
    ]
    assert max(shares) - min(shares) < 0.05


def test_it_goes_on_when_the_aims_are_lowered() -> None:
    work = work_of(share=0.6)
    method = done(started(work))
    before = work.widths()
    work.targets = [0.6 * work.targets[0]]
    assert not method.is_done
    done(method)
    assert all(now <= then for now, then in zip(work.widths(), before, strict=True))


def test_floors_end_it_with_a_word() -> None:
    work = work_of(share=0.01, min_width_ratio=0.5)
    with pytest.raises(InfeasibleBudget, match="floor"):
        done(started(work, cut=0.4))
    assert work.widths() == work.min_widths()


# ---------------------------------------------------------------- the order


@pytest.mark.parametrize("name", ["chain", "residual", "concat"])
def test_groups_go_in_the_order_of_the_energy_of_their_readers(name: str) -> None:
    work = work_of(name, share=0.3)
    method = started(work, cut=0.05)
    layers = work.costs[0].per_layer()  # type: ignore[attr-defined]
    spent = {group.name: sum(layers[path] for path in group.layers(Role.CONSUMER)) for group in work.graph.prunable}
    expected = sorted(spent, key=lambda group: -spent[group])
    assert method.order() == expected
    for _ in expected:
        method.step()
    assert [line["group"] for line in cuts_of(work)] == expected


def test_prices_change_the_order() -> None:
    work = work_of("chain")
    model = work.costs[0]
    orders = []
    for dear in ("conv2", "head"):
        number = model.layers.index(dear)  # type: ignore[attr-defined]
        priced = model.fitted  # type: ignore[attr-defined]
        coefficients = tuple(1.0 if any(layer == number for layer, _ in term.layers) else 1e-6 for term in priced.terms)
        work.costs = (replace(model, fitted=replace(priced, coefficients=coefficients)),)  # type: ignore[type-var]
        first = started(work).order()[0]
        assert dear in work.graph[first].layers(Role.CONSUMER)
        orders.append(first)
    assert orders[0] != orders[1]


def test_a_cost_that_knows_no_layers_gives_an_order_too() -> None:
    work = work_of("chain")
    cost = macs_cost(work.graph)
    full = torch.tensor(cost.full_widths, dtype=torch.float64)
    work.costs, work.targets = (cost,), [0.5 * float(cost.value(full))]
    shares = dict(zip(cost.groups, (cost.gradient(full) * full).tolist(), strict=True))
    names = [group.name for group in work.graph.prunable]
    method = started(work)
    assert method.order() == sorted(names, key=lambda name: -shares[name])
    done(method)


def test_the_cost_farthest_above_its_aim_decides() -> None:
    work = work_of("chain")
    energy, macs = work.costs[0], macs_cost(work.graph)
    full = torch.tensor(macs.full_widths, dtype=torch.float64)
    work.costs, dense = (energy, macs), (float(energy.value(full)), float(macs.value(full)))
    alone = {}
    for number, cost in enumerate(work.costs):
        lone = work_of("chain")
        lone.costs, lone.targets = (cost,), [0.5 * dense[number]]
        alone[number] = started(lone).order()
    work.targets = [0.9 * dense[0], 0.3 * dense[1]]
    assert started(work).order() == alone[1]
    work.targets = [0.3 * dense[0], 0.9 * dense[1]]
    assert started(work).order() == alone[0]


# ---------------------------------------------------------------- the cut


def errors(method: Eap, work: PruningContext, paths: list[str]) -> Tensor:
    """Of the outputs of some layers, on the calibration batches."""
    batches = method._calibration()
    dense, now = (sampled(net, paths, batches, 10_000) for net in (method._dense, work.model))
    return torch.stack([(dense[path].outputs - now[path].outputs).square().mean() for path in paths])


@pytest.mark.parametrize("name", ["chain", "residual", "concat", "transformer MLP"])
def test_refitting_lowers_the_error_of_the_outputs(name: str) -> None:
    found = {}
    for refit in (True, False):
        work = work_of(name, share=0.5)
        method = started(work, refit=refit, rows=10_000, extra=0.0, cut=0.4)
        method.step()
        found[refit] = errors(method, work, list(work.graph[cuts_of(work)[0]["group"]].layers(Role.CONSUMER))[:1])
        assert bool(cuts_of(work)[0]["refit"]) == refit
    assert (found[True] < 0.9 * found[False]).all()


def test_restoring_lowers_the_error_of_the_outputs() -> None:
    found = []
    for extra in (0.0, 1.0):
        work = work_of("chain", share=0.5)
        method = started(work, refit=False, rows=10_000, extra=extra, cut=0.3)
        method.step()
        found.append(errors(method, work, list(work.graph[cuts_of(work)[0]["group"]].layers(Role.CONSUMER))))
    assert (found[1] < found[0]).all()


def test_without_extra_the_smallest_go() -> None:
    work = work_of("chain", share=0.5)
    scores = magnitudes(work)
    method = started(work, extra=0.0)
    method.step()
    cut = cuts_of(work)[0]
    number = list(work.graph.full_widths).index(cut["group"])
    live = live_masks(work.model, work.graph)[number]
    assert scores[cut["group"]][live].min() > scores[cut["group"]][~live].max()
    assert (cut["removed"], cut["restored"]) == (int((~live).sum()), 0)


def test_restored_channels_come_from_beyond_the_cut() -> None:
    work = work_of("chain", share=0.5)
    scores = magnitudes(work)
    started(work, extra=0.5).step()
    cut = cuts_of(work)[0]
    live = live_masks(work.model, work.graph)[list(work.graph.full_widths).index(cut["group"])]
    assert cut["restored"] == math.ceil(0.5 * cut["removed"])
    assert int(live.sum()) == cut["width"]
    order = scores[cut["group"]].argsort(descending=True)
    assert live[order[: cut["width"] - cut["restored"]]].all()  # those that were never in question


def test_layers_that_cannot_be_refit_are_cut_all_the_same() -> None:
    work = work_of("transposed", share=0.5)
    before = {name: value.clone() for name, value in work.model.state_dict().items()}
    done(started(work))
    assert all(line["refit"] == [] and line["restored"] == 0 for line in cuts_of(work))
    for name, value in work.model.state_dict().items():
        assert ((value == before[name]) | (value == 0)).all()


def test_modes_hooks_and_random_numbers_are_left_alone() -> None:
    work = work_of("chain", share=0.5)
    work.model.get_submodule("bn1").eval()
    modes = [module.training for module in work.model.modules()]
    statistics = work.model.get_buffer("bn1.running_mean").clone()
    random = torch.get_rng_state()
    done(started(work))
    assert [module.training for module in work.model.modules()] == modes
    assert torch.equal(work.model.get_buffer("bn1.running_mean"), statistics)
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_hooks for module in work.model.modules())


def test_calibration_is_counted_once_and_moves_nothing() -> None:
    work = work_of("chain", share=0.4)
    done(started(work, batches=3))
    assert (work.stream.total, work.stream.lineage) == (3, 0)


# ---------------------------------------------------------------- the threshold


def test_a_group_whose_cut_loses_too_much_is_put_back() -> None:
    work = work_of("chain", share=0.5)
    spoiled = started(work).order()[0]
    dense = {name: value.clone() for name, value in work.model.state_dict().items()}
    number = list(work.graph.full_widths).index(spoiled)

    def held_out(net: nn.Module) -> float:
        assert not net.training
        return 1.0 if work.widths(net)[number] == work.graph[spoiled].width else 0.5

    work.held_out = held_out
    work.targets = [0.7 * work.targets[0] / 0.5]
    method = started(work, max_drop=0.1)
    method.step()
    assert cuts_of(work)[0]["put_back"]
    assert all(torch.equal(value, dense[name]) for name, value in work.model.state_dict().items())
    done(method)
    assert work.widths()[number] == work.graph[spoiled].width
    assert not any("note" in line for line in lines_of(work))


def test_where_the_threshold_forbids_the_budget_the_budget_wins_and_it_is_told() -> None:
    work = work_of("chain", share=0.5)
    work.held_out = lambda net: 0.0 if net is work.model else 1.0
    done(started(work, max_drop=0.1))
    notes = [line["note"] for line in lines_of(work) if "note" in line]
    assert notes == ["the budget cannot be met within max_drop=0.1"]
    assert work.constraint_violation(work.widths()) <= 0


def test_held_out_data_are_not_asked_without_a_threshold() -> None:
    work = work_of("chain", share=0.5)

    def refuse(net: nn.Module) -> float:
        raise AssertionError(net)

    work.held_out = refuse
    done(started(work))
    assert work.constraint_violation(work.widths()) <= 0


def test_training_after_each_pass_keeps_the_silent_silent() -> None:
    work = work_of("chain", share=0.3)
    done(started(work, finetune_steps=2, cut=0.15))
    passes = max(line["pass"] for line in lines_of(work))
    assert work.stream.lineage == 2 * (passes - 1) > 0
    assert work.constraint_violation(work.widths()) <= 0


# ---------------------------------------------------------------- settings and resuming


@pytest.mark.parametrize(
    "wrong",
    [
        {"cut": 0.0},
        {"cut": 1.0},
        {"extra": -0.1},
        {"batches": 0},
        {"rows": 0},
        {"ridge": 0.0},
        {"max_drop": -1.0},
        {"max_drop": math.nan},
        {"finetune_steps": -1},
    ],
)
def test_settings_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(EccError, match=next(iter(wrong))):
        EapSettings(**wrong)


@pytest.mark.parametrize("settings", [{"cut": 0.2}, {"max_drop": 1e4}, {"finetune_steps": 2, "cut": 0.15}])
def test_a_resumed_run_equals_one_that_was_not_stopped(settings: dict[str, Any], tmp_path: Path) -> None:
    whole = work_of("residual", share=0.4)
    steps, method = 0, started(whole, **settings)
    while not method.is_done:
        method.step()
        steps += 1
    work = work_of("residual", share=0.4)
    method = started(work, **settings)
    for number in range(steps):
        assert not method.is_done
        if number % 2:
            saved = {"method": method.state_dict(), "model": work.model.state_dict(), "stream": work.stream.state()}
            save_state(tmp_path / "state", saved)
            state, lines = load_state(tmp_path / "state"), lines_of(work)
            work = work_of("residual", share=0.4)
            lines_of(work).extend(lines)  # type: ignore[attr-defined]
            method = started(work, **settings)
            method.load_state_dict(state["method"])
            work.model.load_state_dict(state["model"])
            work.stream.restore(state["stream"])
        method.step()
    assert method.is_done
    for name, value in whole.model.state_dict().items():
        assert torch.equal(work.model.state_dict()[name], value), name
    assert work.stream.state() == whole.stream.state()
    assert lines_of(work) == lines_of(whole)
