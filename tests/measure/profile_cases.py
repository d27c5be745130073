"""A small network, a source of known coefficients for it, and a board on which it takes a known time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ecc.graph import ChannelGraph, trace_channels
from ecc.measure import Design, Estimated, MeterInfo, Profile, ProfileHeader, Progress, Reading, Sample, profile
from measure.fakes import FakeBoard, FakeMeter

EXAMPLE = torch.ones(2, 3, 6, 6)


class Link:
    """Leads to a board; a copy of a network keeps the same board."""

    def __init__(self, board: FakeBoard | None) -> None:
        self.board = board

    def __deepcopy__(self, memo: object) -> Link:
        return self


class SmallNet(nn.Module):
    """Two groups, of 16 and 12 channels. On a board, an inference takes `run_seconds` of its widths."""

    def __init__(self, board: FakeBoard | None = None) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3)
        self.second = nn.Conv2d(16, 12, 1)
        self.head = nn.Conv2d(12, 4, 1)
        self.link = Link(board)

    def forward(self, x: Tensor) -> Tensor:
        if self.link.board is not None and x.device.type != "meta":
            self.link.board.work(run_seconds(self.second.in_channels, self.second.out_channels))
            return x  # the time is the board's; nothing need be computed
        y: Tensor = self.head(torch.relu(self.second(torch.relu(self.first(x)))))
        return y


def run_seconds(first: int, second: int) -> float:
    return 1e-3 * (1 + first * second / 64)


@cache
def small_graph() -> ChannelGraph:
    return trace_channels(SmallNet(), EXAMPLE)


class FakeCosts:
    """An analytic source: a constant and a price a MAC; it may take its time, and it counts."""

    def __init__(self, joules_per_mac: float = 1e-6, wait_seconds: float = 0.0, name: str = "coefficients") -> None:
        self.joules_per_mac = joules_per_mac
        self.wait_seconds = wait_seconds
        self.name = name
        self.calls = 0

    def cost(self, graph: ChannelGraph, widths: Mapping[str, int]) -> Reading:
        self.calls += 1
        time.sleep(self.wait_seconds)
        return Reading(1e-3 + self.joules_per_mac * float(graph.macs(widths)), 1e-4)

    def describe(self) -> MeterInfo:
        return MeterInfo(name=self.name, device="paper", provenance=Estimated("made up"), scope="all")


class DriftingBoard(FakeBoard):
    """Draws more and more, as a device does that warms up: `drift(now)` is relative."""

    drift_per_second = 0.0

    @property
    def busy_watts(self) -> float:
        return self._cold_watts * (1 + self.drift_per_second * (self._now - 1000.0))

    @busy_watts.setter
    def busy_watts(self, watts: float) -> None:
        self._cold_watts = watts


def header(**changes: Any) -> ProfileHeader:
    """A header of the small network."""
    values: dict[str, Any] = {
        "meter": FakeCosts().describe(),
        "design": Design(samples=20),
        "environment": {"torch": "2"},
    }
    return replace(ProfileHeader.of(small_graph(), EXAMPLE, **values), **changes)


def reference(joules: float, **values: Any) -> Sample:
    return Sample(**{"index": None, "widths": (16, 12), "joules": joules, "seconds": 1e-3, **values})


def sample(number: int, joules: float = 1.0, widths: tuple[int, ...] = (4, 3), **values: Any) -> Sample:
    return Sample(**{"index": number, "widths": widths, "joules": joules, "seconds": 1e-3, **values})


def profile_of(*samples: Sample, **changes: Any) -> Profile:
    return Profile(header(**changes), samples)


# --- profiles in a line -----------------------------------------------------------------------------


def computed(path: Path, source: FakeCosts | None = None, **options: Any) -> Profile:
    options = {"samples": 25, "reference_every": 10, **options}
    return profile(SmallNet(), small_graph(), EXAMPLE, source or FakeCosts(), path, **options)


def measured(path: Path, board: FakeBoard, meter: FakeMeter | None = None, **options: Any) -> Profile:
    options = {"samples": 12, "reference_every": 4, "clock": board.clock, **options}
    return profile(SmallNet(board), small_graph(), EXAMPLE, meter or FakeMeter(board), path, **options)


class Stop(Exception):
    pass


def stop_after(count: int) -> Any:
    """Ends a profile after that many lines, references among them."""
    seen: list[Progress] = []

    def progress(step: Progress) -> None:
        seen.extend([step] if step.sample is not None else [])
        if len(seen) == count:
            raise Stop

    return progress
