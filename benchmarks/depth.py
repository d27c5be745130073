"""Pruning with and without removing residual branches, at equal measured energy and equal training.

    PYTHONPATH=src python3 benchmarks/depth.py --data DATA --out results/depth.json

ResNet-56 (published weights) and a ViT-Tiny with patches of 4 pixels (trained here), both on CIFAR-10. Each network is
profiled once, with removed branches among the samples, and one energy model is fitted. Then it is compressed to each
budget twice: widths only, and widths and branches. A budget that widths alone cannot reach is replaced by the least
energy that they can reach. The JSON is written after every run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import machine, write_record
from packed import packed_data, packed_task
from torch import Tensor, nn

from ecc.api import compress_task
from ecc.budget import parse_budgets
from ecc.energy import EnergyModel
from ecc.errors import InfeasibleBudget
from ecc.methods.base import trace_task
from ecc.methods.ecc.constraints import group_min_widths
from ecc.profiling import open_meter, profile_and_fit
from ecc.records import to_builtins
from ecc.settings import CompressSettings, make_settings
from ecc.task import Task
from ecc.training import DistributedContext
from ecc.training.cuda_graph import CudaGraphPass


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        """Self-attention."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, -1))
        return mixed

    def forward(self, x: Tensor) -> Tensor:
        """Attention and MLP, each added to the input."""
        x = x + self.attend(self.norm1(x))
        mixed: Tensor = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return mixed


class ViT(nn.Module):
    """A vision transformer; by default for images of 32 pixels."""

    def __init__(
        self, width: int = 192, depth: int = 12, heads: int = 3, patch: int = 4, classes: int = 10, size: int = 32
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        logits: Tensor = self.head(self.norm(self.blocks(x)).mean(1))
        return logits


def train_dense(task: Task, steps: int, lr: float, device: str) -> nn.Module:
    """Train a network from scratch with AdamW, a warm-up and a cosine; returns it on the CPU."""
    model = task.model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05, fused=device == "cuda")
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=warm),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - warm)),
        ],
        [warm],
    )

    def gradients(batch: Any) -> Tensor:
        images, labels = batch
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images).float(), labels, label_smoothing=0.1)
        loss.backward()
        return loss.detach()

    run = CudaGraphPass(model, gradients) if device == "cuda" else gradients
    step, epoch = 0, 0
    while step < steps:
        for images, labels in task.epoch_batches(epoch):
            run((images.to(device), labels.to(device)))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            step += 1
            if step == steps:
                break
        epoch += 1
    return model.cpu().eval()


def tasks(options: argparse.Namespace, device: str) -> dict[str, Callable[[], Task]]:
    """The networks by name, built when they are needed."""
    data = packed_data("cifar10", options.data, options.limit)

    def resnet() -> Task:
        return packed_task("resnet56", "cifar10", options.data, device=device, batch=256, data=data)

    def vit() -> Task:
        torch.manual_seed(0)
        task = replace(resnet(), name="vit_tiny", model=ViT(depth=options.vit_depth))
        return replace(task, model=train_dense(task, options.vit_steps, 1e-3, device))

    return {"resnet56": resnet, "vit_tiny": vit}


def compress(task: Task, budget: str, depth: bool, energy: EnergyModel, options: Any, folder: Path) -> dict[str, Any]:
    """One run, and its record."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = make_settings(
        "default",
        {
            "prune_steps": options.steps,
            "finetune_steps": options.finetune_steps,
            "lr": 1e-3 if task.name == "resnet56" else 5e-4,
            "kd_temperature": 4.0,
            "precision": "bf16",
            "channels_last": task.name == "resnet56" and device == "cuda",
            "cuda_graph": device == "cuda",
            "checkpoint_every": None,
            "depth": depth,
            "seed": options.seed,
        },
    )
    started = time.perf_counter()
    result = compress_task(
        task, parse_budgets(budget), folder=folder, meter=options.meter, energy_models=[energy], settings=settings,
        batch=options.batch, device=device,
    )  # fmt: skip
    row = result.summary.budgets["energy"]
    return {
        "network": task.name,
        "depth": depth,
        "budget": budget,
        "met": result.met,
        "label": row.label,
        "share_of_dense": row.result / row.dense,
        "share_of_budget": row.result / row.limit,
        "scores": result.summary.scores,
        "removed_branches": [b.name for b in result.graph.branches if not any(result.widths[g] for g in b.groups)],
        "branches": len(result.graph.branches),
        "seconds": time.perf_counter() - started,
        "summary": to_builtins(result.summary),
    }


def least_energy(task: Task, energy: EnergyModel, batch: int) -> float:
    """Predicted energy with every group at its minimum width and all branches kept."""
    graph, _ = trace_task(task, batch, ())
    widths = group_min_widths(graph, CompressSettings.min_width_ratio, energy.origin.width_multiple or 1)
    return float(energy.value(torch.tensor(widths, dtype=torch.float64)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--meter", default="auto")
    parser.add_argument("--networks", default="resnet56,vit_tiny")
    parser.add_argument("--budgets", default="30%")
    parser.add_argument("--batch", type=int, default=512, help="items in one measured inference")
    parser.add_argument("--samples", type=int, default=90)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--finetune-steps", type=int, default=1500)
    parser.add_argument("--vit-steps", type=int, default=6000)
    parser.add_argument("--vit-depth", type=int, default=12)
    parser.add_argument("--limit", type=int, help="images of each split; all by default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("out/depth"))
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record: dict[str, Any] = {
        "what": "compression with and without removed branches, CIFAR-10 (a lossy copy)",
        "environment": machine(),
        "fits": {},
        "runs": [],
    }
    built = tasks(options, device)
    for name in options.networks.split(","):
        started = time.perf_counter()
        task = built[name]()
        print(f"{name}: task ready after {time.perf_counter() - started:.0f} s", flush=True)
        folder = options.folder / name
        with open_meter(options.meter, torch.device(device)) as source:
            assert source is not None
            started = time.perf_counter()
            energy = profile_and_fit(
                task, ["energy"], source, folder / "profile", samples=options.samples, batch=options.batch,
                distributed=DistributedContext(torch.device(device)),
            )[0]  # fmt: skip
        assert energy.errors is not None
        record["fits"][name] = {
            "seconds": time.perf_counter() - started, "kind": energy.kind, "dense_joules": energy.dense,
            "errors": to_builtins(energy.errors), "noise": energy.quality.noise, "batch": options.batch,
        }  # fmt: skip
        print(f"{name}: {energy.dense:.4g} J, cross-validated error {energy.errors.mean:.2%}", flush=True)
        for budget in options.budgets.split(","):
            for depth in (True, False):
                where = folder / f"{budget.rstrip('%')}-{'depth' if depth else 'widths'}"
                try:
                    row = compress(task, budget, depth, energy, options, where)
                except InfeasibleBudget as error:
                    least = f"{102 * least_energy(task, energy, options.batch) / energy.dense:.1f}%"
                    print(f"{name}: {budget} is not reachable by widths ({error}); {least} instead", flush=True)
                    row = {
                        **compress(task, least, depth, energy, options, where.with_name("least")),
                        "wanted": budget,
                        "why": str(error),
                    }
                record["runs"].append(row)
                write_record(record, options.out)
                print(
                    f"{name} {row['budget']:>6} {'widths and branches' if depth else 'widths':20} "
                    f"{row['share_of_dense']:.1%} of dense, {row['share_of_budget']:.1%} of the budget "
                    f"({row['label']}), {len(row['removed_branches'])} of {row['branches']} branches removed, "
                    f"{row['scores']}, {row['seconds']:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
