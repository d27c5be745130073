"""Prune a CNN with a DataLoader to half of its energy. Run: python examples/cnn.py."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ecc

torch.manual_seed(0)
images = torch.tensor(load_digits().images).float().unsqueeze(1) / 16
labels = torch.tensor(load_digits().target)
loader = DataLoader(TensorDataset(images[:1400], labels[:1400]), batch_size=128, shuffle=True)
model = nn.Sequential(
    *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
    *(nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    nn.Linear(64, 10),
)


def accuracy(model):
    return (model.eval()(images[1400:]).argmax(1) == labels[1400:]).float().mean().item()


print(ecc.inspect(model, images[:1]))
# The platform estimates energy from published constants; leave `meter` out on a machine with an energy meter.
result = ecc.compress(model, loader, budget="50%", loss=F.cross_entropy, evaluate=accuracy, epochs=8,
                      lr=1e-3, meter="platform:jetson-tx2", pretrain_steps=60)  # fmt: skip
print(result)
