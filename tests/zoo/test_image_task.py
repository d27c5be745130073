"""`image_task` on tiny data sets: batches, loss, scores and published weights."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from sklearn.metrics import confusion_matrix, jaccard_score, top_k_accuracy_score
from torch import Tensor, nn

from ecc.errors import BadTask
from ecc.training import save_state
from ecc.zoo.data import find_data
from ecc.zoo.data.images import VOID
from ecc.zoo.data.sets import Packed
from ecc.zoo.image_task import (
    NETWORKS,
    PixelLoss,
    confusion,
    image_task,
    load_weights_,
    mean_iou,
    pixel_counts,
    read_weights,
    top_k,
)
from ecc.zoo.resnet_cifar import resnet20
from zoo.data import trees

CASES: dict[str, tuple[Any, str, tuple[int, int], int]] = {
    "folders": (trees.folders, "mobilenet_v1", (32, 32), 3),
    "alexnet": (trees.folders, "alexnet", (64, 64), 3),
    "cifar10": (trees.cifar10, "resnet20", (32, 32), 10),
    "cityscapes": (trees.cityscapes, "erfnet", (32, 64), 19),
    "camvid": (trees.camvid, "erfnet", (24, 32), 11),
}


@pytest.mark.parametrize("case", CASES)
def test_a_network_and_a_data_folder_make_a_complete_task(case: str, tmp_path: Path) -> None:
    make, name, size, num_classes = CASES[case]
    data = find_data(make(tmp_path / "tree"))
    task: Any = image_task(name, data, image_size=size, batch_size=2)
    assert task.name == f"{name}-{data.name}"
    assert task.example_input.shape == (1, 3, *size)
    inputs, targets = next(iter(task.train_batches(0)))
    assert inputs.shape == (2, 3, *size)
    scores = task.model(inputs)
    assert scores.shape[1] == num_classes
    loss = task.loss(scores, targets)
    loss.backward()
    assert math.isfinite(loss.item())
    task.model.train()
    for evaluate in (task.evaluate, task.evaluate_held_out):
        score = evaluate(task.model)
        assert 0 <= score <= 1
        assert score == evaluate(task.model)
    assert task.model.training
    again = pickle.loads(pickle.dumps(task.train_batches))  # noqa: S301 - our own bytes
    assert torch.equal(next(iter(again(0)))[0], next(iter(task.train_batches(0)))[0])


def test_default_sizes_and_batches_and_seeded_weights(tmp_path: Path) -> None:
    for make, name, size, batch in (
        (trees.cityscapes, "erfnet", (512, 1024), 4),
        (trees.camvid, "erfnet", (24, 32), 12),
        (trees.folders, "mobilenet_v1", (224, 224), 128),
    ):
        task: Any = image_task(name, find_data(make(tmp_path / make.__name__)))
        assert (tuple(task.example_input.shape[-2:]), task.train_batches.args[2]) == (size, batch)
    before = torch.get_rng_state()
    one: Any = image_task("resnet20")
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    assert torch.equal(one.model.conv1.weight, image_task("resnet20").model.conv1.weight)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "make", "options", "message"),
    [
        ("erfnet", trees.folders, {}, "erfnet classifies pixels, but the data set 't' has labels of images"),
        ("alexnet", trees.camvid, {}, "alexnet classifies images, but the data set 'camvid' has labels of pixels"),
        ("erfnet", trees.camvid, {"image_size": (20, 32)}, "20x32 does not fit erfnet: sides must be at least 8 and"),
        ("alexnet", trees.folders, {"image_size": (32, 32)}, "32x32 does not fit alexnet: sides must be at least 63"),
        ("resnet20", trees.cifar10, {"batch_size": 0}, r"batch size 0 is outside 1\.\.1048576"),
        ("resnet20", trees.cifar10, {"image_size": (32, 99_999)}, "sides may have at most 8192 pixels"),
    ],
)
def test_wrong_combinations_are_refused(
    name: str, make: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadTask, match=message):
        image_task(name, find_data(make(tmp_path / "t")), **options)


# ---------------------------------------------------------------- loss of pixels


def split_of(*labels: list[int]) -> Packed:
    maps = torch.tensor(labels, dtype=torch.uint8).view(len(labels), 1, -1)
    return Packed(torch.zeros(len(maps), 3, *maps.shape[1:], dtype=torch.uint8), maps)


def test_pixel_loss_is_torchs_weighted_mean_without_void_pixels() -> None:
    loss = PixelLoss(split_of([0, 0, 0, 1], [0, VOID, VOID, VOID]), 3)
    np.testing.assert_allclose(loss.weights, 1 / np.log(1.02 + np.array([4, 1, 0]) / 5), rtol=1e-6)
    scores, targets = torch.randn(2, 3, 4, 5), torch.randint(0, 3, (2, 4, 5))
    targets[0, 0] = VOID
    expected = F.cross_entropy(scores, targets, loss.weights, ignore_index=VOID)
    torch.testing.assert_close(loss(scores, targets), expected)
    scores.requires_grad_()
    nothing = loss(scores, torch.full((2, 4, 5), VOID))
    nothing.backward()
    assert nothing.item() == 0
    assert scores.grad is not None
    assert float(scores.grad.abs().sum()) == 0


def test_pixels_are_counted_alike_in_files_and_in_memory(tmp_path: Path) -> None:
    data: Any = find_data(trees.camvid(tmp_path))
    maps = [trees.noise(24, 32, seed=number, below=12) for number in range(3)]
    expected = sum(np.bincount(np.where(m == 11, VOID, m).ravel(), minlength=256) for m in maps)
    assert (pixel_counts(data.train).numpy() == expected).all()
    assert (pixel_counts(data.train.scenes).numpy() == expected).all()


# ---------------------------------------------------------------- scores


class Identity(nn.Module):
    """Returns its input as scores; must be evaluated in eval mode without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.bn = nn.BatchNorm2d(1).eval()

    def forward(self, scores: Tensor) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        return scores * self.scale


def batches(scores: Tensor, labels: Tensor, size: int = 7) -> Any:
    def on(device: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
        assert device.type == "cpu"
        return zip(scores.split(size), labels.split(size), strict=True)

    return on


def test_top_k_equals_scikit_learn() -> None:
    scores, labels = torch.randn(100, 9), torch.randint(0, 9, (100,))
    model = Identity().train()
    model.bn.eval()
    for k, share in zip((1, 3, 5), top_k(model, batches(scores, labels), (1, 3, 5)), strict=True):
        assert share == pytest.approx(top_k_accuracy_score(labels, scores, k=k, labels=range(9)))
    assert (model.training, model.bn.training) == (True, False)
    assert top_k(Identity(), batches(torch.randn(8, 3), torch.zeros(8, dtype=torch.int64)))[1] == 1.0  # 5 of 3 classes
    with pytest.raises(BadTask, match="the split gave no batch"):
        top_k(Identity(), lambda _: [])


def test_confusion_and_mean_iou_equal_scikit_learn_without_void() -> None:
    scores, labels = torch.randn(20, 5, 6, 8), torch.randint(0, 5, (20, 6, 8))
    labels[torch.rand(labels.shape) < 0.2] = VOID
    counts = confusion(Identity(), batches(scores, labels), 5)
    known = labels != VOID
    truth, predicted = labels[known].numpy(), scores.argmax(1)[known].numpy()
    assert (counts.numpy() == confusion_matrix(truth, predicted, labels=range(5))).all()
    assert mean_iou(counts) == pytest.approx(jaccard_score(truth, predicted, average="macro"))
    # TP / (FP + TP + FN): class 0 has 3 / (3 + 1 + 2), class 1 has 4 / (4 + 2 + 1).
    assert mean_iou(torch.tensor([[3, 2], [1, 4]])) == pytest.approx((3 / 6 + 4 / 7) / 2)
    assert mean_iou(torch.tensor([[5, 0, 0], [0, 5, 0], [0, 0, 0]])) == 1.0  # a class that never occurs
    assert mean_iou(torch.tensor([[5, 0, 0], [0, 5, 0], [5, 0, 0]])) == pytest.approx((0.5 + 1 + 0) / 3)
    with pytest.raises(BadTask, match="every pixel of the split is void"):
        mean_iou(torch.zeros(3, 3))
    with pytest.raises(BadTask, match="2 labels are neither classes, 0 to 2, nor 255 for void"):
        confusion(nn.Identity(), lambda _: [(torch.zeros(1, 3, 2, 2), torch.tensor([[[0, 3], [VOID, -1]]]))], 3)


# ---------------------------------------------------------------- published weights

HEAD = NETWORKS["resnet20"].head


def publish(path: Path) -> dict[str, Tensor]:
    torch.manual_seed(1)
    state = {name: value for name, value in resnet20().state_dict().items() if "num_batches" not in name}
    save_file(state, path)
    return state


def test_tensors_of_any_type_are_read_and_half_precision_becomes_float32(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    types = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    given = {str(dtype): torch.tensor([[0, 1], [2, 3]]).to(dtype) for dtype in types} | {"none": torch.empty(0, 3)}
    save_file(given, path)
    found = read_weights(path)
    assert set(found) == set(given)
    for name, tensor in given.items():
        assert torch.equal(found[name].double(), tensor.double())
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        assert found[name].dtype == (torch.float32 if half else tensor.dtype)


def test_published_weights_are_loaded_and_classes_selected(tmp_path: Path) -> None:
    path, notes = tmp_path / "a.safetensors", []
    state = publish(path)
    model = resnet20()
    load_weights_(model, path, head=HEAD, log=notes.append)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in state.items())
    assert notes == []
    selected = resnet20(3)
    load_weights_(selected, path, head=HEAD, published={10: (7, 0, 2)}, log=notes.append)
    assert torch.equal(selected.linear.weight, state["linear.weight"][[7, 0, 2]])
    assert torch.equal(selected.linear.bias, state["linear.bias"][[7, 0, 2]])
    other = resnet20(4)
    before = other.linear.weight.clone()
    load_weights_(other, path, head=HEAD, log=notes.append)
    assert torch.equal(other.linear.weight, before)
    assert torch.equal(other.conv1.weight, state["conv1.weight"])
    assert notes == [
        "a.safetensors has 10 outputs and the data 3 classes: the outputs of these classes are kept.",
        "a.safetensors has 10 outputs and the data 4 classes: the last layer starts from random weights; train it "
        "first (--pretrain-steps N).",
    ]
    save_state(tmp_path / "dense.safetensors", model.state_dict())  # files of a run are read too
    load_weights_(other := resnet20(), tmp_path / "dense.safetensors", head=HEAD)
    assert torch.equal(model.conv1.weight, other.conv1.weight)


def test_outputs_of_a_transposed_convolution_are_on_its_second_axis(tmp_path: Path) -> None:
    network = NETWORKS["erfnet"]
    state = {name: value for name, value in network.build(20).state_dict().items() if "num_batches" not in name}
    save_file(state, tmp_path / "a.safetensors")
    model = network.build(19)
    load_weights_(model, tmp_path / "a.safetensors", head=network.head, published={20: tuple(range(19))})
    found = model.state_dict()["decoder.output_conv.weight"]
    assert torch.equal(found, state["decoder.output_conv.weight"][:, :19])
