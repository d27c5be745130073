"""Running a network so that two versions of it can be compared: precision, random draws, inputs, differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ecc.graph.forward_pass import Inputs, as_call
from ecc.graph.model_copy import named_tensors, rebuilt
from ecc.torch_utils import tensors_in

ALLOWED_FLOAT64 = 1e-9
"""Allowed difference, relative to the largest output, in float64: some million times its rounding error, which leaves
room for layers that enlarge errors, and is far below what a wrong channel changes."""
ALLOWED_FLOAT32 = 1e-4
"""Allowed in float32: sums in another order differ by up to some hundred rounding errors after many layers."""
ROUNDINGS = 8
"""Rounding errors allowed in coarser types, whose every operator rounds."""
MOST_ELEMENTS = 1 << 28
"""Parameters of a network on the meta device up to which it is given random values and verified: 2 GiB in float64."""


class CannotVerify(Exception):
    """Verification could not run, and why."""


def allowed_difference(*epsilons: float) -> float:
    """What rounding explains, given the largest machine epsilon of any operator."""
    epsilon = max(epsilons)
    if epsilon <= torch.finfo(torch.float64).eps:
        return ALLOWED_FLOAT64
    return max(ALLOWED_FLOAT32, ROUNDINGS * epsilon) if epsilon > torch.finfo(torch.float32).eps else ALLOWED_FLOAT32


def relative_error(wanted: Sequence[Tensor], found: Sequence[Tensor], *, together: bool = False) -> float:
    """Largest difference between two lists of tensors, relative to the largest finite number of the first.

    Infinite where shapes differ, or one is infinite or not a number where the other is not: what a network masks with
    infinity stays masked. Only floating point is compared, unless there is none: then the share of other numbers.

    Args:
        wanted: The expected tensors.
        found: As many others.
        together: Relative to the largest number of all tensors, and not of each. Gradients that cancel to zero are
            rounding errors, which have no relation to themselves.
    """
    if len(wanted) != len(found) or any(a.shape != b.shape for a, b in zip(wanted, found, strict=True)):
        return float("inf")
    pairs = [(a.detach(), b.detach()) for a, b in zip(wanted, found, strict=True) if a.numel()]
    floats = [(a, b) for a, b in pairs if a.is_floating_point() or a.is_complex()]
    if not floats:
        return max((float((a != b).double().mean()) for a, b in pairs), default=0.0)
    apart, scales = [], []
    for left, right in floats:
        same = (left == right) | (left.isnan() & right.isnan())  # infinity less infinity is not a number
        gap = torch.where(same, 0.0, (left - right).abs())
        apart.append(torch.where(gap.isnan(), float("inf"), gap).max().double())
        scales.append(torch.where(left.isfinite(), left.abs(), 0.0).max().double())
    least = torch.finfo(torch.float64).tiny
    gaps, sizes = torch.stack([a.cpu() for a in apart]), torch.stack([s.cpu() for s in scales])
    return float((gaps / (sizes.max() if together else sizes).clamp(min=least)).max())


# ---------------------------------------------------------------- runs


@torch.no_grad()
def outputs_of(model: nn.Module, example_input: Inputs) -> list[Tensor]:
    """Every tensor that comes out, in evaluation mode, with one seed for whatever is drawn."""
    args, kwargs = tree_map_only(Tensor, lambda t: t.detach().clone(), as_call(example_input))
    with seeded({t.device for t in (*named_tensors(model).values(), *tensors_in((args, kwargs)))}):
        model.eval()
        return list(tensors_in(model(*args, **kwargs)))


@dataclass(frozen=True)
class Ran:
    """What a run gave."""

    outputs: list[Tensor]
    gradients: list[Tensor]
    """Of every parameter, where they were asked for."""
    coarsest: float
    """The largest machine epsilon of any operator's result."""

    @property
    def has_nan(self) -> bool:
        """Whether some number of the outputs is NaN."""
        return any(bool(t.isnan().any()) for t in self.outputs if t.is_floating_point())

    @property
    def has_numbers(self) -> bool:
        """Whether some number of the outputs is finite, where there are any."""
        floats = [t for t in self.outputs if t.is_floating_point() and t.numel()]
        return not floats or any(bool(t.isfinite().any()) for t in floats)


def run_steadily(
    model: nn.Module,
    inputs: Inputs,
    *,
    training: bool,
    gradients: bool = False,
    drawn: float = 0.25,
    slices: Mapping[str, Mapping[int, Tensor]] | None = None,
) -> Ran:
    """Runs a network with constants in place of random draws.

    Args:
        model: Its mode, buffers and gradients change.
        inputs: Are copied.
        training: Train mode with gradients enabled, else eval mode without.
        gradients: Whether to run backward too.
        drawn: What stands in place of random numbers, which most code takes from 0 to 1.
        slices: Indices to keep of the gradients, by parameter and axis.
    """
    args, kwargs = tree_map_only(Tensor, lambda t: t.detach().clone(), as_call(inputs))
    given = list(tensors_in((args, kwargs)))
    weights = [tensor for module in model.modules() for tensor in module._parameters.values() if tensor is not None]
    double = all(tensor.dtype == torch.float64 for tensor in (*weights, *given) if tensor.is_floating_point())
    model.train(training)
    steady = _SteadyDraws(drawn)
    with ExitStack() as stack:
        stack.enter_context(seeded({tensor.device for tensor in (*weights, *given)}))
        stack.enter_context(_default_dtype(torch.float64) if double else nullcontext())
        stack.enter_context(torch.set_grad_enabled(training))
        stack.enter_context(steady)
        outputs = list(tensors_in(model(*args, **kwargs)))
        slopes = _gradients(model, outputs, slices or {}) if gradients else []
    return Ran([output.detach() for output in outputs], slopes, steady.coarsest)


def _gradients(model: nn.Module, outputs: Sequence[Tensor], slices: Mapping[str, Mapping[int, Tensor]]) -> list[Tensor]:
    """Gradients of a fixed weighted sum of all outputs."""
    model.zero_grad()
    total: Tensor | None = None
    for output in outputs:
        if output.requires_grad and output.is_floating_point():
            weights = torch.arange(output.numel(), device=output.device, dtype=output.dtype).cos().view(output.shape)
            finite = torch.where(output.isfinite(), output, 0.0)
            part = (finite * weights).sum()
            total = part if total is None else total + part.to(total)
    if total is not None:
        total.backward()
    found = []
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for axis, index in slices.get(name, {}).items():
            gradient = gradient.index_select(axis, index.to(gradient.device))
        found.append(gradient.detach())
    return found


_UNIFORM = frozenset({"rand", "rand_like", "uniform", "randn", "randn_like", "normal", "exponential"})
_WHOLE = frozenset({"randint", "randint_like", "random"})
_MORE_ITEMS = 4
_DROPOUT = frozenset({"dropout", "dropout_p"})


@dataclass(eq=False)
class _SteadyDraws(TorchDispatchMode):
    """Random operators give constants: a masked and a slim network draw different numbers otherwise.

    Dropout keeps everything. Notes the coarsest floating-point type of any result on the way.
    """

    drawn: float
    """What stands in place of random numbers."""
    coarsest: float = field(default=0.0)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch: to keep dynamo away would import it, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        draw = _draw_of(func)
        result = func(*args, **(kwargs or {})) if draw is None else draw(self, func, args, dict(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dim():
                self.coarsest = max(self.coarsest, _epsilon(tensor.dtype))
        return result

    def filled(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A draw of numbers."""
        name = _name(func)
        return func(*args, **kwargs).fill_(1 if name == "bernoulli" else 0 if name in _WHOLE else self.drawn)

    def without_dropout(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator that drops some of its results: recurrent layers, attention."""
        for position, argument in enumerate(func._schema.arguments):
            if argument.name in _DROPOUT and position < len(args):
                args = (*args[:position], 0.0, *args[position + 1 :])
            elif argument.name in _DROPOUT and argument.name in kwargs:
                kwargs[argument.name] = 0.0
        return func(*args, **kwargs)

    def kept(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG002 - as above
        """Dropout with its mask."""
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)

    def leaky(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A ReLU of random slopes; not in training, they have their mean."""
        names = [argument.name for argument in func._schema.arguments]
        return func(*args[: names.index("training")], **{**kwargs, "training": False})


@cache
def _epsilon(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


def _name(func: OpOverload) -> str:
    return func._schema.name.removeprefix("aten::").rstrip("_")


@cache
def _draw_of(func: OpOverload) -> Callable[..., Any] | None:
    """How a random operator runs; None for all others."""
    name = _name(func)
    if name == "native_dropout":
        return _SteadyDraws.kept
    if name == "rrelu_with_noise":
        return _SteadyDraws.leaky
    if any(argument.name in _DROPOUT for argument in func._schema.arguments):
        return _SteadyDraws.without_dropout
    if torch.Tag.nondeterministic_seeded in func.tags and name in _UNIFORM | _WHOLE | {"bernoulli"}:
        return _SteadyDraws.filled
    return None


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def seeded(devices: set[torch.device]) -> Iterator[None]:
    """One seed for the host and these devices, whose random states come back; no other device is touched."""
    gpus = [device for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=gpus), ExitStack() as stack:
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed every GPU, for good
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(0)
        if any(device.type == "mps" for device in devices):
            stack.enter_context(torch.random.fork_rng(device_type="mps"))
            torch.mps.manual_seed(0)
        yield


# ---------------------------------------------------------------- networks and inputs


def as_double(model: nn.Module, example_input: Inputs) -> Inputs:
    """Turns a network into float64 in place; the example in float64."""
    for tensor in named_tensors(model).values():
        tensor.data = _doubled(tensor.data)
    return _mapped(example_input, _doubled)


def _doubled(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


@torch.no_grad()
def with_random_constants_(model: nn.Module, generator: torch.Generator) -> None:
    """Gives tensors that are constant random values, in place: what a zero hides, other values show."""
    for name, tensor in named_tensors(model).items():
        if not tensor.is_floating_point() or tensor.numel() < 2:
            continue
        if bool((tensor == tensor.flatten()[0]).all()):
            noise = torch.rand(tensor.shape, generator=generator, device="cpu").to(tensor)
            tensor.data.copy_(0.5 + noise if "mean" not in name and "bias" not in name else noise - 0.5)


def plain_state(model: nn.Module) -> list[tuple[str, str, object]]:
    """Numbers, flags and words that modules keep as attributes, their mode aside: what counts calls changes."""
    found = [(path, *item) for path, module in model.named_modules() for item in vars(module).items()]
    return [item for item in found if type(item[2]) in (int, float, bool, str) and item[1] != "training"]


def other_inputs(example_input: Inputs, *, doubled: bool = False) -> Iterator[Inputs]:
    """Inputs with other numbers than an example's: of two items, then of as many as it has, then the example itself.

    Floating-point numbers are drawn anew, with the example's deviation (1, where that is zero) around its negated mean,
    so that code which asks for a sign sees both; whole numbers are put into another order. `doubled` gives each
    several times over with different numbers, for batch norm of a single item.
    """
    generator = torch.Generator("cpu").manual_seed(1)
    fresh = _mapped(example_input, lambda t: _other_numbers(t, generator))
    sizes = {t.shape[0] for t in tensors_in(as_call(example_input)) if t.dim()}
    inputs = [fresh, example_input]
    if len(sizes) == 1 and next(iter(sizes)) > 2:
        inputs.insert(0, _mapped(fresh, lambda t: t[:2] if t.dim() else t))
    if not doubled:
        yield from inputs
        return
    for one in inputs:  # different items: equal ones have no deviation to divide by
        yield _mapped(one, lambda t: _several(t, generator))


def _several(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Several different items for each of a tensor."""
    others = [_other_numbers(tensor, generator) for _ in range(_MORE_ITEMS - 1)]
    return torch.cat([tensor, *others]) if tensor.dim() else tensor


def _other_numbers(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if tensor.is_floating_point():
        values = tensor.double()
        spread = float(values.std()) if tensor.numel() > 1 else 0.0
        if not (math.isfinite(spread) and spread > 0):
            spread = 1.0
        center = -float(values.mean()) if bool(values.isfinite().all()) and tensor.numel() else 0.0
        return (center + spread * torch.randn(tensor.shape, generator=generator, device="cpu")).to(tensor)
    if tensor.is_complex() or tensor.dtype == torch.bool or not tensor.dim():
        return tensor
    order = torch.randperm(tensor.numel(), generator=generator, device="cpu")
    return tensor.flatten()[order.to(tensor.device)].view(tensor.shape)


def nudged(inputs: Inputs) -> Inputs:
    """The same inputs but for a few rounding errors."""
    generator = torch.Generator("cpu").manual_seed(2)

    def nudge(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.randn(tensor.shape, generator=generator, device="cpu", dtype=torch.float64)
        return (tensor.double() * (1 + 4 * _epsilon(tensor.dtype) * noise.to(tensor.device))).to(tensor.dtype)

    return _mapped(inputs, nudge)


def materialized(model: nn.Module, example_input: Inputs) -> tuple[nn.Module, Inputs]:
    """A network and an example that can run: on the CPU with random values where they are on the meta device.

    Raises:
        CannotVerify: If values are missing that cannot be made up, or the network is too large for that.
    """
    tensors = named_tensors(model)
    hollow = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "meta"}
    inputs = _mapped(example_input, _made_up)
    if not hollow:
        return model, inputs
    elements = sum(tensor.numel() for tensor in tensors.values())
    if elements > MOST_ELEMENTS:
        raise CannotVerify(
            f"the network is on the meta device and has {elements:,} numbers (at most {MOST_ELEMENTS:,})"
        )
    for name, tensor in hollow.items():
        if not tensor.is_floating_point() and tensor.dim():
            raise CannotVerify(f"{name} is on the meta device and its values are not known")
    made = {id(tensor): _like(tensor, _made_up(tensor)) for tensor in tensors.values()}
    return rebuilt(model, made), inputs


def _made_up(tensor: Tensor) -> Tensor:
    if tensor.device.type != "meta":
        return tensor
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
    generator = torch.Generator("cpu").manual_seed(tensor.numel())
    fan_in = tensor[0].numel() if tensor.dim() > 1 else 1
    values = torch.randn(tensor.shape, generator=generator, device="cpu") / fan_in**0.5
    made: Tensor = values if tensor.dim() > 1 else values.abs() + 0.5
    return made.to(tensor.dtype)


def _like(old: Tensor, new: Tensor) -> Tensor:
    new = new.detach().to("cpu")
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new


def _mapped(inputs: Inputs, change: Any) -> Inputs:
    result: Inputs = tree_map_only(Tensor, change, inputs)
    return result
