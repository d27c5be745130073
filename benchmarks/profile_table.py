"""The section of RESULTS.md about the time that a profile takes, from results/profile_speed.json."""

from __future__ import annotations

from typing import Any

from result_tables import RESULTS, load, origin, table

FILE = "profile_speed.json"
SECONDS_GOAL = 1.0  # for each sample, with default options
NOISE_GOAL = 0.01  # standard deviation of the dense reference


def profile_section() -> str:
    """The section; empty if it has not been measured."""
    return section_of(load(FILE), origin(FILE)) if (RESULTS / FILE).exists() else ""


def section_of(found: dict[str, Any], source: str) -> str:
    """Text and table of a record."""
    networks = found["networks"]
    slow = [name for name, one in networks.items() if one["seconds_per_sample"] > SECONDS_GOAL]
    noisy = [name for name, one in networks.items() if one["repeat_noise"] > NOISE_GOAL]
    reasons = sorted({f"`{one['mode']}`: {one['mode_reason']}" for one in networks.values()})
    return "\n\n".join(
        [
            "## Time to profile",
            f"Networks without a recipe on an {found['device']}, profiled with default options. Seconds per sample are "
            "wall-clock time between\ntwo samples, everything included. *Repeat noise* is the standard deviation of repeated "
            "measurements of the dense\nnetwork, *bias* their mean relative to one long measurement.",
            f"Goals: at most {SECONDS_GOAL:g} s per sample ({_verdict(slow)}) and at most {NOISE_GOAL:.0%} repeat noise "
            f"({_verdict(noisy)}).\nThe execution mode was chosen automatically, {'; '.join(reasons)}.",
            table(
                ["network", "runner", "s per sample", "slowest, s", "samples", "repeat noise", "repeats", "bias"],
                [_line(name, one) for name, one in networks.items()],
            ),
            source + "\n\n",
        ]
    )


def _verdict(missed: list[str]) -> str:
    return f"missed by {', '.join(missed)}" if missed else "met by all networks"


def _line(name: str, one: dict[str, Any]) -> list[str]:
    shape = "x".join(map(str, one["input_shape"]))
    return [
        f"{name}, {shape}",
        str(one.get("runner", one.get("mode"))),
        f"{one['seconds_per_sample']:.2f}",
        f"{one['slowest_sample_seconds']:.2f}",
        str(one["samples"]),
        f"{one['repeat_noise']:.2%}",
        str(one["references"]),
        f"{one['bias']:+.2%}",
    ]
