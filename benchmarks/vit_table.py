"""The section of RESULTS.md about ViT-Tiny at energy budgets (E5), from results/vit.json."""

from __future__ import annotations

import statistics
from typing import Any

from paired import paired_interval
from result_tables import RESULTS, load, origin, table

FILE = "vit.json"
NAMES = {
    "ecc": "ECC",
    "ecc_widths": "ECC, widths only",
    "uniform": "uniform",
    "isomorphic": "isomorphic",
    "tp_magnitude": "Torch-Pruning, magnitude",
    "tp_taylor": "Torch-Pruning, Taylor",
}


def vit_section() -> str:
    """The section; empty if the benchmark has not been run."""
    return section_of(load(FILE), origin(FILE)) if (RESULTS / FILE).exists() else ""


def section_of(record: dict[str, Any], source: str) -> str:
    """Text and table of a record."""
    cells, settings = [cell for cell in record["cells"] if "error" not in cell], record["settings"]
    rows = []
    for budget in sorted({cell["budget"] for cell in cells}, key=lambda text: -float(text.rstrip("%"))):
        scores = {method: by_seed(cells, method, budget) for method in NAMES}
        for method in [name for name in NAMES if scores[name]]:
            mine = [cell for cell in cells if (cell["method"], cell["budget"]) == (method, budget)]
            common = sorted(scores["ecc"].keys() & scores[method].keys())
            lead = [scores["ecc"][seed] - scores[method][seed] for seed in common]
            found = None if method == "ecc" or not lead else paired_interval(lead)
            rows.append(
                [
                    budget,
                    NAMES[method],
                    f"{statistics.fmean(scores[method].values()):.2f}",
                    str(len(scores[method])),
                    "-" if found is None else str(found),
                    "-" if found is None else found.side,
                    f"{statistics.fmean(cell['of_budget'] for cell in mine):.1%}",
                    f"{statistics.fmean(cell['removed_branches'] for cell in mine):.1f}",
                ]
            )
    heads = [
        "budget",
        "method",
        "top-1, %",
        "seeds",
        "ECC minus it, points",
        "ECC is",
        "of the budget",
        "branches removed",
    ]
    equal = (
        "the same number of batches" if settings["protocol"] == "equal" else "equal fine-tuning after its own search"
    )
    counts = sorted({cell["batches"] for cell in cells if "batches" in cell})
    if settings["protocol"] == "equal" and len(counts) > 1:  # Torch-Pruning computes its importance on a few more
        equal = f"nearly the same number of batches ({counts[0]:,} to {counts[-1]:,})"
    failed = [f"{cell['method']} at {cell['budget']}" for cell in record["cells"] if "error" in cell]
    left_out = f" Failed: {', '.join(sorted(set(failed)))}." if failed else ""
    return f"""## E5: a Vision Transformer on Imagenette

ViT-Tiny ({settings["width"]} channels, {settings["blocks"]} blocks, 3 heads, 64 tokens), trained here with strong augmentation: {100 * record["dense_accuracy"]:.2f} % top-1.
Heads, MLP widths, the residual width and, with ECC, branches are pruned to a measured energy ({record["device"]}, batch {settings["measured_batch"]}).
Every method has {equal} and the same distillation; ± is the 95 % interval of paired differences. The copy of Imagenette is
lossy: compare with the rows of this table alone.{left_out}

{table(heads, rows)}

{source}

"""


def by_seed(cells: list[dict[str, Any]], method: str, budget: str) -> dict[int, float]:
    """Accuracy in percent after fine-tuning, by seed."""
    return {
        cell["seed"]: 100 * cell["scores"]["finetuned"]
        for cell in cells
        if (cell["method"], cell["budget"]) == (method, budget)
    }
