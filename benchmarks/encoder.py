"""Sentence encoder MiniLM: similarity of its embeddings to those of the dense encoder, at measured energy budgets.

    python3 benchmarks/encoder.py --weights MINILM --text WIKITEXT2 --out encoder.json --meter nvml --seconds 110

Trains on WikiText-2 valid (1 - cosine similarity to the embeddings of the dense encoder), reports the mean similarity on
test. ECC and uniform pruning have the same energy model, budget, batches and learning rate. Cells, deadline and the record
are those of `cells.py`; the energy model is kept beside the JSON. Recorded on an H200: 50 s for the profile, 36 s a cell.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from cells import Cells, Deadline, Key, add_options, device_name, facts_of, print_cells, run_in_turn

from ecc.api import compress_task
from ecc.budget import parse_budgets
from ecc.energy import EnergyModel
from ecc.options import settings_from
from ecc.settings import CompressSettings
from ecc.zoo.language import language_task

CELLS = (("ecc", "60%"), ("uniform", "60%"), ("ecc", "40%"), ("uniform", "40%"))


def run(options: argparse.Namespace, key: Key, energy: Path) -> dict[str, Any]:
    """One compression. The first one makes the file of the energy model."""
    task = language_task(
        options.weights,
        [options.text / "valid.txt"],
        test_text=[options.text / "test.txt"],
        length=options.length,
        batch_size=options.batch,
        batch=options.batch,
    )
    method, budget = key["method"], key["budget"]
    values = {
        "prune_steps": options.steps,
        "finetune_steps": options.steps,
        "lr": options.lr,
        "kd_weight": 0.0,
        "precision": "bf16" if options.device == "cuda" else "fp32",
        "seed": key["seed"],
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        result = compress_task(
            task,
            parse_budgets([budget]),
            folder=folder,
            meter=options.meter,
            energy_models=[EnergyModel.load(energy)] if energy.is_file() else [],
            settings=settings_from(CompressSettings, values),
            samples=options.samples,
            method=method,
            device=options.device,
        )
        if not energy.is_file():
            shutil.copy(folder / "energy.json", energy)
    return facts_of(result.summary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, seconds=200.0)
    parser.add_argument("--weights", type=Path, required=True, help="folder with the model and its tokenizer")
    parser.add_argument("--text", type=Path, required=True, help="folder with valid.txt and test.txt")
    parser.add_argument("--meter", default="nvml")
    parser.add_argument("--device", default="cuda" if torch.cuda.device_count() else "cpu")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200, help="of pruning, and of finetuning")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("meter", "length", "batch", "steps", "samples", "lr")}
    keys: list[Key] = [
        {"method": method, "budget": budget, "seed": seed} for seed in range(options.seeds) for method, budget in CELLS
    ]
    header = {
        "what": "similarity of the embeddings of a pruned MiniLM to those of the dense one",
        "device": device_name(options.device),
        **{name: settings[name] for name in ("length", "batch", "steps")},
        "settings": settings,
    }
    cells = Cells(options.out, header, options.earlier, options.again, options.only)
    if options.list:
        print_cells(cells, keys)
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    energy = options.out.parent / f"{options.out.stem}.energy.json"
    run_in_turn(
        cells,
        keys,
        lambda key: run(options, key, energy),
        Deadline.after(options.seconds),
        estimate=90.0 if options.device == "cuda" else 0.0,
        show=("of_budget", "scores"),
    )


if __name__ == "__main__":
    main()
