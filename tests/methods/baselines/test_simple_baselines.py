"""Uniform, greedy and scratch, and the recalibration of batch norms."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ecc.energy import counted_cost, parse_budgets
from ecc.errors import BadTask, BadWidths, InfeasibleBudget
from ecc.graph import ChannelGraph, live_masks, trace_channels
from ecc.measure import Reading
from ecc.methods import Compression, Greedy, Method, PruningContext, Scratch, Uniform
from ecc.methods.base import magnitudes
from ecc.methods.baselines.greedy import GreedyTaylor
from ecc.methods.baselines.isomorphic import Isomorphic, ranks_in_classes, structure
from ecc.methods.baselines.recalibration import recalibrate_, recalibrated
from ecc.methods.baselines.scratch import reinitialise_
from ecc.settings import make_settings
from ecc.task import Task
from graph.branch_nets import NETWORKS, built
from methods.baselines.cases import finish, lines_of
from methods.jobs import Truth, _graph, true_model, wide_job, wide_task
from methods.nets import traced
from methods.works import work_of


@pytest.mark.parametrize("width_multiple", [1, 8])
@pytest.mark.parametrize("name", ["chain", "residual", "grouped"])
def test_uniform_keeps_the_largest_ratio_that_meets_the_targets(name: str, width_multiple: int) -> None:
    context = work_of(name, share=0.4, width_multiple=width_multiple)
    finish(Uniform(), context)
    full = [group.width for group in context.graph.groups]
    ratio = lines_of(context)[-1]["ratio"]
    assert context.widths() == context.round_widths([ratio * width for width in full])
    larger = context.round_widths([(ratio + 1e-6) * width + 1e-6 for width in full])
    assert larger == context.widths() or context.constraint_violation(larger) > 0


def test_greedy_removes_the_least_magnitude_per_joule() -> None:
    context = work_of("chain", share=0.5)
    left = {name: sorted(values.tolist()) for name, values in magnitudes(context).items()}
    finish(Greedy(), context)
    widths, least = (
        dict(context.graph.full_widths),
        dict(zip(context.graph.full_widths, context.min_widths(), strict=True)),
    )
    while context.constraint_violation(list(widths.values())) > 0:
        slope = dict(zip(widths, context.costs[0].gradient(context.graph.widths(widths)).tolist(), strict=True))
        name = min((n for n in left if widths[n] > least[n]), key=lambda name: left[name][0] / slope[name])
        left[name].pop(0)
        widths[name] -= 1
    found = context.named_widths()
    assert all(abs(found[name] - width) <= 2 for name, width in widths.items())  # the slope is updated 50 times only


# ---------------------------------------------------------------- isomorphic


@pytest.mark.parametrize("name", ["chain", "residual"])
def test_isomorphic_keeps_the_largest_ratio_that_meets_the_targets(name: str) -> None:
    context = work_of(name, share=0.5)
    finish(Isomorphic(), context)
    assert -0.1 < context.constraint_violation(context.widths()) <= 0


def test_isomorphic_groups_share_a_ranking_and_others_do_not() -> None:
    torch.manual_seed(0)
    model = TinyViT()
    graph = trace_channels(model, torch.randn(2, 5, 16))
    kinds = {}
    for group in graph.prunable:
        kinds.setdefault(structure(group), []).append(group.name)
    assert sorted(sorted(names) for names in kinds.values()) == [["0.fc1", "1.fc1"], ["0.q", "1.q"]]
    importance = {group.name: torch.rand(group.width) for group in graph.prunable}
    importance["1.fc1"] *= 100  # the scale of a group does not matter
    importance["0.fc1"][:4] += 50  # a few channels that stand out raise the mean, so that the others come last
    ranks = ranks_in_classes(graph.prunable, importance)
    assert sorted([*ranks["0.fc1"].tolist(), *ranks["1.fc1"].tolist()]) == [number / 64 for number in range(64)]
    kept = {name: int((ranks[name] < 0.5).sum()) for name in ("0.fc1", "1.fc1")}
    assert kept == {"0.fc1": 4, "1.fc1": 28}
    assert sorted(ranks["0.q"].tolist() + ranks["1.q"].tolist()) == [number / 8 for number in range(8)]


class TinyViT(nn.Sequential):
    """Two blocks with four heads, whose residual stream is the output."""

    def __init__(self) -> None:
        super().__init__(TinyBlock(), TinyBlock())


class TinyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (layer(x).view(batch, length, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.o(heads.transpose(1, 2).reshape(batch, length, -1))
        mixed: torch.Tensor = x + self.fc2(nn.functional.relu(self.fc1(x)))
        return mixed


# ---------------------------------------------------------------- scratch


def halves(context: PruningContext) -> dict[str, int]:
    return {group.name: group.width // 2 for group in context.graph.prunable if group.width >= 4}


def scratched(name: str = "chain", seed: int = 0, **fields: Any) -> PruningContext:
    context = context_of(name, seed)
    finish(Scratch(halves(context), **fields), context)
    return context


def context_of(name: str, seed: int = 0) -> PruningContext:
    """A context of one of `NETS`; scratch needs neither costs nor batches."""
    context = work_of("chain", seed=seed)
    context.model, _, context.graph = traced(name)
    return context


def is_equal(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", ["residual", "depthwise", "digits"])
def test_scratch_masks_the_given_widths_and_reinitialises_all_weights(name: str) -> None:
    context = context_of(name)
    dense, importance, given = copy.deepcopy(context.model), magnitudes(context), halves(context)
    random = torch.get_rng_state()
    method = finish(Scratch(given), context)
    assert torch.equal(random, torch.get_rng_state())
    assert context.named_widths() == {**context.graph.full_widths, **given}
    for group, mask in zip(context.graph.groups, live_masks(context.model, context.graph), strict=True):
        if group.name in given:
            assert importance[group.name][mask].min() >= importance[group.name][~mask].max()
    for key, weight in context.model.state_dict().items():
        assert weight.dim() < 2 or ((weight != dense.state_dict()[key]) | (weight == 0)).all()
    resumed = Scratch(given)
    resumed.start(context)
    resumed.load_state_dict(method.state_dict())
    assert resumed.is_done
    assert resumed.config() == {"widths": given}


def test_scratch_depends_on_the_seed_and_resets_statistics() -> None:
    one, same, other = (scratched(seed=seed).model for seed in (0, 0, 1))
    assert is_equal(one, same)
    assert not is_equal(one, other)
    twins = [traced("digits")[0] for _ in range(2)]
    for twin in twins:
        for key, buffer in twin.named_buffers():
            if key.endswith("running_mean"):
                buffer.fill_(7)
        reinitialise_(twin, 3)
        assert not any(buffer.any() for key, buffer in twin.named_buffers() if key.endswith("running_mean"))
    assert is_equal(*twins)
    assert not is_equal(twins[0], traced("digits")[0])


def test_scratch_refuses_what_it_cannot_do() -> None:
    context = context_of("tied")
    with pytest.raises(BadTask, match="weight cannot be reinitialised"):
        Scratch(halves(context)).start(context)
    context = context_of("chain")
    group = context.graph.prunable[0]
    frozen = next(group for group in context.graph.groups if group.frozen is not None)
    for wrong in ({"nobody": 3}, {group.name: 0}, {group.name: group.width + 1}, {frozen.name: frozen.width - 1}):
        with pytest.raises(BadWidths, match=r"nobody|cannot have width"):
            Scratch(wrong).start(context)


def test_scratch_trains_the_widths_of_another_run_and_100_percent_is_the_dense_control(tmp_path: Path) -> None:
    def job(method: Any, budget: str) -> Any:
        made = wide_job(budget, name="residual", factor=1.0, prune_steps=1, kd_weight=0.0)
        made.method = method
        return made

    other = job(Uniform(), "60%").run(tmp_path / "uniform")
    found = job(Scratch(other.widths), "60%").run(tmp_path / "scratch")
    assert found.widths == other.widths
    assert found.summary.method == "scratch"
    assert found.summary.budgets["energy"].result == other.summary.budgets["energy"].result
    dense = job(Uniform(), "100%").run(tmp_path / "dense")
    assert dense.widths == dense.graph.full_widths


# ---------------------------------------------------------------- recalibration


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, momentum=0.3), nn.Dropout(0.5), nn.Conv2d(4, 3, 1))


def batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [5 + torch.randn(6, 2, 5, 5) for _ in range(3)]


def test_statistics_are_the_means_over_all_batches_and_nothing_else_changes() -> None:
    model, seen = net(), batches()
    model[2].eval()
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    modes, random = [module.training for module in model.modules()], torch.get_rng_state()
    recalibrate_(model, seen)
    with torch.no_grad():
        outputs = [model[0](batch) for batch in seen]
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm2d)
    torch.testing.assert_close(norm.running_mean, torch.stack([one.mean((0, 2, 3)) for one in outputs]).mean(0))
    torch.testing.assert_close(norm.running_var, torch.stack([one.var((0, 2, 3)) for one in outputs]).mean(0))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())
    assert [module.training for module in model.modules()] == modes
    assert norm.momentum == 0.3
    assert torch.equal(torch.get_rng_state(), random)
    unused = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    recalibrate_(unused, ["no inputs at all"])  # not run
    assert unused[1].running_mean is None


def test_the_old_statistics_return_even_after_an_error() -> None:
    model, seen = net(), batches()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with contextlib.suppress(RuntimeError), recalibrated(model, seen):
        assert not torch.equal(model.state_dict()["1.running_mean"], before["1.running_mean"])
        raise RuntimeError("scoring failed")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.gpu
def test_recalibration_does_not_synchronise() -> None:
    model, seen = net().cuda(), [batch.cuda() for batch in batches()]
    recalibrate_(model, seen)  # loads libraries, which synchronises
    found = model[1].running_mean.clone()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with recalibrated(model, seen):
            inside = model[1].running_mean.clone()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(inside, found)


def test_scratch_removes_the_branches_that_ecc_removed(tmp_path: Path) -> None:
    net, example = built(*NETWORKS["basic"][:2])
    batches = [(torch.randn(4, *example.shape[1:]), torch.randint(2, (4,))) for _ in range(4)]
    task = Task(
        name="branches", model=net, example_input=example, train_batches=lambda _: iter(batches),
        loss=lambda outputs, labels: F.cross_entropy(outputs.flatten(1), labels), evaluate_held_out=lambda model: 0.5,
    )  # fmt: skip
    graph = trace_channels(net, example, verify=False)
    made = Compression(
        task, parse_budgets(("macs=25%",)), settings=make_settings("default", {"prune_steps": 12, "finetune_steps": 2})
    ).run(tmp_path / "ecc")
    assert 0 in made.widths.values()
    found = Compression(
        task, parse_budgets(("macs=25%",)), settings=make_settings("default", {"prune_steps": 1, "finetune_steps": 2}),
        method=Scratch(made.widths),
    ).run(tmp_path / "scratch")  # fmt: skip
    assert found.widths == made.widths
    widths = [[sizes[group.name] for group in graph.groups] for sizes in (found.widths, graph.full_widths)]
    macs, dense = (counted_cost(graph, "macs").value(torch.tensor(one, dtype=torch.float64)) for one in widths)
    assert macs <= 0.25 * dense


@pytest.mark.parametrize("method", [Uniform, Greedy, GreedyTaylor, Isomorphic])
def test_one_shot_methods_end_where_the_device_costs_more_than_the_profile(
    method: Callable[[], Method], tmp_path: Path
) -> None:
    class Dearer(Truth):
        def cost(self, graph: ChannelGraph, widths: Mapping[str, int]) -> Reading:
            reading = super().cost(graph, widths)
            return replace(reading, joules=1.05 * reading.joules)

    model = true_model(_graph("chain"))
    (floor,) = wide_job(factor=1.0).feasibility()
    job = Compression(
        wide_task("chain", evaluate_held_out=lambda net: 0.0), parse_budgets((f"{1.02 * floor.min_cost} J",)), model,
        meter=Dearer(model), method=method(),
        settings=make_settings("default", {"prune_steps": 24, "finetune_steps": 2}),
    )  # fmt: skip
    steps, step = [], job.method.step

    def counted() -> None:
        steps.append(0)
        assert len(steps) < 100, "the method never ends"
        step()

    job.method.step = counted  # type: ignore[method-assign]
    with contextlib.suppress(InfeasibleBudget):
        assert not job.run(tmp_path / "run").summary.met
    assert steps
