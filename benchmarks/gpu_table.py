"""The section of RESULTS.md about the GPU acceptance suite, from results/gpu_acceptance.json."""

from __future__ import annotations

from typing import Any

from result_tables import RESULTS, load, origin, table

FILE = "gpu_acceptance.json"
COLUMNS = {
    "cpu": "CPU",
    "defaults": "CUDA, defaults",
    "matmul_high": "matmul precision `high`",
    "autocast_bf16": "autocast bf16",
    "cudnn_benchmark": "`cudnn.benchmark`",
    "cudnn_deterministic": "`cudnn.deterministic`",
    "channels_last": "channels last",
    "bf16_weights": "bf16 weights",
    "fp16_weights": "fp16 weights",
    "train_mode": "train mode",
}


def gpu_section() -> str:
    """The section; empty if the suite has not been run."""
    return section_of(load(FILE), origin(FILE)) if (RESULTS / FILE).exists() else ""


def section_of(found: dict[str, Any], source: str) -> str:
    """Text and tables of a record."""
    checks = found["checks"]
    passed = sum(check["passed"] for check in checks.values())
    where = found["environment"]
    commits: dict[str, list[str]] = {}
    for name, check in checks.items():
        commits.setdefault(check.get("commit", where["commit"])[:12], []).append(name)
    (first, _), *others = sorted(commits.items(), key=lambda item: -len(item[1]))
    later = "".join(f"; {', '.join(names)} at commit {commit}" for commit, names in others)
    parts = [
        "## On a GPU",
        f"`make gpu` on an {where.get('gpu', 'unknown device')}: {passed} of {len(checks)} checks passed, at commit "
        f"{first}{later}.",
        table(["check", "result", "seconds", "numbers"], [_line(check) for check in checks.values()]),
    ]
    if rows := checks.get("settings", {}).get("numbers", {}).get("table"):
        parts += ["Prunable groups / all groups, by device and PyTorch settings:", settings_table(rows)]
    return "\n\n".join([*parts, source]) + "\n\n"


def _line(check: dict[str, Any]) -> list[str]:
    numbers = check["summary"].replace("|", "/").replace("\n", " ")
    return [check["title"], "passed" if check["passed"] else "FAILED", f"{check['seconds']:.0f}", numbers]


def settings_table(rows: dict[str, dict[str, dict[str, Any]]]) -> str:
    """One line per network; a count that differs from the CPU is bold."""
    columns = [name for name in COLUMNS if any(name in cells for cells in rows.values())]
    lines = [
        [name, *(_cell(cells[column]) if column in cells else "" for column in columns)] for name, cells in rows.items()
    ]
    return table(["network", *(COLUMNS[name] for name in columns)], lines)


def _cell(cell: dict[str, Any]) -> str:
    text = str(cell["count"]).replace("|", "/")
    return text if cell["same_groups"] else f"**{text}**"
