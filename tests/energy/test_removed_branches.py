"""Profiles, energy models and counted costs of networks with removed branches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ecc.budget import parse_budget
from ecc.constants import MIN_WIDTH_RATIO
from ecc.energy import counted_cost
from ecc.energy.model import EnergyModel, fit
from ecc.errors import BadFile, InfeasibleBudget
from ecc.graph import ChannelGraph, trace_channels, with_widths
from ecc.measure import Profile, profile
from ecc.measure.design import sample_widths
from ecc.measure.meters.platform import Platform
from ecc.methods.feasibility import check_feasibility, refuse_infeasible
from ecc.report import terminal
from graph.branch_nets import NETWORKS, built

PLATFORM = Platform("jetson-tx2")


@pytest.fixture(scope="module")
def graph() -> ChannelGraph:
    return trace_channels(*built(*NETWORKS["basic"][:2]), verify=False)


@pytest.fixture(scope="module")
def model(graph: ChannelGraph, tmp_path_factory: pytest.TempPathFactory) -> EnergyModel:
    net, x = built(*NETWORKS["basic"][:2])
    return fit(profile(net, graph, x, PLATFORM, tmp_path_factory.mktemp("a") / "a.profile", samples=60))


def random_networks(graph: ChannelGraph, count: int) -> list[dict[str, int]]:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        widths = {group.name: int(rng.integers(1, group.width + 1)) for group in graph.prunable}
        for branch in graph.branches:
            if rng.random() < 0.5:
                widths |= dict.fromkeys(branch.groups, 0)
        found.append(widths)
    return found


def test_a_design_has_networks_without_branches(graph: ChannelGraph) -> None:
    made = sample_widths(graph, 40)
    removed = [graph.structure.removed(graph.widths(widths).tolist()) for widths in made]
    assert removed[:5] == [(), (), (), (0, 1, 2), (0, 1, 2)]
    assert {len(one) for one in removed} == {0, 1, 2, 3}
    assert {number for one in removed for number in one} == {0, 1, 2}
    assert made[:20] == sample_widths(graph, 20)
    assert all(0 not in widths.values() for widths in sample_widths(graph, 40, "uniform"))
    assert all(0 not in widths.values() for widths in sample_widths(graph.without_branches(), 40))


def test_a_profile_without_depth_removes_nothing(graph: ChannelGraph, tmp_path: Path) -> None:
    net, x = built(*NETWORKS["basic"][:2])
    made = profile(net, graph, x, PLATFORM, tmp_path / "a.profile", samples=20, depth=False)
    assert all(min(sample.widths) > 0 for sample in made.samples)
    assert made.header.structure.branches == ()
    with pytest.raises(BadFile, match="branches"):
        profile(net, graph, x, PLATFORM, tmp_path / "a.profile", samples=30)
    fitted = fit(made)
    assert fitted.branches == ()
    fitted.check(graph)


def test_the_model_predicts_networks_without_branches(graph: ChannelGraph, model: EnergyModel) -> None:
    assert model.branches == tuple(branch.name for branch in graph.branches)
    assert model.errors is not None
    assert model.errors.mean < 0.01
    for widths in random_networks(graph, 20):
        assert model.at(widths) == pytest.approx(PLATFORM.truth(graph, widths).joules, rel=0.01)
    assert model.min_cost < 0.5 * model.at({group.name: group.min_width for group in graph.prunable})


def test_values_gradients_and_arrays_agree(graph: ChannelGraph, model: EnergyModel) -> None:
    counted = ("macs", "params", "weight_bytes", "activation_bytes")
    costs = [model, *(counted_cost(graph, resource) for resource in counted)]
    for cost in costs:
        form = cost.form(cost.dense)
        vectors = torch.stack([graph.widths(widths) for widths in random_networks(graph, 8)])
        together = cost.value(vectors)
        for vector, expected in zip(vectors, together, strict=True):
            point = vector.clone().requires_grad_()
            cost.value(point).backward()
            assert torch.allclose(point.grad, cost.gradient(vector))  # type: ignore[arg-type]
            assert form.value(vector.numpy()) == pytest.approx(float(expected), rel=1e-9)
            assert float(cost.value(vector)) == pytest.approx(float(expected), rel=1e-12)


def test_counted_costs_are_those_of_the_network_itself(graph: ChannelGraph) -> None:
    net, x = built(*NETWORKS["basic"][:2])
    for widths in random_networks(graph, 6):
        small = with_widths(net, graph, widths)
        vector = graph.widths(widths)
        assert float(counted_cost(graph, "params").value(vector)) == sum(p.numel() for p in small.parameters())
        again = trace_channels(small, x, verify=False)
        kinds = ("conv", "linear")
        expected = sum(
            float(macs)
            for layer, macs in zip(again.layers, again.costs.macs_per_layer(again.widths()), strict=True)
            if layer.kind in kinds
        )
        found = graph.costs.macs_per_layer(vector)
        assert sum(float(m) for layer, m in zip(graph.layers, found, strict=True) if layer.kind in kinds) == expected


def test_files_keep_branches(graph: ChannelGraph, model: EnergyModel, tmp_path: Path) -> None:
    model.save(tmp_path / "energy.json")
    again = EnergyModel.load(tmp_path / "energy.json", graph)
    assert (again.branches, again.branch_groups) == (model.branches, model.branch_groups)
    for widths in random_networks(graph, 5):
        assert again.at(widths) == model.at(widths)
    text = (tmp_path / "energy.json").read_text().replace('"switch": [', '"switch": [99,', 1)
    (tmp_path / "energy.json").write_text(text)
    if '"switch": [99,' in text:
        with pytest.raises(BadFile, match="unknown group"):
            EnergyModel.load(tmp_path / "energy.json")


def test_width_0_is_refused_for_a_group_outside_branches(graph: ChannelGraph, tmp_path: Path) -> None:
    net, x = built(*NETWORKS["basic"][:2])
    made = profile(net, graph, x, PLATFORM, tmp_path / "a.profile", samples=15)
    position = next(n for n, name in enumerate(made.header.groups) if name == "0")
    lines = (tmp_path / "a.profile").read_text().splitlines()
    widths = list(made.samples[1].widths)
    broken = [0 if n == position else width for n, width in enumerate(widths)]
    old, new = (str(many).replace(" ", "") for many in (widths, broken))
    (tmp_path / "b.profile").write_text("\n".join([*lines[:2], lines[2].replace(old, new), *lines[3:]]) + "\n")
    with pytest.raises(BadFile, match="do not fit"):
        Profile.load(tmp_path / "b.profile")


def test_budgets_of_the_fit_report_count_removed_branches(graph: ChannelGraph, model: EnergyModel) -> None:
    wide, deep = (terminal.min_cost(model, depth=depth) / model.dense_profiled for depth in (False, True))
    assert deep < 0.7 * wide
    (found,) = check_feasibility(graph, [model], [model.dense], min_width_ratio=MIN_WIDTH_RATIO, width_multiple=1)
    assert deep == pytest.approx(found.min_cost / model.dense_profiled)  # what ecc compress finds
    text = terminal.reachable_budgets(model)
    assert f"Reachable budgets: {deep:.0%} to 100%, with --no-depth {wide:.0%} to 100%." in text
    assert terminal.check_budget(model, parse_budget(f"{50 * (wide + deep):.0f}%"))[0]
    is_reachable, sentence = terminal.check_budget(model, parse_budget("0.01%"))
    assert not is_reachable and "in every group and without residual branches it still uses" in sentence  # noqa: PT018


def test_feasibility_counts_removed_branches(graph: ChannelGraph, model: EnergyModel) -> None:
    limit = 0.3 * model.dense
    options = {"min_width_ratio": 0.0, "width_multiple": 1}
    (deep,) = check_feasibility(graph, [model], [limit], **options)  # type: ignore[arg-type]
    (wide,) = check_feasibility(graph.without_branches(), [model], [limit], **options)  # type: ignore[arg-type]
    assert deep.min_cost == pytest.approx(model.min_cost)
    assert deep.min_cost < 0.5 * wide.min_cost
    assert not wide.is_feasible
    with pytest.raises(InfeasibleBudget, match=r"Options: .*depth=True \(reaches \d+ %\)"):
        refuse_infeasible(graph.without_branches(), [model], [wide], 0.0, 1, graph)
    (never,) = check_feasibility(graph, [model], [1e-9], **options)  # type: ignore[arg-type]
    with pytest.raises(InfeasibleBudget, match="without the 3 residual branches"):
        refuse_infeasible(graph, [model], [never], 0.0, 1)
