"""A loop of your own: the solver takes the optimizer's place, and a learning-rate schedule works as before.

python examples/own_loop.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ecc


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    images, labels = data.tensors
    with torch.no_grad():
        return float((model.eval()(images).argmax(1) == labels).float().mean())


def main() -> None:
    torch.manual_seed(0)
    bunch = load_digits()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images = torch.tensor(bunch.images, device=device).float().unsqueeze(1) / 16
    labels = torch.tensor(bunch.target, device=device)
    train, test = TensorDataset(images[:1400], labels[:1400]), TensorDataset(images[1400:], labels[1400:])
    loader = DataLoader(train, batch_size=64, shuffle=True)

    model = network().to(device)
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(4):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            adam.step()
            adam.zero_grad()
    dense = accuracy(model, test)

    example_input = images[:64]
    graph = ecc.trace_channels(model, example_input)
    meter = ecc.find_meter("platform:jetson-tx2")  # an estimate; ecc.find_meter() for this device's own meter
    with tempfile.TemporaryDirectory() as folder:
        energy = ecc.fit(ecc.profile(model, graph, example_input, meter, Path(folder) / "net.profile", samples=60))

    epochs = 6
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    solver = ecc.EccSolver(model, graph, energy, budget="50%", steps=epochs * len(loader), optimizer=adam)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(solver, epochs)
    for epoch in range(epochs):
        model.train()
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            solver.step()
            solver.zero_grad()
        schedule.step()
        share = float(solver.cost[0]) / energy.dense_profiled
        print(f"epoch {epoch}: {share:.0%} of the dense energy ({energy.label}), widths {list(solver.widths.values())}")

    small = ecc.slim(model.eval(), graph)
    print(f"accuracy {dense:.1%} -> {accuracy(small, test):.1%}")
    print(f"parameters {sum(p.numel() for p in model.parameters())} -> {sum(p.numel() for p in small.parameters())}")


if __name__ == "__main__":
    main()
