from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecc.graph import Role, live_masks
from ecc.methods import PruningContext
from ecc.methods.base import magnitudes
from ecc.methods.baselines.eap import Eap, EapSettings
from ecc.methods.baselines.refit import collect_samples
from methods.baselines.cases import eap, finish, lines_of
from methods.nets import macs_cost
from methods.works import work_of


def started(context: PruningContext, **settings: Any) -> Eap:
    method = eap(**settings)
    method.start(context)
    return method


def pruned(context: PruningContext) -> list[Mapping[str, Any]]:
    return lines_of(context, "group")


# ---------------------------------------------------------------- how far


def test_the_last_group_is_pruned_no_further_than_needed_and_one_pass_is_enough() -> None:
    context = work_of(share=0.4)
    finish(eap(), context)
    assert {line["pass"] for line in lines_of(context)} == {1}
    last = list(context.graph.full_widths).index(pruned(context)[-1]["group"])
    wider = [width + (k == last) for k, width in enumerate(context.widths())]
    assert context.constraint_violation(context.widths()) <= 0 < context.constraint_violation(wider)
    ratios = [context.named_widths()[group.name] / group.width for group in context.graph.prunable]
    assert max(ratios) - min(ratios) < 0.05


def test_a_pass_prunes_every_group_by_the_ratio() -> None:
    context = work_of(share=0.2)
    method = started(context, prune_ratio=0.25)
    for _ in context.graph.prunable:
        method.step()
    for group, width in zip(context.graph.groups, context.widths(), strict=True):
        assert width == (math.floor(0.75 * group.width) if group.frozen is None else group.width)


# ---------------------------------------------------------------- order


@pytest.mark.parametrize("name", ["residual", "concat"])
def test_groups_are_pruned_in_the_order_of_the_energy_of_their_consumers(name: str) -> None:
    context = work_of(name, share=0.3)
    method = started(context, prune_ratio=0.05)
    layers = context.costs[0].per_layer()  # type: ignore[attr-defined]
    energy = {g.name: sum(layers[path] for path in g.layers(Role.CONSUMER)) for g in context.graph.prunable}
    expected = sorted(energy, key=lambda group: -energy[group])
    assert method.order() == expected
    for _ in expected:
        method.step()
    assert [line["group"] for line in pruned(context)] == expected


def test_the_cost_furthest_above_its_target_decides_and_needs_no_layers() -> None:
    context = work_of("chain")
    energy, macs = context.costs[0], macs_cost(context.graph)
    full = context.graph.widths()
    dense, alone = (float(energy.value(full)), float(macs.value(full))), []
    for number, cost in enumerate((energy, macs)):
        context.costs, context.targets = (cost,), [0.5 * dense[number]]
        alone.append(started(context).order())
    by_gradient = dict(zip(macs.groups, (macs.gradient(full) * full).tolist(), strict=True))
    names = [group.name for group in context.graph.prunable]
    assert alone[1] == sorted(names, key=lambda name: -by_gradient[name])
    context.costs = (energy, macs)
    for targets, expected in (((0.9, 0.3), alone[1]), ((0.3, 0.9), alone[0])):
        context.targets = [fraction * one for fraction, one in zip(targets, dense, strict=True)]
        assert started(context).order() == expected


# ---------------------------------------------------------------- pruning a group


def output_errors(method: Eap, context: PruningContext, paths: list[str]) -> Tensor:
    batches = method._batches.inputs()
    dense, now = (collect_samples(net, paths, batches, 10_000) for net in (method._dense, context.model))
    return torch.stack([(dense[path].outputs - now[path].outputs).square().mean() for path in paths])


@pytest.mark.parametrize(("name", "setting"), [("residual", "refit"), ("transformer MLP", "refit"), ("chain", "extra")])
def test_refitting_and_restoring_lower_the_error_of_the_outputs(name: str, setting: str) -> None:
    found = []
    for value in (True, False):
        context = work_of(name, share=0.5)
        settings = {"refit": value, "extra": 0.0} if setting == "refit" else {"refit": False, "extra": float(value)}
        method = started(context, rows=10_000, prune_ratio=0.4, **settings)
        method.step()
        paths = list(context.graph[pruned(context)[0]["group"]].layers(Role.CONSUMER))[:1]
        found.append(output_errors(method, context, paths))
        assert bool(pruned(context)[0]["refit"]) == settings["refit"]
    assert (found[0] < found[1]).all()


@pytest.mark.parametrize("extra", [0.0, 0.5])
def test_the_smallest_channels_are_removed_and_extra_ones_restored(extra: float) -> None:
    context = work_of("chain", share=0.5)
    importance = magnitudes(context)
    started(context, extra=extra).step()
    line = pruned(context)[0]
    live = live_masks(context.model, context.graph)[list(context.graph.full_widths).index(line["group"])]
    assert int(live.sum()) == line["width"]
    assert (line["removed"], line["restored"]) == (int((~live).sum()), math.ceil(extra * line["removed"]))
    order = importance[line["group"]].argsort(descending=True)
    assert live[order[: line["width"] - line["restored"]]].all()
    assert extra or importance[line["group"]][live].min() > importance[line["group"]][~live].max()


def test_layers_that_cannot_be_refit_are_pruned_by_magnitude() -> None:
    context = work_of("transposed", share=0.5)
    before = {name: value.clone() for name, value in context.model.state_dict().items()}
    finish(eap(), context)
    assert all(line["refit"] == [] and line["restored"] == 0 for line in pruned(context))
    assert all(((value == before[name]) | (value == 0)).all() for name, value in context.model.state_dict().items())


def test_modes_statistics_and_hooks_do_not_change_and_calibration_is_counted_once() -> None:
    context = work_of("chain", share=0.4)
    context.model.get_submodule("bn1").eval()
    modes = [module.training for module in context.model.modules()]
    statistics = context.model.get_buffer("bn1.running_mean").clone()
    finish(eap(batches=3), context)
    assert [module.training for module in context.model.modules()] == modes
    assert torch.equal(context.model.get_buffer("bn1.running_mean"), statistics)
    assert not any(module._forward_hooks for module in context.model.modules())
    assert (context.stream.total, context.stream.lineage) == (3, 0)


# ---------------------------------------------------------------- threshold and training


def test_training_after_each_pass_keeps_masked_channels_masked() -> None:
    context = work_of("chain", share=0.3)
    finish(eap(finetune_steps=2, prune_ratio=0.15), context)
    passes = max(line["pass"] for line in lines_of(context))
    assert context.stream.lineage == 2 * (passes - 1) > 0
    assert context.constraint_violation(context.widths()) <= 0


def test_by_default_the_pruning_steps_are_divided_among_the_passes() -> None:
    context = work_of("chain", share=0.3, prune_steps=60)
    calls, real = [], context.train

    def train(model: nn.Module, steps: int, *rest: Any) -> None:
        calls.append(steps)
        real(model, steps, *rest)

    context.train = train
    finish(Eap(), context)
    assert len(calls) == max(line["pass"] for line in lines_of(context)) - 1 >= 2
    assert min(calls) >= 10
    assert 40 <= context.stream.total <= 60
    assert EapSettings().prune_ratio == 0.25
    ratios = [context.named_widths()[group.name] / group.width for group in context.graph.prunable]
    assert max(ratios) - min(ratios) > 0.05  # the most expensive groups lose more
