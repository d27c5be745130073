from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecc.energy import EnergyModel, fit
from ecc.energy.families import FittedModel
from ecc.energy.fitting import FAMILIES, describe_learning_curve, describe_outlier_widths, model_of, noise_of
from ecc.energy.samples import samples_from_profile
from ecc.errors import BadFile, BadMeasurement
from ecc.graph import ChannelGraph, trace_channels
from ecc.measure import Measured, Profile, Sample, find_meter
from ecc.zoo import find_task
from energy.cases import authors_alexnet, computed, graph_of, pairs_of, random_widths, skeleton_of
from measure.profile_cases import profile_of, reference, sample

PLATFORMS = ("jetson-tx2", "gtx-1080-ti", "eyeriss")
ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "results" / "evidence"
RECORDED = sorted((ROOT / "profiles" / "h200").glob("*.profile.gz"))


# ---------------------------------------------------------------- what is known is found again


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", ["digits", "mobilenet_v1"])
def test_a_platform_is_learnt_to_half_a_percent(name: str, platform: str) -> None:
    """The seconds of a platform are a maximum, which no sum of products is; so the error is small and not 0."""
    model = fit(computed(name, platform))
    assert model.quality["mean"] < 0.005
    assert abs(model.quality["bias"]) < 0.005
    graph, meter = graph_of(name), find_meter(f"platform:{platform}")
    for share in (0.3, 0.7, 1.0):
        widths = {group.name: max(1, round(share * group.width)) for group in graph.prunable}
        assert model.at(widths) == pytest.approx(meter.cost(graph, widths).joules, rel=0.02)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", ["digits", "mobilenet_v1"])
def test_noise_is_not_learnt(name: str, platform: str) -> None:
    """With 2 % of it, the error is that of the noise, sqrt(2 / pi) * 2 % = 1.6 %, within half a point."""
    model = fit(computed(name, f"{platform},noise=0.02,seed=1", rows=100))
    assert model.quality["mean"] == pytest.approx(0.02 * math.sqrt(2 / math.pi), abs=0.005)
    truth = samples_from_profile(computed(name, platform))
    away = np.array([float(model.value(torch.from_numpy(row))) for row in truth.widths]) / truth.values - 1
    assert np.abs(away).mean() < 0.01  # nearer to the truth than what it was shown


def test_the_authors_device_is_learnt_from_a_profile_of_it() -> None:
    truth, structure = authors_alexnet(), skeleton_of("alexnet")
    model = fit(profile_from(truth, graph_of("alexnet"), 80), "bilinear")
    assert model.dense == pytest.approx(0.0498, abs=5e-5)
    probe = torch.from_numpy(random_widths(structure, 20, seed=9))
    assert model.value(probe).tolist() == pytest.approx(truth.at(probe.numpy()).tolist(), rel=1e-6)


def profile_from(truth: FittedModel, graph: ChannelGraph, rows: int) -> Profile:
    """Uniform random widths of a graph with what a model says of them, and nothing else."""
    structure = graph.structure
    header = computed("alexnet", "jetson-tx2", 20).header
    widths = random_widths(structure, rows)
    joules = truth.at(widths)
    kept = widths[:, list(structure.prunable)].astype(int)
    found = (
        Sample(index=number, widths=tuple(map(int, kept[number])), joules=float(joules[number]), seconds=1.0)
        for number in range(rows)
    )
    return Profile(header, tuple(found))


# ---------------------------------------------------------------- the choice


def test_the_family_that_predicts_best_is_chosen() -> None:
    """Bytes of activations cost on the TX2, which the paper's family has no term for."""
    model = fit(computed("digits", "jetson-tx2"))
    families = model.quality["families"]
    assert set(families) == set(FAMILIES) == {"bilinear", "physical"}
    assert model.kind == model.quality["chosen"] == "physical"
    assert families["physical"]["mean"] < families["bilinear"]["mean"]
    assert model.quality["mean"] == families["physical"]["mean"]


def test_the_simpler_family_is_kept_where_the_other_is_no_better() -> None:
    model = fit(profile_from(authors_alexnet(), graph_of("alexnet"), 80))
    assert model.kind == model.quality["chosen"] == "bilinear"
    assert set(model.quality["families"]) == {"bilinear", "physical"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_is_asked_for_is_taken(family: str) -> None:
    model = fit(computed("digits", "jetson-tx2"), family)
    assert model.kind == model.quality["chosen"] == family
    assert set(model.quality["families"]) == {family}
    assert not {"learning_curve", "held_out"} & set(model.quality)


def test_the_model_says_where_it_comes_from() -> None:
    profile = computed("digits", "jetson-tx2")
    model = fit(profile)
    assert model.fingerprint == graph_of("digits").fingerprint
    assert model.origin.meter == profile.header.meter
    assert (model.origin.batch, model.origin.rows, model.origin.settings) == (64, 60, None)
    assert (model.resource, model.unit, model.label) == ("energy", "J", "estimated")
    assert model.quality["rows"] == 60
    model.check(graph_of("digits"))


def test_the_same_profile_gives_the_same_model() -> None:
    profile = computed("digits", "jetson-tx2,noise=0.02,seed=1")
    assert fit(profile) == fit(profile)


def test_latency_is_learnt_as_energy_is() -> None:
    profile = computed("mobilenet_v1", "jetson-tx2")
    model = fit(profile, resource="latency")
    assert (model.resource, model.unit) == ("latency", "s")
    seconds = find_meter("platform:jetson-tx2").cost(graph_of("mobilenet_v1"), {}).seconds
    assert model.dense == pytest.approx(seconds, rel=0.1)
    assert model.quality["mean"] < 0.05  # a maximum of three in each layer


def test_a_model_can_be_made_of_given_prices() -> None:
    profile = computed("alexnet", "jetson-tx2", 20)
    model = model_of(authors_alexnet(), samples_from_profile(profile), profile, "energy")
    assert model.dense == pytest.approx(0.0498, abs=5e-5)
    assert model.quality == {}
    assert model.layers == tuple(layer.path for layer in skeleton_of("alexnet").layers)


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=30)
def test_removing_channels_never_predicts_more(family: str, data: st.DataObject) -> None:
    """Whatever was measured: here energies that fall as networks grow, and energies of nothing but noise."""
    model = odd_model(family, data.draw(st.sampled_from(["falling", "noise"])))
    fewer, more = data.draw(pairs_of(skeleton_of("digits")))
    assert 0 <= float(model.value(fewer)) <= float(model.value(more)) * (1 + 1e-12)


@cache
def odd_model(family: str, way: str) -> EnergyModel:
    profile = computed("digits", "jetson-tx2")
    noise = np.random.default_rng(0).uniform(0.1, 10, len(profile.samples))
    rows = tuple(
        replace(row, joules=(noise[0] if row.is_reference else noise[number]) if way == "noise" else 1 / row.joules)
        for number, row in enumerate(profile.samples)
    )
    return fit(Profile(profile.header, rows), family)


# ---------------------------------------------------------------- what is refused


def test_a_family_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        BadMeasurement, match="there is no family 'cubic' of models; there are auto, bilinear, physical"
    ):
        fit(computed("digits", "jetson-tx2"), "cubic")


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(BadMeasurement, match="the profile holds 11 networks, and a fit needs 12"):
        fit(profile_of(*(sample(number, 1.0 + number) for number in range(11))))
    with pytest.raises(BadMeasurement, match="the profile holds 0 networks"):
        fit(profile_of())


def test_an_unsteady_profile_is_refused_unless_allowed() -> None:
    rows = [sample(number, 1.0 + number, (1 + number, 3)) for number in range(12)]
    unsteady = profile_of(reference(20.0), *rows[:6], reference(23.0), *rows[6:], reference(20.0))
    with pytest.raises(BadMeasurement, match=r"varied by 8\.2% .*allow_drift=True"):
        fit(unsteady)
    assert fit(unsteady, allow_drift=True).origin.rows == 13


def test_a_bad_row_is_refused_by_its_number() -> None:
    rows = [sample(number, 1.0) for number in range(20)]
    with pytest.raises(BadFile, match="row 20 of the profile has nan joules"):
        fit(profile_of(*rows, sample(20, math.nan)))
    with pytest.raises(BadFile, match="knows nothing of 'macs'"):
        fit(profile_of(*rows), resource="macs")


# ---------------------------------------------------------------- noise, and whether more rows would help


def test_noise_is_told_by_rounds_or_else_by_the_reference() -> None:
    rounds = [
        sample(i, joules, round=r) for i in range(50) for r, joules in enumerate((1.0, math.exp(0.02 * math.sqrt(2))))
    ]
    assert noise_of(profile_of(*rounds)) == pytest.approx(0.02)
    references = [reference(2.0 * math.exp(0.01 * (-1) ** k)) for k in range(20)]
    measured = profile_of(sample(0), *references, device_type="cpu")
    assert noise_of(measured) == pytest.approx(0.01 * math.sqrt(2), rel=1e-6)
    assert noise_of(profile_of(sample(0), *references)) is None  # an analytic one would repeat itself
    assert noise_of(profile_of(sample(0), reference(2.0), reference(2.0))) is None
    assert noise_of(profile_of(sample(0))) is None


def test_noise_and_steadiness_are_those_of_what_is_fitted() -> None:
    """Seconds may be steady where joules are not."""
    rows = [replace(sample(i, 1.0 + 0.05 * r, round=r), seconds=2.0 + 0.002 * r) for i in range(30) for r in (0, 1)]
    references = [replace(reference(2.0 * (1 + 0.1 * k)), seconds=3.0 * (1 + 0.001 * (-1) ** k)) for k in range(6)]
    profile = profile_of(*rows, *references, device_type="cpu")
    assert noise_of(profile, "latency") == pytest.approx(0.001 / math.sqrt(2), rel=0.1)
    assert noise_of(profile, "energy") > 0.02
    with pytest.raises(BadMeasurement, match="the joules of the dense reference varied by 1"):
        samples_from_profile(profile)
    assert len(samples_from_profile(profile, "latency")) > 1


def test_a_learning_curve_is_told_if_asked_for() -> None:
    model = fit(computed("mobilenet_v1", "jetson-tx2,noise=0.02,seed=1", rows=100), curve=True)
    curve = model.quality["learning_curve"]
    assert [size for size, _ in curve] == [15, 20, 30, 40, 60, 80]
    assert all(0 < error < 0.2 for _, error in curve)
    errors = [abs(predicted / value - 1) for value, predicted in model.quality["held_out"]]
    assert len(errors) == model.quality["rows"]
    assert sum(errors) / len(errors) == pytest.approx(model.quality["mean"], rel=1e-3)


@pytest.mark.parametrize(
    ("curve", "noise", "said"),
    [
        ([], None, ""),
        ([[15, 0.1], [20, 0.05]], None, ""),
        (
            [[15, 0.2], [20, 0.1], [30, 0.07], [40, 0.05]],
            0.01,
            "More rows would help: the error still falls (10.0% with 20 rows, 5.0% with 40).",
        ),
        ([[15, 0.1], [20, 0.07], [30, 0.05]], None, "More rows would help: the error still falls (10.0% with 15"),
        (
            [[15, 0.05], [20, 0.05], [30, 0.049]],
            0.01,
            "More rows will hardly help: the error has stopped falling (5.0% with 15 rows, 4.9% with 30).",
        ),
        (
            [[15, 0.0012], [20, 0.0011], [30, 0.0009]],
            None,
            "More rows would help: the error still falls (0.12% with 15 rows, 0.09% with 30).",
        ),
        (
            [[15, 0.1], [20, 0.05], [30, 0.024]],
            0.02,
            "More rows will not help: the error (10.0% with 15 rows, 2.4% with 30) is at the noise of the "
            "measurements, 2.0%.",
        ),
    ],
)
def test_whether_more_rows_would_help_is_said_in_a_sentence(
    curve: list[list[float]], noise: float | None, said: str
) -> None:
    sentence = describe_learning_curve({"learning_curve": curve, "noise": noise})
    assert sentence.startswith(said)
    assert bool(sentence) == bool(said)


def test_without_a_curve_nothing_is_said() -> None:
    assert describe_learning_curve({}) == ""


# ---------------------------------------------------------------- widths that cost more than wider ones


def test_on_an_h200_twelve_channels_of_a_resnet_cost_more_than_sixteen() -> None:
    """And nothing else of what was measured does."""
    odd = {
        file.name: fit(Profile.load(file)).quality["outlier_widths"] for file in sorted(EVIDENCE.glob("*.profile.gz"))
    }
    (found,) = odd.pop("e4.profile.gz")
    assert (found["group"], found["width"]) == ("conv1", 12)
    assert found["excess"] > 0.1
    assert list(odd.values()) == [[], [], []]


def test_odd_widths_are_told_in_a_sentence() -> None:
    assert describe_outlier_widths({}) == describe_outlier_widths({"outlier_widths": []}) == ""
    odd = [{"group": f"g{number}", "width": 12, "networks": 14, "excess": 0.148} for number in range(5)]
    assert "with 12 channels in g0 (14 networks) 14.8% more. A wider" in describe_outlier_widths(
        {"outlier_widths": odd[:1]}
    )
    several = describe_outlier_widths({"outlier_widths": odd})
    assert "in g2 (14 networks) 14.8% more, and 2 widths like these." in several
    assert "g3" not in several


# ---------------------------------------------------------------- what was measured


def test_there_are_recorded_profiles() -> None:
    assert len(RECORDED) >= 5


@pytest.fixture(
    params=[pytest.param(path, marks=[pytest.mark.thorough] * ("erfnet" in path.name)) for path in RECORDED],
    ids=lambda path: path.name.removesuffix(".profile.gz"),
)
def recorded(request: pytest.FixtureRequest) -> Path:
    path = request.param
    assert isinstance(path, Path)
    return path


def recorded_graph(path: Path, shape: tuple[int, ...]) -> ChannelGraph:
    """Of the network that a file is named for, at the input of the recording."""
    return trace_channels(find_task(path.name.partition("-")[0]).model, torch.rand(shape), verify=False)


def test_a_recorded_profile_was_measured_on_an_h200(recorded: Path) -> None:
    profile = Profile.load(recorded)
    header = profile.header
    assert header.meter.device == "NVIDIA H200"
    assert isinstance(header.meter.provenance, Measured)
    assert (profile.label, header.device_type) == ("measured", "cuda")
    assert header.settings is not None
    assert f"-b{header.batch}." in recorded.name
    assert len(profile.design_samples) >= 200
    assert profile.drift is not None
    assert profile.drift.is_steady


def test_a_recorded_profile_can_be_fitted_without_its_network(recorded: Path, tmp_path: Path) -> None:
    profile = Profile.load(recorded)
    model = fit(profile)
    assert model.label == "measured"
    assert model.quality["mean"] < 0.08  # AlexNet's 4096-wide layers jump between kernels, and are the worst
    assert set(model.quality["families"]) == set(FAMILIES)
    samples = samples_from_profile(profile)
    (joules,) = samples.values[samples.is_dense]
    assert model.dense == pytest.approx(joules, rel=0.2)
    assert model.least < model.dense
    model.save(tmp_path / "a.model")
    assert EnergyModel.load(tmp_path / "a.model") == model


def test_a_recorded_profile_answers_as_a_meter(recorded: Path) -> None:
    header = Profile.load(recorded).header
    graph = recorded_graph(recorded, header.input_shapes["0"])
    profile, replay = Profile.load(recorded, graph), find_meter(f"replay:{recorded}")
    assert replay.describe().device == "NVIDIA H200"
    assert replay.describe().label == f"measured (replayed from {recorded.name})"
    for sample in profile.corrected()[::50]:
        reading = replay.cost(graph, profile.named(sample.widths))
        assert (reading.joules, reading.seconds) == (sample.joules, sample.seconds)
