"""How long a sample of a profile takes with default options, and how well the dense reference repeats.

Four networks that no recipe knows, each profiled with default options into a new file: a few samples of the default
design, and the dense network before and after each of them. Seconds per sample are wall-clock time from one row of the
file to the next, everything included: building the network, autotuning, capturing, warming up, measuring, writing.
At the end the dense network is measured once more in one long window, which the short ones are compared with.

    PYTHONPATH=src python3 benchmarks/profile_speed.py --out results/profile_speed.json
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from machine import machine, write_record
from torch import Tensor, nn

from ecc.graph import trace_channels
from ecc.measure import PROFILE_SETTINGS, Meter, Profile, Progress, close_meter, find_meter, measure_model, profile
from ecc.task import with_batch_size
from ecc.zoo import find_task

LONG_TICKS = 15
"""Of the window that the short ones are compared with: about a second and a half."""

SETTINGS = replace(PROFILE_SETTINGS, probe_seconds=0.5)
"""Default options, but for the watching of the counter before the first row, which is not in the time of a sample."""


class UNet(nn.Module):
    """A small U-Net: four levels, skip connections by concatenation."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256), classes: int = 8) -> None:
        super().__init__()
        inputs = (3, *widths[:-1])
        self.down = nn.ModuleList(_double(a, b) for a, b in zip(inputs, widths, strict=True))
        pairs = list(zip(widths[1:], widths[:-1], strict=True))[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in pairs)
        self.join = nn.ModuleList(_double(2 * b, b) for _, b in pairs)
        self.head = nn.Conv2d(widths[0], classes, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of every pixel."""
        kept = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else self.pool(x))
            kept.append(x)
        for up, join, skip in zip(self.up, self.join, kept[-2::-1], strict=True):
            x = join(torch.cat([up(x), skip], dim=1))
        out: Tensor = self.head(x)
        return out


def _double(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def _of_library(spec: str, batch: int) -> tuple[nn.Module, Tensor]:
    task = find_task(spec)
    example = with_batch_size(task.example_input, batch)
    assert isinstance(example, Tensor)
    return task.model.eval(), example


def _unet() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return UNet().eval(), torch.randn(8, 3, 256, 256)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "torchvision ResNet-18": lambda: _of_library("torchvision:resnet18", 32),
    "timm ViT-Tiny/16": lambda: _of_library("timm:vit_tiny_patch16_224", 64),
    "timm ConvNeXt-Atto": lambda: _of_library("timm:convnext_atto", 32),
    "U-Net": _unet,
}


class Late(Exception):
    """Ends a profile before its last row."""


def seconds_of(made: Profile) -> tuple[list[float], list[float]]:
    """Seconds that each sample took, and each reference but the first."""
    samples: list[float] = []
    references: list[float] = []
    for before, row in pairwise(made.samples):
        assert before.measured_at is not None
        assert row.measured_at is not None
        took = row.measured_at - before.measured_at
        (references if row.is_reference else samples).append(took.total_seconds())
    return samples, references


def one(name: str, path: Path, meter: Meter, device: str, rows: int, deadline: float) -> dict[str, Any]:
    """Profiles one network with default options."""
    model, example = NETWORKS[name]()
    graph = trace_channels(model, example, verify=False)

    def stop(_: Progress) -> None:
        if time.perf_counter() > deadline:
            raise Late

    with suppress(Late):
        profile(
            model,
            graph,
            example,
            meter,
            path,
            samples=rows,
            settings=SETTINGS,
            reference_every=1,
            device=device,
            progress=stop,
        )
    made = Profile.load(path, graph)
    settings = made.header.settings
    assert settings is not None
    samples, references = seconds_of(made)
    if len(references) < 2:
        raise SystemExit(f"{name}: {len(samples)} samples were measured in the time; allow more with --seconds.")
    dense = [row.joules for row in made.references]
    careful = replace(settings, min_ticks=LONG_TICKS, window_seconds=LONG_TICKS / 10)
    long = measure_model(model.to(device), example, meter, careful, counter=made.header.counter)
    return {
        "input_shape": list(example.shape),
        "runner": settings.runner,
        "runner_reason": made.header.runner_reason,
        "samples": len(samples),
        "seconds_per_sample": statistics.fmean(samples),
        "slowest_sample_seconds": max(samples),
        "seconds_per_reference": statistics.fmean(references),
        "ticks": [row.ticks for row in made.samples],
        "references": len(dense),
        "reference_joules": dense,
        "repeat_noise": statistics.stdev(dense) / statistics.fmean(dense),
        "long_window_joules": long.joules,
        "bias": statistics.fmean(dense) / long.joules - 1,
    }


def record_of(networks: dict[str, Any], device: str) -> dict[str, Any]:
    return {
        "what": "seconds per sample of a profile with default options, and repeat noise of its dense reference",
        "environment": machine(),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "settings": asdict(SETTINGS),
        "networks": networks,
    }


def main() -> None:
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=5, help="samples of each network")
    parser.add_argument("--seconds", type=float, default=55, help="no sample is begun after this")
    parser.add_argument("--only", default=",".join(NETWORKS), help="names, with commas between them")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--meter", default="nvml")
    options = parser.parse_args()
    meter = find_meter(options.meter, device_type=options.device)
    assert isinstance(meter, Meter), "an analytic source measures nothing"
    names = options.only.split(",")
    networks: dict[str, Any] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number, name in enumerate(names):
                left = started + options.seconds - time.perf_counter()
                deadline = time.perf_counter() + left / (len(names) - number)
                path = Path(folder) / f"{number}.profile"
                networks[name] = found = one(name, path, meter, options.device, options.samples, deadline)
                write_record(record_of(networks, options.device), options.out)  # a run that is cut short leaves this
                print(
                    f"{name:22} runner {found['runner']}, {found['seconds_per_sample']:.2f} s a sample (slowest "
                    f"{found['slowest_sample_seconds']:.2f}) over {found['samples']}, repeat noise "
                    f"{found['repeat_noise']:.2%} over {found['references']}, bias {found['bias']:+.2%}",
                    flush=True,
                )
    finally:
        close_meter(meter)
    print(f"{time.perf_counter() - started:.0f} s in all")


if __name__ == "__main__":
    main()
