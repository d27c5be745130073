"""The two families of energy models: the paper's bilinear one, and the physical one, which is the default.

A family is a function from samples to a `FittedModel`, a sum of terms:

    bilinear   a constant, and one term per layer with MACs, in * out (the paper's s_j * s_{j+1})
    physical   a constant; one term per group, linear in its width (activations, biases, norms, depthwise convolutions);
               one term in * out per layer that mixes channels; steps where a library changes kernels; and costs of
               sizes that are not a multiple of 8, 16, 32 or 64

If branches were removed in some samples, each term of a layer that is removed with a branch has a switch: it is 0
without the branch. Every branch has a constant of its own, for the kernels that are launched for it.

Each term knows how many MACs and bytes it stands for. With joules per MAC and per byte, the physical family therefore
has a prior for every coefficient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ecc.graph import AffineSize, Layer, StructureSpec
from ecc.graph.structure import width_of

from .cost import ONE, RISE, Array, size_at
from .regression import Samples, fit_coefficients, leave_one_out_errors

AMOUNTS = ("MACs", "grouped MACs", "activation bytes", "weight bytes")
"""Quantities that a term may stand for. Grouped convolutions reuse little of what they load, so their MACs have a
coefficient of their own."""

ALIGNMENTS = (8, 16, 32, 64)
"""Multiples that kernels are written for. On an H200, a network with 12 channels may cost more than one with 16."""

MAX_LEVELS = 16
"""Most steps of one size. Their distance is a power of two, as tile sizes are."""

MIN_RISE = 2
"""Fewest channels over which a step rises."""

NonNegative: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
Amounts: TypeAlias = tuple[NonNegative, NonNegative, NonNegative, NonNegative]


@dataclass(frozen=True)
class Term:
    """left * right, and the amounts that one unit of it stands for."""

    name: str
    """The group, or the path of the layer."""
    left: AffineSize
    right: AffineSize
    amounts: Amounts
    """Quantity of each of `AMOUNTS` per unit of left * right."""
    layers: tuple[tuple[int, Amounts], ...]
    """The layers that contribute: (position, amounts)."""
    switch: tuple[int, ...] = ()
    """Positions of groups. The term is 0 if all of them have width 0: its branch is removed. Empty: no effect."""

    def at(self, widths: Array) -> Array:
        """left * right at each row of widths."""
        product = size_at(self.left, widths) * size_at(self.right, widths)
        return np.where((widths[:, list(self.switch)] > 0).any(axis=1), product, 0.0) if self.switch else product


@dataclass(frozen=True)
class Step:
    """A rise from 0 to 1 over a few channels of a size, or 1 where a size is not a multiple."""

    name: str
    """The groups that make up the size."""
    size: AffineSize
    level: int
    """Size at which the step starts to rise."""
    layers: tuple[int, ...]
    """Positions of the layers that produce or consume these channels."""
    multiple: int = 0
    """If above 0, the step is 1 where the size is not a multiple of it, and `level` and `rise` are not used."""
    rise: Annotated[int, msgspec.Meta(ge=1)] = RISE
    """Channels over which it rises."""

    def at(self, widths: Array) -> Array:
        """Its height, from 0 to 1, at each row of widths."""
        sizes = size_at(self.size, widths)
        if self.multiple:
            return np.asarray(np.round(sizes) % self.multiple != 0, dtype=np.float64)
        return np.clip((sizes - self.level) / self.rise, 0.0, 1.0)


@dataclass(frozen=True)
class FittedModel:
    """base + sum of coefficient * term + sum of height * step; all coefficients and heights are at least 0."""

    kind: str
    """bilinear or physical."""
    base: NonNegative
    """Cost that does not depend on the widths."""
    terms: tuple[Term, ...]
    coefficients: tuple[NonNegative, ...]
    """One per term."""
    unit_coefficients: tuple[NonNegative, ...] = ()
    """Prior cost of one unit of each of `AMOUNTS`; empty for the bilinear family."""
    strength: float | None = None
    """Weight of the prior; None for the bilinear family."""
    steps: tuple[Step, ...] = ()
    heights: tuple[NonNegative, ...] = ()
    """One per step."""

    def at(self, widths: Array) -> Array:
        """The cost at each row of widths."""
        total = np.full(len(widths), self.base)
        for term, coefficient in zip(self.terms, self.coefficients, strict=True):
            if coefficient:
                total += coefficient * term.at(widths)
        for step, height in zip(self.steps, self.heights, strict=True):
            total += height * step.at(widths)
        return total


Family: TypeAlias = Callable[[Samples], FittedModel]


def bilinear(samples: Samples, *, relative: bool = True) -> FittedModel:
    """The paper's Eq. (3) over the channel graph: a_0 + sum of a_j in_j out_j with all a at least 0.

    The paper squares errors in joules (`relative=False`); by default relative errors are squared.
    """
    terms = (*bilinear_terms(samples.structure), *_switch_constants(samples.structure))
    features = np.stack([np.ones(len(samples)), *(term.at(samples.widths) for term in terms)], axis=1)
    base, *coefficients = fit_coefficients(features, samples.values, relative=relative).tolist()
    return FittedModel("bilinear", base, terms, tuple(coefficients))


STRENGTHS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Candidate weights of the prior, at `REFERENCE_SAMPLES` samples."""

REFERENCE_SAMPLES = 250
"""The prior does not grow with the number of samples: a short profile relies on it, a long one on the data."""

_MIN_IMPROVEMENT = 0.9  # coefficients of equal layers differ if the leave-one-out error is then below this share

_MIN_RELATIVE_SCALE = 0.02  # smallest scale of a prior, relative to the mean contribution of all terms


def physical(samples: Samples) -> FittedModel:
    """Coefficients with a prior from common joules per MAC and per byte, and steps with a prior of 0.

    A kernel costs roughly what its MACs and bytes cost. Which kernel a library picks for which shape follows no
    formula; it shows in the coefficients of layers and in steps. So the fit has three parts:

    1. Common coefficients: one cost per MAC, grouped MAC, activation byte and weight byte, fitted to all samples.
    2. These give every term a prior. The final fit moves terms away from it where the samples demand it; a term may
       move by about the square root of its expected contribution (`_prior_scales`).
    3. Layers of the same shape run the same kernels, so their terms share one coefficient (`_shapes`), unless the
       leave-one-out error is clearly smaller without. The weight of the prior is the candidate in `STRENGTHS` with the
       smallest leave-one-out error.
    """
    terms, steps = physical_terms(samples.structure), candidate_steps(samples.structure)
    # An alignment that all samples have, or none, is a constant.
    steps = tuple(step for step in steps if not step.multiple or np.ptp(step.at(samples.widths)) > 0)
    columns = [*(term.at(samples.widths) for term in terms), *(step.at(samples.widths) for step in steps)]
    features = np.stack(columns, axis=1)
    common = _common_coefficients(terms, features[:, : len(terms)], samples)
    amounts = np.array([term.amounts for term in terms])
    launches = np.array([_launches(term) for term in terms])
    prior = np.concatenate([amounts @ common[1:-1] + common[-1] * launches, np.zeros(len(steps))])
    prior[0] += common[0]  # idle power and kernel launches belong to the constant term
    prior_scale = _prior_scales(terms, steps, prior, features, samples)
    apart, shared = np.arange(len(prior)), _shapes(samples.structure, terms, steps)
    error, coefficients, strength = _fit_shared(features, samples, prior, prior_scale, shared)
    if shared.max() < apart.max():
        found = _fit_shared(features, samples, prior, prior_scale, apart)
        if found[0] < _MIN_IMPROVEMENT * error:
            _, coefficients, strength = found
    heights = coefficients[len(terms) :].tolist()
    kept = [(step, height) for step, height in zip(steps, heights, strict=True) if height > 0]
    return FittedModel(
        kind="physical",
        base=float(coefficients[0]),
        terms=terms[1:],
        coefficients=tuple(coefficients[1 : len(terms)].tolist()),
        unit_coefficients=tuple(common[1:-1].tolist()),
        strength=strength,
        steps=tuple(step for step, _ in kept),
        heights=tuple(height for _, height in kept),
    )


def _fit_shared(
    features: Array, samples: Samples, prior: Array, prior_scale: Array, grouping: NDArray[np.intp]
) -> tuple[float, Array, float]:
    """The smallest leave-one-out error over `STRENGTHS`, its coefficients and its strength.

    Columns of the features with the same number in `grouping` have the same coefficient. The error is the mean over
    all samples but the ends of the range, as in the cross-validation.
    """
    count = np.bincount(grouping)
    members = np.zeros((len(grouping), len(count)))
    members[np.arange(len(grouping)), grouping] = 1
    features = features @ members
    prior, prior_scale = (prior @ members) / count, (prior_scale @ members) / count
    values, weights, inner = samples.values, samples.weights, ~samples.range_ends
    best, coefficients, strength = np.inf, prior[grouping], STRENGTHS[-1]
    for candidate in STRENGTHS:
        scaled = candidate * REFERENCE_SAMPLES / len(samples)
        found = fit_coefficients(
            features, values, weights=weights, prior=prior, prior_scale=prior_scale, strength=scaled
        )
        errors = leave_one_out_errors(
            features, values, found, weights=weights, prior_scale=prior_scale, strength=scaled
        )
        error = float(np.abs(errors[inner]).mean())
        if error < best:
            best, coefficients, strength = error, found[grouping], candidate
    return best, coefficients, strength


def _shapes(structure: StructureSpec, terms: Sequence[Term], steps: Sequence[Step]) -> NDArray[np.intp]:
    """A number for each term and step, the same for those whose layers have the same shapes.

    A network repeats its blocks. Blocks of one stage have layers of the same kind, with as many channels and positions.
    """
    full = structure.full_widths
    layers = [
        (
            one.kind,
            one.macs,
            one.item_bytes,
            *(size.at(full) for size in (one.incoming, one.outgoing, one.reads, one.writes)),
        )
        for one in structure.layers
    ]
    keys: list[object] = []
    for term in terms:
        sizes = sorted((size.at(full), len(size.multiples)) for size in (term.left, term.right))
        keys.append((sizes, term.amounts, len(term.layers), bool(term.switch)))
    keys += [(step.multiple, step.level, step.size.at(full), sorted(layers[n] for n in step.layers)) for step in steps]
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(repr(key), len(numbers)) for key in keys])


FAMILIES: dict[str, Family] = {"bilinear": bilinear, "physical": physical}


def _common_coefficients(terms: Sequence[Term], features: Array, samples: Samples) -> Array:
    """Cost of a network without work, of one unit of each of `AMOUNTS`, and of one layer that is launched.

    The number of layers differs only between samples with and without removed branches.
    """
    amounts = np.array([term.amounts for term in terms])
    launched = features @ np.array([_launches(term) for term in terms])
    pooled = np.column_stack([np.ones(len(samples)), features @ amounts, launched])
    used = pooled.max(axis=0) > 0
    common = np.zeros(2 + len(AMOUNTS))
    common[used] = fit_coefficients(pooled[:, used], samples.values, weights=samples.weights)
    return common


def _launches(term: Term) -> float:
    """Number of layers that are removed with a constant term; 0 for all other terms."""
    is_constant = not term.left.multiples and not term.right.multiples
    return float(len(term.layers)) if term.switch and is_constant else 0.0


def _prior_scales(
    terms: Sequence[Term], steps: Sequence[Step], prior: Array, features: Array, samples: Samples
) -> Array:
    """Scale of the prior of each coefficient: the square root of the contribution that the prior expects.

    The prior of a step is 0, so its scale comes from the terms of the same channels and layers instead.
    """
    size = np.sqrt(((features / samples.values[:, None]) ** 2).mean(axis=0))
    size[size == 0] = 1.0
    expected = prior * size
    scale = np.empty(len(prior))
    scale[: len(terms)] = _relative_scales(expected[: len(terms)])
    if steps:
        by_layer: dict[int, float] = {}
        by_group: dict[int, float] = {}
        for term, contribution in zip(terms, expected, strict=False):
            groups = {group for part in (term.left, term.right) for group, _ in part.multiples}
            if term.right.multiples:
                layer = term.layers[0][0]
                by_layer[layer] = by_layer.get(layer, 0.0) + float(contribution)
            elif len(groups) == 1:
                group = groups.pop()
                by_group[group] = by_group.get(group, 0.0) + float(contribution)
        of_steps = [
            sum(by_group.get(group, 0.0) for group, _ in step.size.multiples)
            + sum(by_layer.get(layer, 0.0) for layer in step.layers)
            for step in steps
        ]
        scale[len(terms) :] = _relative_scales(np.array(of_steps))
    return np.asarray(scale / size)


def _relative_scales(contributions: Array) -> Array:
    """Square roots with mean 1; small contributions count as `_MIN_RELATIVE_SCALE` of the mean."""
    scale = np.sqrt(contributions.clip(min=max(_MIN_RELATIVE_SCALE * float(contributions.mean()), 1e-300)))
    return np.asarray(scale / scale.mean())


# ---------------------------------------------------------------- terms of a network


def bilinear_terms(structure: StructureSpec) -> tuple[Term, ...]:
    """One term in * out per layer with MACs."""
    return tuple(
        Term(layer.path, layer.incoming, layer.outgoing, _macs(layer), ((number, _macs(layer)),), switch)
        for number, (layer, switch) in enumerate(zip(structure.layers, structure.layer_switches, strict=True))
        if layer.macs
    )


def _switch_constants(structure: StructureSpec) -> tuple[Term, ...]:
    """One constant for each set of branches without which layers are removed."""
    nothing: Amounts = (0.0, 0.0, 0.0, 0.0)
    layers: dict[tuple[int, ...], list[int]] = {}
    for number, switch in enumerate(structure.layer_switches):
        if switch:
            layers.setdefault(switch, []).append(number)
    return tuple(
        Term(_switch_name(structure, switch), ONE, ONE, nothing, tuple((n, nothing) for n in numbers), switch)
        for switch, numbers in layers.items()
    )


def _switch_name(structure: StructureSpec, switch: tuple[int, ...]) -> str:
    groups = zip(structure.branches, structure.branch_groups, strict=True)
    return " + ".join(branch.name for branch, inside in groups if set(inside) <= set(switch))


def physical_terms(structure: StructureSpec) -> tuple[Term, ...]:
    """The constant, one linear term per group, and one product per layer that mixes channels."""
    table = _TermTable(structure)
    tensors = {tensor.name: tensor for tensor in structure.tensors}
    for number, layer in enumerate(structure.layers):
        table.add(number, layer.incoming, layer.outgoing, _macs(layer))
        bytes_moved = (0.0, 0.0, float(layer.item_bytes), 0.0)
        table.add(number, layer.reads, ONE, bytes_moved)
        table.add(number, layer.writes, ONE, bytes_moved)
        for name in layer.tensors:
            tensor = tensors[name]
            left, right, size = _factors(tensor.axes, structure.full_widths)
            table.add(number, left, right, (0.0, 0.0, 0.0, size * tensor.item_bytes))
    return table.terms()


def _macs(layer: Layer) -> Amounts:
    macs = float(layer.macs)
    return (0.0, macs, 0.0, 0.0) if layer.kind == "grouped conv" else (macs, 0.0, 0.0, 0.0)


def _factors(axes: Sequence[AffineSize], full_widths: Sequence[int]) -> tuple[AffineSize, AffineSize, float]:
    """The size of a tensor as left * right * a number. A third varying axis counts at its full size."""
    size = 1.0
    varying: list[AffineSize] = []
    for axis in axes:
        if axis.multiples and len(varying) < 2:
            varying.append(axis)
        else:
            size *= axis.at(full_widths)
    left, right = [*varying, ONE, ONE][:2]
    return left, right, size


@dataclass
class _AmountSum:
    """Amounts that depend on the widths in the same way, in total and by layer."""

    total: Array = field(default_factory=lambda: np.zeros(len(AMOUNTS)))
    layers: dict[int, Array] = field(default_factory=dict)

    def add(self, layer: int, amounts: Array) -> None:
        self.total = self.total + amounts
        self.layers[layer] = self.layers.get(layer, np.zeros(len(AMOUNTS))) + amounts

    def term(self, name: str, left: AffineSize, right: AffineSize, switch: tuple[int, ...] = ()) -> Term:
        layers = tuple((number, _amounts(amounts)) for number, amounts in self.layers.items())
        return Term(name, left, right, _amounts(self.total), layers, switch)


def _amounts(values: Array) -> Amounts:
    first, second, third, fourth = values.tolist()
    return first, second, third, fourth


class _TermTable:
    """Collects amounts by the widths they depend on: none, one group, or a product of two sizes in one layer."""

    def __init__(self, structure: StructureSpec) -> None:
        self._structure = structure
        self._switches = structure.layer_switches
        self._constants: dict[tuple[int, ...], _AmountSum] = {(): _AmountSum()}
        for layer, switch in enumerate(self._switches if structure.branches else ()):
            self._constants.setdefault(switch, _AmountSum()).add(layer, np.zeros(len(AMOUNTS)))
        self._linear: dict[tuple[int, tuple[int, ...]], _AmountSum] = {}
        self._products: dict[tuple[int, AffineSize, AffineSize], _AmountSum] = {}

    def add(self, layer: int, left: AffineSize, right: AffineSize, amounts: Sequence[float]) -> None:
        """Add amounts * left * right."""
        vector = np.asarray(amounts, dtype=np.float64)
        if not vector.any():
            return
        left, right = (without_frozen(size, self._structure) for size in (left, right))
        if not left.multiples:
            left, right = right, left
        if right.multiples:
            left, right, scale = _normalised(left, right)
            self._products.setdefault((layer, left, right), _AmountSum()).add(layer, vector * scale)
            return
        switch = self._switches[layer]
        if left.fixed:
            self._constants.setdefault(switch, _AmountSum()).add(layer, vector * right.fixed * left.fixed)
        for group, multiple in left.multiples:
            key = (group, () if group in switch else switch)  # a group of the branch has width 0 without it
            self._linear.setdefault(key, _AmountSum()).add(layer, vector * right.fixed * multiple)

    def terms(self) -> tuple[Term, ...]:
        """The constant first, then groups, then layers."""
        groups, layers = self._structure.groups, self._structure.layers
        found = [self._constants[()].term("constant", ONE, ONE)]
        for switch, amounts in self._constants.items():
            if switch:
                found.append(amounts.term(_switch_name(self._structure, switch), ONE, ONE, switch))
        for (group, switch), amounts in sorted(self._linear.items(), key=lambda item: item[0]):
            found.append(amounts.term(groups[group], width_of(group), ONE, switch))
        for (layer, left, right), amounts in self._products.items():
            found.append(amounts.term(layers[layer].path, left, right, self._switches[layer]))
        return tuple(found)


def without_frozen(size: AffineSize, structure: StructureSpec) -> AffineSize:
    """The size with groups that are not prunable counted as fixed."""
    fixed, multiples = size.fixed, []
    for group, multiple in size.multiples:
        if structure.min_widths[group] == structure.full_widths[group]:
            fixed += multiple * structure.full_widths[group]
        else:
            multiples.append((group, multiple))
    return AffineSize(fixed, tuple(multiples))


def _normalised(left: AffineSize, right: AffineSize) -> tuple[AffineSize, AffineSize, float]:
    """Two sizes in a fixed order with common factors taken out, so that in * out and out * in are one term."""
    scale = 1.0
    pair = []
    for size in (left, right):
        factors = {multiple for _, multiple in size.multiples}
        if len(factors) == 1 and size.fixed % (factor := factors.pop()) == 0:
            scale *= factor
            size = AffineSize(size.fixed // factor, tuple((group, 1) for group, _ in size.multiples))
        pair.append(size)
    pair.sort(key=lambda size: (size.multiples, size.fixed))
    return pair[0], pair[1], scale


# ---------------------------------------------------------------- steps of a network


def candidate_steps(structure: StructureSpec) -> tuple[Step, ...]:
    """Every step and every alignment that a network may have: on each channel count of a layer with dense MACs.

    Multiples of one group's width are one size; a sum of groups, where branches are concatenated, is its own size.
    """
    sizes: dict[AffineSize, list[int]] = {}
    for number, layer in enumerate(structure.layers):
        if not layer.macs or layer.kind == "grouped conv":
            continue
        for channels in (layer.incoming, layer.outgoing):
            size = without_frozen(channels, structure)
            if len(size.multiples) == 1:
                size = AffineSize(0, ((size.multiples[0][0], 1),))
            if size.multiples and number not in sizes.setdefault(size, []):
                sizes[size].append(number)
    found = []
    for size, layers in sizes.items():
        full = round(size.at(structure.full_widths))
        name = " + ".join(structure.groups[group] for group, _ in size.multiples)
        levels, rise = step_levels(full)
        found += [Step(name, size, level, tuple(layers), rise=rise) for level in levels]
        found += [Step(name, size, 0, tuple(layers), multiple) for multiple in ALIGNMENTS if multiple <= full]
    return tuple(found)


def step_levels(full: int) -> tuple[tuple[int, ...], int]:
    """Levels of the steps of a size, counted down from its full value, and the channels over which each step rises.

    Most steps rise over as many channels as they are apart. So a narrow layer, such as one with 16 channels or a few
    heads, may have a cost of its own at each width.
    """
    distance = 1
    while full / distance > MAX_LEVELS:
        distance *= 2
    return tuple(range(full - distance, 0, -distance))[::-1], min(max(distance, MIN_RISE), RISE)
