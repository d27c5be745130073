"""Error of the energy model on classifiers of torchvision that are drawn at random, from 100 samples each.

    python3 benchmarks/unseen_networks.py --out results/unseen_networks.json --seconds 550      # a GPU
    python3 benchmarks/unseen_networks.py --out u.json --networks zoo --meter platform:eyeriss --samples 30   # to try it

A cell is the profile of one network with random weights, and the errors of the energy model that is fitted to it: the
cross-validated one, which `ecc fit` reports, and that on samples which are not part of the fit. A longer design begins with
the shorter one, so the first 100 of 112 samples are those of `ecc profile --samples 100`, and the other 12 are fresh draws.
All are measured in one random order. Other options are those that `ecc profile` has by default, if they are not given
here; `--width-multiples any,8` adds cells with widths in multiples of 8.

Networks are measured in the order of the draw, so a call that ends early leaves a smaller random draw. Cells, deadline and
record are those of `cells.py`. A profile that is not finished is kept beside the JSON and continued by the next call on the
same GPU; on another one it starts anew. Finished profiles are in a folder with the name of the record, which
`gpu_session.py` packs. Expected on an H200: 125 measurements of 0.6 to 0.9 s, and 5 to 10 s for everything else.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from cells import Cells, Deadline, Key, Paused, add_options, name_of, print_cells, run_in_turn
from torch import nn
from torchvision_ops import define_missing_operators

from ecc.constants import BUNDLED_TASKS
from ecc.energy import EnergyModel, fit
from ecc.energy.regression import RESOURCES
from ecc.errors import BadFile, BadMeasurement, describe_error
from ecc.graph import trace_channels
from ecc.measure import Analytic, EnergySource, MeasureSettings, Profile, Progress, close_meter, find_meter, profile
from ecc.measure.profiler import default_device, profile_settings
from ecc.records import to_builtins
from ecc.task import with_batch_size
from ecc.zoo import find_task
from ecc.zoo.image_task import seeded, seeded_images

ANY = "any"
"""Widths that are not multiples of a number, as `ecc profile` has them by default."""
LEAST_SAMPLES = 20
"""Fewer are not fitted if a profile ends early."""
SECONDS_PER_SAMPLE = 0.6
"""Expected before a cell of this call has ended."""
OTHER_SECONDS = 10.0
"""Expected for tracing, the first look at the counter and the fit."""


@dataclass(frozen=True)
class Library:
    """Networks to draw from."""

    names: Callable[[], Sequence[str]]
    build: Callable[[str], tuple[nn.Module, torch.Tensor]]
    """The network with random weights, and an example input."""
    version: Callable[[], str]


def _models() -> Any:
    define_missing_operators()  # otherwise the import fails with the CPU build of PyTorch
    import torchvision.models

    return torchvision.models


def _torchvision_names() -> list[str]:
    """Classifiers; networks for other tasks and quantized ones are in modules of their own."""
    models = _models()
    return list(models.list_models(module=models))


def _torchvision_network(name: str) -> tuple[nn.Module, torch.Tensor]:
    options: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):
        options = {"aux_logits": False, "init_weights": False}  # the other initialisation takes half a minute
    size = 299 if name == "inception_v3" else 224
    model: nn.Module = seeded(lambda: _models().get_model(name, weights=None, **options))
    return model, seeded_images((3, size, size))


def _torchvision_version() -> str:
    _models()
    import torchvision

    return f"torchvision {torchvision.__version__}"


def _zoo_network(name: str) -> tuple[nn.Module, torch.Tensor]:
    task = find_task(name)
    assert isinstance(task.example_input, torch.Tensor)
    return task.model, task.example_input


LIBRARIES = {
    "torchvision": Library(_torchvision_names, _torchvision_network, _torchvision_version),
    "zoo": Library(lambda: BUNDLED_TASKS, _zoo_network, lambda: "ecc.zoo"),
}


def draw(names: Sequence[str], count: int, seed: int) -> list[str]:
    """Random names; a larger count adds names to those of a smaller one."""
    order = sorted(names)
    random.Random(seed).shuffle(order)
    return order[:count]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured of every network."""

    library: Library
    samples: int
    """Samples that the model is fitted to."""
    held_out: int
    """Further samples, which are predicted."""
    batch: int
    source: EnergySource
    settings: MeasureSettings
    device: str | None
    """None if the source runs nothing."""


def measure_network(key: Key, plan: Plan, path: Path, kept: Path, deadline: Deadline) -> dict[str, Any]:
    """Profile, fit and errors of one network.

    A profile that a measurement has stopped is fitted if it has enough samples; the reason is in `stopped_by`.

    Args:
        key: Of the cell.
        plan: What is measured.
        path: The profile while it grows.
        kept: The profile when it is finished.
        deadline: After it no sample is measured.

    Raises:
        Paused: If the time is over; the samples are in the file.
        BadMeasurement: If a measurement failed, and there are not enough samples.
    """
    times = [time.monotonic()]
    model, example = plan.library.build(key["network"])
    inputs = with_batch_size(example, plan.batch)
    times.append(time.monotonic())
    graph = trace_channels(model.eval(), inputs, verify=False)
    times.append(time.monotonic())
    found: dict[str, Any] = {
        "parameters": sum(one.numel() for one in model.parameters()),
        "input_shape": [plan.batch, *example.shape[1:]],
        "groups": len(graph.variable),
        "branches": len(graph.branches),
    }

    def stop(step: Progress) -> None:
        if step.message:
            print(f"{key['network']}: {step.message}", flush=True)
        if step.done < step.total and deadline.is_over:
            raise Paused

    def measure() -> None:
        multiple = key["width_multiple"]
        profile(
            model, graph, inputs, plan.source, path, samples=plan.samples + plan.held_out,
            width_multiple=None if multiple == ANY else int(multiple), settings=plan.settings, device=plan.device,
            progress=stop,
        )  # fmt: skip

    try:
        try:
            measure()
        except BadFile as error:  # begun on another GPU, or with other versions
            print(f"{key['network']} starts anew: {error}", flush=True)
            path.unlink(missing_ok=True)
            measure()
    except BadMeasurement as error:
        if not path.is_file() or _fitted_samples(Profile.load(path), plan.samples) < LEAST_SAMPLES:
            raise
        found["stopped_by"] = str(error)[:200]
    times.append(time.monotonic())
    made = Profile.load(path, graph)
    found |= errors_of(made, plan.samples)
    kept.parent.mkdir(parents=True, exist_ok=True)
    made.save(kept)
    times.append(time.monotonic())
    spent = [round(later - earlier, 2) for earlier, later in pairwise(times)]
    return {
        **found,
        "profile": f"{kept.parent.name}/{kept.name}",
        "seconds_of": dict(zip(("build", "trace", "profile", "fit"), spent, strict=True)),
    }


def errors_of(made: Profile, samples: int) -> dict[str, Any]:
    """Errors of the model that is fitted to the first samples of the design, and facts of the profile."""
    resource = "energy" if made.header.meter.has_energy else "latency"
    first = tuple(one for one in made.samples if one.index is None or one.index < samples)
    fitted = fit(Profile(made.header, first), resource=resource, allow_drift=True)
    assert fitted.errors is not None
    how, drift = made.header.settings, made.drift
    return {
        "resource": resource,
        "samples": _fitted_samples(made, samples),
        "cross_validated": fitted.errors.mean,
        "held_out": held_out_errors(fitted, made, samples),
        "noise": fitted.quality.noise,
        "family": fitted.kind,
        "errors": to_builtins(fitted.quality.families),
        "dense": fitted.dense_profiled,
        "references": len(made.references),
        "reference_cv": None if drift is None else drift.cv,
        "sessions": 1 + max(one.session for one in made.samples),
        "seconds_per_sample": made.seconds_per_sample,
        "runner": None if how is None else how.runner,
        "runner_reason": made.header.runner_reason,
        "precision": None if how is None else how.precision,
        "versions": made.header.environment,
    }


def _fitted_samples(made: Profile, samples: int) -> int:
    """Samples of the design that a model may be fitted to."""
    return sum(one.index is not None and one.index < samples for one in made.design_samples)


def held_out_errors(fitted: EnergyModel, made: Profile, first: int) -> dict[str, Any] | None:
    """Relative errors on the samples of the design from index `first` on; None if there are none."""
    field, _ = RESOURCES[fitted.resource]
    errors = [
        fitted.at(made.widths_by_group(one.widths)) / getattr(one, field) - 1
        for one in made.corrected(allow_drift=True, of=field)
        if one.index >= first
    ]
    if not errors:
        return None
    size = [abs(error) for error in errors]
    return {
        "samples": len(size),
        "mean": statistics.fmean(size),
        "standard_error": statistics.stdev(size) / math.sqrt(len(size)) if len(size) > 1 else None,
        "max": max(size),
        "bias": statistics.fmean(errors),
    }


def width_multiples(text: str) -> list[str]:
    """`any,8` as a list.

    Raises:
        argparse.ArgumentTypeError: If a part is neither `any` nor a number.
    """
    parts = text.split(",")
    if wrong := [part for part in parts if part != ANY and not part.isdecimal()]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is neither {ANY!r} nor a number")
    return parts


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, seconds=550.0)
    parser.add_argument("--networks", choices=LIBRARIES, default="torchvision", help="what is drawn from")
    parser.add_argument("--count", type=int, default=10, help="networks that are drawn; more extend a record")
    parser.add_argument("--draw-seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=100, help="samples that the model is fitted to")
    parser.add_argument("--held-out", type=int, default=12, help="further samples, which are predicted")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--width-multiples", type=width_multiples, default=[ANY], help="such as any,8")
    parser.add_argument("--meter", default="nvml")
    parser.add_argument("--precision", help="as in ecc profile, whose default is fp32")
    parser.add_argument(
        "--autotune", action=argparse.BooleanOptionalAction, help="as in ecc profile, whose default is yes"
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    options = parse(words)
    deadline, library = Deadline.after(options.seconds), LIBRARIES[options.networks]
    every = library.names()
    names = draw(every, options.count, options.draw_seed)
    keys: list[Key] = [
        {"network": name, "width_multiple": multiple} for multiple in options.width_multiples for name in names
    ]
    chosen = {name: getattr(options, name) for name in ("precision", "autotune") if getattr(options, name) is not None}
    header: dict[str, Any] = {
        "what": "errors of energy models on networks that were drawn at random",
        "settings": {
            "networks": options.networks, "draw_seed": options.draw_seed, "samples": options.samples,
            "held_out": options.held_out, "batch": options.batch, "meter": options.meter, **chosen,
        },
        # Besides these, width_multiple differs where the key of a cell has a number.
        "options": f"the defaults of `ecc profile`, except {', '.join(('samples', 'batch', *chosen))}",
        "draw": {"library": library.version(), "of": len(every), "seed": options.draw_seed, "names": names},
    }  # fmt: skip
    cells = Cells(options.out, header, options.earlier, options.again, options.only)
    if options.list:
        print_cells(cells, keys)
        return
    source = find_meter(options.meter)
    try:
        settings, about = profile_settings(source, **chosen), source.describe()
        is_run = not isinstance(source, Analytic)
        cells.header |= {
            "device": about.device, "meter": to_builtins(about), "measure": to_builtins(settings) if is_run else None,
        }  # fmt: skip
        plan = Plan(
            library=library, samples=options.samples, held_out=options.held_out, batch=options.batch, source=source,
            settings=settings, device=default_device(source, settings.runner) if is_run else None,
        )  # fmt: skip
        run_networks(cells, keys, plan, deadline)
    finally:
        close_meter(source)


def run_networks(cells: Cells, keys: Sequence[Key], plan: Plan, deadline: Deadline) -> None:
    """Run all cells that are missing, each within the time that the others took."""
    took: list[float] = []
    cells.out.parent.mkdir(parents=True, exist_ok=True)

    def expected(_: Key) -> float:
        if plan.device is None:
            return 0.0
        return statistics.median(took) if took else SECONDS_PER_SAMPLE * (plan.samples + plan.held_out) + OTHER_SECONDS

    def run(key: Key) -> dict[str, Any]:
        started, path = time.monotonic(), cells.pause(key, deadline).file
        kept = cells.out.with_suffix("") / f"{name_of(key)}.profile.gz"
        try:
            found = measure_network(key, plan, path, kept, deadline)
        except Paused:
            raise
        except Exception as error:  # noqa: BLE001 - the other networks go on
            found = {"error": describe_error(error)}
        else:
            took.append(time.monotonic() - started)
        gc.collect()
        if plan.device is not None and plan.device.startswith("cuda"):
            torch.cuda.empty_cache()
        return found

    show = ("samples", "cross_validated", "held_out", "noise", "seconds_of")
    run_in_turn(cells, keys, run, deadline, estimate=expected, show=show)


if __name__ == "__main__":
    main()
