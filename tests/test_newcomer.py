"""The README's script with a network and data of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from test_readme import folder, steps  # noqa: F401 - a fixture

ROOT = Path(__file__).resolve().parent.parent

NET = '''
"""Tells waves from ramps in noise; written without knowing ECC."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv1d(channels, 2 * channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm1d(2 * channels)
        self.conv2 = nn.Conv1d(2 * channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm1d(channels)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(1, 32, 5, stride=2, padding=2)
        self.blocks = nn.Sequential(Block(32), Block(32))
        self.head = nn.Linear(32, 2)

    def forward(self, x):
        return self.head(self.blocks(F.relu(self.stem(x))).mean(-1))


torch.manual_seed(0)
time = torch.linspace(0, 1, 64)
labels = torch.randint(2, (1024,))
waves = torch.sin(6.28 * (3 + 5 * torch.rand(1024, 1)) * time + 6 * torch.rand(1024, 1))
ramps = (4 * torch.rand(1024, 1) - 2) * time
signals = (torch.where(labels[:, None] == 1, waves, ramps) + 0.5 * torch.randn(1024, 64))[:, None]
loader = DataLoader(TensorDataset(signals, labels), batch_size=128, shuffle=True)


def accuracy(model):
    with torch.no_grad():
        return float((model.eval()(signals).argmax(1) == labels).double().mean())
'''


@pytest.mark.slow
def test_the_script_of_the_readme_compresses_a_network_of_ones_own(folder: Path) -> None:  # noqa: F811
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    script = next(text for _, kind, text in steps(page) if kind == "python" and "ecc.compress(" in text)
    (folder / "net.py").write_text(NET, encoding="utf-8")
    names: dict[str, object] = {"__name__": "__main__"}
    exec(script, names)
    result, net = names["result"], names["Net"]
    assert result.met  # type: ignore[attr-defined]
    assert result.score > 0.9  # type: ignore[attr-defined]
    sizes = [sum(p.numel() for p in model.parameters()) for model in (net(), result.model)]  # type: ignore[attr-defined, operator]
    assert sizes[1] < 0.8 * sizes[0]
    assert result.model(torch.zeros(2, 1, 64)).shape == (2, 2)  # type: ignore[attr-defined]
