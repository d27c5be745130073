"""Profiles of the paper's networks on this machine's GPU, as they stand in `profiles/`.

    PYTHONPATH=src python3 benchmarks/profile_networks.py --out FOLDER --only alexnet-b1,alexnet-b128

Each goes into FOLDER/NAME.profile while it grows, and is kept as NAME.profile.gz when it is whole; the same command
goes on where it ended. Every network runs as a CUDA graph in TF32. Where cuDNN's autotuning of new shapes would take
longer than the measurement itself (MobileNet v1 and ERFNet: seconds for each network), its heuristics choose kernels.
"""

from __future__ import annotations

import argparse
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ecc.graph import trace_channels
from ecc.measure import (
    PROFILE_SETTINGS,
    EnergySource,
    MeasureSettings,
    Meter,
    Profile,
    Progress,
    find_meter,
    profile,
)
from ecc.task import Task, with_batch_size
from ecc.zoo import find_task


@dataclass(frozen=True)
class Plan:
    """One profile."""

    network: str
    batch: int
    autotune: bool
    ticks: int


PLANS = {
    "alexnet-b1": Plan("alexnet", 1, True, 4),
    "alexnet-b128": Plan("alexnet", 128, True, 4),
    "mobilenet_v1-b1": Plan("mobilenet_v1", 1, False, 4),
    "mobilenet_v1-b64": Plan("mobilenet_v1", 64, False, 4),
    "erfnet-b1": Plan("erfnet", 1, False, 5),
    "erfnet-b4": Plan("erfnet", 4, False, 4),
}


class Enough(Exception):
    """Ends a second round early."""


def settings_of(ticks: int, *, autotune: bool, **deployed: Any) -> MeasureSettings:
    """Settings: a CUDA graph in TF32 by default, in windows of `ticks` ticks of 0.1 s."""
    how = {"runner": "cuda-graph", "precision": "tf32", "cudnn_autotune": autotune, **deployed}
    return replace(PROFILE_SETTINGS, **how, window_seconds=ticks / 10, min_ticks=ticks)


def profiled(
    task: Task, batch: int, source: EnergySource, path: Path, rows: int, device: str, width_multiple: int = 8
) -> Profile:
    """A task's network in short windows, for benchmarks that compress it; an analytic source runs nothing.

    On a CPU, where there are no CUDA graphs, it runs eagerly.
    """
    deployed = {} if device.startswith("cuda") else {"runner": "eager", "precision": "fp32"}
    example = with_batch_size(task.example_input, batch)
    graph = trace_channels(task.model, example, verify=False)
    return profile(
        task.model,
        graph,
        example,
        source,
        path,
        samples=rows,
        width_multiple=width_multiple,
        settings=settings_of(3, autotune=False, **deployed),
        device=device,
        reference_every=20,
    )


def measured(plan: Plan, path: Path, meter: Meter, rows: int, reference_every: int, repeats: int) -> Profile:
    """All networks once, and the first of them a second time."""
    settings = settings_of(plan.ticks, autotune=plan.autotune)
    task = find_task(plan.network)
    example = with_batch_size(task.example_input, plan.batch)
    graph = trace_channels(task.model, example, verify=False)

    def stop(progress: Progress) -> None:
        if progress.done >= rows + repeats:
            raise Enough

    with suppress(Enough):
        profile(
            task.model,
            graph,
            example,
            meter,
            path,
            samples=rows,
            width_multiple=8,
            settings=settings,
            device="cuda",
            rounds=2 if repeats else 1,
            reference_every=reference_every,
            progress=stop,
        )
    return Profile.load(path, graph)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default=",".join(PLANS), help="names, with commas between them")
    parser.add_argument("--samples", type=int, default=250)
    parser.add_argument("--repeats", type=int, default=12, help="networks measured a second time, for the noise")
    parser.add_argument("--reference-every", type=int, default=20)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    meter = find_meter("nvml", device_type="cuda")
    assert isinstance(meter, Meter)
    for name in options.only.split(","):
        started, path = time.perf_counter(), options.out / f"{name}.profile"
        found = measured(PLANS[name], path, meter, options.samples, options.reference_every, options.repeats)
        found.save(options.out / f"{name}.profile.gz")
        path.unlink()
        noise = "-" if found.repeat_noise is None else f"{found.repeat_noise:.2%}"
        print(
            f"{name:18} {len(found.design_samples)} measurements, {found.seconds_per_sample:.2f} s each, repeat noise "
            f"{noise}; {found.drift}; {time.perf_counter() - started:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
