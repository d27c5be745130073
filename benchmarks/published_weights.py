"""Published weights score as they should: MobileNet v1, ERFNet and two ResNets, on the packed data.

    PYTHONPATH=src python3 benchmarks/published_weights.py --data DATA --out results/published_weights.json

MobileNet v1: Imagenette's validation photos, 128 px scaled to 224, evaluated among all 1,000 classes and among its ten.
ERFNet: CamVid's validation scenes at 360x480, untrained: its 19 Cityscapes classes are mapped to CamVid's eleven. The
CIFAR ResNets: the test images. The copies of the data are lossy, and most of Imagenette's validation photos are
training photos of ImageNet: the numbers show that weights and networks fit together, and are no results.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import machine, write_record
from packed import WEIGHTS, packed_data
from torch import Tensor, nn

from ecc.zoo import image_task
from ecc.zoo.data import Packed
from ecc.zoo.data.batches import ImageFormat, evaluation_batches
from ecc.zoo.image_task import NETWORKS, confusion, mean_iou, top_k

# What the notes beside the packed data say of all items.
STATED = {
    "mobilenet_v1": "77.1 % top-1 of 1,000, on the originals at 224 px",
    "erfnet": "46.0 % mean IoU; by which map from 19 to 11 classes is not said",
    "resnet20": "90.64 % top-1",
    "resnet56": "92.46 % top-1",
}

# For each of Cityscapes' 19 classes and void, what CamVid calls it; -1 where it has no such class.
TO_CAMVID = {
    "road": 3, "sidewalk": 4, "building": 1, "wall": 1, "fence": 7, "pole": 2, "traffic light": 6, "traffic sign": 6,
    "vegetation": 5, "terrain": 5, "sky": 0, "person": 9, "rider": 10, "car": 8, "truck": 8, "bus": 8, "train": 8,
    "motorcycle": 10, "bicycle": 10, "void": -1,
}  # fmt: skip


class Mapped(nn.Module):
    """A network whose outputs are put together: the score of a class is the highest of those that mean it."""

    def __init__(self, model: nn.Module, meaning: list[int], classes: int) -> None:
        super().__init__()
        self.model, self.meaning, self.classes = model, meaning, classes

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the classes."""
        scores = self.model(images)
        parts = [[row for row, one in enumerate(self.meaning) if one == label] for label in range(self.classes)]
        return torch.stack([scores[:, rows].amax(dim=1) for rows in parts], dim=1)


def form_of(name: str, size: tuple[int, int]) -> ImageFormat:
    return ImageFormat(size, NETWORKS[name].mean, NETWORKS[name].std)


def published(name: str, data: Path, size: tuple[int, int]) -> nn.Module:
    """With as many outputs as were published."""
    return image_task(name, weights=data / WEIGHTS[name], image_size=size).model


def mobilenet(data: Path, limit: int | None, device: str) -> dict[str, Any]:
    form, found = form_of("mobilenet_v1", (224, 224)), packed_data("imagenette", data, limit)
    assert isinstance(found.test, Packed)
    rows = torch.tensor(found.published[1000])
    whole = Packed(found.test.images, rows[found.test.labels])
    model = published("mobilenet_v1", data, form.size).to(device)
    one, five = top_k(model, partial(evaluation_batches, whole, form, 64))
    ten = image_task("mobilenet_v1", found, weights=data / WEIGHTS["mobilenet_v1"], image_size=form.size).model.to(
        device
    )
    (among,) = top_k(ten, partial(evaluation_batches, found.test, form, 64), (1,))
    return {
        "photos": len(whole),
        "top1_of_1000": one,
        "top5_of_1000": five,
        "top1_of_10": among,
        "stated": STATED["mobilenet_v1"],
    }


def erfnet(data: Path, limit: int | None, device: str) -> dict[str, Any]:
    found = packed_data("camvid", data, limit)
    assert found.size is not None
    form = form_of("erfnet", found.size)
    model = Mapped(published("erfnet", data, form.size), list(TO_CAMVID.values()), len(found.classes)).to(device)
    counts = confusion(model, partial(evaluation_batches, found.held_out, form, 2), len(found.classes))
    right, union = counts.diagonal().double(), counts.sum(0) + counts.sum(1) - counts.diagonal()
    shares = (right / union.clamp(min=1)).tolist()
    return {
        "scenes": len(found.held_out),
        "mean_iou": mean_iou(counts),
        "iou": dict(zip(found.classes, shares, strict=True)),
        "stated": STATED["erfnet"],
    }


def resnet(name: str, data: Path, limit: int | None, device: str) -> dict[str, Any]:
    del limit  # small images: all of them
    task = image_task(name, found := packed_data("cifar10", data), weights=data / WEIGHTS[name])
    assert task.evaluate is not None
    return {"images": len(found.test), "top1": task.evaluate(task.model.to(device)), "stated": STATED[name]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, help="photos and scenes of each split; all by default")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record: dict[str, Any] = {
        "what": "published weights evaluated on packed, lossy copies of data: fit of weights and network, no results",
        "environment": machine(device=device, threads=torch.get_num_threads()),
        "subset": "all items of each split"
        if options.limit is None
        else f"at most {options.limit} photos and scenes, spread uniformly; all of CIFAR-10",
        "networks": {},
    }
    jobs: dict[str, Callable[[Path, int | None, str], dict[str, Any]]] = {
        "MobileNet v1, Imagenette val, 128 px scaled to 224": mobilenet,
        "ERFNet, CamVid val, 360x480, untrained": erfnet,
        "ResNet-20, CIFAR-10 test": partial(resnet, "resnet20"),
        "ResNet-56, CIFAR-10 test": partial(resnet, "resnet56"),
    }
    for name, job in jobs.items():
        started = time.perf_counter()
        record["networks"][name] = job(options.data, options.limit, device)
        print(f"{name}: {record['networks'][name]} in {time.perf_counter() - started:.0f} s", flush=True)
    write_record(record, options.out)


if __name__ == "__main__":
    main()
