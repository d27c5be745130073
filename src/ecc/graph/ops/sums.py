"""Sums and means over channels, which are exact if masked channels are zero.

A norm of the residual stream (RMSNorm) computes the mean square of all channels. Removing a channel is exact if the
channel is zero in the stream itself, so masking a unit of such a group sets all of its slices to zero: those of its
producers (embedding columns, output rows, biases) as well as those of its consumers.

Two facts are followed from operator to operator:

* `Tracer.is_zero`: whether the elements of a masked channel are zero in a tensor. Layers give zero from zero rows and
  biases. Operators such as `relu` and `mul` keep it.
* `WidthPower`: how much larger a value is in a pruned network. A mean over d' of d channels of the same sum is
  d / d' times as large. A square root halves the power, and the weight that scales the norm absorbs what is left:
  the pruned network gets `weight * (d / d') ** 0.5` and `eps * d / d'`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ecc.graph.consistency import compare_numbers
from ecc.graph.labels import Labels, Scale, WidthPower, channel_vector, frozen_labels, varying_axes

if TYPE_CHECKING:
    from ecc.graph.calls import Call
    from ecc.graph.tracer import Tracer


# --- masked channels are zero ------------------------------------------------------------------------

_KEEPS_ZERO = frozenset(
    "relu relu6 gelu silu tanh neg abs sin tan asin atan erf sqrt square sign leaky_relu elu selu celu hardswish mish "
    "softshrink hardshrink expm1 log1p sinh asinh trunc round floor ceil positive prelu _prelu_kernel".split()
)
"""Elementwise operators f with f(0) = 0."""


def keeps_zero(trace: Tracer, call: Call, result: Labels) -> bool:
    """Whether masked channels are zero in the result of an elementwise operator."""
    if result is None:
        return False
    zero = [trace.is_zero(tensor) and _same_axes(trace, tensor, result) for tensor in call.tensors]
    first = bool(zero) and call.args[0] is call.tensors[0] and zero[0]
    number = call.args[1] if len(call.args) > 1 and isinstance(call.args[1], (int, float)) else None
    if call.name == "mul":
        return any(zero)
    if call.name in ("add", "sub"):
        return all(zero) and not number
    if call.name in _KEEPS_ZERO or (call.name == "div" and first):
        return first
    if call.name == "pow":
        return first and number is not None and number > 0
    if call.name in ("clamp_min", "clamp", "hardtanh"):
        low, high = call.get("min", None), call.get("max", None)
        return first and call.name != "hardtanh" and (low or 0) <= 0 <= (math.inf if high is None else high)
    if call.name in ("maximum", "minimum"):
        return all(zero)
    return call.name == "masked_fill" and first and call.get("value", None) == 0


def _same_axes(trace: Tracer, tensor: Tensor, result: Tensor) -> bool:
    """Whether a tensor has the channels of the result, and is not broadcast over them."""
    if trace.is_deferred(tensor):
        return True  # it was bound to the channels
    labels = trace.labels(tensor)
    if labels is None:
        return False
    shift = result.dim() - labels.dim()
    return [axis + shift for axis in varying_axes(labels)] == varying_axes(result)


# --- sums over channels ---------------------------------------------------------------------------------

_SUMS = frozenset({"sum", "mean", "norm", "linalg_vector_norm"})


def channel_sum(trace: Tracer, call: Call, x: Tensor, labels: Tensor, axes: list[int]) -> bool:
    """Accept a sum, mean or norm over channels that are zero when masked. False if it is none."""
    varying = varying_axes(labels)
    if call.name not in _SUMS or len(varying) != 1 or varying[0] not in axes or not _is_plain_zero(trace, x):
        return False
    order = call.get("ord", call.get("p", 2)) if "norm" in call.name else 2
    if order is not None and not (isinstance(order, (int, float)) and order > 0):
        return False
    vector = channel_vector(labels, varying[0], labels.shape[varying[0]])
    trace.channel_labels.zeroed.append(vector)
    call.summed = (vector,)
    if call.name == "mean":
        call.power = WidthPower(vector, 1.0)
    return True


def _is_plain_zero(trace: Tracer, x: Tensor) -> bool:
    return trace.is_zero(x) and getattr(x, "_ecc_power", None) is None


def rms_norm(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """`F.rms_norm` over channels. The weight absorbs what the mean square changes by."""
    x, weight = call["input"], call["weight"]
    labels = trace.labels(x)
    trace.record(call, "norm", 0, [], [weight])
    first = x.dim() - len(call["normalized_shape"])
    varying = [] if labels is None else varying_axes(labels)
    if labels is None or not any(axis >= first for axis in varying):
        return labels
    if varying != [x.dim() - 1] or first != x.dim() - 1 or not _is_plain_zero(trace, x):
        return trace.freeze(labels, f"{call.here} mixes channels, so removing one would change the output")
    vector = channel_vector(labels, -1, x.shape[-1])
    trace.channel_labels.zeroed.append(vector)
    count = WidthPower(vector, 1.0)
    eps = call["eps"]
    compare_numbers(trace, call, [torch.finfo(x.dtype).eps if eps is None else eps], count)
    if not _scale_attribute(trace, call, eps, count, "eps"):
        return frozen_labels(x.shape)
    if weight is None:
        trace.channel_labels.attributes[trace.last_path, "normalized_shape"] = vector
        call.power = replace(count, power=-0.5)
    else:
        own = trace.labels(weight)
        if own is not None:
            trace.channel_labels.unite(vector, own.reshape(-1), call.here)
        if not _absorb(trace, call, weight, replace(count, power=-0.5)):
            return trace.freeze(labels, f"the weight of {call.here} is computed, not a parameter")
    call.zero = True
    return labels


# --- powers of the width --------------------------------------------------------------------------------


def follow_power(trace: Tracer, call: Call, *, moves: bool, consumes: bool) -> None:
    """Find how much larger the result of an operator is in a pruned network, or freeze the channels behind it.

    Args:
        trace: The trace.
        call: The operator.
        moves: Whether it only moves or copies its argument.
        consumes: Whether it is a layer, whose weight may absorb the factor.
    """
    powers = [getattr(tensor, "_ecc_power", None) for tensor in call.tensors]
    known = [power for power in powers if power is not None]
    if not known:
        return
    first = known[0]
    result: WidthPower | None = None
    if any(not torch.equal(first.labels, other.labels) for other in known):
        _cannot_fold(trace, call, known)
    elif moves and powers[0] is not None and len(known) == 1:
        result = first
    elif consumes and len(known) == 1 and powers[0] is not None:
        if not any(_absorb(trace, call, tensor, first) for tensor in call.tensors[1:2]):
            _cannot_fold(trace, call, known)
    elif (power := _POWERS.get(call.name)) is not None:
        result = power(trace, call, powers)
        if result is None:
            _cannot_fold(trace, call, known)
    else:
        _cannot_fold(trace, call, known)
    call.power = result if result is not None and result.power else None


def _cannot_fold(trace: Tracer, call: Call, known: list[WidthPower]) -> None:
    why = f"{call.here} uses a mean over channels, which changes with their number"
    for power in known:
        trace.freeze(power.labels, why, unusual=True)


def _product(trace: Tracer, call: Call, powers: list[WidthPower | None]) -> WidthPower | None:
    total = sum(power.power for power in powers if power is not None)
    known = next(power for power in powers if power is not None)
    result = replace(known, power=total)
    for tensor, power in zip(call.tensors, powers, strict=True):
        if power is None and total and _absorb(trace, call, tensor, result):
            return replace(known, power=0.0)
    return result


def _quotient(_: Tracer, call: Call, powers: list[WidthPower | None]) -> WidthPower | None:
    if len(powers) != 2 and not (len(powers) == 1 and call.args[0] is call.tensors[0]):
        return None
    above, below = (powers[0], None) if len(powers) == 1 else powers
    known = above or below
    assert known is not None, "an operand has a power"
    total = (above.power if above else 0.0) - (below.power if below else 0.0)
    return replace(known, power=total)


def _sum(trace: Tracer, call: Call, powers: list[WidthPower | None]) -> WidthPower | None:
    """eps is added to a mean, or limits it."""
    known = next(power for power in powers if power is not None)
    if len(powers) > 1:
        return known if all(power is not None and power.power == known.power for power in powers) else None
    number = call.args[1] if len(call.args) > 1 else call.kwargs.get("other", call.kwargs.get("min"))
    if call.args[0] is not call.tensors[0] or not isinstance(number, (int, float)) or call.get("alpha", 1) != 1:
        return None
    if call.name == "clamp" and call.get("max", None) is not None:
        return None
    if _scale_attribute(trace, call, number, known, "eps"):
        return known
    return replace(known, power=0.0)  # frozen already, with its own reason


def _times(factor: float) -> Callable[..., WidthPower | None]:
    def apply(_: Tracer, __: Call, powers: list[WidthPower | None]) -> WidthPower | None:
        known = powers[0]
        return None if known is None or len(powers) > 1 else replace(known, power=known.power * factor)

    return apply


def _raised(_: Tracer, call: Call, powers: list[WidthPower | None]) -> WidthPower | None:
    known, exponent = powers[0], call.args[1] if len(call.args) > 1 else None
    if known is None or len(powers) > 1 or not isinstance(exponent, (int, float)):
        return None
    return replace(known, power=known.power * exponent)


_POWERS: dict[str, Callable[..., WidthPower | None]] = {
    "mul": _product,
    "div": _quotient,
    "add": _sum,
    "clamp_min": _sum,
    "clamp": _sum,
    "pow": _raised,
    "sqrt": _times(0.5),
    "rsqrt": _times(-0.5),
    "reciprocal": _times(-1.0),
    "square": _times(2.0),
    "neg": _times(1.0),
    "abs": _times(1.0),
    "relu": _times(1.0),
}
"""How elementwise operators change the power of their operands; None if they cannot."""


def _absorb(trace: Tracer, call: Call, tensor: Tensor, power: WidthPower) -> bool:
    """Let a parameter absorb a factor: the pruned network has `(weight + offset) * factor ** -1 - offset`."""
    name, offset = parameter_of(tensor)
    if name is None:
        return False
    call.absorbed.add(name)
    trace.channel_labels.scales.append(Scale(name, power.labels, -power.power, offset))
    return True


def parameter_of(tensor: Any) -> tuple[str | None, float]:
    """The parameter that a tensor is, plus a constant: its name and the constant; None if it is something else."""
    shifted = getattr(tensor, "_ecc_shifted", None)
    if shifted is not None:
        name, offset = shifted
        return name, offset
    return getattr(tensor, "_ecc_own", None), 0.0


def follow_parameter(call: Call, *, moves: bool) -> tuple[str, float] | None:
    """(name, constant) if the result is a parameter plus a constant: a copy, a cast, or `1 + weight`."""
    if len(call.tensors) != 1 or call.in_place:
        return None
    name, offset = parameter_of(call.tensors[0])
    if name is None:
        return None
    if moves:
        return name, offset
    numbers = [value for value in call.args if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if call.name == "add" and len(numbers) == 1 and call.get("alpha", 1) == 1:
        return name, offset + numbers[0]
    return None


def _scale_attribute(trace: Tracer, call: Call, number: float | None, power: WidthPower, wanted: str) -> bool:
    """Let an attribute of the running module with this value follow the width, or freeze the channels."""
    if number == 0:
        return True
    found = list(_attributes(trace, number))
    name = next((name for name in found if wanted in name), found[0] if len(found) == 1 else None)
    if name is None:
        value = "its eps" if number is None else f"{number:g}"
        trace.freeze(
            power.labels,
            f"{call.here} adds {value} to a mean over channels, which must change with their number. Keep it as an "
            "attribute of the module, such as `self.eps`, to make the channels prunable",
        )
        return False
    target = f"{trace.last_path}.{name}".removeprefix(".")
    trace.channel_labels.scales.append(Scale(target, power.labels, power.power, 0.0))
    return True


def _attributes(trace: Tracer, number: float | None) -> Iterator[str]:
    """Plain attributes of the running module with this value."""
    for name, value in vars(trace.module).items() if trace.module is not None else ():
        same = (value is None and name == "eps") if number is None else (type(value) is float and value == number)
        if same:
            yield name
