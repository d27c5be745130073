"""Train mode differs from eval mode, behind something that the source of `forward` does not show."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graph.layers import conv
from graph.traps.base import EXAMPLE, Net, images, trap

IS_TRAINING = operator.attrgetter("training")


def through(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator that hides the function."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Auxiliary(Net):
    """A second head on the stem, if `active`."""

    def __init__(self) -> None:
        super().__init__()
        self.aux = conv(8, 4, 1)

    def active(self, x: Tensor) -> bool:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Any:
        features = F.relu(self.stem(x))
        result = self.head(F.relu(self.body(features)))
        return (result, self.aux(features)) if self.active(features) else result


class Penalty(Net):
    """A loss term of the features of the stem, if `active`."""

    def active(self, x: Tensor) -> bool:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Any:
        features = F.relu(self.stem(x))
        result = self.head(F.relu(self.body(features)))
        return (result, features.pow(2).mean()) if self.active(features) else result


@trap()
class AuxUnderAutocast(Auxiliary):
    @torch.autocast("cpu", enabled=False)
    def active(self, x: Tensor) -> bool:
        return self.training


@trap()
class PenaltyUnderAutocast(Penalty):
    @torch.autocast("cpu", dtype=torch.bfloat16)
    def active(self, x: Tensor) -> bool:
        return self.training


@trap()
class AuxUnderWrapper(Auxiliary):
    @through
    def active(self, x: Tensor) -> bool:
        return self.training


@trap()
class PenaltyUnderWrapper(Penalty):
    @through
    def active(self, x: Tensor) -> bool:
        return self.training


@trap()
class PenaltyUnderNoGradDecorator(Penalty):
    @torch.no_grad()
    def active(self, x: Tensor) -> bool:
        return self.training


@trap()
class AuxBehindProperty(Auxiliary):
    @property
    def is_learning(self) -> bool:
        return self.training

    def active(self, x: Tensor) -> bool:
        return self.is_learning


@trap()
class PenaltyBehindCachedProperty(Penalty):
    @functools.cached_property
    def mode_of(self) -> Callable[[nn.Module], bool]:
        return IS_TRAINING

    def active(self, x: Tensor) -> bool:
        return self.mode_of(self)


class Helper:
    """Knows the network and its mode."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner

    def learns(self) -> bool:
        return self.owner.training


@trap()
class AuxBehindHelper(Auxiliary):
    def __init__(self) -> None:
        super().__init__()
        self.helper = Helper(self.head)

    def active(self, x: Tensor) -> bool:
        return self.helper.learns()


@trap()
class PenaltyBehindHelper(Penalty):
    def __init__(self) -> None:
        super().__init__()
        self.helper = Helper(self.head)

    def active(self, x: Tensor) -> bool:
        return self.helper.learns()


@trap()
class PenaltyBehindStaticMethod(Penalty):
    @staticmethod
    def learns(module: nn.Module) -> bool:
        return module.training

    def active(self, x: Tensor) -> bool:
        return self.learns(self)


@trap()
class AuxWithGradients(Auxiliary):
    def active(self, x: Tensor) -> bool:
        return torch.is_grad_enabled()


@trap()
class PenaltyWithGradients(Penalty):
    def active(self, x: Tensor) -> bool:
        return torch.is_grad_enabled()


@trap()
class PenaltyOutsideInference(Penalty):
    def active(self, x: Tensor) -> bool:
        return not torch.is_inference_mode_enabled()


@trap()
class PenaltyWhereGradientsAreRequired(Penalty):
    def active(self, x: Tensor) -> bool:
        return x.requires_grad


@trap()
class PenaltyWhereThereIsAGradFunction(Penalty):
    def active(self, x: Tensor) -> bool:
        return x.grad_fn is not None


@trap()
class AuxOnRealDevices(Auxiliary):
    def active(self, x: Tensor) -> bool:
        return x.device.type != "meta"


@trap()
class PenaltyOnTheCpu(Penalty):
    def active(self, x: Tensor) -> bool:
        return x.device == torch.device("cpu")


@trap()
class PenaltyNotOnMeta(Penalty):
    def active(self, x: Tensor) -> bool:
        return not x.is_meta


@trap()
class PenaltyInTrainModeNotOnMeta(Penalty):
    """A trace on meta tensors sees no difference between the modes."""

    def active(self, x: Tensor) -> bool:
        return self.training and not x.is_meta


@trap()
class PenaltyInTrainModeOnTheCpu(Penalty):
    def active(self, x: Tensor) -> bool:
        return self.training and x.device.type == "cpu"


@trap()
class PenaltyByChance(Penalty):
    """Half of the calls in train mode have the loss term."""

    def active(self, x: Tensor) -> bool:
        return self.training and float(torch.rand(())) < 0.5


@trap()
class AuxByComputedName(Auxiliary):
    def active(self, x: Tensor) -> bool:
        return getattr(self, "train" + "ing"[: len("ing")])


@trap()
class PenaltyByVars(Penalty):
    def active(self, x: Tensor) -> bool:
        return any(value is True for key, value in vars(self).items() if key.endswith("ning"))


@trap()
class PenaltyByAttributeGetter(Penalty):
    def active(self, x: Tensor) -> bool:
        return IS_TRAINING(self)


@trap()
class PenaltyByStoredPartial(Penalty):
    def __init__(self) -> None:
        super().__init__()
        self.mode_of = functools.partial(lambda name, module: module.__dict__[name], "train" + chr(105) + "ng")

    def active(self, x: Tensor) -> bool:
        return self.mode_of(self)


@trap(example=images(1, batch=1, size=8), second=images(2, batch=3, size=8))
class PenaltyBehindANormOfOneValue(Penalty):
    """In train mode a batch of one cannot be normalized, so the example input runs in eval mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    @through
    def active(self, x: Tensor) -> bool:
        return self.training

    def forward(self, x: Tensor) -> Any:
        result = super().forward(x)
        first = result[0] if isinstance(result, tuple) else result
        return result, self.norm(first.mean((2, 3)))


@trap(example=images(1, batch=1, size=8), second=images(2, batch=3, size=8))
class AuxThatRefusesTheExample(Auxiliary):
    """The second head needs a batch of three in train mode."""

    @through
    def active(self, x: Tensor) -> bool:
        if self.training and len(x) != 3:
            raise ValueError("batch of three expected")
        return self.training


@trap(example=EXAMPLE)
class WidthInTrainModeOnly(Net):
    @property
    def is_learning(self) -> bool:
        return self.training

    def middle(self, x: Tensor) -> Tensor:
        return x / x.new_tensor([x.shape[1]]) if self.is_learning else x


@trap()
class EvalModeMixesChannels(Net):
    """The other way round: eval mode has the extra term."""

    @property
    def is_learning(self) -> bool:
        return self.training

    def middle(self, x: Tensor) -> Tensor:
        return x if self.is_learning else x / x.new_tensor([x.shape[1]])
