"""The section of RESULTS.md about the choice of widths, from results/allocation_gap.json."""

from __future__ import annotations

from result_tables import load, origin, table

FILE = "allocation_gap.json"
TITLES = {"e1": "E1", "e2": "E2", "e3": "E3", "e4": "E4"}
"""Profiles that are named after their experiment; the others are named after their network and batch size."""


def percent(value: float) -> str:
    """A relative excess; numbers of the size of rounding errors are 0."""
    return f"{max(value, 0.0):.2%}"


def allocation_section() -> str:
    """How far the chosen widths are from the optimum, on the energy models of the recorded profiles."""
    record = load(FILE)
    rows = [
        [
            TITLES.get(name, name),
            str(one["groups"]),
            f"{one['solved_to_optimality']} of {one['problems']}",
            *(percent(one["excess"][key]) for key in ("median", "p90", "max")),
            percent(one["order"]["median"]),
            f"{one['milliseconds']['median']:.0f}",
        ]
        for name, one in record["profiles"].items()
    ]
    small, every, large = record["small"], record["all_profiles"], record["large"]
    head = [
        "profile",
        "groups",
        "solved by HiGHS",
        "excess: median",
        "p90",
        "largest",
        "by importance per joule: median",
        "ms",
    ]
    return f"""## Choice of widths

ECC chooses the widths that lose the least importance within the budget (`methods/ecc/allocation.py`), without removed branches here. *Excess* is the
importance that is lost beyond the optimum, which a mixed-integer program (HiGHS) finds, on the energy models of the recorded profiles with random
importance. Problems that no widths solve are left out. *By importance per joule* is the same excess if blocks of channels are removed in that order, without a plan.
The time of one choice is that of the processor.

{table(head, rows)}

Over all {every["problems"]} problems the excess is {percent(every["excess"]["p90"])} at p90 and {percent(every["excess"]["max"])} at most (goal: 1% at p90). On {small["problems"]} small problems,
compared with an exhaustive search, it is {percent(small["excess"]["p90"])} and {percent(small["excess"]["max"])}. A choice for {large["groups"]:,} groups takes {large["milliseconds"]["median"]:.0f} ms (goal: 50 ms).

{origin(FILE)}

"""
