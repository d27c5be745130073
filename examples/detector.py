"""Prune a detector with several outputs, like YOLO. Run: python examples/detector.py."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ecc


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.SiLU())
        self.deep = nn.Sequential(nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.SiLU())
        self.heads = nn.ModuleList(nn.Conv2d(width, 5, 1) for width in (32, 64))  # a box and an object score

    def forward(self, x):
        fine = self.stem(x)
        maps = [self.heads[0](fine), self.heads[1](self.deep(fine))]
        return maps if self.training else torch.cat([one.flatten(2) for one in maps], 2)


def loss(maps, boxes):
    return sum(F.mse_loss(one.mean((2, 3))[:, :4], boxes) + F.softplus(-one[:, 4]).mean() for one in maps)


loader = DataLoader(TensorDataset(torch.randn(256, 3, 32, 32), torch.rand(256, 4)), batch_size=16, shuffle=True)
result = ecc.compress(Detector(), loader, ["macs=60%", "params=70%"], loss=loss, distill=0, epochs=2, folder="detector")
print(result)  # distill=0: this network has other outputs in training than in evaluation
