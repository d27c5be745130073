from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.errors import BadTask, EccError, EccWarning
from ecc.training import DistillSettings, Teacher, training_loss
from ecc.training.distill import NotComparable, output_distance

STUDENT = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
TEACHER = torch.tensor([[3.0, 0.0], [0.0, 1.0]])  # squared errors 4, 0, 0, 1: a mean of 1.25


@dataclass
class Output:
    """As a Hugging Face output."""

    logits: Tensor
    loss: Tensor | None = None


# ---------------------------------------------------------------- distances


def test_the_mean_squared_error_of_logits() -> None:
    assert float(output_distance(STUDENT, TEACHER)) == 1.25
    half = torch.full((1, 2), 300.0, dtype=torch.float16)  # squared, 90,000 overflows fp16
    assert float(output_distance(half, torch.zeros_like(half))) == 90_000


def test_the_divergence_at_a_temperature() -> None:
    """Two classes with probabilities 1/2 and 1/2 against 1/(1+e) and e/(1+e), at temperature 2."""
    high = math.e / (1 + math.e)
    divergence = 0.5 * math.log(0.5 / (1 - high)) + 0.5 * math.log(0.5 / high)
    found = output_distance(torch.tensor([[0.0, 2.0]]), torch.tensor([[0.0, 0.0]]), temperature=2.0)
    assert float(found) == pytest.approx(4 * divergence, rel=1e-6)
    logits = torch.randn(3, 5, 2, 2)
    assert float(output_distance(logits, logits, temperature=4.0)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("temperature", [None, 3.0])
def test_the_axis_of_classes(temperature: float | None) -> None:
    """Axis 1 of images, the last axis of the logits of a sequence."""
    student, teacher = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4)
    expected = output_distance(student.reshape(-1, 4), teacher.reshape(-1, 4), temperature=temperature)
    images = [logits.permute(0, 3, 1, 2) for logits in (student, teacher)]
    sequences = [Output(logits.reshape(2, 15, 4)) for logits in (student, teacher)]
    as_dicts = [{"loss": torch.tensor(1.0), "logits": output.logits} for output in sequences]
    for one, other in (images, sequences, as_dicts):
        torch.testing.assert_close(output_distance(one, other, temperature=temperature), expected)


@pytest.mark.parametrize("temperature", [None, 3.0])
def test_ignored_positions_neither_count_nor_get_gradients(temperature: float | None) -> None:
    student, teacher = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)
    ignore = torch.tensor([True, False, False, True, False, False])
    found = output_distance(student, teacher, temperature=temperature, ignore=ignore)
    torch.testing.assert_close(found, output_distance(student[~ignore], teacher[~ignore], temperature=temperature))
    found.backward()
    assert student.grad is not None
    assert torch.equal(student.grad.abs().sum(dim=1) == 0, ignore)
    assert float(output_distance(STUDENT, TEACHER, ignore=torch.tensor([True, True]))) == 0.0
    with pytest.raises(EccError, match=r"needs targets of shape \(2,\).*these have \(3,\)"):
        output_distance(STUDENT, TEACHER, ignore=torch.zeros(3, dtype=torch.bool))


def test_which_outputs_are_compared() -> None:
    for wrap in (
        lambda x: x,
        lambda x: (x, torch.ones(2, 9)),
        lambda x: {"out": x, "aux": torch.ones(2, 9)},
        lambda x: [None, [x]],
    ):
        assert float(output_distance(wrap(STUDENT), wrap(TEACHER))) == 1.25
    maps = [torch.zeros(1, 3, 4, 4), torch.zeros(1, 3, 2, 2)]  # a list: all feature maps of a detector
    assert float(output_distance(maps, [maps[0], maps[1] + 2])) == 2.0


@pytest.mark.parametrize(
    ("student", "teacher", "shapes"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4), r"\(2, 3\) and \(2, 4\)"),
        (torch.zeros(3), torch.zeros(3), r"\(3,\) and \(3,\)"),
        ({"loss_box": torch.tensor(1.0)}, [{"boxes": torch.zeros(7, 4)}], r"\(\) and \(7, 4\)"),
        ([torch.zeros(1, 3, 4, 4)] * 3, (torch.zeros(1, 8, 9), []), r"\(1, 3, 4, 4\), .* and \(1, 8, 9\)"),
        (torch.zeros(2, 3), "text", r"\(2, 3\) and no tensors"),
        (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3), r"no tensors and \(2, 3\)"),
    ],
)
def test_outputs_that_cannot_be_compared(student: Any, teacher: Any, shapes: str) -> None:
    with pytest.raises(NotComparable, match=f"of equal shapes; these are {shapes}"):
        output_distance(student, teacher)


# ---------------------------------------------------------------- losses


class Classifier(nn.Module):
    """Called as Hugging Face models are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.linear(inputs)
        return Output(logits, None if labels is None else F.cross_entropy(logits, labels))


class Detector(nn.Module):
    """Returns losses in train mode, and detections in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, images: Tensor, targets: Tensor | None = None) -> Any:
        boxes = self.linear(images)
        return {"loss_box": boxes.square().mean()} if self.training else [{"boxes": boxes[:2]}]


INPUTS, LABELS = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 255])


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, ignore_index=255)


def test_all_forms_of_a_loss_agree() -> None:
    model = Classifier()
    teacher = Teacher(model, DistillSettings(weight=0.25))
    with torch.no_grad():
        model.linear.bias.add_(1)  # a squared error of 1
    labels = LABELS[:4]
    inputs = INPUTS[:4]
    batch = {"inputs": inputs, "labels": labels}
    expected = 0.25 * 1.0 + 0.75 * float(F.cross_entropy(model.linear(inputs), labels).detach())
    for loss, given in [
        (None, batch),
        (lambda model, batch: model(**batch).loss, batch),
        (lambda model, batch: F.cross_entropy(model(batch[0]).logits, batch[1]), (inputs, labels)),
        (lambda outputs, targets: F.cross_entropy(outputs.logits, targets), (inputs, labels)),
        (lambda outputs, batch: outputs.loss, batch),
    ]:
        assert float(training_loss(model, given, loss, teacher).detach()) == pytest.approx(expected)
        assert float(training_loss(model, given, loss, None).detach()) == pytest.approx((expected - 0.25) / 0.75)
    assert not model._forward_hooks


def test_the_distillation_loss_has_gradients_and_ignores_labels() -> None:
    model = nn.Linear(3, 4)
    teacher = Teacher(model, DistillSettings(weight=0.5, ignore_index=255))
    with torch.no_grad():
        model.bias.add_(1)
    loss = training_loss(model, (INPUTS, LABELS), cross_entropy, teacher)
    task_loss = float(cross_entropy(model(INPUTS), LABELS).detach())
    assert float(loss.detach()) == pytest.approx(0.5 * 1.0 + 0.5 * task_loss)
    loss.backward()
    assert model.weight.grad is not None
    with pytest.raises(BadTask, match="ignore_index needs targets that are a tensor of labels, not list"):
        training_loss(model, (INPUTS, ["a"]), lambda outputs, targets: outputs.mean(), teacher)


def test_a_model_loss_that_calls_the_model_twice_is_distilled_in_both_calls() -> None:
    model = nn.Linear(3, 4)
    teacher = Teacher(model, DistillSettings(weight=1.0))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return (model(batch) - model(2 * batch)).square().mean()

    with torch.no_grad():
        model.weight.mul_(2)
    expected = (
        F.mse_loss(model(INPUTS), teacher.model(INPUTS)) + F.mse_loss(model(2 * INPUTS), teacher.model(2 * INPUTS))
    ) / 2
    torch.testing.assert_close(training_loss(model, INPUTS, loss, teacher), expected)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda model, batch: model(*batch)["loss_box"], "must be tensors"),
        (lambda model, batch: model.linear(batch[0]).square().mean(), "The loss does not call the model itself"),
    ],
)
def test_distillation_is_left_out_once_where_outputs_cannot_be_compared(loss: Any, reason: str) -> None:
    model, batch = Detector(), (INPUTS, LABELS)
    teacher = Teacher(model)
    with pytest.warns(EccWarning, match=f"Training without distillation. .*{reason}") as caught:
        found = [training_loss(model, batch, loss, teacher) for _ in range(3)]
    assert len(caught) == 1
    assert float(found[0].detach()) == pytest.approx(float(model.linear(INPUTS).square().mean().detach()))
    with pytest.raises(EccError, match=rf"{reason}.* Turn distillation off: distill=0, or --kd-weight 0"):
        training_loss(model, batch, loss, Teacher(model, DistillSettings(weight=0.5)))


def test_batches_that_do_not_fit_the_loss_are_reported() -> None:
    model = nn.Linear(3, 4)
    for batch, what in ((INPUTS, "a Tensor;"), ((1, 2, 3), "a tuple of 3 items;")):
        with pytest.raises(
            BadTask, match=rf"a batch is {what} give pairs \(inputs, targets\), dicts .*loss\(model, batch\)"
        ):
            training_loss(model, batch, cross_entropy, None)
    with pytest.raises(BadTask, match="the task has no loss, and the outputs of the model have none either"):
        training_loss(model, (INPUTS, LABELS), None, None)


# ---------------------------------------------------------------- the teacher


def test_training_does_not_change_the_teacher() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    teacher = Teacher(model)
    before = teacher.outputs((INPUTS,), {})
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(teacher.outputs((INPUTS,), {}), before)
    assert not before.requires_grad
    assert model.training
    assert model[0].weight.requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert teacher.outputs((INPUTS,), {}).dtype == torch.bfloat16


def test_with_weight_0_the_teacher_does_not_run() -> None:
    teacher = Teacher(nn.Linear(99, 4), DistillSettings(weight=0))
    model = nn.Linear(3, 4)
    assert float(training_loss(model, (INPUTS, LABELS), cross_entropy, teacher).detach()) == pytest.approx(
        float(cross_entropy(model(INPUTS), LABELS).detach())
    )
