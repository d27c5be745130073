"""Inference runners on one device: error of the energy model of each, and the cheapest way to run whole networks.

    python3 benchmarks/runners.py --out results/runners.json --seconds 400             # a GPU
    python3 benchmarks/runners.py --out r.json --meter cputime --device cpu --small   # to try it on a CPU

A cell of the part `model` is the profile of a network with one runner, and the cross-validated error of its energy model. One
of the part `search` is `choose_runner`, as `--runner auto` calls it, on a network of the zoo or ViT-Tiny. torch.compile
compiles every width anew, which takes seconds, so it comes last, with a network of fewer layers. Its networks are compiled
ahead in several processes (`compile_ahead`), which fills the cache that torch keeps on disk.

Cells, deadline and the record are those of `cells.py`. Samples of a profile are kept in a file beside the
JSON; if it is not finished, the next call continues it. Recorded on an H200: 0.9 s a sample (eager), 0.6 s (cuda-graph), 3.8 s
(compile), about 50 s a search: 81 + 54 s for two models with 90 samples, 250 s for five searches, 150 s for compile.
"""

from __future__ import annotations

import argparse
import os
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from cells import Cells, Deadline, Key, Paused, add_options, device_name, print_cells, run_in_turn
from torch import nn

from ecc.energy import fit
from ecc.errors import BadMeasurement
from ecc.graph import trace_channels, with_widths
from ecc.measure import PROFILE_SETTINGS, Meter, Progress, close_meter, find_meter, profile, sample_widths
from ecc.measure.profile import Profile
from ecc.measure.runner_search import choose_runner
from ecc.measure.runners import available_runners, prepare_runner
from ecc.options import flat_values, settings_from
from ecc.records import to_builtins
from ecc.settings import MeasureSettings
from ecc.zoo import find_task, resnet20
from ecc.zoo.digits import DigitsNet

BATCHES = {"vit_tiny": 64, "resnet56": 512, "mobilenet_v1": 64, "erfnet": 4, "alexnet": 128}
"""Networks that are searched, with their batch size."""

SAMPLES = {"compile": 60}
"""Samples of a profile; 90 for other runners."""
AHEAD = 12
"""Processes that compile at the same time."""
LEAST_SAMPLES = 20
"""Fewer cannot be cross-validated."""
SECONDS = {"model": 12.0, "search": 55.0}
"""Least time in which a cell is started: a profile is continued, a search is not."""


def build(name: str, batch: int) -> tuple[nn.Module, torch.Tensor]:
    """A network with random weights, and one batch."""
    if name == "vit_tiny":
        import timm

        return timm.create_model("vit_tiny_patch16_224").eval(), torch.randn(batch, 3, 224, 224)
    task = find_task(name)
    assert isinstance(task.example_input, torch.Tensor)
    return task.model.eval(), torch.randn(batch, *task.example_input.shape[1:])


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


def samples_of(spec: str, is_small: bool) -> tuple[int, int]:
    """Number of samples of the profile of a runner, and what their widths are multiples of."""
    return (22, 4) if is_small else (SAMPLES.get(spec, 90), 8)


def compile_some(spec: str, device: str, is_small: bool, part: int, parts: int) -> None:
    """Compile every n-th network of a profile, and run it once."""
    _, model, example = profiled_network(spec, is_small)
    graph = trace_channels(model, example, verify=False)
    samples, multiple = samples_of(spec, is_small)
    model, example = model.to(device), example.to(device)
    for widths in sample_widths(graph, samples, width_multiple=multiple)[part::parts]:
        network = with_widths(model, graph, widths, device=device)
        with prepare_runner(network, example, settings_for(runner=spec, precision="fp32", autotune=False)) as runner:
            runner.run()


def compile_ahead(spec: str, device: str, is_small: bool) -> float:
    """Compile the networks of a profile in several processes; the seconds that this took."""
    begin, parts = time.monotonic(), min(AHEAD, os.cpu_count() or 1)
    with ProcessPoolExecutor(parts, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(compile_some, spec, device, is_small, part, parts) for part in range(parts)]
        for job in jobs:
            job.result()
    return time.monotonic() - begin


def profile_runner(
    spec: str, meter: Meter, device: str, path: Path, deadline: Deadline, is_small: bool
) -> dict[str, Any]:
    """Cross-validated error of the energy (or latency) model of one runner.

    A profile that a measurement has stopped is fitted if it has enough samples; the reason is in `stopped_by`.

    Raises:
        Paused: If the time is over; the samples are in the file.
        BadMeasurement: If a measurement failed, and there are not enough samples.
    """
    name, model, example = profiled_network(spec, is_small)
    graph = trace_channels(model, example, verify=False)
    found: dict[str, Any] = {"network": name, "batch": len(example)}
    samples, multiple = samples_of(spec, is_small)
    if spec.startswith("compile"):
        found["seconds_compiling_ahead"] = compile_ahead(spec, device, is_small)
        print(f"compiled ahead in {found['seconds_compiling_ahead']:.0f} s", flush=True)

    def stop(step: Progress) -> None:
        if step.done and deadline.is_over:
            raise Paused

    try:
        profile(
            model, graph, example, meter, path, samples=samples, progress=stop, width_multiple=multiple, device=device,
            settings=settings_for(runner=spec, precision="fp32", autotune=False),
        )  # fmt: skip
    except BadMeasurement as error:
        if not path.is_file() or len(Profile.load(path).design_samples) < LEAST_SAMPLES:
            raise
        found["stopped_by"] = str(error)[:200]
    found |= fitted(path)
    path.replace(path.with_name(f"runners-{spec.replace(':', '-')}.profile"))  # the fit may be repeated
    return found


def fitted(path: Path) -> dict[str, Any]:
    """Facts of a profile, and the cross-validated error of its energy (or latency) model."""
    made = Profile.load(path)
    resource = "energy" if made.header.meter.has_energy else "latency"
    found: dict[str, Any] = {
        "resource": resource,
        "samples": len(made.design_samples),
        "seconds_per_sample": made.seconds_per_sample,
        "dense": made.references[0].joules if made.references else None,
        "reference_cv": None if made.drift is None else made.drift.cv,
        "versions": made.header.environment,
    }
    errors = fit(made, resource=resource, allow_drift=True).errors
    found["errors"] = None if errors is None else to_builtins(errors)
    return found


def search_network(name: str, meter: Meter, device: str, runners: list[str]) -> dict[str, Any]:
    """The table of `--runner auto` for one network."""
    torch.manual_seed(0)
    batch = BATCHES[name]
    model, example = build(name, batch)
    _, search = choose_runner(
        model.to(device), example.to(device), meter, settings_for(), device=device, runners=runners
    )
    print(search.table(), flush=True)
    best = search.best
    return {"batch": batch, "search": to_builtins(search), "best": best.name, "saving": search.saving(best)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, seconds=400.0)
    parser.add_argument("--meter", default="nvml")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="few samples and one network, to try it")
    options = parser.parse_args()
    deadline, available = Deadline.after(options.seconds), available_runners(options.device)
    usable = [spec for spec, problem in available.items() if not problem]
    fast = [spec for spec in usable if spec != "compile"]
    keys: list[Key] = [{"part": "model", "name": spec} for spec in fast]
    keys += [{"part": "search", "name": name} for name in (["resnet56"] if options.small else BATCHES)]
    keys += [{"part": "model", "name": "compile"}] if "compile" in usable else []
    header = {
        "what": "energy models and costs by inference runner",
        "device": device_name(options.device),
        "settings": {"meter": options.meter, "small": options.small},
        "available": available,
    }
    cells = Cells(options.out, header, options.earlier, options.again, options.only)
    if options.list:
        print_cells(cells, keys)
        return
    meter = find_meter(options.meter, device_type=options.device)
    assert isinstance(meter, Meter), "a platform runs nothing"
    cells.header["meter"] = to_builtins(meter.describe())
    options.out.parent.mkdir(parents=True, exist_ok=True)

    def run(key: Key) -> dict[str, Any]:
        if key["part"] == "search":
            return search_network(key["name"], meter, options.device, fast)
        path = cells.pause(key, deadline).file
        return profile_runner(key["name"], meter, options.device, path, deadline, options.small)

    try:
        run_in_turn(
            cells, keys, run, deadline, estimate=lambda key: 0.0 if options.small else SECONDS[key["part"]],
            show=("samples", "errors", "best", "saving"),
        )  # fmt: skip
    finally:
        close_meter(meter)


if __name__ == "__main__":
    main()
