"""The section of RESULTS.md about the training loop, from results/loop_overhead.json."""

from __future__ import annotations

from typing import Any

from result_tables import RESULTS, load, origin, table

FILE = "loop_overhead.json"
PHASES = ("prune", "finetune")
WANTED = ("ResNet-18", "MobileNet v1", "ERFNet", "ViT-Tiny")


def loop_section() -> str:
    """The section; empty if the benchmark has not been run."""
    return section_of(load(FILE), origin(FILE)) if (RESULTS / FILE).exists() else ""


def section_of(found: dict[str, Any], source: str) -> str:
    """Text and table of a record."""
    ratios = [row[phase]["ratio"] for one in found["networks"].values() for row in one["rows"] for phase in PHASES]
    within, goal = sum(ratio <= found["goal"] for ratio in ratios), found["goal"]
    text = f"""## Overhead of the training loop

Time of a training step of `ecc compress` relative to a hand-written PyTorch loop that does the same work, on an
{found["device"]} in {found["precision"]} and channels-last: same network, batch size, augmentation, loss, fused Adam, and
teacher where distillation is on. *prune* removes channels, *finetune* trains the slim network. Blocks of
{found["steps_of_a_block"]} steps of both loops alternate; each ratio covers {found["log_every"]} steps, in which either loop
reads its loss once; the table shows the median. Goal: a ratio of at most {goal:.2f}. {within} of {len(ratios)} ratios
meet it; the largest is {max(ratios):.2f}. {_missed(found)}
"""
    head = ["network", "CUDA graph", "distillation"]
    head += [f"{phase}: {what}" for phase in PHASES for what in ("plain, ms", "ECC, ms", "ratio")]
    head += ["commit"]
    lines = [
        [name, "yes" if row["cuda_graph"] else "no", "yes" if row["distillation"] else "no"]
        + [cell for phase in PHASES for cell in _cells(row[phase])]
        + [row.get("commit") or ""]
        for name, one in found["networks"].items()
        for row in one["rows"]
    ]
    data = "; ".join(f"{name}: {one['data']}" for name, one in found["networks"].items())
    own = (
        " In *own file* both loops take batches from a Python generator that crops images on the CPU."
        if "own file" in data
        else ""
    )
    absent = [name for name in WANTED if name not in found["networks"]]
    own += f" Not measured: {', '.join(absent)}." if absent else ""
    return "\n".join([text, table(head, lines), "", f"Data: {data}.{own}", "", source, "", ""])


def _missed(found: dict[str, Any]) -> str:
    """Where the goal is missed, and what costs there."""
    missed = {
        phase: sum(row[phase]["ratio"] > found["goal"] for one in found["networks"].values() for row in one["rows"])
        for phase in PHASES
    }
    if not any(missed.values()):
        return "The goal is met."
    counts = " and ".join(f"{count} times in {phase}" for phase, count in missed.items() if count)
    return (
        f"It is missed {counts}.\nOnly *prune* does work that the plain loop does not do: masking after each step, and every "
        "few steps accumulating\nimportance and updating the widths, which launch many small kernels."
    )


def _cells(phase: dict[str, Any]) -> list[str]:
    return [f"{phase['plain_ms']:.2f}", f"{phase['ecc_ms']:.2f}", f"**{phase['ratio']:.3f}**"]
