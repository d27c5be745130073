"""A person who has never seen the project has a small training script of their own, and the README.

The script below is theirs: another network than the README's, other data, written before they heard of ECC. They save
the README's script beside it and run that, word for word. They end with a network that meets the budget, in a file.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from test_examples import printed
from test_readme import steps

ROOT = Path(__file__).resolve().parent.parent

TRAIN = '''
"""Tells waves from ramps in noise."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)


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


time = torch.linspace(0, 1, 64)
labels = torch.randint(2, (1024,))
waves = torch.sin(6.28 * (3 + 5 * torch.rand(1024, 1)) * time + 6 * torch.rand(1024, 1))
ramps = (4 * torch.rand(1024, 1) - 2) * time
signals = torch.where(labels[:, None] == 1, waves, ramps) + 0.5 * torch.randn(1024, 64)
loader = DataLoader(TensorDataset(signals[:, None], labels), batch_size=64, shuffle=True)

model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(4):
    for x, y in loader:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
'''

CHECKS = """
import torch
from train import labels, signals

with torch.no_grad():
    same = torch.equal(again.eval()(signals[:, None]), small(signals[:, None]))
    right = float((again(signals[:, None]).argmax(1) == labels).float().mean())
sizes = [sum(p.numel() for p in net.parameters()) for net in (Net(), again)]
print(f"CHECKS share={float(solver.cost[0]) / energy.dense} same={same} accuracy={right} sizes={sizes[1] / sizes[0]}")
"""


@pytest.mark.slow
def test_a_newcomer_ends_with_a_small_network_of_their_own(tmp_path: Path) -> None:
    readme = [
        step for step in steps((ROOT / "README.md").read_text(encoding="utf-8")) if step.verb in ("save", "python")
    ]
    assert [step.verb for step in readme] == ["save", "python"], "the README has a script of theirs, and one of ours"
    assert readme[0].name == "train.py"
    (tmp_path / "train.py").write_text(TRAIN, encoding="utf-8")
    (tmp_path / "compress.py").write_text(readme[1].text + CHECKS, encoding="utf-8")
    said = printed(["compress.py"], tmp_path)
    assert "J a batch (estimated)" in said
    share, same, accuracy, sizes = re.search(r"CHECKS share=(\S+) same=(\S+) accuracy=(\S+) sizes=(\S+)", said).groups()  # type: ignore[union-attr]
    assert 0.4 < float(share) <= 0.5, "the budget of the README is 50%"
    assert same == "True", "the file gives the very network that was saved"
    assert float(accuracy) > 0.9
    assert float(sizes) < 0.8
    assert (tmp_path / "slim.safetensors").is_file()
