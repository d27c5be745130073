"""`Samples`: what a model is fitted to. Widths of all groups, and what they cost on the device."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ecc.errors import BadFile
from ecc.graph import StructureSpec
from ecc.measure.profile import Profile

from .regression import Array

RESOURCES = {"energy": ("joules", "J"), "latency": ("seconds", "s")}
"""What a profile knows of each network, by the name of the resource: the field of a row, and the unit."""


@dataclass(frozen=True)
class Samples:
    """One row a network."""

    structure: StructureSpec
    widths: Array
    """(networks, groups), all groups in the order of the structure."""
    values: Array
    """Of one inference of the whole batch, above 0."""
    weights: Array | None = None
    """How often each was measured; None for once each."""
    label: str = "unknown"
    """Measured, estimated or declared, as the profile says."""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def is_dense(self) -> NDArray[np.bool_]:
        """Which rows are the dense network."""
        return np.asarray((self.widths == np.asarray(self.structure.full_widths)).all(axis=1))

    @property
    def mean_share(self) -> Array:
        """Mean of width / full width over the groups that can be cut, for each row."""
        positions = list(self.structure.prunable)
        shares = self.widths[:, positions] / np.asarray(self.structure.full_widths)[positions]
        return np.asarray(shares.mean(axis=1))

    def take(self, rows: Sequence[int] | NDArray[np.intp] | NDArray[np.bool_]) -> Samples:
        """Some of the rows."""
        weights = None if self.weights is None else self.weights[rows]
        return replace(self, widths=self.widths[rows], values=self.values[rows], weights=weights)


def samples_from_profile(profile: Profile, resource: str = "energy", *, allow_drift: bool = False) -> Samples:
    """The networks of a profile and its dense reference, drift divided out and rounds combined.

    The dense network was measured again and again as the reference: it stands among the rows once, as the median, with
    the weight of all these measurements.

    Args:
        profile: Of one network on one device.
        resource: `energy` or `latency`.
        allow_drift: Takes a profile whose reference varied by more than is trusted.

    Raises:
        BadFile: If a row holds no positive number, or widths that are not the network's, or stands there twice.
        BadMeasurement: If the device was not steady.
    """
    if resource not in RESOURCES:
        raise BadFile(f"a profile knows nothing of {resource!r}; it knows {' and '.join(RESOURCES)}.")
    field, _ = RESOURCES[resource]
    header = profile.header
    _check_rows(profile)
    rounds = Counter(row.index for row in profile.samples)
    found = [
        (sample.widths, float(getattr(sample, field)), float(rounds[sample.index]))
        for sample in profile.corrected(allow_drift=allow_drift, of=field)
    ]
    if profile.references:
        dense = sorted(float(getattr(row, field)) for row in profile.references)
        dense += [value for widths, value, _ in found if widths == header.full_widths]
        found = [row for row in found if row[0] != header.full_widths]
        found.append((header.full_widths, statistics.median(dense), float(len(dense))))
    positions = [header.structure.groups.index(name) for name in header.groups]
    full = np.asarray(header.structure.full_widths, dtype=np.float64)
    widths = np.tile(full, (len(found), 1))
    for number, (kept, _, _) in enumerate(found):
        widths[number, positions] = kept
    values, weights = (np.array([row[k] for row in found], dtype=np.float64) for k in (1, 2))
    return Samples(header.structure, widths, values, weights, header.label)


def _check_rows(profile: Profile) -> None:
    """Refuses rows that are no measurements of the network; those of a file were checked as they were read."""
    full, seen = profile.header.full_widths, set()
    for row in profile.samples:
        name = "the dense reference" if row.index is None else f"row {row.index}"
        for field, value in (("joules", row.joules), ("seconds", row.seconds)):
            if not (math.isfinite(value) and value > 0):
                raise BadFile(f"{name} of the profile has {value} {field}; it must be above 0. Remove the row.")
        if len(row.widths) != len(full) or any(not 1 <= w <= f for w, f in zip(row.widths, full, strict=True)):
            raise BadFile(f"{name} of the profile has widths {list(row.widths)}, outside 1..{list(full)}.")
        if row.index is not None and (row.index, row.round) in seen:
            raise BadFile(f"{name} of the profile stands there twice for round {row.round}. Remove one of the two.")
        seen.add((row.index, row.round))
