"""Segmentation: an encoder and decoder with a skip connection, two budgets at once, judged by mean IoU.

    python examples/segmentation.py

The pictures are drawn here: discs, and squares that are brighter, in noise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ecc

CLASSES, SIZE = 3, 32  # background, disc, square


class Segmenter(nn.Module):
    """Half the size, and back, with a skip connection over it."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(1, 16, 3, padding=1)
        self.down2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(32, 32, 3, padding=1)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.head = nn.Conv2d(32, CLASSES, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Class scores of each pixel."""
        skip = F.relu(self.down1(images))
        x = F.relu(self.middle(F.relu(self.down2(skip))))
        return self.head(torch.cat([skip, F.relu(self.up(x))], dim=1))  # the head reads two groups


def pictures(count: int) -> tuple[Tensor, Tensor]:
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    at, radius = torch.randint(6, SIZE - 6, (2, 2, count, 1, 1)), torch.randint(3, 7, (2, count, 1, 1))
    disc = (rows - at[0, 0]) ** 2 + (columns - at[0, 1]) ** 2 <= radius[0] ** 2
    square = torch.maximum((rows - at[1, 0]).abs(), (columns - at[1, 1]).abs()) <= radius[1]
    labels = torch.where(square, 2, disc.long())
    return (0.4 * torch.randn(count, SIZE, SIZE) + labels).unsqueeze(1), labels


@torch.no_grad()
def mean_iou(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    found = model.eval()(images).argmax(1)
    hits = [((found == c) & (labels == c)).sum() / ((found == c) | (labels == c)).sum() for c in range(CLASSES)]
    return float(torch.stack(hits).mean())


def main() -> None:
    torch.manual_seed(0)
    model, test = Segmenter(), pictures(64)
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(150):
        images, labels = pictures(16)
        F.cross_entropy(model(images), labels).backward()
        adam.step()
        adam.zero_grad()
    dense = mean_iou(model, *test)

    graph = ecc.trace_channels(model, test[0][:1])
    limited = [ecc.counted_cost(graph, "macs"), ecc.counted_cost(graph, "params")]  # or models of energy and of latency
    solver = ecc.EccSolver(model.train(), graph, limited, budget=["50%", "40%"], steps=150, lr=1e-3)
    for _ in range(150):
        images, labels = pictures(16)
        F.cross_entropy(model(images), labels).backward()
        solver.step()
        solver.zero_grad()

    small = ecc.slim(model.eval(), graph)
    full = [float(graph.macs()), sum(p.numel() for p in model.parameters())]
    for cost, spent, before in zip(limited, solver.cost, full, strict=True):
        print(f"{cost.resource}: {float(spent) / before:.0%} of the dense network ({cost.label})")
    print(f"mean IoU {dense:.3f} -> {mean_iou(small, *test):.3f}")
    print(f"widths {solver.widths}")


if __name__ == "__main__":
    main()
