"""The section of RESULTS.md about the trials of new users."""

from __future__ import annotations

from typing import Any

from result_tables import RESULTS, load, origin_of, table

TRIALS = "new_user_trials.json"


def trials_section() -> str:
    """What was tried, how long it took and what was confusing; empty without the record."""
    if not (RESULTS / TRIALS).exists():
        return ""
    record = load(TRIALS)
    trials = record["trials"]
    commands = [one for row in trials.values() for one in row.get("commands", ())]
    unexpected = [f"`{one['command']}`" for one in commands if not one["as_expected"]]
    verdict = f"{len(commands) - len(unexpected)} of {len(commands)} commands went as they should"
    failing = sum(one["exit_code"] != 0 for one in commands)
    parts = [
        "## Trials as a new user",
        "Ten programs that were not written for ECC (`benchmarks/trials`), in an environment with the installed package and the\n"
        "README alone. Each contains an ordinary network, random data and a short training, so the trials show whether ECC works\n"
        "and is understood, not accuracy. Every command is a process of its own; the record has all of them with their output.\n"
        f"{verdict}{'' if not unexpected else ' (not: ' + ', '.join(unexpected) + ')'}; {failing} of them are mistakes that have to end with a message\n"
        "that says what to do (a wrong loader, loss, budget, optimizer, folder or option, a machine without a meter, an interrupted run).\n"
        "Minutes are processor time of all commands. The record was made in several calls (`--only`).",
        table(
            ["trial", "network", "commands", "mistakes tried", "minutes", "result"],
            [_line(*one) for one in trials.items()],
        ),
        "What was confusing in these trials, and was changed:",
        "\n".join(f"- *{name}*: {text}" for name, row in trials.items() for text in row["confusing"]),
    ]
    return "\n\n".join([*parts, origin_of(TRIALS, record["machine"])]) + "\n\n"


def _line(name: str, row: dict[str, Any]) -> list[str]:
    if "skipped" in row:
        return [name, row["network"], "-", "-", "-", row["skipped"]]
    commands = row["commands"]
    done = [one["output"] for one in commands if one["exit_code"] == 0]
    results = [text for text in done if text.endswith("met") or "of the energy" in text or "of the MACs" in text]
    return [
        name,
        row["network"],
        str(len(commands)),
        str(sum(one["exit_code"] != 0 for one in commands)),
        f"{row['cpu_minutes']:.1f}",
        results[-1] if results else "-",
    ]
