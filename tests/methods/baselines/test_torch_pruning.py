"""Torch-Pruning as a method; where the package is not installed, only the message is tested."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ecc.energy import counted_cost
from ecc.errors import EccError
from ecc.graph import live_masks, slim, trace_channels
from ecc.methods.base import magnitudes
from ecc.methods.baselines.torch_pruning import TorchPruning, TorchPruningSettings
from ecc.methods.registry import find_method
from ecc.training import load_state, save_state
from ecc.zoo.mobilenet import MobileNetV1
from ecc.zoo.resnet_cifar import resnet20
from methods.baselines.cases import finish
from methods.jobs import wide_job, wide_task
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
    assert [find_method(name).name for name in ("tp_magnitude", "tp_taylor")] == ["tp_magnitude", "tp_taylor"]
    assert find_method("tp_taylor").config()["importance"] == "taylor"
    with pytest.raises(EccError, match="importance"):
        TorchPruningSettings(importance="random")


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
@pytest.mark.parametrize("name", ["tp_magnitude", "tp_taylor"])
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
