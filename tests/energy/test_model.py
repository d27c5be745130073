"""`fit`, `EnergyModel` and its file, on analytic platforms and on recorded profiles."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecc.energy import EnergyModel, FitQuality, fit
from ecc.energy.families import FAMILIES, FittedModel
from ecc.energy.model import build_model
from ecc.energy.regression import samples_from_profile
from ecc.errors import BadFile, BadMeasurement, BadWidths, EccError
from ecc.graph import ChannelGraph, trace_channels
from ecc.measure import Measured, Profile, Sample, find_meter, profile
from ecc.zoo import find_task
from energy.cases import (
    AUTHORS_DENSE_JOULES,
    NETWORKS,
    TERMS,
    authors_alexnet,
    computed,
    graph_of,
    model_of,
    named,
    origin,
    pairs_of,
    random_model,
    random_widths,
    slow_size,
    slow_value,
    structure_of,
    widths_of,
)
from measure.profile_cases import profile_of, reference, sample

KINDS = tuple(TERMS)
PLATFORMS = ("jetson-tx2", "gtx-1080-ti", "eyeriss")
ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "results" / "evidence"
RECORDED = sorted((ROOT / "profiles" / "h200").glob("*.profile.gz"))


@pytest.fixture(scope="module")
def digits_model() -> EnergyModel:
    return fit(computed("digits", "jetson-tx2"), "physical", curve=True)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=50)
def test_value_is_the_sum_of_its_terms_and_layers_add_up(kind: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NETWORKS))
    model, structure, widths = random_model(kind, name), structure_of(name), data.draw(widths_of(structure_of(name)))
    assert float(model.value(widths)) == pytest.approx(slow_value(model.fitted, widths.tolist()), rel=1e-12)
    per_layer = model.per_layer(named(structure, widths.floor().tolist()))
    assert sum(per_layer.values()) == pytest.approx(float(model.value(widths.floor())), rel=1e-12)
    assert set(per_layer) == {"", *(layer.path for layer in structure.layers)}
    assert min(per_layer.values()) >= 0
    assert per_layer[""] >= model.fitted.base


def test_a_model_with_steps_adds_up_by_layer_too(digits_model: EnergyModel) -> None:
    assert digits_model.fitted.steps
    assert sum(digits_model.per_layer().values()) == pytest.approx(digits_model.dense, rel=1e-12)


def test_the_authors_model_gives_their_energies_of_alexnet() -> None:
    structure = structure_of("alexnet")
    model = model_of(authors_alexnet(), structure)
    assert model.dense == pytest.approx(AUTHORS_DENSE_JOULES, rel=1e-12)
    halves = {name: full // 2 for name, full in zip(structure.groups[:-1], structure.full_widths, strict=False)}
    inner = sum((0.00754, 0.00391, 0.00494, 0.00339, 0.01616, 0.00721))  # both sides are halved
    assert model.at(halves) == pytest.approx(0.00248 + 0.5 * (0.00223 + 0.00195) + 0.25 * inner, rel=0.002)


@pytest.mark.parametrize("kind", KINDS)
def test_widths_by_name_dense_and_minimum(kind: str) -> None:
    model, structure = random_model(kind, "residual"), structure_of("residual")
    assert model.at({"conv1": 2}) == float(model.value(structure.widths({"conv1": 2})))
    assert model.at() == model.dense == model.dense_profiled == float(model.value(structure.widths()))
    assert model.min_cost == float(model.value(torch.tensor(structure.min_widths))) < model.dense
    assert replace(model, dense_sample=5.0).dense_profiled == 5.0
    with pytest.raises(BadWidths, match="there is no channel group 'conv9'"):
        model.at({"conv9": 2})


def test_terms_are_charged_to_layers_by_their_amounts(digits_model: EnergyModel) -> None:
    model = random_model("bilinear", "chain", seed=1)
    for term, coefficient in zip(model.fitted.terms, model.fitted.coefficients, strict=True):
        sizes = (slow_size(size, model.full_widths) for size in (term.left, term.right))
        assert model.per_layer()[term.name] == pytest.approx(coefficient * math.prod(sizes))
    fitted = digits_model.fitted
    pairs = zip(fitted.terms, fitted.coefficients, strict=True)
    term, coefficient = next((t, c) for t, c in pairs if len(t.layers) > 1 and c and any(t.amounts))
    one = replace(fitted, base=0.0, terms=(term,), coefficients=(coefficient,), steps=(), heights=())
    alone = replace(digits_model, fitted=one)
    shares = [sum(a * u for a, u in zip(part, fitted.unit_coefficients, strict=True)) for _, part in term.layers]
    expected = dict.fromkeys(("", *alone.layers), 0.0)
    for (number, _), share in zip(term.layers, shares, strict=True):
        expected[alone.layers[number]] += alone.dense * share / sum(shares)
    assert alone.per_layer() == pytest.approx(expected)


# ---------------------------------------------------------------- fit


@pytest.mark.parametrize(
    ("name", "platform"), [*(("digits", platform) for platform in PLATFORMS), ("mobilenet_v1", "jetson-tx2")]
)
def test_a_platform_is_learnt_to_half_a_percent_and_noise_is_not(name: str, platform: str) -> None:
    """The seconds of a platform are a maximum, which no sum of products is; so the error is small and not 0."""
    model = fit(computed(name, platform))
    assert model.errors is not None
    assert model.errors.mean < 0.005 > abs(model.errors.bias)
    graph, meter = graph_of(name), find_meter(f"platform:{platform}")
    for ratio in (0.3, 0.7, 1.0):
        widths = {group.name: max(1, round(ratio * group.width)) for group in graph.prunable}
        assert model.at(widths) == pytest.approx(meter.cost(graph, widths).joules, rel=0.02)
    if name != "digits":
        return
    noisy = fit(computed(name, f"{platform},noise=0.02,seed=1", rows=100), "physical")
    assert noisy.errors is not None
    assert noisy.errors.mean == pytest.approx(0.02 * math.sqrt(2 / math.pi), abs=0.005)  # mean of |N(0, 0.02)|
    truth = samples_from_profile(computed(name, platform))
    errors = noisy.value(torch.from_numpy(truth.widths)).numpy() / truth.values - 1
    assert np.abs(errors).mean() < 0.01  # closer to the truth than the samples are


def profile_from(truth: FittedModel, graph: ChannelGraph, rows: int) -> Profile:
    """Random widths with the cost of a model, without a reference."""
    widths = random_widths(graph.structure, rows)
    kept, joules = widths[:, list(graph.structure.prunable)].astype(int), truth.at(widths)
    found = (
        Sample(index=number, widths=tuple(map(int, kept[number])), joules=float(joules[number]), seconds=1.0)
        for number in range(rows)
    )
    return Profile(computed("alexnet", "jetson-tx2", 20).header, tuple(found))


def test_the_family_with_the_smaller_error_is_chosen(digits_model: EnergyModel) -> None:
    """Activation bytes cost energy on the TX2, and the paper's family has no term for them."""
    model = fit(computed("digits", "jetson-tx2"))
    assert set(model.quality.families) == set(FAMILIES) == {"bilinear", "physical"}
    assert model.kind == "physical"
    assert model.quality.families["physical"].mean < model.quality.families["bilinear"].mean
    bilinear_truth = fit(profile_from(authors_alexnet(), graph_of("alexnet"), 80))
    assert bilinear_truth.kind == "bilinear"  # the simpler family stays where the other is no better
    assert bilinear_truth.dense == pytest.approx(0.0498, abs=5e-5)
    assert (bilinear_truth.dense_sample, set(bilinear_truth.quality.families)) == (None, set(FAMILIES))
    assert set(digits_model.quality.families) == {"physical"}
    assert fit(computed("digits", "jetson-tx2")) == model
    with pytest.raises(BadMeasurement, match="model family 'cubic' is unknown; choose one of auto, bilinear, physical"):
        fit(computed("digits", "jetson-tx2"), "cubic")
    with pytest.raises(EccError, match=r"profile is str; give a Profile, from ecc\.profile or ecc\.Profile\.load"):
        fit("digits.profile")  # type: ignore[arg-type]  # what is tested


def test_a_model_records_its_origin_and_its_quality(digits_model: EnergyModel) -> None:
    profile, model = computed("digits", "jetson-tx2"), digits_model
    assert model.fingerprint == graph_of("digits").fingerprint
    assert model.origin.meter == profile.header.meter
    assert (model.origin.batch, model.origin.samples, model.origin.settings) == (64, 60, None)
    assert (model.resource, model.unit, model.label) == ("energy", "J", "estimated")
    assert model.errors is not None
    assert model.errors.samples == 60
    samples = samples_from_profile(profile)
    assert model.dense_profiled == samples.values[samples.is_dense].item()
    assert model.errors.dense_fitted == pytest.approx(model.dense / model.dense_profiled - 1)
    assert [size for size, _ in model.quality.learning_curve] == [15, 20, 30, 40]
    pairs = model.quality.held_out
    assert len(pairs) == 60
    ends = float(f"{samples.values.min():.6g}"), float(f"{model.dense_profiled:.6g}")
    errors = [abs(predicted / value - 1) for value, predicted in pairs if value not in ends]
    assert len(errors) == 58
    assert sum(errors) / 58 == pytest.approx(model.errors.mean, rel=0.1)  # the pairs have six digits
    given = build_model(authors_alexnet(), samples, profile, "energy")
    assert (given.quality, given.errors) == (FitQuality(), None)


def test_latency_is_fitted_like_energy() -> None:
    model = fit(computed("mobilenet_v1", "jetson-tx2"), "physical", resource="latency")
    assert (model.resource, model.unit) == ("latency", "s")
    seconds = find_meter("platform:jetson-tx2").cost(graph_of("mobilenet_v1"), {}).seconds
    assert model.dense == pytest.approx(seconds, rel=0.1)
    assert model.errors is not None
    assert model.errors.mean < 0.05  # a maximum of three in each layer


@cache
def fitted_to_nonsense(family: str, way: str) -> EnergyModel:
    profile = computed("digits", "jetson-tx2")
    noise = np.random.default_rng(0).uniform(0.1, 10, len(profile.samples))
    rows = tuple(
        replace(row, joules=(noise[0] if row.is_reference else noise[number]) if way == "noise" else 1 / row.joules)
        for number, row in enumerate(profile.samples)
    )
    return fit(Profile(profile.header, rows), family)


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=30)
def test_fewer_channels_never_cost_more_whatever_was_measured(family: str, data: st.DataObject) -> None:
    model = fitted_to_nonsense(family, data.draw(st.sampled_from(["decreasing", "noise"])))
    fewer, more = data.draw(pairs_of(structure_of("digits")))
    kept = [k for k, step in enumerate(model.fitted.steps) if not step.multiple]  # misaligned sizes may cost more
    steps, heights = (tuple(part[k] for k in kept) for part in (model.fitted.steps, model.fitted.heights))
    assert float(model.value(fewer)) >= 0
    model = replace(model, fitted=replace(model.fitted, steps=steps, heights=heights))
    assert 0 <= float(model.value(fewer)) <= float(model.value(more)) * (1 + 1e-12)


def test_profiles_that_cannot_be_fitted_are_refused() -> None:
    with pytest.raises(BadMeasurement, match="the profile has 11 samples; a fit needs 12"):
        fit(profile_of(*(sample(number, 1.0 + number) for number in range(11))))
    with pytest.raises(BadMeasurement, match="the profile has 0 samples"):
        fit(profile_of())
    rows = [sample(number, 1.0 + number, (1 + number, 3)) for number in range(12)]
    unsteady = profile_of(reference(20.0), *rows[:6], reference(23.0), *rows[6:], reference(20.0))
    with pytest.raises(BadMeasurement, match=r"varied by 8\.2% .*allow_drift=True"):
        fit(unsteady)
    assert fit(unsteady, allow_drift=True).origin.samples == 13


# ---------------------------------------------------------------- its network


def test_a_model_serves_a_network_with_more_frozen_groups_and_no_other(tmp_path: Path) -> None:
    task = find_task("digits")
    free, frozen = (trace_channels(task.model, task.example_input, freeze=some) for some in ([], ["stem.0"]))
    assert free.fingerprint != frozen.fingerprint
    models = {}
    for name, graph in (("free", free), ("frozen", frozen)):
        meter = find_meter("platform:jetson-tx2")
        made = profile(task.model, graph, task.example_input, meter, tmp_path / name, samples=30)
        models[name] = fit(made, "bilinear")
    models["free"].check(free)
    models["free"].check(frozen)
    models["frozen"].check(frozen)
    for model, graph in ((models["frozen"], free), (models["free"], graph_of("chain"))):
        message = f"belongs to network {model.fingerprint}, not to this one .{graph.fingerprint}"
        with pytest.raises(BadFile, match=message):
            model.check(graph)
        model.save(tmp_path / "a.json")
        with pytest.raises(BadFile, match=message):
            EnergyModel.load(tmp_path / "a.json", graph)


# ---------------------------------------------------------------- its file


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_model_round_trips_exactly(kind: str, name: str, tmp_path: Path) -> None:
    model = random_model(kind, name, seed=5)
    model.save(tmp_path / "a.json")
    loaded = EnergyModel.load(tmp_path / "a.json", graph_of(name))
    assert loaded == model
    widths = torch.from_numpy(random_widths(structure_of(name), 5))
    assert loaded.value(widths).tolist() == model.value(widths).tolist()
    assert loaded.gradient(widths[0]).tolist() == model.gradient(widths[0]).tolist()


def test_a_fitted_model_round_trips_and_is_readable(digits_model: EnergyModel, tmp_path: Path) -> None:
    digits_model.save(tmp_path / "a.json")
    assert EnergyModel.load(tmp_path / "a.json") == digits_model
    data = json.loads((tmp_path / "a.json").read_text())
    assert (data["unit"], data["label"]) == ("J for one inference of the whole batch", "estimated")
    assert data["origin"]["meter"]["device"] == "NVIDIA Jetson TX2"
    assert len(data["fitted"]["terms"]) == len(digits_model.fitted.coefficients)
    assert data["quality"]["families"]["physical"]["samples"] == 60
    analytic = replace(random_model("bilinear", "chain"), origin=replace(origin(), settings=None, device_type=None))
    analytic.save(tmp_path / "b.json")
    assert EnergyModel.load(tmp_path / "b.json") == analytic


# ---------------------------------------------------------------- recorded profiles


def test_steps_of_files_without_a_rise_have_one_of_8_channels(digits_model: EnergyModel, tmp_path: Path) -> None:
    file = tmp_path / "energy.json"
    digits_model.save(file)
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["fitted"]["steps"]
    for step in found["fitted"]["steps"]:
        del step["rise"]
    file.write_text(json.dumps(found), encoding="utf-8")
    assert {step.rise for step in EnergyModel.load(file).fitted.steps} == {8}


def test_on_an_h200_twelve_channels_of_a_resnet_save_nothing() -> None:
    """A model without the terms of misaligned sizes has an error of 5.0 %, and 12 channels of conv1 as an outlier."""
    resnet = fit(Profile.load(EVIDENCE / "e4.profile.gz"), "physical")
    assert resnet.quality.outlier_widths == ()
    assert resnet.errors is not None
    assert resnet.errors.mean < 0.015
    twelve, sixteen = resnet.at({"conv1": 12}), resnet.at({"conv1": 16})
    assert twelve > 0.97 * sixteen > 1.1 * resnet.at({"conv1": 8})  # 12 channels save next to nothing


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.thorough] * (not path.name.startswith("mobilenet_v1-b1.")))
        for path in RECORDED
    ],
    ids=lambda path: path.name.removesuffix(".profile.gz"),
)
def test_a_recorded_profile_is_fitted_and_replayed(path: Path, tmp_path: Path) -> None:
    header = Profile.load(path).header
    task = find_task(path.name.partition("-")[0])
    graph = trace_channels(task.model, torch.rand(header.input_shapes["0"]), verify=False)
    profile = Profile.load(path, graph)
    assert header.meter.device == "NVIDIA H200"
    assert isinstance(header.meter.provenance, Measured)
    assert (profile.label, header.device_type) == ("measured", "cuda")
    assert f"-b{header.batch}." in path.name
    assert len(profile.design_samples) >= 200
    assert profile.drift is not None
    assert profile.drift.is_steady
    model = fit(profile, "physical")
    assert model.label == "measured"
    assert model.errors is not None
    assert model.errors.mean < 0.08  # AlexNet's 4096-wide layers change kernels, and are the worst
    assert model.dense == pytest.approx(model.dense_profiled, rel=0.2)
    assert model.min_cost < model.dense
    model.save(tmp_path / "a.json")
    assert EnergyModel.load(tmp_path / "a.json") == model
    replay = find_meter(f"replay:{path}")
    assert replay.describe().label == f"measured (replayed from {path.name})"
    for one in profile.corrected()[::50]:
        reading = replay.cost(graph, profile.widths_by_group(one.widths))
        assert (reading.joules, reading.seconds) == (one.joules, one.seconds)
    assert len(RECORDED) >= 5
