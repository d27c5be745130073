"""Imagenette as a task: ten ImageNet classes at 128 px, from one packed file of JPEGs, all of it on the device.

Read by benchmarks only; the package has loaders for the true layouts. Numbers from this lossy copy compare methods
with each other and are no ImageNet results.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from ecc.task import Task
from ecc.zoo import MobileNetV1

HELD_OUT = 946  # of the 9,469 training photos: for choices
PAD = 8  # of the random crop


class Epoch(Sequence[tuple[Tensor, Tensor]]):
    """Batches of one epoch: shuffled, cropped and flipped on the device, the same for the same epoch."""

    def __init__(self, images: Tensor, labels: Tensor, epoch: int, batch: int) -> None:
        self._images, self._labels, self._batch, self._epoch = images, labels, batch, epoch
        generator = torch.Generator().manual_seed(1000 + epoch)
        self._order = torch.randperm(len(labels), generator=generator)

    def __len__(self) -> int:
        return len(self._labels) // self._batch

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        if not 0 <= number < len(self):
            raise IndexError(number)
        rows = self._order[number * self._batch : (number + 1) * self._batch].to(self._images.device)
        generator = torch.Generator().manual_seed(self._epoch * 100_003 + number)
        dx, dy = torch.randint(0, 2 * PAD + 1, (2,), generator=generator).tolist()
        images = F.pad(normalised(self._images[rows]), (PAD,) * 4, mode="reflect")
        images = images[:, :, dy : dy + 128, dx : dx + 128]
        flip = (torch.rand(len(rows), generator=generator) < 0.5).to(images.device)
        return torch.where(flip[:, None, None, None], images.flip(3), images), self._labels[rows]


def normalised(images: Tensor) -> Tensor:
    """As the published MobileNet wants them: -1 to 1."""
    return images.float() / 127.5 - 1


def imagenette(data: Path, device: str, batch: int = 128, limit: int | None = None) -> Task:
    """MobileNet v1 with its ImageNet weights, cut down to the ten classes.

    Args:
        data: The folder with `imagenette128.npz` and `mobilenet_v1_1.0_224.safetensors`.
        device: Where the photos live.
        batch: Of training.
        limit: Photos of each split to take; all if None.
    """
    packed = np.load(data / "imagenette128.npz")
    train, train_labels = _decoded(packed, "train", limit)
    test, test_labels = _decoded(packed, "val", limit)
    held = min(HELD_OUT, len(train) // 10)
    images, labels = train.to(device), train_labels.to(device)
    test_images, test_targets = test.to(device), test_labels.to(device)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).to(device)
    images, labels = images[order], labels[order]

    model = MobileNetV1(10)
    weights = {name: tensor.float() for name, tensor in load_file(data / "mobilenet_v1_1.0_224.safetensors").items()}
    rows = torch.as_tensor(packed["imagenet_index"]).long()
    weights["fc.weight"], weights["fc.bias"] = weights["fc.weight"][rows], weights["fc.bias"][rows]
    model.load_state_dict(weights, strict=False)

    def score(net: nn.Module, x: Tensor, y: Tensor) -> float:
        modes = [(module, module.training) for module in net.modules()]
        net.eval()
        where = next(net.parameters()).device
        with torch.no_grad():
            parts = [net(normalised(x[k : k + 512]).to(where)).argmax(1).cpu() for k in range(0, len(x), 512)]
        for module, mode in modes:
            module.training = mode
        return float((torch.cat(parts) == y.cpu()).double().mean())

    return Task(
        name="imagenette-mobilenet",
        model=model,
        example_input=torch.randn(1, 3, 128, 128, generator=torch.Generator().manual_seed(0)),
        loss=F.cross_entropy,
        train_batches=lambda epoch: Epoch(images[held:], labels[held:], epoch, batch),
        evaluate=lambda net: score(net, test_images, test_targets),
        evaluate_held_out=lambda net: score(net, images[:held], labels[:held]),
    )


def _decoded(packed: np.lib.npyio.NpzFile, split: str, limit: int | None) -> tuple[Tensor, Tensor]:
    data, offsets = packed[f"{split}_data"], packed[f"{split}_off"]
    count = len(offsets) - 1
    chosen = np.arange(count) if limit is None else np.linspace(0, count - 1, limit).astype(int)

    def one(row: int) -> np.ndarray:
        photo = Image.open(io.BytesIO(data[offsets[row] : offsets[row + 1]].tobytes()))
        return np.asarray(photo.convert("RGB"))

    with ThreadPoolExecutor() as pool:
        photos = np.stack(list(pool.map(one, chosen.tolist())))
    return torch.from_numpy(photos).permute(0, 3, 1, 2).contiguous(), torch.as_tensor(
        packed[f"{split}_y"][chosen]
    ).long()
