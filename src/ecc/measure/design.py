"""Designs: which widths a profile measures.

    uniform   every group between 1 and its full width, as in the paper
    mixed     dense, minimum and half widths; then one third uniform and two thirds scaled configurations

A scaled configuration multiplies the full widths by one common ratio and by a random factor per group. Networks that a
solver finds look like this. A design of extreme widths alone misleads on hardware with launch overhead and tiles: its
fit errs by 7 to 9 % on realistic networks, that of `mixed` by 1 to 3 %.

If branches of the network can be removed, `mixed` also has the dense and the minimum network without any of them, and
half of its other configurations lack a random part of them.

Designs are seeded, and a longer design begins with the shorter one, so a profile can be extended.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ecc.errors import BadMeasurement, BadWidths
from ecc.graph import ChannelGraph, ChannelGroup
from ecc.settings import Design, Shard

_UNIFORM_SHARE = 1 / 3  # of `mixed`, after its first three
_SCALE_RANGE = (0.1, 1.0)  # common ratio of scaled configurations
_SCALE_SPREAD = 0.35  # standard deviation of the logarithm of the factor per group
_REMOVED_SHARE = 0.5  # of `mixed`, after its first ones
_MAX_REDRAWS = 1_000


def parse_shard(text: str) -> Shard:
    """Parse `3/8`."""
    number, slash, count = text.partition("/")
    if not (slash and number.strip().isdecimal() and count.strip().isdecimal()):
        raise BadMeasurement(f"shard {text!r} does not have the form K/N, such as 3/8.")
    return int(number), int(count)


def sample_widths(
    graph: ChannelGraph, samples: int, kind: str = "mixed", seed: int = 0, width_multiple: int | None = None
) -> tuple[dict[str, int], ...]:
    """Draw distinct width configurations, each with the width of every group that can vary.

    Args:
        graph: Groups and their full widths.
        samples: Number of configurations.
        kind: `mixed` or `uniform`.
        seed: The same seed gives the same design on every machine.
        width_multiple: Rounds each width so that layers have multiples of so many channels, at least one multiple. The
            full width is always allowed. See `StructureSpec.width_steps` and `width_remainders`.
    """
    Design(kind=kind, samples=samples, seed=seed, width_multiple=width_multiple)
    groups = graph.variable
    if not groups:
        raise BadWidths("this network has no prunable group, so there are no widths to vary. See `ecc inspect`.")
    structure, multiple = graph.structure, width_multiple or 1
    pairs = zip(structure.width_steps(multiple), structure.width_remainders(multiple), strict=True)
    allowed = dict(zip(structure.groups, pairs, strict=True))
    available = math.prod(_count_widths(group, *allowed[group.name]) for group in groups)
    branches = [set(branch.groups) for branch in graph.branches] if kind == "mixed" else []
    if samples > available * 2 ** len(branches):
        raise BadWidths(_too_many(samples, f"only {available}", width_multiple))
    drawn: dict[tuple[int, ...], None] = {}  # an ordered set
    redraws = 0
    for values, removed in zip(_draw(groups, kind, seed, bool(branches)), _remove(branches, seed), strict=False):
        widths = tuple(
            0 if group.name in removed else _round_width(value, group, *allowed[group.name])
            for value, group in zip(values, groups, strict=True)
        )
        redraws = redraws + 1 if widths in drawn else 0
        drawn[widths] = None
        if len(drawn) == samples:
            break
        if redraws > _MAX_REDRAWS:
            raise BadWidths(_too_many(samples, f"hardly more than {len(drawn)}", width_multiple))
    names = [group.name for group in groups]
    return tuple(dict(zip(names, widths, strict=True)) for widths in drawn)


def _draw(groups: Sequence[ChannelGroup], kind: str, seed: int, with_branches: bool = False) -> Iterator[list[float]]:
    """Endless widths before rounding."""
    random = np.random.RandomState(seed)  # numpy guarantees its stream; newer generators may change
    full = np.array([group.width for group in groups])
    if kind == "mixed":
        for ratio in (1.0, 0.0, 0.5, *((1.0, 0.0) if with_branches else ())):
            yield (ratio * full).tolist()
    while True:
        if kind == "uniform" or random.random_sample() < _UNIFORM_SHARE:
            yield np.floor(1 + full * random.random_sample(len(full))).tolist()
        else:
            low, high = _SCALE_RANGE
            scale = low + (high - low) * random.random_sample()
            yield (scale * full * np.exp(_SCALE_SPREAD * random.standard_normal(len(full)))).tolist()


def _remove(branches: Sequence[set[str]], seed: int) -> Iterator[set[str]]:
    """Endless sets of groups with width 0: those of no branch, of all, or of a random part."""
    random = np.random.RandomState([seed, 1])
    everything: set[str] = set().union(*branches)
    if branches:
        yield from (set(), set(), set(), everything, everything)  # as in `_draw`
    while True:
        if not branches or random.random_sample() >= _REMOVED_SHARE:
            yield set()
            continue
        order = random.permutation(len(branches))
        count = 1 + int(len(branches) * random.random_sample())
        yield set().union(*(branches[number] for number in order[:count]))


def _round_width(value: float, group: ChannelGroup, step: int, rest: int) -> int:
    if value >= group.width or group.frozen is not None:
        return group.width
    nearest = rest + step * math.floor((value - rest) / step + 0.5)
    return min(max(nearest, _smallest_width(group, step, rest)), group.width)


def _smallest_width(group: ChannelGroup, step: int, rest: int) -> int:
    """The smallest allowed width that is not below the minimum width of the group."""
    least = rest or step
    return least + step * max(0, math.ceil((group.min_width - least) / step))


def _count_widths(group: ChannelGroup, step: int, rest: int) -> int:
    if group.frozen is not None:
        return 1
    return len({*range(_smallest_width(group, step, rest), group.width + 1, step), group.width})


def _too_many(samples: int, available: str, width_multiple: int | None) -> str:
    steps = "" if width_multiple is None else f" in multiples of {width_multiple}"
    remedy = "Use fewer samples" if width_multiple is None else "Use fewer samples or a smaller multiple"
    return f"{samples} samples requested, but this network has {available} different widths{steps}. {remedy}."
