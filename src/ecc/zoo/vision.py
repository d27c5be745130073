"""Tasks of Hugging Face image classifiers: `hf:FOLDER` or `hf:NAME` with `--data`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ecc.errors import BadTask
from ecc.task import Task
from ecc.zoo.data.batches import ImageFormat, SeededBatches, epoch_batches
from ecc.zoo.data.sets import ImageData, Split
from ecc.zoo.image_task import checked_batch_size, score_split, seeded, seeded_images
from ecc.zoo.language import check_weights, import_transformers, load_config, load_part

BATCH_SIZE = 64
"""Training batch size by default, in images."""
PREPROCESSOR_FILE = "preprocessor_config.json"
_HALF = (0.5, 0.5, 0.5)  # mean and standard deviation of the colours where the folder names none


def is_image_classifier(source: str | Path) -> bool:
    """Whether a saved model, or one on the Hugging Face hub, classifies images."""
    names = getattr(load_config(source), "architectures", None) or ()
    return any(name.endswith("ForImageClassification") for name in names)


def image_classifier_task(
    source: str | Path,
    data: ImageData | None = None,
    *,
    image_size: tuple[int, int] | None = None,
    batch_size: int | None = None,
    device: torch.device | str = "cpu",
    log: Callable[[str], None] = lambda _: None,
) -> Task:
    """A task of a Hugging Face image classifier. The score is top-1 accuracy, the loss that of the model.

    Args:
        source: Folder with a saved model, or a name on the Hugging Face hub.
        data: Data set; None for the network alone, enough to trace and measure. If its number of classes differs from
            the outputs of the model, the last layer starts from random weights.
        image_size: (height, width) of the images; by default that of the configuration.
        batch_size: Training batch size; 64 by default.
        device: Device that holds data which fits into memory.
        log: Called with one-line notes for the user.

    Raises:
        BadTask: If the model cannot be loaded or the data do not fit.
    """
    if data is not None and data.has_pixels:
        raise BadTask(f"model {str(source)!r} classifies images, but the data set {data.name!r} has labels of pixels.")
    count = checked_batch_size(BATCH_SIZE if batch_size is None else batch_size)
    model, config = _load(source, None if data is None else len(data.classes), log)
    size = image_size or _size_of(config)
    form = ImageFormat(size, *_colours(source))
    example = seeded_images((3, *size))
    name = Path(str(source)).name
    if data is None:
        return Task(name=name, model=model, example_input={"pixel_values": example})
    score = partial(score_split, form, None, count)
    return Task(
        name=f"{name}-{data.name}",
        model=model,
        example_input={"pixel_values": example},
        train_batches=partial(_labelled_batches, data.train, form, count, str(device)),
        evaluate=partial(score, data.test),
        evaluate_held_out=partial(score, data.held_out),
    )


def _labelled_batches(
    split: Split, form: ImageFormat, count: int, device: str, epoch: int
) -> SeededBatches[dict[str, Tensor]]:
    """Batches `{"pixel_values", "labels"}`, with which models of transformers return their loss."""
    batches = epoch_batches(split, form, count, device, epoch)
    names = ("pixel_values", "labels")
    return SeededBatches(len(batches), lambda number: dict(zip(names, batches[number], strict=True)))


def _load(source: str | Path, classes: int | None, log: Callable[[str], None]) -> tuple[nn.Module, Any]:
    """The model in float32 with an output for each class, and its configuration."""
    where, kind = str(source), import_transformers().AutoModelForImageClassification
    config = load_config(source)
    outputs: int = config.num_labels
    options: dict[str, Any] = {}
    if classes is not None and outputs != classes:
        log(
            f"note: {where} has {outputs} outputs and the data {classes} classes; the last layer starts from "
            "random weights. Train it first (--pretrain-steps N)."
        )
        options = {"num_labels": classes}

    options |= {"dtype": torch.float32, "trust_remote_code": False, "ignore_mismatched_sizes": True}

    def load() -> nn.Module:
        model: nn.Module
        model, found = load_part(
            where, "model", lambda: kind.from_pretrained(where, output_loading_info=True, **options)
        )
        wrong = {one for one in found["mismatched_keys"] if not ("num_labels" in options and one[1][0] == outputs)}
        check_weights(where, {**found, "mismatched_keys": wrong})
        return model

    return seeded(load), config  # the last layer may be new


def _size_of(config: Any) -> tuple[int, int]:
    size = getattr(config, "image_size", None) or 224
    pair = (size, size) if isinstance(size, int) else tuple(size)
    return int(pair[0]), int(pair[1])


def _colours(source: str | Path) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Mean and standard deviation of the colours, as the folder says."""
    file = Path(str(source)) / PREPROCESSOR_FILE
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        mean, std = (tuple(map(float, found.get(key, _HALF))) for key in ("image_mean", "image_std"))
        if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
            raise ValueError("image_mean and image_std must have three numbers")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise BadTask(f"{file} cannot be used: {error}. Write image_mean and image_std, or remove the file.") from None
    return mean, std
