"""Torch-Pruning as a method; where the package is not installed, only the message is tested."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ecc.energy import counted_cost, parse_budgets
from ecc.errors import EccError
from ecc.graph import live_masks, slim, trace_channels
from ecc.methods import Compression, CompressSettings
from ecc.methods.base import magnitudes
from ecc.methods.baselines.torch_pruning import GroupNorm, GroupNormSettings, TorchPruning, TorchPruningSettings
from ecc.methods.registry import find_method
from ecc.training import Interrupted, load_state, save_state
from ecc.zoo.mobilenet import MobileNetV1
from ecc.zoo.resnet_cifar import resnet20
from methods.baselines.cases import finish
from methods.jobs import history_of, noise_batches, same_result, wide_job, wide_task
from methods.works import work_of


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "timm", None)  # it imports timm where that is installed, and does not need it
    try:
        return importlib.import_module("torch_pruning")
    except ImportError:
        pytest.skip("torch-pruning is not installed")


def test_without_the_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_pruning", None)
    with pytest.raises(EccError, match=r'pip install "ecc-compress\[torch-pruning\]"'):
        TorchPruning().start(work_of())


def test_settings_are_checked_and_name_the_method() -> None:
    names = ["tp_magnitude", "tp_taylor", "tp_group_norm"]
    assert [find_method(name).name for name in names] == names
    assert find_method("tp_taylor").config()["importance"] == "taylor"
    with pytest.raises(EccError, match="importance"):
        TorchPruningSettings(importance="random")
    with pytest.raises(EccError, match="importance"):
        GroupNormSettings(importance="taylor")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("width_multiple", [1, 8])
@pytest.mark.parametrize("is_global", [False, True])
@pytest.mark.parametrize("importance", ["magnitude", "taylor"])
@pytest.mark.parametrize("network", ["chain", "residual", "depthwise"])
def test_the_targets_are_met_and_can_be_lowered(
    network: str, importance: str, is_global: bool, width_multiple: int
) -> None:
    context = work_of(network, share=0.6, width_multiple=width_multiple)
    method = finish(TorchPruning(TorchPruningSettings(importance=importance, is_global=is_global)), context, most=1)
    first = context.widths()
    assert -0.2 < context.constraint_violation(first) <= 0
    context.targets = [0.7 * context.targets[0]]
    assert not method.is_done
    finish(method, context, most=1)
    assert context.constraint_violation(context.widths()) <= 0
    assert sum(context.widths()) < sum(first)
    assert all(width >= least for width, least in zip(context.widths(), context.min_widths(), strict=True))


@pytest.mark.usefixtures("package")
def test_the_channels_are_those_that_the_pruner_removes() -> None:
    """With one layer the magnitude of Torch-Pruning is that of producer, batch norm and consumer together."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.ReLU(), nn.Conv2d(16, 4, 3, bias=False))
    with torch.no_grad():
        for layer, axis in ((net[0], 0), (net[2], 1)):
            layer.weight.mul_(torch.arange(1, 17.0).roll(5).view([-1 if k == axis else 1 for k in range(4)]))
    context = work_of("chain")
    context.model, context.graph = net, trace_channels(net, torch.randn(2, 3, 8, 8))
    method = TorchPruning()
    method.start(context)
    removable, _ = method._common_groups(net, torch.randn(2, 3, 8, 8))
    assert list(removable) == ["0"]
    weak = magnitudes(context)[removable["0"]].argsort()[:4]
    assert sorted(weak.tolist()) == [5, 6, 7, 8]


@pytest.mark.usefixtures("package")
def test_groups_that_it_sees_differently_are_not_pruned() -> None:
    model = resnet20().eval()
    context = work_of("chain")
    context.model, context.graph = model, trace_channels(model, torch.randn(2, 3, 32, 32))
    method = TorchPruning()
    method.start(context)
    found, _ = method._common_groups(model, torch.randn(2, 3, 32, 32))
    assert set(found) == {f"layer{stage}.{block}.conv1" for stage in (1, 2, 3) for block in range(3)}
    assert all(root == name for root, name in found.items())


@pytest.mark.usefixtures("package")
def test_all_groups_with_depthwise_convolutions_are_pruned() -> None:
    model = MobileNetV1().eval()
    context = work_of("chain")
    context.model, context.graph = model, trace_channels(model, torch.randn(2, 3, 32, 32))
    method = TorchPruning()
    method.start(context)
    found, layers = method._common_groups(model, torch.randn(2, 3, 32, 32))
    assert set(found.values()) == {group.name for group in context.graph.prunable}
    assert {"conv_pw_1", "conv_dw_2"} <= layers


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["tp_magnitude", "tp_taylor", "tp_group_norm"])
def test_a_whole_run_meets_its_budget(name: str, tmp_path: Path) -> None:
    job = wide_job("50%", name="residual", factor=0.9, task=wide_task("residual"))
    job.method = find_method(name)
    summary = job.run(tmp_path / "run").summary
    assert (summary.met, summary.method) == (True, name)
    assert summary.batches is not None
    assert summary.batches.total == 28
    assert summary.max_relative_diff is not None
    assert summary.max_relative_diff < 1e-4


@pytest.mark.usefixtures("package")
def test_resuming_counts_calibration_once_and_gives_the_same_channels(tmp_path: Path) -> None:
    whole, resumed = work_of("residual", share=0.6), work_of("residual", share=0.6)
    settings = TorchPruningSettings(importance="taylor")
    method = finish(TorchPruning(settings), whole)
    save_state(tmp_path / "state", {"method": method.state_dict(), "stream": whole.stream.state()})
    state = load_state(tmp_path / "state")
    again = TorchPruning(settings)
    again.start(resumed)
    again.load_state_dict(state["method"])
    again.pruned_for = None  # prune once more, since the weights are those of the dense network
    resumed.stream.restore(state["stream"])
    finish(again, resumed)
    pairs = zip(live_masks(whole.model, whole.graph), live_masks(resumed.model, resumed.graph), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert whole.stream.state() == resumed.stream.state()
    assert slim(whole.model, whole.graph) is not None


@pytest.mark.usefixtures("package")
def test_whole_heads_are_pruned() -> None:
    torch.manual_seed(0)
    model = TransformerNet()
    graph = trace_channels(model, torch.randn(2, 5, 16))
    context = work_of("chain", share=0.5)
    context.model, context.graph, context.costs = model, graph, (counted_cost(graph, "macs"),)
    context.targets = [1.0]
    method = TorchPruning()
    method.context, method._package = context, importlib.import_module("torch_pruning")
    roots, method._allowed = method._common_groups(model, torch.randn(2, 5, 16))
    assert set(roots.values()) == {group.name for group in graph.prunable}
    assert method._heads(model, roots) == {"qkv": 4}
    half = method._prune(model, torch.randn(2, 5, 16), roots, 0.6, 1, {"qkv": 4})
    found = dict(zip(graph.full_widths, half.widths(), strict=True))
    assert found["qkv"] == 2
    assert found["inner"] < 16  # several layers produce the channels of the residual stream


# ---------------------------------------------------------------- sparse training


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def sparse_context(network: str = "residual", **settings: Any) -> Any:
    context = work_of(network, share=0.6, **{"prune_steps": 30, **settings})
    context.make_optimizer = lambda: sgd(context.model)
    return context


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("settings", "trained"),
    [({}, 23), ({"share": 0.5}, 11), ({"share": 0.0}, 0), ({"within_prune_steps": False}, 4)],
)
def test_sparse_training_takes_the_pruning_steps_and_the_rest_is_finetuning(
    settings: dict[str, Any], trained: int, tmp_path: Path
) -> None:
    job = wide_job("50%", name="residual", factor=0.9, task=wide_task("residual"), log_every=1)
    job.method = GroupNorm(GroupNormSettings(**settings))
    summary = job.run(tmp_path / "run").summary
    lines = history_of(tmp_path / "run")
    steps = {phase: [one["step"] for one in lines if one["phase"] == phase] for phase in ("prune", "finetune")}
    assert steps["prune"] == list(range(1, trained + 1))
    assert summary.met
    assert summary.batches is not None
    assert summary.batches.total == 28
    assert len(steps["finetune"]) == 28 - trained - 1  # one batch is the example that is traced


@pytest.mark.usefixtures("package")
def test_the_published_sparse_training_is_as_long_as_finetuning() -> None:
    method: Any = find_method("tp_group_norm", published=True)
    method.start(sparse_context(prune_steps=7, finetune_steps=40))
    assert method.sparse_steps == 40


@pytest.mark.usefixtures("package")
def test_weights_are_regularized_by_the_norm_of_their_channel() -> None:
    """Compared with reg * 2^(4 (max - norm) / (max - min)) * w in a network with one group."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6), nn.Conv2d(6, 4, 1)).train()
    with torch.no_grad():
        net[1].weight.copy_(torch.arange(1, 7.0).roll(2))
    context = work_of("chain")
    context.model, context.graph = net, trace_channels(net, torch.randn(2, 3, 4, 4))
    net.train()
    method = GroupNorm(GroupNormSettings(regularization=0.5))
    method.start(context)
    example, _ = method._find_groups(net)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    method._regularizer(net, example).regularize(net)
    squares = [net[0].weight.square().sum((1, 2, 3)), net[1].weight.square(), net[2].weight.square().sum((0, 2, 3))]
    norms = (torch.stack(squares).mean(0) / torch.stack(squares).mean(0).max()).sqrt()
    gamma = 2 ** (4 * (norms.max() - norms) / (norms.max() - norms.min()))
    for weight, shape in ((net[0].weight, (-1, 1, 1, 1)), (net[1].weight, (-1,)), (net[2].weight, (1, -1, 1, 1))):
        torch.testing.assert_close(weight.grad, 1 + 0.5 * gamma.view(shape) * weight)
    assert net[1].bias.grad is not None
    assert torch.equal(net[1].bias.grad, torch.ones(6))
    assert net.training


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(("regularization", "is_sparser"), [(0.02, True), (1e-9, False)])
def test_sparse_training_shrinks_weak_channels_more_than_plain_training(
    regularization: float, is_sparser: bool
) -> None:
    def weak_part(context: Any) -> dict[str, float]:
        """Norm of the weaker half of the channels, as a fraction of that of all."""
        found = {}
        for name, squares in magnitudes(context).items():
            norms = squares.sqrt().sort().values
            found[name] = float(norms[: len(norms) // 2].sum() / norms.sum())
        return found

    plain, sparse = sparse_context(), sparse_context()
    method = GroupNorm(GroupNormSettings(regularization=regularization))
    method.start(sparse)
    method.step()
    optimizer = sgd(plain.model)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    for step in plain.training(optimizer, method.sparse_steps):
        if step in (17, 23):  # 60 % and 80 % of 29 steps
            optimizer.param_groups[0]["lr"] *= 0.1
    assert plain.stream.lineage == sparse.stream.lineage == 29
    before, after = weak_part(plain), weak_part(sparse)
    assert all((after[name] < 0.95 * before[name]) == is_sparser for name in before)
    if not is_sparser:
        torch.testing.assert_close(sparse.model.state_dict(), plain.model.state_dict(), rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("package")
def test_changed_targets_prune_the_trained_network_again_without_training() -> None:
    context = sparse_context()
    context.model.get_submodule("conv1").eval()
    modes = [module.training for module in context.model.modules()]
    dense = {name: value.clone() for name, value in context.model.state_dict().items()}
    method = finish(GroupNorm(), context, most=2)
    assert [module.training for module in context.model.modules()] == modes
    trained, batches = method.dense_state, context.stream.state()
    assert not torch.equal(trained["conv1.weight"], dense["conv1.weight"])
    first = context.widths()
    for factor in (0.7, 1.5):
        context.targets = [factor * context.targets[0]]
        method.step()
        assert context.stream.state() == batches
        assert method.is_done
        assert context.constraint_violation(context.widths()) <= 0
        assert (sum(context.widths()) < sum(first)) == (factor < 1)
        live = context.model.state_dict()["head.weight"] != 0
        assert torch.equal(context.model.state_dict()["head.weight"][live], trained["head.weight"][live])


@pytest.mark.usefixtures("package")
def test_without_pruning_steps_the_dense_network_is_pruned() -> None:
    context = sparse_context(prune_steps=0)
    dense = context.model.state_dict()["conv1.bias"].clone()
    method = finish(GroupNorm(), context, most=2)
    assert (method.sparse_steps, context.stream.total) == (0, 1)
    live = context.model.state_dict()["conv1.bias"] != 0
    assert torch.equal(context.model.state_dict()["conv1.bias"][live], dense[live])


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("settings", [{}, {"checkpoint_steps": 1}, {"checkpoint_steps": 5}])
def test_a_run_that_is_stopped_in_and_after_sparse_training_ends_the_same(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(folder: str, stop: int | None = None) -> Any:
        def batches(epoch: int) -> Iterator[Any]:
            for number, batch in enumerate(noise_batches((3, 4, 4), epoch), start=1):
                if stop == 4 * epoch + number:
                    os.kill(os.getpid(), 15)
                yield batch

        task = wide_task("residual", train_batches=batches)
        job = wide_job("50%", name="residual", factor=0.8, task=task, **settings)
        job.method = find_method("tp_group_norm")
        return job.run(tmp_path / folder)

    trained: list[int] = []
    train = GroupNorm._train
    monkeypatch.setattr(GroupNorm, "_train", lambda method: (trained.append(1), train(method)))
    whole = run("whole")
    with pytest.raises(Interrupted, match="after step 12, saved in"):
        run("parts", stop=12)
    prune = TorchPruning.step
    with monkeypatch.context() as patch:
        patch.setattr(TorchPruning, "step", lambda method: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run("parts")
        patch.setattr(TorchPruning, "step", lambda method: (prune(method), os.kill(os.getpid(), 15)))
        with pytest.raises(Interrupted, match="of tp_group_norm"):
            run("parts")
    count = len(trained)
    again = run("parts")
    assert len(trained) == count  # it was saved after the training
    assert same_result(whole, again)
    assert again.summary == whole.summary
    assert history_of(tmp_path / "parts") == history_of(tmp_path / "whole")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(("network", "producer"), [("grouped", "conv1"), ("transposed", "up")])
def test_convolutions_that_it_cannot_regularize_are_refused(network: str, producer: str) -> None:
    context = sparse_context(network)
    weights = {name: value.clone() for name, value in context.model.state_dict().items()}
    method = GroupNorm()
    method.start(context)
    with pytest.raises(EccError, match=rf"channels of {producer}, because .* Use tp_magnitude.*--freeze {producer}"):
        method.step()
    assert all(torch.equal(value, weights[name]) for name, value in context.model.state_dict().items())
    assert not method.is_done


@pytest.mark.usefixtures("package")
def test_channels_that_it_cannot_regularize_can_be_frozen(tmp_path: Path) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 1, groups=4), nn.Conv2d(16, 64, 3), nn.Conv2d(64, 2, 1)
    )
    task, settings = wide_task(model=model), CompressSettings(prune_steps=5, finetune_steps=1)
    budgets, frozen = parse_budgets(["macs=60%"]), ["0"]
    with pytest.raises(EccError, match=r"--freeze 0"):
        Compression(task, budgets, settings=settings, method="tp_group_norm").run(tmp_path / "all")
    job = Compression(task, budgets, settings=settings, method="tp_group_norm", freeze=frozen)
    assert job.run(tmp_path / "frozen").summary.met


@pytest.mark.usefixtures("package")
def test_networks_that_it_cannot_trace_or_regularize_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    context = sparse_context("chain")
    method = GroupNorm()
    method.start(context)
    with torch.no_grad():
        context.model.get_submodule("conv1").weight.fill_(1.0)
        context.model.get_submodule("conv2").weight.fill_(1.0)
    with pytest.raises(EccError, match="all channels of its group have the same norm"):
        method.step()
    monkeypatch.setattr(TorchPruning, "_common_groups", lambda *_: ({}, set()))
    with pytest.raises(EccError, match=r"nothing to regularize\. Use another method"):
        method.step()

    def fail(*_: Any) -> Any:
        raise AssertionError("no dependency")

    monkeypatch.setattr(TorchPruning, "_common_groups", fail)
    with pytest.raises(EccError, match=r"cannot trace this network \(.*no dependency.*\)\. Use another method"):
        method.step()


class TransformerNet(nn.Module):
    """One block with four heads between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.inner, self.out = nn.Linear(16, 16), nn.Linear(16, 3)
        self.qkv, self.o, self.fc1, self.fc2 = (
            nn.Linear(16, 48),
            nn.Linear(16, 16),
            nn.Linear(16, 32),
            nn.Linear(32, 16),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        x = self.inner(x)
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.o(heads.transpose(1, 2).reshape(batch, length, -1))
        mixed: torch.Tensor = self.out(x + self.fc2(nn.functional.relu(self.fc1(x))))
        return mixed
