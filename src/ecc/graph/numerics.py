"""Reproducible runs of a network, for comparing two versions of it: precision, random numbers, inputs, differences."""

from __future__ import annotations

import math
from collections import Counter
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
from ecc.graph.model_copy import named_tensors, rebuild
from ecc.torch_utils import fork_seed, on_cpu, outputs_in, tensors_in, to_device_of

ALLOWED_FLOAT64 = 1e-9
"""Allowed difference in float64, relative to the largest output. It is about a million rounding errors, which leaves
room for layers that amplify errors, and is far below the effect of a wrong channel."""
ALLOWED_FLOAT32 = 1e-4
"""Allowed difference in float32: sums in another order differ by some hundred rounding errors after many layers."""
ROUNDINGS = 8
"""Rounding errors allowed in coarser types."""
MAX_ELEMENTS = 1 << 28
"""Largest network on the meta device that is filled with random values and verified (2 GiB in float64)."""


class CannotVerify(Exception):
    """Verification could not run. The message says why."""


def allowed_difference(*epsilons: float) -> float:
    """Allowed difference, given the largest machine epsilon of any operator."""
    epsilon = max(epsilons)
    if epsilon <= torch.finfo(torch.float64).eps:
        return ALLOWED_FLOAT64
    return max(ALLOWED_FLOAT32, ROUNDINGS * epsilon) if epsilon > torch.finfo(torch.float32).eps else ALLOWED_FLOAT32


def relative_error(wanted: Sequence[Tensor], found: Sequence[Tensor], *, together: bool = False) -> float:
    """Largest difference between two lists of tensors, relative to the largest finite value of the first.

    It is infinite if shapes differ, or if one value is infinite or NaN and the other is not. Only floating-point
    tensors are compared. If there are none, it is the share of values that differ.

    Args:
        wanted: The expected tensors.
        found: The tensors to compare.
        together: Use the largest value of all tensors instead of each tensor. Gradients that cancel to zero consist of
            rounding errors, so a difference relative to themselves would say nothing.
    """
    if len(wanted) != len(found) or any(a.shape != b.shape for a, b in zip(wanted, found, strict=True)):
        return float("inf")
    pairs = [(a.detach(), b.detach()) for a, b in zip(wanted, found, strict=True) if a.numel()]
    floats = [(a, b) for a, b in pairs if a.is_floating_point() or a.is_complex()]
    if not floats:
        return max((float((a != b).double().mean()) for a, b in pairs), default=0.0)
    both = _differences(floats)
    if not bool(both.isfinite().all()):
        both = _differences([_finite(a, b) for a, b in floats])
    differences, scales = both
    tiny = torch.finfo(torch.float64).tiny
    return float((differences / (scales.max() if together else scales).clamp(min=tiny)).max())


def _differences(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """For each pair the largest difference, and the largest value of the first. Shape (2, pairs), on the CPU."""
    columns = [(left - right, left) for left, right in pairs]
    norms = [torch.linalg.vector_norm(one, float("inf")) for row in zip(*columns, strict=True) for one in row]
    return torch.stack([one.double() for one in on_cpu(norms)]).view(2, -1)


def _finite(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The same tensors with 0 where both are NaN or the same infinity; infinite where only one is not finite."""
    same = (left == right) | (left.isnan() & right.isnan())
    is_finite = left.isfinite()
    right = torch.where(is_finite & right.isfinite(), right, float("inf"))
    return torch.where(is_finite, left, 0.0), torch.where(same, torch.where(is_finite, left, 0.0), right)


# ---------------------------------------------------------------- runs


@torch.no_grad()
def outputs_of(model: nn.Module, example_input: Inputs) -> list[Tensor]:
    """All output tensors of a network in eval mode, with a fixed seed."""
    args, kwargs = tree_map_only(Tensor, lambda t: t.detach().clone(), as_call(example_input))
    with fork_seed({t.device for t in (*named_tensors(model).values(), *tensors_in((args, kwargs)))}):
        model.eval()
        return list(outputs_in(model(*args, **kwargs)))


@dataclass(frozen=True)
class RunResult:
    """Result of one run."""

    outputs: list[Tensor]
    gradients: list[Tensor]
    """Gradients of all parameters, if requested."""
    epsilon: float
    """Largest machine epsilon of any operator's result."""

    @property
    def has_nan(self) -> bool:
        """Whether an output contains NaN."""
        return any(map(bool, on_cpu([t.isnan().any() for t in self.outputs if t.is_floating_point()])))

    @property
    def is_empty(self) -> bool:
        """Whether there are floating-point outputs, but none has a value: a detector that finds nothing."""
        floats = [t for t in self.outputs if t.is_floating_point()]
        return bool(floats) and not any(t.numel() for t in floats)

    @property
    def has_finite(self) -> bool:
        """Whether an output contains a finite value, or there are no floating-point outputs."""
        floats = [t for t in self.outputs if t.is_floating_point() and t.numel()]
        return not floats or any(map(bool, on_cpu([t.isfinite().any() for t in floats])))


def run_without_randomness(
    model: nn.Module,
    inputs: Inputs,
    more: Mapping[str, Any] | None = None,
    *,
    training: bool,
    gradients: bool = False,
    grad_enabled: bool | None = None,
    random_value: float = 0.25,
    slices: Mapping[str, Mapping[int, Tensor] | None] | None = None,
    factors: Mapping[str, Tensor] | None = None,
    decisions: Decisions | None = None,
) -> RunResult:
    """Run a network with a constant in place of random numbers.

    Args:
        model: The network. Its mode, buffers and gradients change.
        inputs: The inputs, which are copied.
        more: Keyword arguments besides `inputs`.
        training: Train mode with gradients enabled, else eval mode without gradients.
        gradients: Also run backward.
        grad_enabled: Enable gradients, if not as in `training`.
        random_value: The constant, between 0 and 1.
        slices: Indices to keep of the gradients, by parameter and axis; None for a parameter to leave out.
        factors: Factors of the gradients, by parameter.
        decisions: Records the decisions of the network, or repeats those of another one.
    """
    args, kwargs = as_call(inputs)
    args, kwargs = tree_map_only(Tensor, lambda t: t.detach().clone(), (args, {**kwargs, **(more or {})}))
    given = list(tensors_in((args, kwargs)))
    weights = [tensor for module in model.modules() for tensor in module._parameters.values() if tensor is not None]
    double = all(tensor.dtype == torch.float64 for tensor in (*weights, *given) if tensor.is_floating_point())
    model.train(training)
    constant_random = _ConstantRandom(random_value, decisions=decisions)
    with ExitStack() as stack:
        stack.enter_context(fork_seed({tensor.device for tensor in (*weights, *given)}))
        stack.enter_context(_default_dtype(torch.float64) if double else nullcontext())
        stack.enter_context(torch.set_grad_enabled(training if grad_enabled is None else grad_enabled))
        stack.enter_context(constant_random)
        outputs = list(outputs_in(model(*args, **kwargs)))
        found = _gradients(model, outputs, slices or {}, factors or {}) if gradients else []
    return RunResult([output.detach() for output in outputs], found, constant_random.epsilon)


@contextmanager
def layer_outputs(model: nn.Module) -> Iterator[dict[tuple[str, int], Tensor]]:
    """Collect the floating-point outputs of modules with parameters of their own, by path and number of the call."""
    found: dict[tuple[str, int], Tensor] = {}
    counts: Counter[str] = Counter()

    def collect(path: str, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            found[path, counts[path]] = output.detach().clone()
        counts[path] += 1

    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if any(parameter is not None for parameter in module._parameters.values()):
                handle = module.register_forward_hook(lambda _, __, output, path=path: collect(path, output))
                hooks.callback(handle.remove)
        yield found


def _gradients(
    model: nn.Module,
    outputs: Sequence[Tensor],
    slices: Mapping[str, Mapping[int, Tensor] | None],
    factors: Mapping[str, Tensor],
) -> list[Tensor]:
    """Gradients of a weighted sum of all outputs, with fixed weights."""
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
        axes = slices.get(name, {})
        if axes is None:
            continue
        for axis, index in axes.items():
            gradient = gradient.index_select(axis, to_device_of(gradient, index))
        found.append(gradient.detach() * factors[name].to(gradient) if name in factors else gradient.detach())
    return found


_UNIFORM = frozenset({"rand", "rand_like", "uniform", "randn", "randn_like", "normal", "exponential"})
_WHOLE = frozenset({"randint", "randint_like", "random"})
_MORE_ITEMS = 4
_DROPOUT = frozenset({"dropout", "dropout_p"})


@dataclass(eq=False)
class _ConstantRandom(TorchDispatchMode):
    """Replaces random numbers by a constant, since a masked and a slim network draw different ones.

    Dropout keeps everything. Also records the largest machine epsilon of any result.
    """

    random_value: float
    """The constant in place of random numbers."""
    epsilon: float = field(default=0.0)
    decisions: Decisions | None = None

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Called by torch. True would import dynamo, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        replacement = _replacement_of(func)
        if replacement is not None:
            result = replacement(self, func, args, dict(kwargs or {}))
        elif self.decisions is not None and _decides(func):
            result = self.decisions.run(func, args, dict(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dim():
                self.epsilon = max(self.epsilon, _epsilon(tensor.dtype))
        return result

    def filled(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Random numbers: a constant tensor."""
        name = _name(func)
        return func(*args, **kwargs).fill_(1 if name == "bernoulli" else 0 if name in _WHOLE else self.random_value)

    def without_dropout(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Recurrent layers and attention: no dropout."""
        for position, argument in enumerate(func._schema.arguments):
            if argument.name in _DROPOUT and position < len(args):
                args = (*args[:position], 0.0, *args[position + 1 :])
            elif argument.name in _DROPOUT and argument.name in kwargs:
                kwargs[argument.name] = 0.0
        return func(*args, **kwargs)

    def kept(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ARG002 - as above
        """Dropout with its mask: everything is kept."""
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)

    def leaky(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """RReLU: the mean slope, as in eval mode."""
        names = [argument.name for argument in func._schema.arguments]
        return func(*args[: names.index("training")], **{**kwargs, "training": False})


_ROUNDING = frozenset("floor ceil round trunc sign".split())
_DECIDING = _ROUNDING.union(
    "gt ge lt le eq ne topk sort argsort argmax argmin max min median kthvalue mode nonzero searchsorted bucketize "
    "_local_scalar_dense _to_copy unique_dim _unique2 unique_consecutive".split()
)


@cache
def _decides(func: OpOverload) -> bool:
    """Whether an operator may turn values into positions, flags or whole numbers."""
    return _name(func) in _DECIDING or func.namespace != "aten"


@dataclass
class Decisions:
    """Positions, flags and whole numbers that a network computes from values, such as the boxes that a detector keeps.

    Rounding errors may change them, and with them the whole output. So the masked network records them, and the slim
    network repeats them (`repeating`). The values that they were computed from are compared, besides the outputs.
    """

    recorded: list[tuple[OpOverload, list[torch.Size], list[Tensor], Any]] = field(default_factory=list)
    """Operator, shapes of its arguments, its floating-point arguments, and its result."""
    repeating: bool = False
    compared: tuple[list[Tensor], list[Tensor]] = field(default_factory=lambda: ([], []))
    """The values of the first and of the second network from which the decisions were computed."""
    _position: int = 0

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator of the first network, or give the result that it had there."""
        tensors = list(tensors_in((args, kwargs)))
        shapes = [tensor.shape for tensor in tensors]
        floats = [tensor.detach().clone() for tensor in tensors if tensor.is_floating_point()]
        result = func(*args, **kwargs)
        if not floats or not _is_decision(func, result):
            return result
        if not self.repeating:
            self.recorded.append((func, shapes, floats, _copied(result)))
            return result
        for number in range(self._position, len(self.recorded)):
            other, sizes, values, before = self.recorded[number]
            if other == func and sizes == shapes:
                self._position = number + 1
                self.compared[0].extend(values)
                self.compared[1].extend(floats)
                return _repeated(func, args, kwargs, result, _copied(before))
        return result


def _is_decision(func: OpOverload, result: Any) -> bool:
    """Whether a result, or its second part as of `topk`, consists of positions, flags or whole numbers."""
    last = result[-1] if isinstance(result, (tuple, list)) else result
    return _name(func) in _ROUNDING or not isinstance(last, Tensor) or not last.is_floating_point()


def _copied(result: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), result)


def _repeated(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, before: Any) -> Any:
    """The result with the positions of another network. Values at these positions are those of this network."""
    if not isinstance(result, (tuple, list)) or len(result) != 2 or not result[0].is_floating_point():
        return before
    names = [argument.name for argument in func._schema.arguments]
    axis = {**dict(zip(names, args, strict=False)), **kwargs}.get("dim", -1)
    values, index = args[0], before[1]
    if index.dim() == values.dim():
        return values.gather(axis, index), index
    return values.gather(axis, index.unsqueeze(axis)).squeeze(axis), index


@cache
def _epsilon(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


def _name(func: OpOverload) -> str:
    return func._schema.name.removeprefix("aten::").rstrip("_")


@cache
def _replacement_of(func: OpOverload) -> Callable[..., Any] | None:
    """The replacement of a random operator; None for all other operators."""
    name = _name(func)
    if name == "native_dropout":
        return _ConstantRandom.kept
    if name == "rrelu_with_noise":
        return _ConstantRandom.leaky
    if any(argument.name in _DROPOUT for argument in func._schema.arguments):
        return _ConstantRandom.without_dropout
    if torch.Tag.nondeterministic_seeded in func.tags and name in _UNIFORM | _WHOLE | {"bernoulli"}:
        return _ConstantRandom.filled
    return None


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---------------------------------------------------------------- networks and inputs


def to_float64(model: nn.Module, example_input: Inputs) -> Inputs:
    """Convert a network to float64 in place, and return the example input in float64."""
    for tensor in named_tensors(model).values():
        tensor.data = _float64(tensor.data)
    return _mapped(example_input, _float64)


def _float64(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


@torch.no_grad()
def randomize_constants_(model: nn.Module, generator: torch.Generator) -> None:
    """Fill constant tensors with random values, in place. A zero would hide differences."""
    floats = [(name, t) for name, t in named_tensors(model).items() if t.is_floating_point() and t.numel() > 1]
    flags = on_cpu([(tensor == tensor[(0,) * tensor.dim()]).all() for _, tensor in floats])
    for (name, tensor), is_constant in zip(floats, flags, strict=True):
        if bool(is_constant):
            noise = torch.rand(tensor.shape, generator=generator, device="cpu")
            noise += -0.5 if "mean" in name or "bias" in name else 0.5
            tensor.data.copy_(noise.to(tensor.dtype), non_blocking=tensor.device.type == "cuda")


def plain_state(model: nn.Module) -> list[tuple[str, str, object]]:
    """Numbers, flags and strings that modules keep as attributes, except their mode; a call counter is one."""
    return [
        (path, name, value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in (int, float, bool, str) and name != "training"
    ]


def other_inputs(example_input: Inputs, *, repeated: bool = False) -> Iterator[Inputs]:
    """Inputs with other values than the example: two items, then as many as the example has, then the example itself.

    Floating-point values are drawn with the example's standard deviation (or 1) around its negated mean, so that code
    that tests a sign sees both signs. Integers are permuted. `repeated` yields each input several times with different
    values, for batch norm of a single item.
    """
    generator = torch.Generator("cpu").manual_seed(1)
    fresh = _mapped(example_input, lambda t: _other_numbers(t, generator))
    sizes = {t.shape[0] for t in tensors_in(as_call(example_input)) if t.dim()}
    inputs = [fresh, example_input]
    if len(sizes) == 1 and next(iter(sizes)) > 2:
        inputs.insert(0, _mapped(fresh, lambda t: t[:2] if t.dim() else t))
    if not repeated:
        yield from inputs
        return
    for one in inputs:  # different items, since equal ones have zero variance
        yield _mapped(one, lambda t: _several(t, generator))


def _several(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Several different items for each item of a tensor."""
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


def perturbed(inputs: Inputs) -> Inputs:
    """The same inputs with a few rounding errors."""
    generator = torch.Generator("cpu").manual_seed(2)

    def perturb(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.randn(tensor.shape, generator=generator, device="cpu", dtype=torch.float64)
        return (tensor.double() * (1 + 4 * _epsilon(tensor.dtype) * noise.to(tensor.device))).to(tensor.dtype)

    return _mapped(inputs, perturb)


def materialize(model: nn.Module, example_input: Inputs) -> tuple[nn.Module, Inputs]:
    """A network and an example input that can run: meta tensors get random values on the CPU.

    Raises:
        CannotVerify: If integer values are missing, or the network is too large.
    """
    tensors = named_tensors(model)
    on_meta = {name: tensor for name, tensor in tensors.items() if tensor.device.type == "meta"}
    inputs = _mapped(example_input, _with_values)
    if not on_meta:
        return model, inputs
    elements = sum(tensor.numel() for tensor in tensors.values())
    if elements > MAX_ELEMENTS:
        raise CannotVerify(f"the network is on the meta device and has {elements:,} values (limit {MAX_ELEMENTS:,})")
    for name, tensor in on_meta.items():
        if not tensor.is_floating_point() and tensor.dim():
            raise CannotVerify(f"{name} is on the meta device, and its integer values are not known")
    made = {id(tensor): _like(tensor, _with_values(tensor)) for tensor in tensors.values()}
    return rebuild(model, made), inputs


def _with_values(tensor: Tensor) -> Tensor:
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
