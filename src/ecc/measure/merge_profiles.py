"""A fleet: equal devices measure shards of one design, and `merge_profiles` joins their files.

All of them measure the dense reference too, so that it is seen whether the devices are as equal as they look.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ecc.errors import BadFile

from .profile import Profile
from .profile_header import disagreement
from .samples import Sample

MAX_DIFFERENCE = 0.02
"""Devices whose references differ by more are not taken for equal."""

_OF_A_SHARD = frozenset({"design.shard", "meter.device_id"})


def merge_profiles(paths: Sequence[str | Path], out: str | Path, *, rescale: bool = False) -> Profile:
    """Joins profiles of one design that were measured on equal devices.

    Args:
        paths: The shards.
        out: The file to write, compressed if its name ends in .gz.
        rescale: CostEvaluator each file so that all agree on the reference; the header tells the factors.

    Raises:
        BadFile: If the files belong to different networks, settings or designs, hold the same sample, or come
            from devices that differ by more than 2 % on the reference.
    """
    if len(paths) < 2:
        raise BadFile(f"{len(paths)} file was given to merge; give two or more.")
    if Path(out).exists():
        raise BadFile(f"{out} exists already, and is left as it is. Give another name.")
    shards = [Profile.load(path) for path in paths]
    _check_headers(paths, shards)
    _check_twice(paths, shards)
    levels = [_reference(path, shard) for path, shard in zip(paths, shards, strict=True)]
    factors = [(1.0, 1.0)] * len(shards)
    if rescale:
        common = [statistics.geometric_mean(column) for column in zip(*levels, strict=True)]
        factors = [(common[0] / joules, common[1] / seconds) for joules, seconds in levels]
    else:
        _check_levels(paths, [joules for joules, _ in levels])
    samples: list[Sample] = []
    for shard, scale in zip(shards, factors, strict=True):
        samples += _placed(shard.samples, 1 + max((sample.session for sample in samples), default=-1), *scale)
    parts = [
        {
            "shard": shard.header.design.shard and list(shard.header.design.shard),
            "device_id": shard.header.meter.device_id,
            "created": shard.header.created,
            "reference_joules": joules,
            "rescaled_by": scale[0] if rescale else None,
        }
        for shard, (joules, _), scale in zip(shards, levels, factors, strict=True)
    ]
    designs = [shard.header.design for shard in shards]
    samples_planned, rounds_planned = max(plan.samples for plan in designs), max(plan.rounds for plan in designs)
    header = replace(
        shards[0].header,
        design=replace(designs[0], shard=None, samples=samples_planned, rounds=rounds_planned),
        meter=replace(shards[0].header.meter, device_id=""),
        merged_from=tuple(parts),
    )
    profile = Profile(header, tuple(samples))
    profile.save(out)
    return profile


def missing_samples(profile: Profile) -> list[int]:
    """Rows of the design that the profile does not hold, such as those of a shard that was not merged."""
    there = {sample.index for sample in profile.design_samples}
    return [number for number in range(profile.header.design.samples) if number not in there]


def _placed(samples: Sequence[Sample], first_session: int, joules: float, seconds: float) -> list[Sample]:
    """Rows as sessions of their own, so that drift is not followed from one device to the next."""
    return [
        replace(
            sample,
            session=first_session + sample.session,
            joules=sample.joules * joules,
            seconds=sample.seconds * seconds,
        )
        for sample in samples
    ]


def _reference(path: str | Path, shard: Profile) -> tuple[float, float]:
    """Median joules and seconds of the dense reference."""
    if not shard.references:
        raise BadFile(f"{path} holds no measurement of the dense reference, so it cannot be compared.")
    joules = statistics.median(sample.joules for sample in shard.references)
    return joules, statistics.median(sample.seconds for sample in shard.references)


def _check_levels(paths: Sequence[str | Path], joules: Sequence[float]) -> None:
    low, high = min(range(len(joules)), key=joules.__getitem__), max(range(len(joules)), key=joules.__getitem__)
    difference = joules[high] / joules[low] - 1
    if difference > MAX_DIFFERENCE:
        raise BadFile(
            f"the devices differ: the dense reference takes {joules[low]:.4g} J in {paths[low]} and "
            f"{joules[high]:.4g} J in {paths[high]}, {difference:.1%} more; {MAX_DIFFERENCE:.0%} is the most. "
            "Look for a warmer, slower or shared one, or scale them to each other with --rescale (rescale=True)."
        )


def _check_headers(paths: Sequence[str | Path], shards: Sequence[Profile]) -> None:
    for path, shard in zip(paths, shards, strict=True):
        if shard.header.merged_from:
            raise BadFile(f"{path} was merged already; give the files that it was merged from.")
        found = disagreement(shards[0].header, shard.header, may_differ=_OF_A_SHARD)
        if found is not None:
            field, first, other = found
            raise BadFile(f"{paths[0]} and {path} cannot be merged: their {field} is {first!r} and {other!r}.")


def _check_twice(paths: Sequence[str | Path], shards: Sequence[Profile]) -> None:
    seen: dict[tuple[int | None, int], str | Path] = {}
    for path, shard in zip(paths, shards, strict=True):
        for sample in shard.design_samples:
            if (sample.index, sample.round) in seen:
                raise BadFile(
                    f"sample {sample.index} of round {sample.round} stands both in {seen[sample.index, sample.round]} and in {path}. "
                    "Leave one of them out."
                )
        seen.update(dict.fromkeys(((sample.index, sample.round) for sample in shard.design_samples), path))
