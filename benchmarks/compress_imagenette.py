"""MobileNet v1 on Imagenette, compressed to half of its measured energy.

    PYTHONPATH=src python3 benchmarks/compress_imagenette.py --data DATA --out results/compress_imagenette.json

Profiles the network at 128 px, fits the energy model, prunes, fine-tunes and measures. The JSON holds the summary of the
run, every measurement during pruning, the quality of the fit and the environment.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from machine import machine, write_record
from packed import packed_task
from profile_networks import profiled

from ecc.energy import fit, parse_budgets
from ecc.measure import find_meter
from ecc.methods import Compression, CompressSettings
from ecc.options import settings_from
from ecc.records import to_builtins
from ecc.training import DistributedContext


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--meter", default="nvml")
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--batch", type=int, default=64, help="items in one measured inference")
    parser.add_argument("--samples", type=int, default=100, help="networks in the profile")
    parser.add_argument("--pretrain-steps", type=int, default=600)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--finetune-steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--temperature", type=float, default=4.0, help="of the teacher's probabilities; 0 for logits")
    parser.add_argument("--importance", choices=("taylor", "adam_norm"), default="taylor")
    parser.add_argument("--min-width-ratio", type=float, default=CompressSettings.min_width_ratio)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--limit", type=int, help="photos of each split; all by default")
    parser.add_argument("--profile", type=Path, help="keep the profile here, or take it from here")
    options = parser.parse_args()
    started = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = find_meter(options.meter, device_type=device)
    task = packed_task(
        "mobilenet_v1", "imagenette", options.data, device=device, size=(128, 128), batch=128, limit=options.limit
    )
    with tempfile.TemporaryDirectory() as folder:
        path = options.profile or Path(folder) / "imagenette.profile"
        energy = fit(profiled(task, options.batch, source, path, options.samples, device))
        seconds = time.perf_counter() - started
        assert energy.errors is not None
        error = energy.errors.mean
        print(
            f"profile and fit: {seconds:.0f} s, error {error:.2%}, dense {energy.dense:.4g} J",
            flush=True,
        )
        job = Compression(
            task,
            parse_budgets([options.budget]),
            energy,
            meter=source,
            settings=settings_from(
                CompressSettings,
                {
                    "pretrain_steps": options.pretrain_steps,
                    "prune_steps": options.steps,
                    "finetune_steps": options.finetune_steps,
                    "lr": options.lr,
                    "pretrain_lr": 1e-3,
                    "kd_temperature": options.temperature or None,
                    "importance": options.importance,
                    "min_width_ratio": options.min_width_ratio,
                    "precision": options.precision,
                    "channels_last": device == "cuda",
                    "cuda_graph": True,
                    "checkpoint_every": None,
                },
            ),
            device=device,
        )
        result = job.run(
            Path(folder) / "run", distributed=DistributedContext(device), progress=lambda line: print(line, flush=True)
        )
        history = [json.loads(line) for line in (Path(folder) / "run" / "history.jsonl").read_text().splitlines()]
    summary = result.summary
    row = summary.budgets["energy"]
    drop = summary.scores["dense"] - summary.scores["finetuned"]
    record = {
        "what": "MobileNet v1 on Imagenette (a lossy 128 px copy) compressed to a budget of joules",
        "environment": machine(),
        "device": summary.device,
        "label": row.label,
        "importance": options.importance,
        "temperature": options.temperature or None,
        "budget_share_reached": row.result / row.limit,
        "energy_share_of_dense": row.result / row.dense,
        "points_lost": 100 * drop,
        "seconds": time.perf_counter() - started,
        "seconds_profile_and_fit": seconds,
        "fit": {"chosen": energy.kind, **to_builtins(energy.errors), "noise": energy.quality.noise},
        "summary": to_builtins(summary),
        "cost_checks": [line for line in history if line.get("phase") == "cost_check"],
        "solver": [line for line in history if line.get("phase") == "solver"],
    }
    write_record(record, options.out)
    print(f"{record['energy_share_of_dense']:.1%} of dense, {record['budget_share_reached']:.1%} of the budget "
          f"({row.label}); score {summary.scores}; {record['seconds']:.0f} s")  # fmt: skip


if __name__ == "__main__":
    main()
