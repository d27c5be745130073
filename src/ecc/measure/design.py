"""Width designs: which networks a profile measures.

    uniform   each group anywhere between 1 and its full width, as the paper does
    mixed     dense, minimum and half; then one third uniform and two thirds scaled

A scaled network is a thinner copy of the dense one, unevenly so: a share of the full widths, times a factor of
its own for each group. Networks that a solver arrives at look like that. On hardware with launch floors and
tiles, a design of corners alone misleads: its fit misses realistic networks by 7 to 9 %, that of `mixed` by 1
to 3 %.

Designs are seeded, and a longer design begins with the shorter one, so that a profile can be extended.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ecc.errors import BadMeasurement, BadWidths
from ecc.graph import ChannelGraph, ChannelGroup

DESIGNS = ("uniform", "mixed")

Shard = tuple[int, int]
"""(k, n): this device takes the samples that are k modulo n, with k from 1 to n."""

UNIFORM_SHARE = 1 / 3  # of `mixed`, after its anchors
SCALE_RANGE = (0.1, 1.0)  # g, the share of the full widths
SCALE_SPREAD = 0.35  # standard deviation of the logarithm of each group's own factor
_MAX_REDRAWS = 1_000
MAX_SAMPLES = 1_000_000
"""Of a design; it is made in memory before the first is measured."""
_MAX_SEED = 2**32 - 1  # of numpy's RandomState


def sample_widths(
    graph: ChannelGraph,
    samples: int,
    kind: str = "mixed",
    seed: int = 0,
    width_multiple: int | None = None,
) -> tuple[dict[str, int], ...]:
    """The networks to measure: for each, the width of every group that can be cut.

    Args:
        graph: Gives the groups and their full widths.
        samples: How many networks, no two of them equal.
        kind: `uniform` or `mixed`.
        seed: The same seed gives the same design on every machine.
        width_multiple: Rounds each width to the nearest multiple of this, at least one multiple; the full width
            is always allowed. Groups that are joined with others are cut in such steps, see `StructureSpec.width_remainders`.

    Raises:
        BadMeasurement: If an argument is out of its range.
        BadWidths: If there are not so many different networks.
    """
    check_design(samples, kind, seed, width_multiple)
    groups = graph.prunable
    if not groups:
        raise BadWidths("no group of this network can be cut, so there is no width to vary. See `ecc inspect`.")
    left = dict(zip(graph.structure.groups, graph.structure.width_remainders(width_multiple or 1), strict=True))
    room = math.prod(len(_allowed(group, width_multiple, left[group.name])) for group in groups)
    if samples > room:
        raise BadWidths(_too_small(samples, f"only {room}", width_multiple))
    drawn: dict[tuple[int, ...], None] = {}  # a set that keeps its order
    redraws = 0
    for values in _endless(groups, kind, seed):
        widths = tuple(
            _rounded(value, group, width_multiple or 1, left[group.name])
            for value, group in zip(values, groups, strict=True)
        )
        redraws = redraws + 1 if widths in drawn else 0
        drawn[widths] = None
        if len(drawn) == samples:
            break
        if redraws > _MAX_REDRAWS:
            raise BadWidths(_too_small(samples, f"hardly more than {len(drawn)}", width_multiple))
    names = [group.name for group in groups]
    return tuple(dict(zip(names, widths, strict=True)) for widths in drawn)


def parse_shard(text: str) -> Shard:
    """The shard that `3/8` names.

    Raises:
        BadMeasurement: If it is not written so.
    """
    number, slash, count = text.partition("/")
    if not (slash and number.strip().isdecimal() and count.strip().isdecimal()):
        raise BadMeasurement(f"shard {text!r} is not written as K/N, such as 3/8.")
    return int(number), int(count)


def shard_indices(samples: int, shard: Shard | None) -> tuple[int, ...]:
    """The samples of a design that a shard takes; all of them without a shard.

    Raises:
        BadMeasurement: If there is no such shard.
    """
    if shard is None:
        return tuple(range(samples))
    number, count = shard
    if count < 1:
        raise BadMeasurement(f"shard {number}/{count} does not exist; the first of two is 1/2.")
    if not 1 <= number <= count:
        raise BadMeasurement(f"shard {number}/{count} does not exist; {count} shards are 1/{count} to {count}/{count}.")
    return tuple(sample for sample in range(samples) if sample % count == number % count)


def check_design(samples: int, kind: str, seed: int, width_multiple: int | None) -> None:
    """Refuses arguments that no design can be made of.

    Raises:
        BadMeasurement: If one is out of its range.
    """
    if kind not in DESIGNS:
        raise BadMeasurement(f"design {kind!r} is unknown; give one of {', '.join(DESIGNS)}.")
    if samples < 1:
        raise BadMeasurement(f"samples={samples} is below 1, the least a design can have.")
    if samples > MAX_SAMPLES:
        raise BadMeasurement(f"samples={samples} is above {MAX_SAMPLES}, the most a design can have.")
    if not 0 <= seed <= _MAX_SEED:
        raise BadMeasurement(f"seed={seed} is outside 0..{_MAX_SEED}.")
    if width_multiple is not None and width_multiple < 1:
        raise BadMeasurement(f"width_multiple={width_multiple} is below 1; leave it out for any width.")


# ---------------------------------------------------------------- drawing


def _endless(groups: Sequence[ChannelGroup], kind: str, seed: int) -> Iterator[list[float]]:
    """Widths before rounding, sample after sample."""
    # numpy has frozen the stream of RandomState; other generators may change with a release.
    random = np.random.RandomState(seed)
    full = np.array([group.width for group in groups])
    if kind == "mixed":
        for share in (1.0, 0.0, 0.5):
            yield (share * full).tolist()
    while True:
        if kind == "uniform" or random.random_sample() < UNIFORM_SHARE:
            yield np.floor(1 + full * random.random_sample(len(full))).tolist()
        else:
            low, high = SCALE_RANGE
            scale = low + (high - low) * random.random_sample()
            yield (scale * full * np.exp(SCALE_SPREAD * random.standard_normal(len(full)))).tolist()


def _rounded(value: float, group: ChannelGroup, step: int, left: int) -> int:
    if value >= group.width:
        return group.width
    nearest = left + step * math.floor((value - left) / step + 0.5)
    return min(max(nearest, left or step), group.width)


def _allowed(group: ChannelGroup, width_multiple: int | None, left: int) -> range | set[int]:
    if width_multiple is None:
        return range(1, group.width + 1)
    return {*range(left or width_multiple, group.width + 1, width_multiple), group.width}


def _too_small(samples: int, room: str, width_multiple: int | None) -> str:
    steps = "" if width_multiple is None else f" in multiples of {width_multiple}"
    way = "Ask for fewer samples" if width_multiple is None else "Ask for fewer samples or a smaller multiple"
    return f"a design of {samples} samples was asked for, but this network has {room} different widths{steps}. {way}."
