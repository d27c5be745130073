"""One-shot pruning and layer-wise reconstruction."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.energy import parse_budgets
from ecc.errors import BadTask
from ecc.graph import live_channels, mask_branches_, mask_channels_, removed_branches, trace_channels
from ecc.methods import Compression, compression
from ecc.methods.base import PruningContext
from ecc.methods.one_shot import _SLACK, Move, OneShot, OneShotSettings, Round, _less
from ecc.methods.reconstruction import linear_consumers, reconstruct_, record_outputs
from ecc.methods.registry import find_method
from ecc.settings import make_settings
from ecc.task import Task
from methods.jobs import Truth, one_shot_context, true_model, wrong_model


class Block(nn.Module):
    """A residual MLP that is normalized before, as in a transformer."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up, self.down = nn.Linear(size, hidden), nn.Linear(hidden, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Some of them, and a linear head."""

    def __init__(self, count: int = 4, size: int = 12, hidden: int = 24) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size, hidden) for _ in range(count))
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


@pytest.fixture
def net() -> Blocks:
    torch.manual_seed(0)
    return Blocks()


def data(count: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 6, 12, generator=generator) for _ in range(count)]


def error_of(model: nn.Module, dense: nn.Module, inputs: list[Tensor]) -> float:
    with torch.no_grad():
        return float(torch.stack([(model(x) - dense(x)).square().mean() for x in inputs]).mean())


def test_reconstruction_lowers_the_error_of_pruned_and_of_removed_blocks(net: Blocks) -> None:
    graph = trace_channels(net, data(1)[0], verify=False)
    consumers = [one.tensor for group in graph.prunable for one in group.slices if one.is_consumer]
    paths = linear_consumers(net, consumers)
    assert paths == [f"blocks.{number}.down" for number in range(4)]
    dense = record_outputs(net, paths, data())
    assert set(dense.residuals) == set(paths)  # verified: each adds to the stream that the norm before it takes
    removed = copy.deepcopy(net)
    mask_branches_(removed, graph, [graph.branches[0].name])
    pruned = copy.deepcopy(net)
    mask_channels_(pruned, graph, {group.name: torch.arange(8) for group in graph.prunable})
    for small in (removed, pruned):
        before = error_of(small, net, data(12)[8:])
        live = live_channels(small, graph)
        reconstruct_(small, dense, paths, data())
        assert error_of(small, net, data(12)[8:]) < 0.8 * before
        assert live_channels(small, graph) == live  # masked channels stay masked


def test_a_refit_leaves_pruned_channels_of_the_residual_stream_at_zero(net: Blocks) -> None:
    paths = [f"blocks.{number}.down" for number in range(4)]
    dense = record_outputs(net, paths, data())
    layer = net.blocks[1].down
    before = layer.bias[4].item()
    with torch.no_grad():
        layer.weight[:3] = 0
        layer.bias[:3] = 0
        net.blocks[2].up.weight[:, :6] = 0  # something to make up for
    reconstruct_(net, dense, paths, data())
    assert not layer.weight[:3].any()
    assert not layer.bias[:3].any()
    assert layer.bias[4].item() != before


def test_a_network_that_is_not_pruned_does_not_change(net: Blocks) -> None:
    paths = [f"blocks.{number}.down" for number in range(4)]
    dense = record_outputs(net, paths, data())
    same = copy.deepcopy(net)
    reconstruct_(same, dense, paths, data())
    assert error_of(same, net, data()) < 1e-10


def test_norms_after_the_sum_are_not_taken_for_norms_before_it() -> None:
    class After(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(12, 8), nn.Linear(8, 12), nn.LayerNorm(12)
            self.up2, self.down2, self.norm2 = nn.Linear(12, 8), nn.Linear(8, 12), nn.LayerNorm(12)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x + self.down(torch.relu(self.up(x))))
            return self.norm2(x + self.down2(torch.relu(self.up2(x))))  # type: ignore[no-any-return]

    assert not record_outputs(After(), ["down", "down2"], data(2)).residuals


def context_of(net: nn.Module, share: float) -> PruningContext:
    graph = trace_channels(net, data(1)[0], verify=False)
    inputs, dense = data(), copy.deepcopy(net)
    batches = [(x, dense(x).detach()) for x in inputs]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean() + outputs.square().mean()

    task = Task(name="blocks", model=net, example_input=inputs[0], loss=loss, train_batches=batches)
    return one_shot_context(task, graph, share, lambda model: -error_of(model, dense, inputs[:4]), loss=loss)


def test_it_meets_its_target_and_follows_a_changed_one(net: Blocks) -> None:
    context = context_of(net, 0.7)
    method = OneShot(OneShotSettings(batches=4))
    method.start(context)
    assert not method.is_done
    method.step()
    assert method.is_done
    first = context.widths()
    violation = context.constraint_violation(first)
    assert -0.02 < violation <= 0
    path = list(method.path)
    context.targets = [0.8 * target / 0.7 for target in context.targets]
    method.step()  # from the dense network, along the same path
    assert method.path[: len(path)] == path
    assert context.constraint_violation(context.widths()) <= 0
    assert sum(context.widths()) > sum(first)


@pytest.mark.parametrize("seed", range(5))
def test_many_small_moves_end_just_below_the_target(seed: int) -> None:
    # What a move saves is rounded to the unit above, and the errors of forty moves add up to more than the slack.
    draw = random.Random(seed)
    saved = {f"group{number}": draw.uniform(0.0016, 0.0020) for number in range(60)}
    moves = [Move({name: 0}, draw.uniform(0.1, 3.0), 0.0) for name in saved]
    start, reached = dict.fromkeys(saved, 1), dict.fromkeys(saved, 0)
    method: Any = OneShot()
    method.context, method._branches = SimpleNamespace(graph=SimpleNamespace(full_widths=start)), {}
    target = 1 - 0.6 * sum(saved.values())
    method._violation = lambda widths: (1 - sum(saved[name] for name in saved if not widths[name])) / target - 1
    found = method._end(Round(start, tuple(moves), reached))
    assert -_SLACK <= method._violation(found) <= 0


def test_a_branch_that_does_nothing_is_removed_first(net: Blocks) -> None:
    with torch.no_grad():
        net.blocks[2].down.weight.mul_(1e-4)  # type: ignore[union-attr]
        net.blocks[2].down.bias.zero_()  # type: ignore[union-attr]
    context = context_of(net, 0.75)
    method = OneShot(OneShotSettings(batches=4, refits=False))
    method.start(context)
    method.step()
    assert removed_branches(context.model, context.graph) == ("blocks.2",)


def test_heads_are_ranked_by_the_loss_without_each() -> None:
    torch.manual_seed(0)
    net = Blocks(count=2, hidden=3)
    before = copy.deepcopy(net.state_dict())
    context = context_of(net, 0.8)
    method = OneShot(OneShotSettings(batches=2))
    method.start(context)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    dense = context.held_out(net)
    for group in context.graph.prunable:
        if group.width != 3:
            continue
        for unit in range(3):
            masked = copy.deepcopy(net)
            mask_channels_(masked, context.graph, {group.name: [unit]})
            assert float(method.importance[group.name][unit]) == pytest.approx(dense - context.held_out(masked))
    wide = OneShot(OneShotSettings(batches=2))
    wide.start(context_of(Blocks(hidden=24), 0.8))
    assert all(bool((one >= 0).all()) for one in wide.importance.values())  # squares: the Taylor criterion


class StepCost:
    """Cost of networks whose groups have three channels: the second one saves most, as heads of a KV cache may."""

    resource, unit, label = "decode", "J", "estimated"

    def __init__(self, branches: tuple[str, ...]) -> None:
        self.branches = branches

    def value(self, widths: Tensor) -> Tensor:
        """Joules."""
        saved = {2: 0.1, 1: 10.0, 0: 10.5}
        return torch.tensor(100.0 - sum(saved.get(int(one), 0.0) for one in widths.tolist()), dtype=torch.float64)

    def to(self, device: object) -> StepCost:
        del device
        return self


def test_several_heads_are_removed_at_once_where_that_saves_more() -> None:
    torch.manual_seed(0)
    net = Blocks(hidden=3)
    with torch.no_grad():
        for block in net.blocks:
            block.down.weight[:, 1:] *= 0.01  # type: ignore[union-attr,operator]
    context = context_of(net, 0.8)
    groups = tuple(one if one.width == 3 else replace(one, frozen="wide") for one in context.graph.groups)
    hidden = [number for number, one in enumerate(groups) if one.width == 3]
    assert len(hidden) == 4
    context.graph = replace(context.graph, groups=groups)
    context.costs = (StepCost(tuple(one.name for one in context.graph.branches)),)  # type: ignore[assignment]
    context.targets = [80.5]
    method = OneShot(OneShotSettings(batches=4, refits=False))
    method.start(context)
    method.step()
    tried = [tuple(move.widths.values()) for move in method.path[0].moves]
    assert sorted(tried) == [(0,)] * 4 + [(1,)] * 4 + [(2,)] * 4
    assert sorted(context.widths()[number] for number in hidden) == [1, 1, 3, 3]
    assert removed_branches(context.model, context.graph) == ()
    name = groups[hidden[0]].name
    increases = {move.widths[name]: move.increase for move in method.path[0].moves if name in move.widths}
    assert method._next_above(method.path[0], name, 1) == (2, increases[2])
    assert method._next_above(method.path[0], name, 2) == (3, 0.0)


@pytest.mark.parametrize(
    ("width", "full", "expected"), [(3, 3, 2), (1536, 1536, 1344), (64, 64, 56), (1, 64, 0), (128, 1536, 64)]
)
def test_widths_of_moves_are_multiples_that_kernels_like(width: int, full: int, expected: int) -> None:
    assert _less(width, full, 0.125) == expected


def test_settings_belong_to_the_run() -> None:
    assert OneShot(OneShotSettings(batches=3)).config()["batches"] == 3


@pytest.mark.parametrize(("name", "budget"), [("one_shot", "60%"), ("flap", "50%"), ("wanda_sp", "60%")])
def test_a_stopped_run_ends_as_if_it_had_not_been_stopped(
    name: str, budget: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job() -> Compression:
        torch.manual_seed(0)
        inputs = data(40)
        batches = [(x, torch.randint(0, 5, x.shape[:2])) for x in inputs]

        def held_out(model: nn.Module) -> float:
            with torch.no_grad():
                return -float(sum(F.cross_entropy(model(x).flatten(0, 1), y.flatten()) for x, y in batches[32:]))

        task = Task(
            name="blocks", model=Blocks(), example_input=inputs[0][:2], train_batches=lambda _: iter(batches[:32]),
            loss=lambda outputs, labels: F.cross_entropy(outputs.flatten(0, 1), labels.flatten()),
            evaluate_held_out=held_out,
        )  # fmt: skip
        graph = trace_channels(task.model, task.example_input, verify=False)
        settings = {"pretrain_steps": 5, "prune_steps": 4, "finetune_steps": 3, "checkpoint_steps": 1, "lr": 1e-3}
        return Compression(
            task, parse_budgets((budget,)), wrong_model(graph, 0.6), meter=Truth(true_model(graph)),
            settings=make_settings("default", settings), method=find_method(name),
        )  # fmt: skip

    whole = job().run(tmp_path / "whole")
    after_step, calls = compression._Saver.after_step, list[int]()

    def stopped(self: Any, *, is_measured: bool) -> None:
        after_step(self, is_measured=is_measured)
        calls.append(0)
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(compression._Saver, "after_step", stopped)
    with pytest.raises(KeyboardInterrupt):
        job().run(tmp_path / "parts")
    parts = job().run(tmp_path / "parts")
    assert parts.widths == whole.widths
    for one, other in zip(parts.model.state_dict().values(), whole.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)


def test_batches_of_different_lengths_are_refused(net: Blocks) -> None:
    with pytest.raises(BadTask, match=r"different shapes, such as \(6, 12\) and \(5, 12\).*Pad the batches"):
        record_outputs(net, ["head"], [torch.randn(4, 6, 12), torch.randn(4, 5, 12)])
