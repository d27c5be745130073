"""Sentence encoder MiniLM: similarity of its embeddings to those of the dense encoder, at measured energy budgets.

    python3 benchmarks/encoder.py --weights MINILM --text WIKITEXT2 --out encoder.json --meter nvml --seconds 110

Trains on WikiText-2 valid (1 - cosine similarity to the embeddings of the dense encoder), reports the mean similarity on
test. ECC and uniform pruning have the same energy model, budget, batches and learning rate. The file is written after each
run, and a run for which there is no time left is listed under "skipped".
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from machine import machine, write_record

from ecc.api import compress_task
from ecc.budget import parse_budgets
from ecc.energy import EnergyModel
from ecc.errors import EccError
from ecc.options import settings_from
from ecc.records import to_builtins
from ecc.settings import CompressSettings
from ecc.zoo.language import language_task

CELLS = (("ecc", "60%"), ("uniform", "60%"), ("ecc", "40%"), ("uniform", "40%"))


def run(
    options: argparse.Namespace, method: str, budget: str, folder: Path, energy: Path | None
) -> tuple[dict[str, Any], Path]:
    """One compression: its record, and the file of the energy model, which the first run makes."""
    task = language_task(
        options.weights,
        [options.text / "valid.txt"],
        test_text=[options.text / "test.txt"],
        length=options.length,
        batch_size=options.batch,
        batch=options.batch,
    )
    started = time.monotonic()
    values = {
        "prune_steps": options.steps,
        "finetune_steps": options.steps,
        "lr": options.lr,
        "kd_weight": 0.0,
        "precision": "bf16" if options.device == "cuda" else "fp32",
    }
    result = compress_task(
        task,
        parse_budgets([budget]),
        folder=folder,
        meter=options.meter,
        energy_models=[] if energy is None else [EnergyModel.load(energy)],
        settings=settings_from(CompressSettings, values),
        samples=options.samples,
        method=method,
        device=options.device,
    )
    summary = result.summary
    (row,) = summary.budgets.values()
    found = {
        "method": method,
        "budget": budget,
        "of_budget": row.result / row.limit,
        "of_dense": row.result / row.dense,
        "met": row.met,
        "label": row.label,
        "scores": summary.scores,
        "parameters": to_builtins(summary.parameters),
        "widths": summary.widths,
        "seconds": round(time.monotonic() - started, 1),
    }
    return found, energy or folder / "energy.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="folder with the model and its tokenizer")
    parser.add_argument("--text", type=Path, required=True, help="folder with valid.txt and test.txt")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--meter", default="nvml")
    parser.add_argument("--device", default="cuda" if torch.cuda.device_count() else "cpu")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200, help="of pruning, and of finetuning")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seconds", type=float, default=110.0)
    options = parser.parse_args()
    begin, longest = time.monotonic(), 0.0
    energy: Path | None = None
    record: dict[str, Any] = {
        "what": "similarity of the embeddings of a pruned MiniLM to those of the dense one",
        "environment": machine(),
        "length": options.length,
        "batch": options.batch,
        "steps": options.steps,
        "cells": [],
        "skipped": [],
    }
    with tempfile.TemporaryDirectory() as name:
        for number, (method, budget) in enumerate(CELLS):
            if time.monotonic() - begin + longest > options.seconds:
                record["skipped"].append(f"{method} at {budget}")
                continue
            try:
                cell, energy = run(options, method, budget, Path(name) / str(number), energy)
                longest = max(longest, cell["seconds"] if number else 0.6 * cell["seconds"])
            except EccError as error:  # such as a budget that widths alone do not reach
                cell = {"method": method, "budget": budget, "error": str(error)}
            record["cells"].append(cell)
            print({key: value for key, value in cell.items() if key != "widths"}, flush=True)
            write_record(record, options.out)
    write_record(record, options.out)


if __name__ == "__main__":
    main()
