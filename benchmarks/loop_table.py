"""The section of RESULTS.md about the training loop, from results/loop_overhead.json."""

from __future__ import annotations

from typing import Any

from result_tables import RESULTS, load, origin, table

FILE = "loop_overhead.json"
PHASES = ("prune", "finetune")
WANTED = ("ResNet-18", "MobileNet v1", "ERFNet", "ViT-Tiny")


def loop_section() -> str:
    """The section, or nothing where the benchmark has not been run."""
    return section_of(load(FILE), origin(FILE)) if (RESULTS / FILE).exists() else ""


def section_of(found: dict[str, Any], told_origin: str) -> str:
    """Text and table of a record."""
    ratios = [row[phase]["ratio"] for one in found["networks"].values() for row in one["rows"] for phase in PHASES]
    within, goal = sum(ratio <= found["goal"] for ratio in ratios), found["goal"]
    text = f"""## The training loop

A training step of `ecc compress` and one of a plain PyTorch loop that does the same work, on the {found["device"]} in
{found["precision"]}, channels last: the same network, batch size, augmentation and loss, fused Adam, and the teacher
where there is distillation. *prune* removes channels, *finetune* trains the slim network. Blocks of
{found["steps_of_a_block"]} steps of both loops alternate, and each ratio is of {found["log_every"]} steps, in which
either loop looks at its loss once; the median is shown. The goal was a ratio of at most {goal:.2f}; {within} of
{len(ratios)} are within it, and the largest is {max(ratios):.2f}. {_missed(found)}
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
    own = " In *own file* a user's generator crops the images on the host, in both loops." if "own file" in data else ""
    absent = [name for name in WANTED if name not in found["networks"]]
    own += f" Not measured yet: {', '.join(absent)}." if absent else ""
    return "\n".join([text, table(head, lines), "", f"Data: {data}.{own}", "", told_origin, "", ""])


def _missed(found: dict[str, Any]) -> str:
    """Where the goal is missed, and what costs there."""
    missed = {
        phase: sum(row[phase]["ratio"] > found["goal"] for one in found["networks"].values() for row in one["rows"])
        for phase in PHASES
    }
    if not any(missed.values()):
        return "The goal is held."
    counts = " and ".join(f"{count} times in {phase}" for phase, count in missed.items() if count)
    return (
        f"It is missed {counts}.\nOnly *prune* has work that the plain loop has not: masks after each step, and every "
        "few steps sums of gradients\nand an update of the widths, small kernels that the host has to start."
    )


def _cells(phase: dict[str, Any]) -> list[str]:
    return [f"{phase['plain_ms']:.2f}", f"{phase['ecc_ms']:.2f}", f"**{phase['ratio']:.3f}**"]
