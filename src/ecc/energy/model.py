"""`EnergyModel`: joules, or seconds, of a network at any widths, learnt from a profile; and its file.

The file is JSON that a person can read: coefficients with their units, the terms they belong to, the device they were
learnt on and how well they predict.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ecc.errors import BadFile, BadWidths, EccError
from ecc.graph import AffineSize, ChannelGraph
from ecc.io import read_text, write_text
from ecc.measure import MeasureSettings, MeterInfo
from ecc.records import from_builtins, to_builtins

from .bilinear_form import BilinearForm
from .families import FittedModel
from .features import AMOUNTS, Term
from .samples import RESOURCES
from .step_terms import Step, StepTerms

FORMAT = "ecc energy model, version 1"
A_PROFILE = '{"header": {"format": "ecc profile"'
"""How a profile begins, which may be taken for its energy model."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Whose joules they are: the meter and its device, and how networks were run on it."""

    meter: MeterInfo
    batch: int
    """Items in one inference."""
    device_type: str | None = None
    """Where networks ran: cuda, cpu, ...; None where none was run."""
    settings: MeasureSettings | None = None
    """How they ran and were measured; None where none was run."""
    rows: int = 0
    """Networks that the model was fitted to."""
    width_multiple: int | None = None
    """Their widths were multiples of this: of others the model knows little."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        settings = None if self.settings is None else asdict(self.settings)
        return {**vars(self), "meter": self.meter.to_dict(), "settings": settings}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Origin:
        """The reverse of `to_dict`."""
        settings = data["settings"]
        return cls(
            meter=MeterInfo.from_dict(data["meter"]),
            batch=int(data["batch"]),
            device_type=data["device_type"],
            settings=None if settings is None else MeasureSettings(**settings),
            rows=int(data["rows"]),
            width_multiple=None if data["width_multiple"] is None else int(data["width_multiple"]),
        )


@dataclass(frozen=True, kw_only=True, repr=False)
class EnergyModel:
    """A `Cost` that is a sum of fitted products of widths.

    Coefficients are at least 0, so that the model is too, and removing a channel never raises it.
    """

    fingerprint: str
    """Of the channel graph that it belongs to."""
    groups: tuple[str, ...]
    full_widths: tuple[int, ...]
    min_widths: tuple[int, ...]
    layers: tuple[str, ...]
    """Paths, for telling what each costs."""
    resource: str
    origin: Origin
    fitted: FittedModel
    quality: dict[str, Any] = field(default_factory=dict)
    """How well it predicts, as `fit` found it."""
    device: torch.device | str = "cpu"
    """Where it computes."""

    def __repr__(self) -> str:
        dense = f"{self.dense:.4g} {self.unit} at full width"
        return f"<EnergyModel of {self.fingerprint}: {self.resource}, {self.kind}, {dense}, {self.origin.meter.device}>"

    @property
    def unit(self) -> str:
        """J or s, of one inference of the whole batch."""
        return RESOURCES[self.resource][1]

    @property
    def label(self) -> str:
        """Measured, estimated or declared: belongs beside every number."""
        return self.origin.meter.label

    @property
    def kind(self) -> str:
        """bilinear or physical."""
        return self.fitted.kind

    def value(self, widths: Tensor) -> Tensor:
        """The cost at one vector of widths, or at each row of a matrix."""
        value = self._products.value(widths)
        return value + self._stairs.value(widths) if self.fitted.steps else value

    def gradient(self, widths: Tensor) -> Tensor:
        """Derivative at one vector of widths; where it jumps, that of cutting."""
        gradient = self._products.gradient(widths)
        return gradient + self._stairs.gradient(widths) if self.fitted.steps else gradient

    def to(self, device: torch.device | str) -> EnergyModel:
        """The same model, computing on a device."""
        is_there = torch.device(device) == torch.device(self.device)
        return self if is_there else replace(self, device=device)  # with its tensors, which took a while to make

    def at(self, widths: Mapping[str, float] | None = None) -> float:
        """The cost of a network by the names of its groups; those not named keep their full width.

        Raises:
            BadWidths: If there is no such group.
        """
        return float(self.value(self._vector(widths)))

    def _vector(self, widths: Mapping[str, float] | None) -> Tensor:
        vector = torch.tensor(self.full_widths, dtype=torch.float64, device="cpu")
        position = {name: number for number, name in enumerate(self.groups)}
        for name, width in (widths or {}).items():
            if name not in position:
                raise BadWidths(f"no channel group is called {name!r}.")
            vector[position[name]] = float(width)
        return vector.to(self.device)

    @property
    def dense(self) -> float:
        """At full widths, by the model."""
        return self.at()

    @property
    def dense_profiled(self) -> float:
        """At full widths, as the profile has it, which the model may miss; by the model if the profile lacks it."""
        return self.dense / (1 + (self.quality.get("dense_fitted") or 0.0))

    @property
    def least(self) -> float:
        """With every group at the smallest width it may have: no budget below this can be met."""
        return self.at(dict(zip(self.groups, self.min_widths, strict=True)))

    def per_layer(self, widths: Mapping[str, float] | None = None) -> dict[str, float]:
        """What each layer costs, by its path; under the empty name what belongs to none.

        A term of a group is shared among the layers that use the group, by the amounts that each brings; a step equally
        among those that read or write its channels.
        """
        vector = self._vector(widths)
        costs = self._products.terms(vector).tolist()
        found = dict.fromkeys(("", *self.layers), 0.0)
        found[""] = self.fitted.base  # operators in the root's own forward have the empty path too
        unit_coefficients = self.fitted.unit_coefficients or (1.0,) * len(AMOUNTS)
        for term, cost in zip(self.fitted.terms, costs, strict=True):
            parts = [sum(a * p for a, p in zip(amounts, unit_coefficients, strict=True)) for _, amounts in term.layers]
            parts = parts if sum(parts) > 0 else [1.0] * len(parts)
            for (number, _), part in zip(term.layers, parts, strict=True):
                found[self.layers[number]] += cost * part / sum(parts)
        if self.fitted.steps:
            raised = self._stairs.terms(vector).tolist()
            for step, cost in zip(self.fitted.steps, raised, strict=True):
                for number in step.layers:
                    found[self.layers[number]] += cost / len(step.layers)
        return found

    def check(self, graph: ChannelGraph) -> None:
        """Refuses another network. In this one more groups may be frozen than in the profile: they keep their widths.

        Raises:
            BadFile: If the model was fitted to another one.
        """
        sizes = zip(self.groups, self.min_widths, self.full_widths, strict=True)
        frozen = [name for name, least, full in sizes if least == full]
        is_known = {group.name for group in graph.prunable} <= set(self.groups) - set(frozen)  # all that can be cut
        if graph.fingerprint != self.fingerprint and not (
            is_known and graph.fingerprint_if(frozen) == self.fingerprint
        ):
            raise BadFile(
                f"the energy model belongs to network {self.fingerprint}, and this one is {graph.fingerprint}. "
                "Profile and fit this network, with this input shape."
            )

    @cached_property
    def _products(self) -> BilinearForm:
        terms = self.fitted.terms
        lefts, rights = tuple(term.left for term in terms), tuple(term.right for term in terms)
        return BilinearForm(self.fitted.base, self.fitted.coefficients, lefts, rights, len(self.groups), self.device)

    @cached_property
    def _stairs(self) -> StepTerms:
        steps = self.fitted.steps
        sizes, levels = tuple(step.size for step in steps), tuple(step.level for step in steps)
        return StepTerms(self.fitted.heights, sizes, levels, len(self.groups), self.device)

    # ------------------------------------------------------------ files

    def save(self, path: str | Path) -> None:
        """Writes the model as JSON.

        Raises:
            BadFile: If it cannot be written.
        """
        write_text(path, json.dumps(self._to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path, graph: ChannelGraph | None = None) -> EnergyModel:
        """Reads what `save` wrote.

        Args:
            path: The file.
            graph: If given, the network that the model must belong to.

        Raises:
            BadFile: If it is no energy model, is damaged, or belongs to another network.
        """
        try:
            text = read_text(path)
            if text.startswith(A_PROFILE):
                raise BadFile(f"{path} is a profile, and no energy model yet; make one: ecc fit {path} -o energy.json")
            data = json.loads(text, parse_constant=_refuse_constant)
            if not isinstance(data, dict) or data.get("format") != FORMAT:
                raise BadFile(f"{path} is not an energy model of this version ({FORMAT!r}).")
            model = cls._from_json(data)
        except EccError as error:
            raise BadFile(str(error)) from None
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise BadFile(f"{path} is damaged ({type(error).__name__}: {error}). Fit the profile again.") from None
        if graph is not None:
            model.check(graph)
        return model

    def _to_json(self) -> dict[str, Any]:
        fitted = self.fitted
        return {
            "format": FORMAT,
            "resource": self.resource,
            "unit": f"{self.unit} for one inference of the whole batch",
            "label": self.label,
            "origin": self.origin.to_dict(),
            "network": {
                "fingerprint": self.fingerprint,
                "groups": list(self.groups),
                "full_widths": list(self.full_widths),
                "min_widths": list(self.min_widths),
                "layers": list(self.layers),
            },
            "quality": self.quality,
            "model": {
                "kind": fitted.kind,
                "formula": "base + sum of coefficient * left * right + sum of height * clip((size - level) / 8, 0, 1); "
                "a size is [fixed, [[group, multiple], ...]]",
                "unit_coefficients": dict(zip(AMOUNTS, fitted.unit_coefficients, strict=True))
                if fitted.unit_coefficients
                else None,
                "strength": "inf" if fitted.strength == math.inf else fitted.strength,  # JSON knows no infinity
                "base": fitted.base,
                "terms": [
                    {
                        "name": term.name,
                        "coefficient": coefficient,
                        "left": to_builtins(term.left),
                        "right": to_builtins(term.right),
                        "amounts": list(term.amounts),
                        "layers": [[number, list(amounts)] for number, amounts in term.layers],
                    }
                    for term, coefficient in zip(fitted.terms, fitted.coefficients, strict=True)
                ],
                "steps": [
                    {
                        "name": step.name,
                        "height": height,
                        "size": to_builtins(step.size),
                        "level": step.level,
                        "layers": list(step.layers),
                    }
                    for step, height in zip(fitted.steps, fitted.heights, strict=True)
                ],
            },
        }

    @classmethod
    def _from_json(cls, data: Mapping[str, Any]) -> EnergyModel:
        network, model = data["network"], data["model"]
        common = model["unit_coefficients"]
        groups = tuple(str(name) for name in network["groups"])
        layers = tuple(str(path) for path in network["layers"])
        found = cls(
            fingerprint=str(network["fingerprint"]),
            groups=groups,
            full_widths=tuple(int(width) for width in network["full_widths"]),
            min_widths=tuple(int(width) for width in network["min_widths"]),
            layers=layers,
            resource=str(data["resource"]),
            origin=Origin.from_dict(data["origin"]),
            fitted=FittedModel(
                kind=str(model["kind"]),
                base=_coefficient(model["base"]),
                terms=tuple(_term(term, len(groups), len(layers)) for term in model["terms"]),
                coefficients=tuple(_coefficient(term["coefficient"]) for term in model["terms"]),
                unit_coefficients=() if common is None else tuple(_coefficient(common[name]) for name in AMOUNTS),
                strength=None if model["strength"] is None else float(model["strength"]),
                steps=tuple(_step(step, len(groups), len(layers)) for step in model["steps"]),
                heights=tuple(_coefficient(step["height"]) for step in model["steps"]),
            ),
            quality=_quality(data["quality"]),
        )
        if not len(set(groups)) == len(groups) == len(found.full_widths) == len(found.min_widths):
            raise ValueError("groups and widths differ in number")
        if any(not 1 <= least <= full for least, full in zip(found.min_widths, found.full_widths, strict=True)):
            raise ValueError("a least width is outside 1 and the full width")
        if not all(name.isprintable() for name in (*groups, *layers, found.fingerprint, found.kind)):
            raise ValueError("a name cannot be shown")
        if found.origin.batch < 1 or not isinstance(found.origin.device_type, str | None):
            raise ValueError("the origin is none")
        if found.resource not in RESOURCES:
            raise ValueError(f"resource {found.resource!r} is unknown")
        if not (math.isfinite(found.dense) and found.dense > 0):
            raise ValueError(f"the dense network would take {found.dense} {found.unit}")
        return found


def _term(data: Mapping[str, Any], num_groups: int, num_layers: int) -> Term:
    left, right = from_builtins(data["left"], AffineSize, "the energy model"), from_builtins(data["right"], AffineSize, "the energy model")
    for extent in (left, right):
        if extent.fixed < 0 or any(not 0 <= g < num_groups or m < 0 for g, m in extent.multiples):
            raise ValueError(f"a size of term {data['name']!r} is negative or of no group")
    layers = tuple((int(number), _amounts(amounts)) for number, amounts in data["layers"])
    if any(not 0 <= number < num_layers for number, _ in layers):
        raise ValueError(f"term {data['name']!r} belongs to no layer")
    return Term(str(data["name"]), left, right, _amounts(data["amounts"]), layers)


def _amounts(values: Sequence[Any]) -> tuple[float, ...]:
    if len(values) != len(AMOUNTS):
        raise ValueError(f"{len(values)} amounts where there are {len(AMOUNTS)}")
    return tuple(_coefficient(value) for value in values)


def _step(data: Mapping[str, Any], num_groups: int, num_layers: int) -> Step:
    size, layers = from_builtins(data["size"], AffineSize, "the energy model"), tuple(int(number) for number in data["layers"])
    if size.fixed < 0 or any(not 0 <= g < num_groups or m < 0 for g, m in size.multiples):
        raise ValueError(f"the size of step {data['name']!r} is negative or of no group")
    if not layers or any(not 0 <= number < num_layers for number in layers):
        raise ValueError(f"step {data['name']!r} belongs to no layer")
    return Step(str(data["name"]), size, int(data["level"]), layers)


def _coefficient(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"coefficient {value!r} is no number of at least 0")
    return float(value)


def _quality(found: Mapping[str, Any]) -> dict[str, Any]:
    error = found.get("dense_fitted")
    if error is not None and (isinstance(error, bool) or not isinstance(error, int | float) or not -1 < error < 1e3):
        raise ValueError(f"dense_fitted {error!r} is no relative error")
    return dict(found)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")
