from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from ecc.errors import BadTask
from ecc.zoo.data import find_data
from ecc.zoo.data.images import VOID
from ecc.zoo.data.sets import ImageData, Packed
from ecc.zoo.image_task import PixelLoss, image_task, pixel_counts
from zoo.data import trees

CASES: dict[str, tuple[Any, str, tuple[int, int], int]] = {
    "folders": (trees.folders, "mobilenet_v1", (32, 32), 3),
    "alexnet": (trees.folders, "alexnet", (64, 64), 3),
    "cifar10": (trees.cifar10, "resnet20", (32, 32), 10),
    "cityscapes": (trees.cityscapes, "erfnet", (32, 64), 19),
    "camvid": (trees.camvid, "erfnet", (24, 32), 11),
}


@pytest.mark.parametrize("case", CASES)
def test_a_network_and_a_folder_of_data_make_a_whole_task(case: str, tmp_path: Path) -> None:
    make, name, size, outputs = CASES[case]
    data = find_data(make(tmp_path / "tree"))
    task = image_task(name, data, size=size, batch=2)
    assert task.name == f"{name}-{data.name}"
    assert task.loss is not None
    assert task.train_batches is not None
    assert task.evaluate is not None
    assert task.evaluate_held_out is not None
    assert isinstance(task.example_input, torch.Tensor)
    assert task.example_input.shape == (1, 3, *size)
    inputs, targets = next(iter(task.train_batches(0)))
    assert inputs.shape == (2, 3, *size)
    scores = task.model(inputs)
    assert scores.shape[1] == outputs
    loss = task.loss(scores, targets)
    loss.backward()
    assert math.isfinite(loss.item())
    task.model.train()
    for judge in (task.evaluate, task.evaluate_held_out):
        score = judge(task.model)
        assert 0 <= score <= 1
        assert score == judge(task.model)
    assert task.model.training


def test_tasks_can_be_sent_to_other_processes(tmp_path: Path) -> None:
    task = image_task("resnet20", find_data(trees.cifar10(tmp_path)), batch=2)
    assert task.train_batches is not None
    again = pickle.loads(pickle.dumps((task.train_batches, task.evaluate)))[0]  # noqa: S301 - our own bytes
    assert torch.equal(next(iter(again(0)))[0], next(iter(task.train_batches(0)))[0])


def test_training_helps_and_the_score_is_top_one(tmp_path: Path) -> None:
    task = image_task("resnet20", find_data(trees.folders(tmp_path, train=11, test=6)), batch=15)
    assert task.train_batches is not None
    assert task.evaluate is not None
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for epoch in range(8):
        for inputs, targets in task.train_batches(epoch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
    assert task.evaluate(model) > 0.8  # the three classes differ in their colour


def test_sizes_and_batches_are_those_of_the_paper_unless_asked_for(tmp_path: Path) -> None:
    task = image_task("erfnet", find_data(trees.cityscapes(tmp_path / "a")))
    assert task.example_input.shape[-2:] == (512, 1024)  # type: ignore[union-attr]
    assert task.train_batches.args[2] == 4  # type: ignore[union-attr]
    task = image_task("erfnet", find_data(trees.camvid(tmp_path / "b")))
    assert task.example_input.shape[-2:] == (24, 32)  # type: ignore[union-attr]
    task = image_task("mobilenet_v1", find_data(trees.folders(tmp_path / "c")))
    assert task.example_input.shape[-2:] == (224, 224)  # type: ignore[union-attr]
    assert task.train_batches.args[2] == 128  # type: ignore[union-attr]


def test_weights_and_input_are_seeded_and_the_global_random_state_is_left() -> None:
    before = torch.get_rng_state()
    one = image_task("resnet20")
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    assert torch.equal(one.model.conv1.weight, image_task("resnet20").model.conv1.weight)  # type: ignore[arg-type]


def test_published_weights_fill_the_network_and_a_head_that_differs_is_told(tmp_path: Path) -> None:
    torch.manual_seed(5)
    state = {k: torch.rand_like(v) for k, v in image_task("resnet20").model.state_dict().items() if v.dim()}
    save_file(state, tmp_path / "w.safetensors")
    told: list[str] = []
    task = image_task(
        "resnet20", find_data(trees.folders(tmp_path / "tree")), weights=tmp_path / "w.safetensors", tell=told.append
    )
    assert torch.equal(task.model.state_dict()["conv1.weight"], state["conv1.weight"])
    assert len(told) == 1
    assert "3 classes" in told[0]


@pytest.mark.parametrize(
    ("name", "make", "options", "message"),
    [
        ("erfnet", trees.folders, {}, "erfnet labels pixels, and the data set 't' has labels of whole images"),
        ("alexnet", trees.camvid, {}, "alexnet labels whole images, and the data set 'camvid' has labels of pixels"),
        ("erfnet", trees.camvid, {"size": (20, 32)}, "20x32 do not fit erfnet: sides must have at least 8 and be mult"),
        ("alexnet", trees.folders, {"size": (32, 32)}, "32x32 do not fit alexnet: sides must have at least 63"),
        ("resnet20", trees.cifar10, {"batch": -1}, "batch size -1 is outside 1..1048576"),
        ("resnet20", trees.cifar10, {"batch": 0}, "batch size 0 is outside 1..1048576"),
        ("resnet20", trees.cifar10, {"batch": 10**30}, "is outside 1..1048576"),
        ("resnet20", trees.cifar10, {"size": (32, 99_999)}, "sides may have 8192 pixels at most"),
    ],
)
def test_what_does_not_go_together_is_refused(
    name: str, make: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadTask) as caught:
        image_task(name, find_data(make(tmp_path / "t")), **options)
    assert message in str(caught.value)


# ---------------------------------------------------------------- the loss of pixels


def scenes(*labels: list[int]) -> ImageData:
    maps = torch.tensor(labels, dtype=torch.uint8).view(len(labels), 1, -1)
    split = Packed(torch.zeros(len(maps), 3, *maps.shape[1:], dtype=torch.uint8), maps)
    return ImageData("x", ("a", "b"), split, split, split)


def test_rare_classes_weigh_more_as_in_erfnets_paper() -> None:
    loss = PixelLoss(scenes([0, 0, 0, 1], [0, VOID, VOID, VOID]).train, 3)
    shares = np.array([4, 1, 0]) / 5
    np.testing.assert_allclose(loss.weights, 1 / np.log(1.02 + shares), rtol=1e-6)


def test_the_loss_is_torchs_weighted_mean_without_void_pixels() -> None:
    loss = PixelLoss(scenes([0, 0, 0, 1]).train, 3)
    scores, targets = torch.randn(2, 3, 4, 5), torch.randint(0, 3, (2, 4, 5))
    targets[0, 0] = VOID
    expected = F.cross_entropy(scores, targets, loss.weights, ignore_index=VOID)
    torch.testing.assert_close(loss(scores, targets), expected)


def test_a_batch_without_any_class_teaches_nothing() -> None:
    loss = PixelLoss(scenes([0, 1]).train, 2)
    scores = torch.randn(1, 2, 3, 3, requires_grad=True)
    found = loss(scores, torch.full((1, 3, 3), VOID))
    found.backward()
    assert found.item() == 0
    assert scores.grad is not None
    assert float(scores.grad.abs().sum()) == 0


def test_pixels_are_counted_alike_in_files_and_in_memory(tmp_path: Path) -> None:
    data = find_data(trees.camvid(tmp_path))
    expected = sum(
        np.bincount(np.where((m := trees.noise(24, 32, seed=k, below=12)) == 11, VOID, m).ravel(), minlength=256)
        for k in range(3)
    )
    assert (pixel_counts(data.train).numpy() == expected).all()
    assert (pixel_counts(data.train.scenes).numpy() == expected).all()  # type: ignore[union-attr]
