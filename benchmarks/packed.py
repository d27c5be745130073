"""The packed copies of CIFAR-10, Imagenette and CamVid as data sets of the zoo, all of it in memory as bytes.

Read by benchmarks only; the package reads the true layouts. The copies are lossy: numbers from them compare methods
with each other, and are no results on the originals.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from ecc.task import Task
from ecc.zoo import image_task
from ecc.zoo.data import VOID, ImageData, Packed
from ecc.zoo.data.layouts import CAMVID_CLASSES, CAMVID_FROM_CITYSCAPES, stratified
from ecc.zoo.data.sets import Split, map_in_threads

WEIGHTS = {
    "mobilenet_v1": "mobilenet_v1_1.0_224.safetensors",
    "erfnet": "erfnet_cityscapes20_from_int8.safetensors",
    "resnet20": "cifar10_resnet20.safetensors",
    "resnet56": "cifar10_resnet56.safetensors",
}


def packed_data(name: str, folder: Path, limit: int | None = None) -> ImageData:
    """One of `cifar10`, `imagenette` and `camvid`.

    Args:
        name: Which.
        folder: Folder of the packed files.
        limit: Number of images of each split, spread uniformly; None for all.
    """
    return {"cifar10": _cifar10, "imagenette": _imagenette, "camvid": _camvid}[name](folder, limit)


def packed_task(
    network: str,
    name: str,
    folder: Path,
    *,
    device: str = "cpu",
    size: tuple[int, int] | None = None,
    batch: int | None = None,
    limit: int | None = None,
    data: ImageData | None = None,
    tell: Callable[[str], None] = print,
    state: Mapping[str, Tensor] | None = None,
) -> Task:
    """A network with its published weights, where there are any, on packed data.

    `data` if they are read already, and `state` if another call has prepared the weights.
    """
    file = WEIGHTS.get(network) if state is None else None
    data = packed_data(name, folder, limit) if data is None else data
    weights = None if file is None else folder / file
    task = image_task(network, data, weights=weights, image_size=size, batch_size=batch, device=device, log=tell)
    if state is not None:
        task.model.load_state_dict(state)
    elif network == "erfnet" and task.train_batches is not None:
        few = [inputs.cpu() for (inputs, _), _ in zip(task.epoch_batches(0), range(8), strict=False)]
        unfold_batch_norms_(task.model, few)
    return task


def _cifar10(folder: Path, limit: int | None) -> ImageData:
    packed = np.load(folder / "cifar10.npz")

    def tiles(number: int) -> np.ndarray:
        mosaic = np.asarray(Image.open(io.BytesIO(packed[f"mosaic{number}"].tobytes())).convert("RGB"))
        return mosaic.reshape(100, 32, 100, 32, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 32, 32)

    images = torch.from_numpy(np.concatenate([tiles(number) for number in range(5)]))
    labels = torch.from_numpy(packed["train_y"]).long()
    test = Packed(torch.from_numpy(tiles(5).copy()), torch.from_numpy(packed["test_y"]).long())
    classes = tuple(str(name) for name in packed["classes"])
    return _split("cifar10", classes, Packed(images, labels), test, limit)


def _imagenette(folder: Path, limit: int | None) -> ImageData:
    packed = np.load(folder / "imagenette128.npz")

    def split(name: str) -> Packed:
        rows = _some(len(packed[f"{name}_y"]), limit)
        photos = _decoded(packed[f"{name}_data"], packed[f"{name}_off"], rows)
        return Packed(photos.permute(0, 3, 1, 2).contiguous(), torch.from_numpy(packed[f"{name}_y"]).long()[rows])

    index = tuple(int(row) for row in packed["imagenet_index"])
    names = tuple(str(row) for row in index)
    return _split("imagenette", names, split("train"), split("val"), None, {1000: index})


def _camvid(folder: Path, limit: int | None) -> ImageData:
    packed = np.load(folder / "camvid.npz")

    def split(name: str) -> Packed:
        rows = _some(len(packed[f"{name}_img_off"]) - 1, limit)
        photos = _decoded(packed[f"{name}_img"], packed[f"{name}_img_off"], rows)
        labels = _decoded(packed[f"{name}_lab"], packed[f"{name}_lab_off"], rows, mode=None)
        return Packed(photos.permute(0, 3, 1, 2).contiguous(), labels.masked_fill(labels == 11, VOID))

    train, held_out, test = (split(name) for name in ("train", "val", "test"))
    height, width = train.images.shape[-2:]
    return ImageData(
        "camvid", CAMVID_CLASSES, train, held_out, test, size=(height, width), published={20: CAMVID_FROM_CITYSCAPES}
    )


def _split(
    name: str,
    classes: tuple[str, ...],
    train: Packed,
    test: Packed,
    limit: int | None,
    published: dict[int, tuple[int, ...]] | None = None,
) -> ImageData:
    kept, held = stratified(train.labels)
    parts = [(train, kept), (train, held), (test, torch.arange(len(test)))]
    chosen = [(split, rows[_some(len(rows), limit)]) for split, rows in parts]
    kept_train, held_out, some = (Packed(split.images[rows], split.labels[rows]) for split, rows in chosen)
    return ImageData(name, classes, kept_train, held_out, some, published=published or {})


def as_packed(split: Split) -> Packed:
    """A split of `packed_data`, all of which are in memory."""
    assert isinstance(split, Packed)
    return split


def _some(count: int, limit: int | None) -> Tensor:
    if limit is None or limit >= count:
        return torch.arange(count)
    return torch.from_numpy(np.linspace(0, count - 1, limit).astype(np.int64))


def _decoded(data: np.ndarray, offsets: np.ndarray, rows: Tensor, mode: str | None = "RGB") -> Tensor:
    def one(row: int) -> np.ndarray:
        picture = Image.open(io.BytesIO(data[offsets[row] : offsets[row + 1]].tobytes()))
        return np.asarray(picture if mode is None else picture.convert(mode))

    return torch.from_numpy(np.stack(map_in_threads(one, rows.tolist())))


@torch.no_grad()
def unfold_batch_norms_(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Gives batch norms that were folded away their statistics back, so that training can go on; outputs stay.

    In ERFNet's weights many stand as identities with mean 0 and variance 1. In train mode those would normalise, and
    the network would be another one. Here each gets the mean and variance of what it sees, and scale and shift that
    undo it.
    """
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    folded = [norm for norm in norms if norm.running_mean is not None and not bool(norm.running_mean.any())]
    sums: dict[nn.BatchNorm2d, list[Tensor]] = {norm: [] for norm in folded}

    def watch(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(norm, nn.BatchNorm2d)
        x = inputs[0].double()
        sums[norm].append(torch.stack([x.mean((0, 2, 3)), x.square().mean((0, 2, 3))]))

    hooks = [norm.register_forward_pre_hook(watch) for norm in folded]
    modes = [(layer, layer.training) for layer in model.modules()]
    model.eval()
    for batch in batches:
        model(batch)
    for hook in hooks:
        hook.remove()
    for layer, mode in modes:
        layer.training = mode
    for norm, seen in sums.items():
        mean, square = torch.stack(seen).mean(0)
        variance = (square - mean.square()).clamp(min=1e-8)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = norm.weight.double() / (norm.running_var.double() + norm.eps).sqrt()
        shift = norm.bias.double() - scale * norm.running_mean.double()
        norm.weight.copy_(scale * (variance + norm.eps).sqrt())
        norm.bias.copy_(shift + scale * mean)
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)
