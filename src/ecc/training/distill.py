"""Knowledge distillation: the network in training also learns from the outputs of the dense network.

The paper adds "a knowledge distillation term" to the loss. The authors' code uses half the mean squared error of the
logits (Ba and Caruana, 2014) and half the loss of the task, which is the default here. With a temperature, the term is
the divergence of softened class probabilities (Hinton et al., 2015).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ecc.errors import BadTask, EccError, EccWarning, describe_error
from ecc.settings import DistillSettings
from ecc.task import Batch, call_model, split_batch, takes_model


class Teacher:
    """The dense network as a teacher: a copy in eval mode without gradients."""

    def __init__(self, model: nn.Module, settings: DistillSettings | None = None) -> None:
        self.settings = settings or DistillSettings()
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self._is_applied = not self.settings.is_off

    @torch.no_grad()  # tensors of inference mode cannot be used in a backward pass
    def outputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Outputs of the dense network."""
        return self.model(*args, **kwargs)

    def add_loss(self, task_loss: Tensor, calls: list[ModelCall], targets: Any) -> Tensor:
        """`weight * distance + (1 - weight) * task_loss`, or `task_loss` if distillation is off.

        Args:
            task_loss: Loss of the task.
            calls: Calls of the student, with its outputs. The distance is a mean over calls.
            targets: Labels, for `ignore_index`.

        Raises:
            EccError: If a weight was given and outputs of student and teacher cannot be compared. With the automatic
                weight, distillation is turned off in that case, with an `EccWarning`.
        """
        if not self._is_applied:
            return task_loss
        try:
            distance = self._distance(calls, targets)
        except NotComparable as error:
            if not self.settings.is_auto:
                raise EccError(f"{error} Turn distillation off: distill=0, or --kd-weight 0.") from None
            self._is_applied = False
            warnings.warn(
                f"Training without distillation. {error} To do so without this warning: distill=0, or --kd-weight 0.",
                EccWarning,
                stacklevel=2,
            )
            return task_loss
        weight = self.settings.used_weight
        return weight * distance + (1 - weight) * task_loss

    def _distance(self, calls: list[ModelCall], targets: Any) -> Tensor:
        if not calls:
            raise NotComparable("The loss does not call the model itself, so its outputs are unknown.")
        ignore_index = self.settings.ignore_index
        if ignore_index is not None and not isinstance(targets, Tensor):
            raise BadTask(f"ignore_index needs targets that are a tensor of labels, not {type(targets).__name__}.")
        ignore = None if ignore_index is None else targets == ignore_index
        distances = [
            output_distance(
                call.outputs, self.outputs(call.args, call.kwargs), temperature=self.settings.temperature, ignore=ignore
            )
            for call in calls
        ]
        return torch.stack(distances).mean()


class ModelCall:
    """One call of a model during a loss: its arguments and outputs."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> None:
        self.args, self.kwargs, self.outputs = args, kwargs, outputs


class NotComparable(EccError):
    """Raised when outputs of student and teacher cannot be compared."""


def training_loss(
    model: nn.Module, batch: Batch, loss: Callable[..., Tensor] | None, teacher: Teacher | None
) -> Tensor:
    """The loss of a batch: that of the task, combined with distillation if there is a teacher.

    Three forms are supported: `loss(outputs, targets)`, `loss(model, batch)`, and None for a model that returns its
    loss when it is called with a dict batch.

    Raises:
        BadTask: If the batch does not fit the form of the loss.
        EccError: If distillation was requested and is not possible.
    """
    if takes_model(loss):
        assert loss is not None
        with _recorded_calls(model) as calls:
            found = loss(model, batch)
        targets = batch.get("labels") if isinstance(batch, Mapping) else None
        if isinstance(batch, tuple | list) and len(batch) == 2:
            targets = batch[1]
    else:
        inputs, targets = split_batch(batch)
        outputs = call_model(model, inputs)
        if loss is not None:
            try:
                found = loss(outputs, batch if isinstance(batch, Mapping) else targets)
            except (TypeError, AttributeError, ValueError, LookupError) as error:
                if not isinstance(outputs, Tensor) or "not callable" in str(error):
                    raise BadTask(
                        f"loss(outputs, targets) raised {describe_error(error)}; outputs is {type(outputs).__name__}. "
                        "For a loss that calls the network, name the first parameter `model`: "
                        "loss=lambda model, batch: model(**batch).loss."
                    ) from error
                raise
        else:
            found = _own_loss(outputs)
        calls = [ModelCall(*_as_call(inputs), outputs)]
    if not isinstance(found, Tensor) or found.numel() != 1:
        kind = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise BadTask(f"the loss returned {kind}; return a tensor with one number, such as the sum of all terms.")
    return found if teacher is None else teacher.add_loss(found, calls, targets)


def _own_loss(outputs: Any) -> Tensor:
    """The loss that a model returns, as Hugging Face models do when they get labels."""
    found = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(found, Tensor):
        raise BadTask(
            "the task has no loss, and the outputs of the model have none either; give loss=..., or batches that are "
            "dicts with the labels that the model expects."
        )
    return found


def _as_call(inputs: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), inputs
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


@contextmanager
def _recorded_calls(model: nn.Module) -> Iterator[list[ModelCall]]:
    """A block in which calls of the model are recorded by a forward hook."""
    calls: list[ModelCall] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        del module
        calls.append(ModelCall(args, kwargs, outputs))

    handle = model.register_forward_hook(record, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def output_distance(
    student: Any, teacher: Any, *, temperature: float | None = None, ignore: Tensor | None = None
) -> Tensor:
    """Distance between the outputs of two networks.

    What is compared: the `logits` of Hugging Face outputs; all tensors of a list (feature maps of a detector);
    otherwise the first floating-point tensor of the outputs.

    Args:
        student: Outputs of the network in training.
        teacher: Outputs of the dense network.
        temperature: None for the mean squared error. T for T^2 KL(teacher || student) of class probabilities at
            temperature T, a mean over positions; the factor keeps the size of the gradients. Classes are axis 1, and
            the last axis of three-dimensional `logits`.
        ignore: True at positions that do not count, of the shape of the logits without the axis of classes.

    Raises:
        NotComparable: If there are no such tensors of equal shapes.
        EccError: If the shape of `ignore` does not fit.
    """
    ours, theirs = _compared(student), _compared(teacher)
    shapes = [[tuple(tensor.shape) for tensor in side] for side in (ours, theirs)]
    if shapes[0] != shapes[1] or not ours or any(tensor.dim() < 2 for tensor in ours):
        raise NotComparable(
            "Distillation compares the outputs of the network with those of the dense network in eval mode, which must "
            f"be tensors (N, C, ...) of equal shapes; these are {_shown(shapes[0])} and {_shown(shapes[1])}."
        )
    axis = -1 if _logits(student) is not None and ours[0].dim() == 3 else 1
    distances = []
    for mine, other in zip(ours, theirs, strict=True):
        distance = _class_distance(mine.float(), other.detach().float(), temperature, axis)
        if ignore is None:
            distances.append(distance.mean())
            continue
        if ignore.shape != distance.shape:
            raise EccError(
                f"ignore_index needs targets of shape {tuple(distance.shape)} for outputs of shape "
                f"{tuple(mine.shape)}; these have {tuple(ignore.shape)}."
            )
        distances.append(distance.masked_fill(ignore, 0).sum() / (~ignore).sum().clamp(min=1))
    return torch.stack(distances).mean() if len(distances) > 1 else distances[0]


def _class_distance(ours: Tensor, theirs: Tensor, temperature: float | None, axis: int) -> Tensor:
    if temperature is None:
        return (ours - theirs).square().mean(dim=axis)
    log_ours, log_theirs = (F.log_softmax(logits / temperature, dim=axis) for logits in (ours, theirs))
    divergence = F.kl_div(log_ours, log_theirs, reduction="none", log_target=True).sum(dim=axis)
    return divergence * temperature**2


def _compared(outputs: Any) -> list[Tensor]:
    """The tensors of a network's outputs that distillation compares."""
    logits = _logits(outputs)
    tensors = [leaf for leaf in tree_leaves(outputs if logits is None else logits) if isinstance(leaf, Tensor)]
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    return floating if isinstance(outputs, list) else floating[:1]


def _logits(outputs: Any) -> Any:
    """The field `logits` of Hugging Face outputs; None if there is none."""
    return outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)


def _shown(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(map(str, shapes)) or "no tensors"
