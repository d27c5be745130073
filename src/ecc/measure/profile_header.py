"""What the numbers of a profile mean: the first line of its file.

A profile holds one network, on one device, run in one way. Everything that says so stands in the header, and
samples are only ever appended under a header that agrees in all of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from ecc.errors import BadFile
from ecc.graph import ChannelGraph, StructureSpec
from ecc.records import from_builtins, to_builtins
from ecc.task import Inputs

from .counter import CounterProbe
from .design import Shard, check_design
from .measurement import MeasureSettings
from .meter import MeterInfo

_T = TypeVar("_T")

FORMAT = "ecc profile"
VERSION = 2
UNITS = {
    "joules": "gross, one inference of the whole batch",
    "seconds": "one inference of the whole batch",
    "widths": "channels kept, in the order of network.groups",
}

# A later run may ask for more samples or rounds; the rest of this list changes no joule.
_MAY_DIFFER = {
    "created",
    "counter",
    "design.samples",
    "design.rounds",
    "environment.ecc",
    "environment.python",
    "meter.notes",
    "mode_reason",
}


@dataclass(frozen=True, kw_only=True)
class Design:
    """How the networks were chosen, and in which order they are measured."""

    kind: str
    """`uniform` or `mixed`."""
    seed: int
    width_multiple: int | None
    samples: int
    """As planned when the file was made; the file may have been extended since."""
    rounds: int
    """Times that each network is measured, as planned; rounds are far apart in time."""
    reference_every: int
    """Networks between two measurements of the dense reference."""
    shard: Shard | None
    """(k, n): only the samples that are k modulo n."""


@dataclass(frozen=True, kw_only=True)
class ProfileHeader:
    """Network, input, device, meter, settings, design and software of a profile."""

    structure: StructureSpec
    """The network, as far as costs are counted from it: with it, a profile can be fitted by itself."""
    groups: tuple[str, ...]
    """The groups that can be cut: the order of the widths in each sample."""
    full_widths: tuple[int, ...]
    """Of those groups."""
    input_shapes: dict[str, tuple[int, ...]]
    """By argument name or position."""
    batch: int
    """Items in one inference."""
    meter: MeterInfo
    device_type: str | None
    """Where the networks ran; None where none was run."""
    settings: MeasureSettings | None
    """How they ran and how long they were measured; None where none was run. Its mode is never `auto`."""
    mode_reason: str | None = None
    """Why they ran in that mode; None where none was run, and in older files."""
    design: Design
    counter: CounterProbe | None = None
    """How the meter's counter behaves, probed once."""
    environment: dict[str, str]
    created: str | None
    """UTC; None for arithmetic, so that its files can be compared byte for byte."""
    merged_from: tuple[dict[str, Any], ...] = ()
    """The shards that were joined: their device, the median of their reference, and its factor if rescaled."""

    @property
    def fingerprint(self) -> str:
        """Of the channel graph."""
        return self.structure.fingerprint

    @property
    def label(self) -> str:
        """Measured, estimated or declared: belongs beside every number."""
        return self.meter.label

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, what the numbers are in front."""
        counter = None if self.counter is None else asdict(dataclasses.replace(self.counter, idle_state=None))
        if counter is not None:
            del counter["idle_state"]
        return {
            "format": FORMAT,
            "version": VERSION,
            "created": self.created,
            "label": self.label,
            "units": UNITS,
            "network": {
                "fingerprint": self.fingerprint,
                "groups": list(self.groups),
                "full_widths": list(self.full_widths),
                "structure": to_builtins(self.structure),
            },
            "input": {
                "batch": self.batch,
                "shapes": {name: list(shape) for name, shape in self.input_shapes.items()},
            },
            "device": self.device_type,
            "meter": self.meter.to_dict(),
            "settings": None if self.settings is None else asdict(self.settings),
            "mode_reason": self.mode_reason,
            "design": {**asdict(self.design), "shard": self.design.shard and list(self.design.shard)},
            "counter": counter,
            "environment": self.environment,
            "merged_from": list(self.merged_from),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ProfileHeader:
        """The reverse of `to_dict`.

        Raises:
            BadFile: If it is no header of a profile, or of a later version.
            KeyError, TypeError, ValueError, EccError: If it is damaged.
        """
        if data.get("format") != FORMAT:
            raise BadFile(f"this is not the header of a profile, whose format is {FORMAT!r}.")
        if data["version"] != VERSION:
            raise BadFile(f"the profile has version {data['version']}; this ecc reads version {VERSION}.")
        network = data["network"]
        header = cls(
            structure=from_builtins(network["structure"], StructureSpec, "the profile header"),
            groups=tuple(str(name) for name in network["groups"]),
            full_widths=tuple(int(width) for width in network["full_widths"]),
            input_shapes={str(name): tuple(shape) for name, shape in data["input"]["shapes"].items()},
            batch=int(data["input"]["batch"]),
            meter=MeterInfo.from_dict(data["meter"]),
            device_type=data["device"],
            settings=_maybe(MeasureSettings, data["settings"]),
            mode_reason=data.get("mode_reason"),
            design=_design(data["design"]),
            counter=_maybe(CounterProbe, data["counter"]),
            environment={str(name): str(value) for name, value in data["environment"].items()},
            created=data["created"],
            merged_from=tuple(dict(part) for part in data["merged_from"]),
        )
        texts = (header.device_type, header.mode_reason, header.created)
        if not all(isinstance(text, str | None) for text in texts) or header.batch < 1:
            raise ValueError("device, reason of the mode, time or batch")
        if network["fingerprint"] != header.fingerprint:
            raise ValueError(f"network {network['fingerprint']} with the structure of {header.fingerprint}")
        if not all(name.isprintable() for name in header.structure.groups):
            raise ValueError("a name of a group cannot be shown")
        whole = dict(zip(header.structure.groups, header.structure.full_widths, strict=True))
        if [whole.get(name) for name in header.groups] != list(header.full_widths):
            raise ValueError("groups and full widths do not fit the structure")
        return header


def network_of(graph: ChannelGraph) -> dict[str, Any]:
    """The part of a header that a graph decides."""
    return {
        "structure": graph.structure,
        "groups": tuple(group.name for group in graph.prunable),
        "full_widths": tuple(group.width for group in graph.prunable),
    }


def input_of(example_input: Inputs) -> dict[str, Any]:
    """The part of a header that the example input decides."""
    if isinstance(example_input, dict):
        named = example_input
    else:
        tensors = example_input if isinstance(example_input, tuple) else (example_input,)
        named = {str(position): tensor for position, tensor in enumerate(tensors)}
    shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
    first = next(iter(shapes.values()))
    return {"input_shapes": shapes, "batch": first[0] if first else 1}


def disagreement(
    old: ProfileHeader, new: ProfileHeader, *, may_differ: frozenset[str] = frozenset()
) -> tuple[str, Any, Any] | None:
    """The first field in which two headers contradict each other, with both values; None if they agree.

    Args:
        old: One header.
        new: The other.
        may_differ: Fields to pass over besides those that change no joule, such as `design.shard`.
    """
    mine, other = dict(_leaves(old.to_dict())), dict(_leaves(new.to_dict()))
    computed = old.device_type is None and new.device_type is None
    names = [*mine, *(name for name in other if name not in mine)]
    for name in sorted(names, key=lambda name: not name.startswith("input.")):  # the fingerprint follows from the input
        if name in _MAY_DIFFER or name.partition(".")[0] in _MAY_DIFFER or name in may_differ:
            continue
        if computed and name.startswith("environment."):
            continue  # arithmetic does not depend on what it was computed with
        if mine.get(name) != other.get(name):
            return name, mine.get(name), other.get(name)
    return None


def _leaves(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if name == "structure":
            continue  # its fingerprint stands for it
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _maybe(cls: type[_T], data: Mapping[str, Any] | None) -> _T | None:
    return None if data is None else cls(**_known(cls, data))


def _design(data: Mapping[str, Any]) -> Design:
    planned = _known(Design, {"samples": data.get("rows"), **data})  # files of 0.1
    shard, multiple = planned["shard"], planned["width_multiple"]
    planned["shard"] = None if shard is None else (int(shard[0]), int(shard[1]))
    for name in ("seed", "samples", "rounds", "reference_every", *([] if multiple is None else ["width_multiple"])):
        planned[name] = int(planned[name])
    design = Design(**planned)
    check_design(design.samples, design.kind, design.seed, design.width_multiple)
    return design


def _known(cls: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """The values that this version knows; those of a later one are left out."""
    names = {field.name for field in fields(cls)}
    return {name: value for name, value in data.items() if name in names}
