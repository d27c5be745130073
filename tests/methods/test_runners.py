"""A latency budget with onnxruntime and with OpenVINO on the CPU: profile, fit, compress, and a fresh measurement."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ecc
from ecc.energy import EnergyModel, fit
from ecc.errors import BadMeasurement, EccError, EccWarning
from ecc.graph import trace_channels
from ecc.measure import PROFILE_SETTINGS, Profile, find_meter, measure_model
from ecc.measure.meters.cputime import CpuTimeMeter
from ecc.measure.profiler import find_runner, profile
from ecc.methods.cost_evaluator import CostEvaluator, check_meter
from ecc.zoo.registry import find_task


@pytest.mark.thorough  # measure/remote/test_ssh.py does the same with onnxruntime on a board
@pytest.mark.parametrize("runner", ["onnxruntime", "openvino"])
def test_a_latency_budget_is_met_on_the_cpu(runner: str, tmp_path: Path) -> None:
    pytest.importorskip(runner)
    task = find_task("digits")
    assert task.train_batches is not None and task.loss is not None  # noqa: PT018 - the bundled task has both
    example = torch.randn(64, *task.example_input.shape[1:])  # type: ignore[union-attr]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EccWarning)  # on a busy machine the budget may be missed by noise
        done = ecc.compress(
            task.model, task.train_batches, "latency=65%", loss=task.loss, meter="cputime", runner=runner,
            example_input=example, prune_steps=12, finetune_steps=2, samples=20, folder=tmp_path / "run",
            progress=False,
        )  # fmt: skip
    latency = done.summary.budgets["latency"]
    assert latency.label == "measured (CPU time)"
    assert done.summary.runner.startswith(f"{runner}:")
    assert runner in done.summary.versions
    made = Profile.load(tmp_path / "run" / "network.profile")
    assert made.header.settings is not None
    errors = fit(made, resource="latency", allow_drift=True).errors
    assert errors is not None
    assert errors.mean < 0.25  # on a machine that others use
    # A fresh measurement, in turns with the dense network, so that a slower machine slows both.
    settings = replace(made.header.settings, min_repeats=2, max_repeats=2)
    ratios = []
    for _ in range(3):
        dense = measure_model(task.model, example, CpuTimeMeter(), settings).seconds
        ratios.append(measure_model(done.model.cpu(), example, CpuTimeMeter(), settings).seconds / dense)
    assert min(ratios) < 0.8
    assert latency.result < 0.75 * latency.dense


# --- mixing is refused -------------------------------------------------------------------------------


def small_models(tmp_path: Path) -> tuple[Profile, EnergyModel]:
    task = find_task("digits")
    graph = trace_channels(task.model, task.example_input, verify=False)
    quick = replace(PROFILE_SETTINGS, window_seconds=0.002, probe_seconds=0.2, warmup_seconds=0.0, warmup_runs=1)
    made = profile(task.model, graph, task.example_input, CpuTimeMeter(), tmp_path / "p", samples=22, settings=quick)
    return made, fit(made, "bilinear", resource="latency", allow_drift=True)


def test_clocks_measure_latency_and_no_energy_and_ways_are_not_mixed(tmp_path: Path) -> None:
    made, model = small_models(tmp_path)
    assert made.label == "measured (CPU time)"
    assert all(sample.joules == sample.seconds for sample in made.samples)
    for resource in ("energy", "decode", "prefill"):  # the last two are energies of language models
        with pytest.raises(BadMeasurement, match="the clock 'cputime': it has latency and no energy"):
            fit(made, resource=resource, allow_drift=True)
    assert model.origin.environment["torch"] == torch.__version__
    assert model.origin.settings is not None
    assert EnergyModel.load(model.save(tmp_path / "m.json") or tmp_path / "m.json").origin == model.origin
    other = replace(
        model,
        resource="energy",
        origin=replace(model.origin, settings=replace(model.origin.settings, precision="bf16")),
    )
    with pytest.raises(BadMeasurement, match=r"eager, fp32 and .*eager, bf16"):
        check_meter(CpuTimeMeter(), [model, other])
    task = find_task("digits")
    graph = trace_channels(task.model, task.example_input, verify=False)
    old = replace(model, origin=replace(model.origin, environment={**model.origin.environment, "torch": "1.0"}))
    with pytest.raises(BadMeasurement, match=r"measured with torch 1\.0, and this is torch"):
        CostEvaluator(task.model, graph, task.example_input, {"latency": old}, CpuTimeMeter())
    evaluator = CostEvaluator(task.model, graph, task.example_input, {"latency": model}, CpuTimeMeter(), repeats=(1, 2))
    assert set(evaluator({}).amounts) == {"latency"}


def test_a_budget_on_energy_needs_more_than_a_clock(tmp_path: Path) -> None:
    task = find_task("digits")
    with pytest.raises(EccError, match="cputime is a clock and measures no energy; give a budget on latency"):
        ecc.compress(
            task.model, task.train_batches, "50%", loss=task.loss, meter="cputime",  # type: ignore[arg-type]
            example_input=task.example_input, prune_steps=2, finetune_steps=1, folder=tmp_path / "run", progress=False,
        )  # fmt: skip
    with pytest.raises(BadMeasurement, match="runner 'auto' needs a meter"):
        find_runner(
            tmp_path / "none", task.model, task.example_input, find_meter("platform:h100"),
            replace(PROFILE_SETTINGS, runner="auto"),
        )  # fmt: skip


def test_wall_clock_measures_on_any_device() -> None:
    quick = replace(PROFILE_SETTINGS, window_seconds=0.01, probe_seconds=0.05)
    result = measure_model(torch.nn.Linear(64, 64), torch.randn(8, 64), find_meter("wall"), quick)  # type: ignore[arg-type]
    assert result.label == "measured (wall clock)"
    assert result.joules == result.seconds > 0
    assert result.net_joules is None
