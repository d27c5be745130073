"""Inference runners on one device: error of the energy model of each, and the cheapest way to run whole networks.

    python3 benchmarks/runners.py --out results/runners.json                       # a GPU, about four minutes
    python3 benchmarks/runners.py --out r.json --meter cputime --device cpu --small   # to try it on a CPU

A model is the profile of a network with one runner, and the cross-validated error of its energy model. A search is
`choose_runner`, as `--runner auto` calls it, on a network of the zoo or ViT-Tiny. torch.compile compiles every width anew, which takes
seconds, so it comes last, with a network of fewer layers, and is searched on one network only.

The file is written after each part. A part that fails is recorded with its reason, and a part for which `--seconds` leaves no time
is listed under "skipped".
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from machine import machine, write_record
from torch import nn

from ecc.energy import fit
from ecc.errors import EccError
from ecc.graph import trace_channels
from ecc.measure import PROFILE_SETTINGS, Meter, Progress, close_meter, find_meter, profile
from ecc.measure.profile import Profile
from ecc.measure.runner_search import choose_runner
from ecc.measure.runners import available_runners
from ecc.options import flat_values, settings_from
from ecc.records import to_builtins
from ecc.settings import MeasureSettings
from ecc.zoo import find_task, resnet20
from ecc.zoo.digits import DigitsNet

NETWORKS = (("alexnet", 128), ("vit_tiny", 64), ("resnet56", 512), ("mobilenet_v1", 64), ("erfnet", 4))

COMPILE_SECONDS = 70.0
"""Kept for the model of torch.compile, where it is available."""

MIN_SAMPLES = 20
"""Below this a fit cannot be cross-validated."""


class TimeIsUp(Exception):
    """The samples measured so far have to do."""


def build(name: str, batch: int) -> tuple[nn.Module, torch.Tensor]:
    """A network with random weights, and one batch."""
    if name == "vit_tiny":
        import timm

        return timm.create_model("vit_tiny_patch16_224").eval(), torch.randn(batch, 3, 224, 224)
    task = find_task(name)
    assert isinstance(task.example_input, torch.Tensor)
    return task.model.eval(), torch.randn(batch, *task.example_input.shape[1:])


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def settings_for(**choices: Any) -> MeasureSettings:
    return settings_from(MeasureSettings, {**flat_values(PROFILE_SETTINGS), **choices})


def profiled_network(spec: str, is_small: bool) -> tuple[str, nn.Module, torch.Tensor]:
    """Name, network and batch for a runner. Every width is compiled anew, so `compile` gets fewer layers."""
    torch.manual_seed(0)
    if not spec.startswith("compile"):
        return "resnet20", resnet20().eval(), torch.randn(8 if is_small else 512, 3, 32, 32)
    if is_small:
        return "digits", DigitsNet().eval(), torch.randn(8, 1, 8, 8)
    return "digits, 4 times as wide", DigitsNet((64, 128, 192)).eval(), torch.randn(512, 1, 32, 32)


def profile_runner(
    spec: str, meter: Meter, device: str, samples: int, seconds: float, is_small: bool
) -> dict[str, Any]:
    """Cross-validated error of the energy (or latency) model of one runner, or the reason why there is none."""
    name, model, example = profiled_network(spec, is_small)
    graph = trace_channels(model, example, verify=False)
    found: dict[str, Any] = {"runner": spec, "network": name, "batch": len(example), "samples": 0}
    started = time.monotonic()

    def stop(step: Progress) -> None:
        late = time.monotonic() - started
        if step.done and late > seconds and (step.done >= MIN_SAMPLES or late > 1.4 * seconds):
            raise TimeIsUp

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.profile"
        try:
            with suppress(TimeIsUp):
                profile(
                    model, graph, example, meter, path, samples=samples, width_multiple=4, progress=stop,
                    device=device, settings=settings_for(runner=spec, precision="fp32", autotune=False),
                )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - the other runners go on, and the samples so far are fitted
            found["problem"] = f"{type(error).__name__}: {str(error)[:300]}"
        if not path.is_file():
            return found
        made = Profile.load(path)
    resource = "energy" if made.header.meter.has_energy else "latency"
    found |= {
        "resource": resource,
        "samples": len(made.design_samples),
        "seconds_per_sample": made.seconds_per_sample,
        "dense": made.references[0].joules if made.references else None,
        "reference_cv": None if made.drift is None else made.drift.cv,
        "versions": made.header.environment,
    }
    try:
        errors = fit(made, resource=resource, allow_drift=True).errors
        found["errors"] = None if errors is None else to_builtins(errors)
    except EccError as error:
        found.setdefault("problem", str(error))
    return found


def search_network(name: str, batch: int, meter: Meter, device: str, **choices: Any) -> dict[str, Any]:
    """The table of `--runner auto` for one network, or the reason why there is none."""
    found: dict[str, Any] = {"network": name, "batch": batch}
    started = time.monotonic()
    try:
        torch.manual_seed(0)
        model, example = build(name, batch)
        _, search = choose_runner(model.to(device), example.to(device), meter, settings_for(), device=device, **choices)
        found |= {"search": to_builtins(search), "best": search.best.name, "saving": search.saving(search.best)}
        print(f"{name} b{batch}: {search.best.name}, saves {found['saving']:.1%}\n{search.table()}", flush=True)
    except Exception as error:  # noqa: BLE001 - the other networks go on
        found["problem"] = f"{type(error).__name__}: {str(error)[:300]}"
        print(name, found["problem"], flush=True)
    return {**found, "seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--meter", default="nvml")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=235.0, help="total time")
    parser.add_argument("--small", action="store_true", help="few samples and one network, to try it")
    options = parser.parse_args()
    started, meter = time.monotonic(), find_meter(options.meter, device_type=options.device)
    assert isinstance(meter, Meter), "a platform runs nothing"
    available = available_runners(options.device)
    models: list[dict[str, Any]] = []
    searches: list[dict[str, Any]] = []
    skipped: list[str] = []
    record: dict[str, Any] = {
        "what": "energy models and costs by inference runner",
        "environment": machine(device=device_name(options.device)),
        "meter": to_builtins(meter.describe()),
        "available": available,
        "models": models,
        "searches": searches,
        "skipped": skipped,
    }
    usable = [spec for spec, problem in available.items() if not problem]
    fast = [spec for spec in usable if spec != "compile"]
    kept = COMPILE_SECONDS if "compile" in usable and not options.small else 0.0
    networks = [("resnet56", 2)] if options.small else NETWORKS

    def left() -> float:
        return float(options.seconds) - (time.monotonic() - started)

    def add_model(spec: str, samples: int, seconds: float) -> None:
        models.append(profile_runner(spec, meter, options.device, samples, seconds, options.small))
        print({key: value for key, value in models[-1].items() if key != "versions"}, flush=True)
        write_record(record, options.out)

    def add_search(name: str, batch: int, **choices: Any) -> None:
        searches.append(search_network(name, batch, meter, options.device, **choices))
        write_record(record, options.out)

    try:
        for spec in fast:
            add_model(spec, 22 if options.small else 45, 5.0 if options.small else 24.0)
        needed = 15.0
        for name, batch in networks:
            if left() < needed + kept:
                skipped.append(f"search of {name}: {left():.0f} s left")
                continue
            add_search(name, batch, runners=fast)
            needed = max(needed, searches[-1]["seconds"])
        if "compile" in usable:
            add_model("compile", 22 if options.small else 30, 5.0 if options.small else max(20.0, (left() - 25) / 1.4))
            best = searches[0].get("search", {}) if searches else {}
            if left() > 15 and best and not options.small:
                precision = best["candidates"][best["chosen"]]["precision"]
                add_search(*networks[0], runners=["compile"], precisions=[precision])
    finally:
        close_meter(meter)
        write_record(record, options.out)
    print(f"{time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
