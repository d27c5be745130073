"""Inference runners on one device: error of the energy model of each, and the cheapest way to run whole networks.

    python3 benchmarks/runners.py --out results/runners.json                       # a GPU, about four minutes
    python3 benchmarks/runners.py --out r.json --meter cputime --device cpu --small   # to try it on a CPU

Part 1 profiles a small residual network (for compile, a smaller one) with each runner and reports the cross-validated error of its energy model. Part 2
calls `choose_runner`, as `--runner auto` does, on the networks of the zoo and ViT-Tiny. torch.compile takes long to
compile every width, so it gets fewer samples, and in part 2 only the precision and format of the winner on one network. A
part that would exceed `--seconds` is left out and recorded so. The file is written after each part.
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
from ecc.measure.runner_search import RunnerSearch, choose_runner
from ecc.measure.runners import available_runners
from ecc.options import flat_values, settings_from
from ecc.records import to_builtins
from ecc.settings import MeasureSettings
from ecc.zoo import find_task, resnet20

NETWORKS = (("alexnet", 128), ("mobilenet_v1", 64), ("resnet56", 128), ("erfnet", 4), ("vit_tiny", 64))

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
    return settings_from(MeasureSettings, {**flat_values(PROFILE_SETTINGS), "autotune": False, **choices})


def profile_runner(spec: str, meter: Meter, device: str, samples: int, seconds: float, batch: int) -> dict[str, Any]:
    """Cross-validated error of the energy (or latency) model of one runner."""
    torch.manual_seed(0)
    is_slow = spec.startswith("compile")  # every width is compiled anew, so the network is smaller
    model, example = build("digits", batch) if is_slow else (resnet20().eval(), torch.randn(batch, 3, 32, 32))
    graph = trace_channels(model, example, verify=False)
    started = time.monotonic()

    def stop(step: Progress) -> None:
        late = time.monotonic() - started
        if step.done and late > seconds and (step.done >= MIN_SAMPLES or late > 1.6 * seconds):
            raise TimeIsUp

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.profile"
        with suppress(TimeIsUp):
            profile(
                model, graph, example, meter, path, samples=samples, width_multiple=4, progress=stop, device=device,
                settings=settings_for(runner=spec, precision="fp32"),
            )  # fmt: skip
        made = Profile.load(path)
    resource = "energy" if made.header.meter.has_energy else "latency"
    found: dict[str, Any] = {
        "runner": spec,
        "network": "digits" if is_slow else "resnet20",
        "batch": batch,
        "resource": resource,
        "samples": len(made.design_samples),
        "seconds_per_sample": made.seconds_per_sample,
        "dense": made.references[0].joules,
        "reference_cv": None if made.drift is None else made.drift.cv,
        "versions": made.header.environment,
    }
    try:
        errors = fit(made, resource=resource, allow_drift=True).errors
        found["errors"] = None if errors is None else to_builtins(errors)
    except EccError as error:
        found["problem"] = str(error)
    return found


def search_network(
    name: str, batch: int, meter: Meter, device: str, runners: list[str], with_compile: bool
) -> dict[str, Any]:
    """The table of `--runner auto` for one network."""
    model, example = build(name, batch)
    model = model.to(device)
    settings = settings_for()
    _, search = choose_runner(model, example, meter, settings, device=device, runners=runners)
    found: dict[str, Any] = {"network": name, "batch": batch, "search": to_builtins(search)}
    if with_compile:
        best = search.best
        _, compiled = choose_runner(
            model, example, meter, settings, device=device, runners=["compile"], precisions=[best.precision]
        )
        found["compile"] = to_builtins(compiled)
    saving = search.saving(search.best)
    found["best"] = search.best.name
    found["saving"] = saving
    print(f"{name} b{batch}: {search.best.name}, saves {saving:.1%}\n{search.table()}", flush=True)
    assert isinstance(search, RunnerSearch)
    return found


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
    record: dict[str, Any] = {
        "what": "energy models and costs by inference runner",
        "environment": machine(device=device_name(options.device)),
        "meter": to_builtins(meter.describe()),
        "available": available,
        "models": [],
        "searches": [],
        "skipped": [],
    }
    usable = [spec for spec, problem in available.items() if not problem]
    batch = 8 if options.small else 512

    def left() -> float:
        return float(options.seconds) - (time.monotonic() - started)

    networks = NETWORKS[2:3] if options.small else NETWORKS
    try:
        for spec in usable:
            is_slow = spec == "compile"
            samples, limit = (22, 5.0) if options.small else (40, 45.0) if is_slow else (60, 28.0)
            if spec.startswith("openvino") or left() < 20:
                record["skipped"].append(f"model of {spec}: {left():.0f} s left")
                continue
            record["models"].append(profile_runner(spec, meter, options.device, samples, min(limit, left()), batch))
            print({k: v for k, v in record["models"][-1].items() if k != "versions"}, flush=True)
            write_record(record, options.out)
        fast = [spec for spec in usable if spec != "compile"]
        for number, (name, size) in enumerate(networks):
            if left() < 25:
                record["skipped"].append(f"search of {name}: {left():.0f} s left")
                continue
            with_compile = number == 0 and "compile" in usable and not options.small
            try:
                record["searches"].append(
                    search_network(name, 2 if options.small else size, meter, options.device, fast, with_compile)
                )
            except (EccError, ImportError, RuntimeError) as error:
                record["skipped"].append(f"search of {name}: {type(error).__name__}: {str(error)[:200]}")
            write_record(record, options.out)
    finally:
        close_meter(meter)
        write_record(record, options.out)


if __name__ == "__main__":
    main()
