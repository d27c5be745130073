"""A compression that prunes the residual width of networks with LayerNorm, from the budget to the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ecc
from ecc.energy import CountedCost
from ecc.export import export_model
from ecc.graph import slim, trace_channels
from ecc.graph.masked_norm import MaskedNorm


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, -1))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Transformer(nn.Module):
    """A vision transformer for images of 8 pixels."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches, self.positions = nn.Conv2d(3, width, 4, stride=4), nn.Parameter(torch.randn(1, 4, width))
        self.blocks = nn.Sequential(Block(width, 4), Block(width, 4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(epoch)
    for _ in range(8):
        images = torch.randn(4, 3, 8, 8, generator=generator)
        yield images, torch.randint(5, (4,), generator=generator)


def compress(folder: Path, budget: str = "macs=25%", items: int = 1, **options: Any) -> Any:
    torch.manual_seed(0)
    settings = {"depth": False, "prune_steps": 24, "finetune_steps": 6, "progress": False, **options}
    return ecc.compress(
        Transformer(),
        batches,
        budget,
        loss=F.cross_entropy,
        evaluate=lambda _: 0.5,
        example_input=torch.randn(items, 3, 8, 8, generator=torch.Generator().manual_seed(0)),
        folder=folder,
        **settings,
    )


def test_a_budget_below_that_of_heads_and_hidden_widths_is_met(tmp_path: Path) -> None:
    done = compress(tmp_path / "run", "macs=10%")
    assert done.met
    assert done.summary.widths["patches"] < 32
    assert not any(isinstance(module, MaskedNorm) for module in done.model.modules())
    assert done.model.norm.normalized_shape == (done.summary.widths["patches"],)
    loaded = ecc.load_slim(Transformer(), tmp_path / "run").eval()
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(loaded(x), done.model.eval()(x))
    again = compress(tmp_path / "run", "macs=10%")
    assert torch.equal(again.model.eval()(x), loaded(x))


@pytest.mark.thorough
def test_the_residual_width_can_be_kept(tmp_path: Path) -> None:
    done = compress(tmp_path / "run", "macs=50%", freeze=["patches"])
    assert done.met
    assert done.summary.widths["patches"] == 32


def test_an_energy_budget_with_profile_and_energy_model(tmp_path: Path) -> None:
    meter = "platform:raspberry-pi-5"  # where starting a kernel is a small part of the energy
    done = compress(tmp_path / "run", "30%", items=256, meter=meter, samples=40, prune_steps=40)
    assert done.met
    assert done.summary.widths["patches"] < 32
    assert done.summary.max_relative_diff < 1e-4


@pytest.mark.thorough
def test_the_onnx_file_has_the_layer_norms(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    small = compress(tmp_path / "run").model.eval()
    export_model(small, torch.randn(1, 3, 8, 8), tmp_path / "net.onnx")
    kinds = [node.op_type for node in onnx.load(str(tmp_path / "net.onnx")).graph.node]
    assert kinds.count("LayerNormalization") == 5


@pytest.mark.parametrize("method", ["uniform", pytest.param("greedy", marks=pytest.mark.thorough)])
def test_baselines_prune_it_too(method: str, tmp_path: Path) -> None:
    done = compress(tmp_path / "run", "macs=25%", method=method)
    assert done.met
    assert done.summary.widths["patches"] < 32


def test_a_users_own_training_loop() -> None:
    torch.manual_seed(0)
    net, x = Transformer(), torch.randn(4, 3, 8, 8)
    graph = trace_channels(net, x)
    solver = ecc.EccSolver(net, graph, CountedCost(graph.structure, "macs"), budget="20%", steps=30, lr=1e-3)
    for _ in range(40):
        solver.zero_grad()
        F.cross_entropy(net(x), torch.arange(4)).backward()
        solver.step()
    small = slim(net, graph)
    assert small.patches.out_channels < 32
    torch.testing.assert_close(small.eval()(x), net.eval()(x), rtol=1e-4, atol=1e-5)
