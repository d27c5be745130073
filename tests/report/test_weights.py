from __future__ import annotations

import io
import re
from typing import Any

from rich.console import Console

from ecc.report.live_compress import CompressView
from ecc.report.weights import weights_view


def summary(**changes: Any) -> dict[str, Any]:
    energy = {"limit": 1.44e-5, "unit": "J", "dense": 3.6e-5, "result": 1.43e-5, "label": "estimated", "met": True}
    found = {
        "task": "digits",
        "device": "Eyeriss-like [accelerator]",
        "budgets": {"energy": energy},
        "weights": {"stem.0.weight": 144, "head.weight": 480},
        "nonzeros": {"stem.0.weight": 36, "head.weight": 480},
        "sparsity": 0.173,
        "assumes": "that zeros are free",
        "scores": {"dense": 0.98123, "pruned": 0.7, "finetuned": 0.97654},
    }
    return found | changes


def shown(**changes: Any) -> list[str]:
    file = io.StringIO()
    Console(width=140, file=file).print(weights_view(summary(**changes), "runs/[a]"))
    return [" | ".join(re.split(r"\s{2,}", line.strip())) for line in file.getvalue().splitlines()]


def test_all_that_matters_is_shown() -> None:
    title, _, energy, weights, score, *rest = shown()
    assert title == "digits on Eyeriss-like [accelerator], single weights"
    assert energy == "energy (estimated) | 36 uJ | 14.3 uJ | 14.4 uJ | 99.3% | met"
    assert weights == "weights that can go (counted) | 624 | 516"
    assert score == "score | 0.9812 | 0.9765"
    assert rest == [
        "Nonzero weights: stem.0.weight 36/144. 17.3% are zero.",
        "The estimate assumes: that zeros are free.",
        "runs/[a]: sparse.safetensors, nonzeros.json, summary.json, history.jsonl",
    ]


def test_without_scores_and_with_many_tensors() -> None:
    full = {f"w{k}": 10 for k in range(15)}
    lines = shown(scores={}, weights=full, nonzeros=dict.fromkeys(full, 5))
    assert not any(line.startswith("score") for line in lines)
    assert "w11 5/10 and 3 more." in lines[4]
    assert "all as before" in shown(nonzeros=summary()["weights"])[5]
    energy = summary()["budgets"]["energy"] | {"met": False}
    assert "NOT MET" in shown(budgets={"energy": energy})[2]


def test_the_live_line_shows_weights_as_it_shows_channels() -> None:
    file = io.StringIO()
    view = CompressView(Console(width=140, file=file, force_terminal=True))
    view.plan({"solve": 9}, [], {"a": 2, "b": 2})
    view.log({"phase": "solver", "step": 5, "spent": {"energy": 2e-5}, "target": 2.1e-5, "nonzeros": {"a": 1, "b": 2}})
    assert view._spent.startswith("energy 20 u (predicted), schedule 21 u")
    assert view._bars == "▅█"
