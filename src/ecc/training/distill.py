"""Learning from the dense network beside the labels.

The paper adds "a knowledge distillation term" to the loss; the authors' code takes half the mean squared error of
the logits (Ba and Caruana, 2014) and half the task's loss, which is the default here. The other choice is the
divergence of softened class probabilities (Hinton et al., 2015).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.errors import BadTask, EccError
from ecc.task import Inputs

from .settings import DistillSettings


def distillation_loss(
    student: Any,
    teacher: Any,
    task_loss: Tensor,
    *,
    weight: float = 0.5,
    temperature: float | None = None,
    ignore: Tensor | None = None,
) -> Tensor:
    """`weight * distance(student, teacher) + (1 - weight) * task_loss`.

    Args:
        student: Outputs of the network in training: logits `(N, C)` or `(N, C, H, W)`, or a tuple or dict whose
            first tensor they are.
        teacher: Outputs of the dense network, in the same form.
        task_loss: What the labels say.
        weight: Share of the teacher.
        temperature: None for the mean squared error of logits. T for T^2 KL(teacher || student) of the class
            probabilities at temperature T, a mean over positions; T^2 keeps the gradients' size.
        ignore: True where nothing is to be learnt: the shape of the logits without their axis of classes.

    Raises:
        EccError: If shapes do not fit.
    """
    ours, theirs = logits_of(student).float(), logits_of(teacher).detach().float()
    if ours.shape != theirs.shape or ours.dim() < 2:
        raise EccError(
            f"logits of the student have shape {tuple(ours.shape)} and those of the teacher {tuple(theirs.shape)}; "
            "distillation needs equal shapes (N, C, ...)."
        )
    if temperature is None:
        distance = (ours - theirs).square().mean(dim=1)
    else:
        logs, target_logs = F.log_softmax(ours / temperature, dim=1), F.log_softmax(theirs / temperature, dim=1)
        distance = F.kl_div(logs, target_logs, reduction="none", log_target=True).sum(dim=1) * temperature**2
    if ignore is None:
        return weight * distance.mean() + (1 - weight) * task_loss
    if ignore.shape != distance.shape:
        raise EccError(
            f"the ignore mask has shape {tuple(ignore.shape)}; for logits {tuple(ours.shape)} it must have "
            f"{tuple(distance.shape)}."
        )
    kept = distance.masked_fill(ignore.to(torch.bool), 0).sum() / (~ignore.to(torch.bool)).sum().clamp(min=1)
    return weight * kept + (1 - weight) * task_loss


def logits_of(outputs: Any) -> Tensor:
    """The first tensor in the outputs of a network.

    Raises:
        EccError: If there is none.
    """
    first = _first_tensor(outputs)
    if first is None:
        raise EccError(f"a network's output is a {type(outputs).__name__} without a tensor; distillation needs logits.")
    return first


class Teacher:
    """The dense network as it was: a copy in evaluation mode, without gradients, that training cannot change.

    Called inside an autocast block it computes in that precision too.

    Args:
        model: Copied, weights and all, to where they lie now.
        settings: How to learn from it.
    """

    def __init__(self, model: nn.Module, settings: DistillSettings | None = None) -> None:
        self.settings = settings or DistillSettings()
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()  # inference mode would be quicker still, but its tensors cannot enter a backward pass
    def __call__(self, inputs: Inputs) -> Any:
        """What the dense network says to these inputs."""
        return call_model(self.model, inputs)

    def loss(self, outputs: Any, inputs: Inputs, targets: Any, task_loss: Tensor) -> Tensor:
        """The loss to train with, given the student's outputs and what the labels say."""
        if self.settings.is_off:
            return task_loss
        ignore = None
        if self.settings.ignore_index is not None:
            if not isinstance(targets, Tensor):
                raise BadTask(f"ignore_index needs targets that are a tensor of labels; these are {type(targets)}.")
            ignore = targets == self.settings.ignore_index
        settings = self.settings
        return distillation_loss(
            outputs,
            self(inputs),
            task_loss,
            weight=settings.used_weight,
            temperature=settings.temperature,
            ignore=ignore,
        )


def call_model(model: nn.Module, inputs: Inputs) -> Any:
    """Calls a network with one tensor, a tuple of positional arguments, or a dict of named ones."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def _first_tensor(value: Any) -> Tensor | None:
    if isinstance(value, Tensor):
        return value
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return next((found for item in items if (found := _first_tensor(item)) is not None), None)
