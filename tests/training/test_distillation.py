from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.errors import BadTask, EccError
from ecc.training.distill import DistillSettings, Teacher, call_model, distillation_loss, logits_of

STUDENT = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
TEACHER = torch.tensor([[3.0, 0.0], [0.0, 1.0]])  # squared errors 4, 0, 0, 1: a mean of 1.25


def test_the_papers_loss_by_hand() -> None:
    loss = distillation_loss(STUDENT, TEACHER, torch.tensor(2.0))
    assert float(loss) == 0.5 * 1.25 + 0.5 * 2.0


def test_the_weight_is_the_teachers_share() -> None:
    assert float(distillation_loss(STUDENT, TEACHER, torch.tensor(2.0), weight=1.0)) == 1.25
    assert float(distillation_loss(STUDENT, TEACHER, torch.tensor(2.0), weight=0.0)) == 2.0
    assert float(distillation_loss(STUDENT, TEACHER, torch.tensor(2.0), weight=0.25)) == 0.25 * 1.25 + 1.5


def test_the_divergence_by_hand() -> None:
    """Two classes with probabilities 1/2 and 1/2 against 1/(1+e) and e/(1+e), at temperature 2."""
    student, teacher = torch.tensor([[0.0, 2.0]]), torch.tensor([[0.0, 0.0]])
    high = math.e / (1 + math.e)
    divergence = 0.5 * math.log(0.5 / (1 - high)) + 0.5 * math.log(0.5 / high)
    loss = distillation_loss(student, teacher, torch.tensor(7.0), weight=1.0, temperature=2.0)
    assert float(loss) == pytest.approx(4 * divergence, rel=1e-6)


def test_the_divergence_of_a_network_from_itself_is_nothing() -> None:
    logits = torch.randn(3, 5, 2, 2)
    assert float(distillation_loss(logits, logits, torch.tensor(0.0), temperature=4.0)) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("temperature", [None, 3.0])
def test_segmentation_is_a_mean_over_positions(temperature: float | None) -> None:
    student, teacher = torch.randn(2, 4, 3, 5), torch.randn(2, 4, 3, 5)
    flat = [logits.permute(0, 2, 3, 1).reshape(-1, 4) for logits in (student, teacher)]
    options = {"weight": 1.0, "temperature": temperature}
    torch.testing.assert_close(
        distillation_loss(student, teacher, torch.tensor(0.0), **options),
        distillation_loss(flat[0], flat[1], torch.tensor(0.0), **options),
    )


@pytest.mark.parametrize("temperature", [None, 3.0])
def test_ignored_positions_neither_count_nor_teach(temperature: float | None) -> None:
    student, teacher = torch.randn(6, 4, requires_grad=True), torch.randn(6, 4)
    ignore = torch.tensor([True, False, False, True, False, False])
    zero = torch.tensor(0.0)
    loss = distillation_loss(student, teacher, zero, temperature=temperature, ignore=ignore)
    expected = distillation_loss(student[~ignore], teacher[~ignore], zero, temperature=temperature)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert student.grad is not None
    assert torch.equal(student.grad.abs().sum(dim=1) == 0, ignore)


def test_where_all_is_ignored_the_loss_is_finite() -> None:
    loss = distillation_loss(STUDENT, TEACHER, torch.tensor(2.0), ignore=torch.tensor([True, True]))
    assert float(loss) == 1.0


@pytest.mark.parametrize(
    ("student", "teacher", "ignore", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4), None, r"\(2, 3\) and those of the teacher \(2, 4\)"),
        (torch.zeros(3), torch.zeros(3), None, r"distillation needs equal shapes \(N, C, ...\)"),
        (torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(3), r"mask has shape \(3,\).*must have \(2,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_told(student: Tensor, teacher: Tensor, ignore: Tensor | None, message: str) -> None:
    with pytest.raises(EccError, match=message):
        distillation_loss(student, teacher, torch.tensor(0.0), ignore=ignore)


def test_half_precision_is_compared_in_full() -> None:
    student = torch.full((1, 2), 300.0, dtype=torch.float16)  # squared, 90,000 is beyond fp16
    loss = distillation_loss(student, torch.zeros(1, 2, dtype=torch.float16), torch.tensor(0.0), weight=1.0)
    assert float(loss) == 90_000


def test_logits_are_the_first_tensor() -> None:
    logits = torch.zeros(2, 3)
    for outputs in (logits, (logits, torch.ones(1)), {"out": logits, "aux": torch.ones(1)}, [None, [logits]]):
        assert logits_of(outputs) is logits
    with pytest.raises(EccError, match="output is a str without a tensor"):
        logits_of("nothing")


@pytest.mark.parametrize(("field", "value"), [("weight", 1.5), ("weight", float("nan")), ("temperature", 0.0)])
def test_settings_out_of_range_are_told(field: str, value: float) -> None:
    with pytest.raises(EccError, match=f"kd_{field} is {value}"):
        DistillSettings(**{field: value})


# ---------------------------------------------------------------- the teacher


def test_the_teacher_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    teacher = Teacher(model)
    inputs = torch.randn(5, 3)
    before = teacher(inputs)
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(teacher(inputs), before)
    assert not before.requires_grad
    assert model.training
    assert model[0].weight.requires_grad


def test_the_teacher_computes_in_the_precision_of_the_block() -> None:
    teacher = Teacher(nn.Linear(3, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert teacher(torch.randn(5, 3)).dtype == torch.bfloat16
    assert teacher(torch.randn(5, 3)).dtype == torch.float32


def test_the_teachers_loss_can_be_learnt_from() -> None:
    model = nn.Linear(3, 4)
    teacher = Teacher(model, DistillSettings(weight=0.5, ignore_index=255))
    inputs, targets = torch.randn(2, 3), torch.tensor([1, 255])
    outputs = model(inputs) + 1
    task_loss = F.cross_entropy(outputs, targets, ignore_index=255)
    loss = teacher.loss(outputs, inputs, targets, task_loss)
    assert loss.item() == pytest.approx(0.5 + 0.5 * task_loss.item())
    loss.backward()
    assert model.weight.grad is not None


def test_a_weight_of_0_does_not_run_the_teacher() -> None:
    teacher = Teacher(nn.Linear(3, 4), DistillSettings(weight=0))
    task_loss = torch.tensor(1.0)
    assert teacher.loss(None, torch.zeros(7), None, task_loss) is task_loss


def test_labels_to_ignore_must_be_a_tensor() -> None:
    teacher = Teacher(nn.Linear(3, 4), DistillSettings(ignore_index=255))
    with pytest.raises(BadTask, match="ignore_index needs targets that are a tensor"):
        teacher.loss(torch.zeros(1, 4), torch.zeros(1, 3), ["a"], torch.tensor(1.0))


class Two(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a - b


def test_networks_are_called_as_their_inputs_say() -> None:
    a, b = torch.tensor(3.0), torch.tensor(1.0)
    assert call_model(Two(), (a, b)) == call_model(Two(), {"b": b, "a": a}) == 2
    assert call_model(nn.Identity(), a) is a
