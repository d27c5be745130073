"""The sections of RESULTS.md about what can be pruned: removed branches, and Hugging Face models."""

from __future__ import annotations

from typing import Any

from result_tables import RESULTS, load, origin, table

DEPTH_FILES = ("depth_resnet56.json", "depth_vit_tiny.json")
TRANSFORMERS = "transformer_coverage.json"


def depth_section() -> str:
    """Compression with and without removed branches; empty without the records."""
    found = [(name, load(name)) for name in DEPTH_FILES if (RESULTS / name).exists()]
    if not found:
        return ""
    runs = [run for _, record in found for run in record["runs"]]
    rows = [_line(run) for run in runs]
    fits = [
        f"{name} {fit['errors']['mean']:.1%} (p90 {fit['errors']['p90']:.1%}, {fit['errors']['samples']} samples)"
        for _, record in found
        for name, fit in record["fits"].items()
    ]
    parts = [
        "## Removing residual branches",
        "Each network is compressed twice to the same budget of measured energy: once with widths alone, once with widths and\n"
        "residual branches (`depth`). Both have the same energy model, steps, learning rate and distillation; one seed, and\n"
        "short trainings, so the scores compare the two rows of a network and nothing else. CIFAR-10 is a lossy copy.\n"
        "While ResNet-56 was measured, a CPU benchmark ran on other cores of the same machine.",
        table(["network", "pruned", "budget", "energy", "of the budget", "branches removed", "dense", "result"], rows),
        f"Cross-validated error of the energy models, with removed branches among the samples: {'; '.join(fits)}.\n"
        "The goal was 3 %.",
        *(f"{run['network']}: {run['why']}" for run in runs if "why" in run),
    ]
    return "\n\n".join([*parts, "\n".join(origin(name) for name, _ in found)]) + "\n\n"


def _line(run: dict[str, Any]) -> list[str]:
    scores = run["scores"]
    return [
        run["network"],
        "widths and branches" if run["depth"] else "widths",
        run["budget"] + (f" (wanted {run['wanted']})" if "wanted" in run else ""),
        f"{run['share_of_dense']:.1%} ({run['label']})",
        f"{run['share_of_budget']:.1%}{'' if run['met'] else ', not met'}",
        f"{len(run['removed_branches'])} of {run['branches']}" if run["depth"] else "-",
        f"{scores['dense']:.2%}",
        f"{scores['finetuned']:.2%}",
    ]


def transformer_section() -> str:
    """Share of the parameters of Hugging Face's models that can be pruned; empty without the record."""
    if not (RESULTS / TRANSFORMERS).exists():
        return ""
    rows = [
        [
            one["model"],
            f"{one['prunable_share']:.1%}",
            "yes" if one["residual_width"] else "no",
            f"{one['relative_difference']:.0e}",
            f"{one['trace_seconds']:.1f}",
        ]
        for one in load(TRANSFORMERS)["models"]
    ]
    parts = [
        "## Hugging Face transformers",
        "Tiny random configurations. *Prunable* is the share of the parameters on at least one axis that can be pruned: heads,\n"
        "hidden widths, and the residual width. *Difference* is that of the masked and the slim network after a\n"
        "random 40 % of every group was removed, relative to the largest output; Hugging Face's RMSNorm computes in float32.\n"
        "Goals: at least 90 % with residual width and 80 % without, each trace below 2 s.",
        table(["model", "prunable", "residual width", "difference", "CPU seconds of the trace"], rows),
    ]
    return "\n\n".join([*parts, origin(TRANSFORMERS)]) + "\n\n"
