"""How fast data comes from files and from memory, as training asks for it: images a second, and a second of one core.

    PYTHONPATH=src python3 benchmarks/data_speed.py --out results/data_speed.json

Makes a tree of photos of ImageNet's usual size and one of scenes of Cityscapes' in a temporary folder (from noise that
was smoothed, so that files have about the bytes of real ones), and draws training batches from them with one thread and
with all. The images from memory are drawn on whatever device is here.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from machine import machine, write_record
from PIL import Image, ImageFilter

from ecc.zoo.data import ImageData, Packed, batches, find_data
from ecc.zoo.data.batches import ImageFormat, epoch_batches
from ecc.zoo.data.sets import cores
from ecc.zoo.image_task import IMAGENET_MEAN, IMAGENET_STD

Epochs = Callable[[int], Sequence[tuple[torch.Tensor, torch.Tensor]]]


def picture(height: int, width: int, seed: int) -> Image.Image:
    """Smooth shapes with some grain."""
    draw = np.random.default_rng(seed)
    coarse = Image.fromarray(draw.integers(0, 256, (height // 24 + 1, width // 24 + 1, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC).filter(ImageFilter.GaussianBlur(2)))
    grain = draw.normal(0, 6, (height, width, 3))
    return Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8))


def photos(root: Path, count: int) -> ImageData:
    for split, number in (("train", count), ("val", 2)):
        (root / split / "a").mkdir(parents=True)
        for index in range(number):
            picture(375, 500, index).save(root / split / "a" / f"{index}.JPEG", quality=92)
    return find_data(root)


def scenes(root: Path, count: int) -> ImageData:
    for split, number in (("train", count), ("val", 2)):
        for index in range(number):
            stem = f"city_{index:06d}_000019"
            for part, end in (("leftImg8bit", "leftImg8bit"), ("gtFine", "gtFine_labelIds")):
                path = root / part / split / "city" / f"{stem}_{end}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                scene = picture(1024, 2048, index)
                (scene if part == "leftImg8bit" else scene.convert("L").point(lambda v: v // 8)).save(path)
    return find_data(root)


def speed(epochs: Epochs, seconds: float) -> tuple[float, float]:
    """Images per second, and per second of processor time, which other programs on the machine do not stretch."""
    drawn = itertools.chain.from_iterable(epochs(number) for number in itertools.count())
    next(drawn)
    count, started, worked = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - started < seconds:
        images, _ = next(drawn)
        count += len(images)
    if images.device.type == "cuda":
        torch.cuda.synchronize()
    return count / (time.perf_counter() - started), count / (time.process_time() - worked)


def _same(pool: ThreadPoolExecutor) -> ThreadPoolExecutor:
    return pool


def from_files(data: ImageData, form: ImageFormat, batch: int, seconds: float, device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"batch": batch}
    for threads in sorted({1, cores()}):
        with ThreadPoolExecutor(threads) as pool, patch.object(batches, "thread_pool", partial(_same, pool)):
            wall, worked = speed(lambda epoch: epoch_batches(data.train, form, batch, device, epoch), seconds)
        found[f"threads_{threads}"] = {"images_per_second": wall, "images_per_core_second": worked}
    return found


def from_memory(shape: tuple[int, int], scene: bool, batch: int, seconds: float, device: str) -> dict[str, Any]:
    images = torch.randint(0, 256, (512, 3, *shape), dtype=torch.uint8)
    labels = torch.randint(0, 11, (512, *shape), dtype=torch.uint8) if scene else torch.randint(0, 10, (512,))
    split, form = Packed(images, labels), ImageFormat(shape, IMAGENET_MEAN, IMAGENET_STD)
    wall, worked = speed(lambda epoch: epoch_batches(split, form, batch, device, epoch), seconds)
    return {"batch": batch, "images_per_second": wall, "images_per_core_second": worked}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    options = parser.parse_args()
    device, seconds = "cuda" if torch.cuda.is_available() else "cpu", options.seconds
    torch.set_num_threads(1)  # of arithmetic: the figures are for one core
    with tempfile.TemporaryDirectory() as folder:
        trees = photos(Path(folder) / "photos", 64), scenes(Path(folder) / "scenes", 12)
        half = ImageFormat((512, 1024), (0.0,) * 3, (1.0,) * 3)
        rows = {
            "photos of 500x375 from JPEG, random with_widths crop to 224": from_files(
                trees[0], ImageFormat((224, 224), IMAGENET_MEAN, IMAGENET_STD), 32, seconds, device
            ),
            "scenes of 2048x1024 from PNG, zoomed and cut to 1024x512": from_files(trees[1], half, 4, seconds, device),
            "images of 32x32 from memory, moved and mirrored": from_memory((32, 32), False, 128, seconds, device),
            "scenes of 480x360 from memory, zoomed": from_memory((360, 480), True, 8, seconds, device),
        }
    record = {
        "what": "training images a second, decoded, augmented and normalised",
        "environment": machine(device=device, load_average=round(os.getloadavg()[0], 1)),
        "speed": rows,
    }
    write_record(record, options.out)
    for name, row in rows.items():
        print(name, row)


if __name__ == "__main__":
    main()
