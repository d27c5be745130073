from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ecc.energy import EnergyModel, counted_cost, fit
from ecc.energy.features import AMOUNTS
from ecc.errors import BadFile
from ecc.graph import trace_channels
from ecc.measure import Profile, find_meter, profile
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
    random_fitted,
    random_model,
    random_widths,
    skeleton_of,
    slow_extent,
    slow_value,
    widths_of,
)

KINDS = tuple(TERMS)


@pytest.fixture(scope="module")
def fitted() -> EnergyModel:
    return fit(computed("digits", "jetson-tx2"), "physical", curve=True)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_its_value_is_the_sum_over_its_terms(kind: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NETWORKS))
    model, widths = random_model(kind, name), data.draw(widths_of(skeleton_of(name)))
    assert float(model.value(widths)) == pytest.approx(slow_value(model.fitted, widths.tolist()), rel=1e-12)


def test_where_it_is_already_it_stays_with_all_that_it_has_made() -> None:
    for cost in (random_model("physical", "chain"), counted_cost(graph_of("chain"), "macs")):
        assert cost.to("cpu") is cost
        moved = cost.to("meta")
        assert moved is not cost
        assert torch.device(moved.device).type == "meta"
        assert torch.device(cost.device).type == "cpu"


def test_it_serves_a_network_of_which_more_is_frozen_and_not_less(tmp_path: Path) -> None:
    task = find_task("digits")
    free, frozen = (trace_channels(task.model, task.example_input, freeze=some) for some in ([], ["stem.0"]))
    assert free.fingerprint != frozen.fingerprint
    assert frozen.fingerprint_if([group.name for group in free.groups if group.frozen is not None]) == free.fingerprint
    models = {
        name: fit(profile(task.model, graph, task.example_input, find_meter("platform:jetson-tx2"), tmp_path / name))
        for name, graph in (("free", free), ("frozen", frozen))
    }
    models["free"].check(free)
    models["free"].check(frozen)
    models["frozen"].check(frozen)
    with pytest.raises(BadFile, match="belongs to network"):
        models["frozen"].check(free)
    with pytest.raises(BadFile, match="belongs to network"):
        models["free"].check(graph_of("chain"))


def test_a_file_that_lies_about_the_dense_network_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "energy.json"
    random_model("bilinear", "chain").save(path)
    data = json.loads(path.read_text(encoding="utf-8"))
    for lie in (-1.0, "half", True, 1e9):
        path.write_text(json.dumps({**data, "quality": {"dense_fitted": lie}}), encoding="utf-8")
        with pytest.raises(BadFile):
            EnergyModel.load(path)


def test_the_authors_model_gives_their_energies_of_alexnet() -> None:
    structure = skeleton_of("alexnet")
    model = model_of(authors_alexnet(), structure)
    assert model.dense == pytest.approx(0.0498, abs=5e-5)
    assert model.dense == pytest.approx(AUTHORS_DENSE_JOULES, rel=1e-12)
    half = model.at(
        {name: width // 2 for name, width in zip(structure.groups[:-1], structure.full_widths, strict=False)}
    )
    inner = sum((0.00754, 0.00391, 0.00494, 0.00339, 0.01616, 0.00721))  # both sides are halved
    assert half == pytest.approx(0.00248 + 0.5 * (0.00223 + 0.00195) + 0.25 * inner, rel=0.002)


@pytest.mark.parametrize("kind", KINDS)
def test_widths_are_given_by_name_and_the_rest_is_full(kind: str) -> None:
    model, structure = random_model(kind, "residual"), skeleton_of("residual")
    assert model.at({"conv1": 2}) == float(model.value(structure.widths({"conv1": 2})))
    assert model.at() == model.dense == float(model.value(structure.widths()))
    assert model.least == float(model.value(torch.tensor(structure.min_widths)))
    assert model.least < model.dense


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_layers_together_cost_what_the_network_costs(kind: str, name: str) -> None:
    """Operators in the network's own forward have the empty path, as has what belongs to no layer."""
    model, structure = random_model(kind, name), skeleton_of(name)
    for widths in random_widths(structure, 3):
        per_layer = model.per_layer(named(structure, widths))
        assert sum(per_layer.values()) == pytest.approx(float(model.value(torch.tensor(widths))), rel=1e-12)
        assert min(per_layer.values()) >= 0
        assert per_layer[""] >= model.fitted.base
    assert set(per_layer) == {"", *(layer.path for layer in structure.layers)}


def test_a_term_of_one_layer_is_charged_to_it() -> None:
    model = random_model("bilinear", "chain", seed=1)
    full, per_layer = model.full_widths, model.per_layer()
    for term, coefficient in zip(model.fitted.terms, model.fitted.coefficients, strict=True):
        assert per_layer[term.name] == pytest.approx(
            coefficient * slow_extent(term.left, full) * slow_extent(term.right, full)
        )


def test_a_term_of_a_group_is_shared_by_what_each_layer_brings(fitted: EnergyModel) -> None:
    term, coefficient = next(
        (t, p) for t, p in zip(fitted.fitted.terms, fitted.fitted.coefficients, strict=True) if len(t.layers) > 1 and p
    )
    alone = replace(
        fitted,
        fitted=replace(fitted.fitted, base=0.0, terms=(term,), coefficients=(coefficient,), steps=(), heights=()),
    )
    worth = [sum(a * u for a, u in zip(part, fitted.fitted.unit_coefficients, strict=True)) for _, part in term.layers]
    expected = dict.fromkeys(("", *fitted.layers), 0.0)
    for (number, _), share in zip(term.layers, worth, strict=True):
        expected[fitted.layers[number]] += alone.dense * share / sum(worth)
    assert alone.per_layer() == pytest.approx(expected)


def test_its_repr_fits_a_line(fitted: EnergyModel) -> None:
    assert repr(fitted).startswith(f"<EnergyModel of {fitted.fingerprint}: {fitted.resource}, {fitted.kind}, ")
    assert len(repr(fitted)) < 160


def test_it_tells_what_it_is() -> None:
    model = random_model("physical", "chain")
    assert (model.resource, model.unit, model.label, model.kind) == ("energy", "J", "estimated", "physical")
    assert replace(model, resource="latency").unit == "s"


# ---------------------------------------------------------------- its network


@pytest.mark.parametrize("kind", KINDS)
def test_another_network_is_refused(kind: str, tmp_path: Path) -> None:
    model = random_model(kind, "chain")
    model.check(graph_of("chain"))
    said = f"belongs to network {graph_of('chain').fingerprint}, and this one is {graph_of('residual').fingerprint}"
    with pytest.raises(BadFile, match=said):
        model.check(graph_of("residual"))
    model.save(tmp_path / "a.model")
    assert EnergyModel.load(tmp_path / "a.model", graph_of("chain")) == model
    with pytest.raises(BadFile, match=said):
        EnergyModel.load(tmp_path / "a.model", graph_of("residual"))


def test_a_profile_of_another_network_is_refused(tmp_path: Path) -> None:
    profile = computed("digits", "jetson-tx2")
    profile.save(tmp_path / "a.profile")
    assert fit(Profile.load(tmp_path / "a.profile", graph_of("digits"))).fingerprint == graph_of("digits").fingerprint
    with pytest.raises(BadFile, match=f"and this one is {graph_of('chain').fingerprint}"):
        Profile.load(tmp_path / "a.profile", graph_of("chain"))


# ---------------------------------------------------------------- its file


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_comes_back_bit_by_bit(kind: str, name: str, tmp_path: Path) -> None:
    model = random_model(kind, name, seed=5)
    model.save(tmp_path / "a.model")
    loaded = EnergyModel.load(tmp_path / "a.model")
    assert loaded == model
    widths = torch.from_numpy(random_widths(skeleton_of(name), 5))
    assert loaded.value(widths).tolist() == model.value(widths).tolist()
    assert loaded.gradient(widths[0]).tolist() == model.gradient(widths[0]).tolist()
    assert loaded.per_layer() == model.per_layer()


def test_a_fitted_model_comes_back_with_its_quality(fitted: EnergyModel, tmp_path: Path) -> None:
    fitted.save(tmp_path / "a.model")
    assert EnergyModel.load(tmp_path / "a.model") == fitted
    fitted.save(tmp_path / "b.model")
    assert (tmp_path / "a.model").read_bytes() == (tmp_path / "b.model").read_bytes()


@pytest.mark.parametrize("strength", [None, 1e-3, math.inf])
def test_any_strength_comes_back(strength: float | None, tmp_path: Path) -> None:
    fitted = replace(
        random_fitted("physical", skeleton_of("chain")), strength=strength, unit_coefficients=(1.0, 0.0, 2.0, 3.0)
    )
    model = model_of(fitted, skeleton_of("chain"))
    model.save(tmp_path / "a.model")
    assert EnergyModel.load(tmp_path / "a.model") == model
    assert "Infinity" not in (tmp_path / "a.model").read_text()  # other languages read JSON too


def test_an_origin_without_settings_comes_back(tmp_path: Path) -> None:
    """Of an estimate, where nothing ran."""
    model = replace(random_model("bilinear", "chain"), origin=replace(origin(), settings=None, device_type=None))
    model.save(tmp_path / "a.model")
    assert EnergyModel.load(tmp_path / "a.model") == model


def test_a_person_can_read_the_file(fitted: EnergyModel, tmp_path: Path) -> None:
    fitted.save(tmp_path / "a.model")
    data = json.loads((tmp_path / "a.model").read_text())
    assert data["unit"] == "J for one inference of the whole batch"
    assert data["label"] == "estimated"
    assert data["origin"]["meter"]["device"] == "NVIDIA Jetson TX2"
    assert list(data["model"]["unit_coefficients"]) == list(AMOUNTS)
    assert len(data["model"]["terms"]) == len(fitted.fitted.coefficients)
    assert data["quality"]["rows"] == 60


def _set(path: str, value: Any) -> Any:
    """A change of one place of the file."""

    def change(data: dict[str, Any]) -> None:
        *way, last = [int(part) if part.isdigit() else part for part in path.split("/")]
        for part in way:
            data = data[part]
        data[last] = value

    return change


DAMAGES = [
    (_set("format", "ecc energy model, version 7"), r"is not an energy model of this version \('ecc energy model, ver"),
    (_set("resource", "money"), "damaged .*resource 'money' is unknown"),
    (_set("network", None), "damaged .*TypeError"),
    (_set("network/groups", ["conv1"]), "damaged .*(of no group|differ in number)"),
    (_set("network/full_widths", [8, 6]), "damaged .*differ in number"),
    (_set("network/layers", []), "damaged .*belongs to no layer"),
    (_set("model/base", -1), "damaged .*coefficient -1 is no number of at least 0"),
    (_set("model/base", "1"), "damaged .*coefficient '1' is no number"),
    (_set("model/base", True), "damaged .*coefficient True is no number"),
    (_set("model/base", math.nan), "damaged .*NaN is not a number"),
    (_set("model/terms/0/coefficient", -1e-9), "damaged .*coefficient -1e-09 is no number of at least 0"),
    (_set("model/terms/0/coefficient", math.inf), "damaged .*Infinity is not a number"),
    (_set("model/terms/0/left", [0, [[3, 1]]]), "damaged .*negative or of no group"),
    (_set("model/terms/0/left", [-1, []]), "damaged .*negative or of no group"),
    (_set("model/terms/0/right", [0, [[0, -1]]]), "damaged .*negative or of no group"),
    (_set("model/terms/0/layers", [[99, [0, 0, 0, 0]]]), "damaged .*belongs to no layer"),
    (_set("model/terms/0/amounts", [0]), "damaged .*1 amounts where there are 4"),
    (_set("model/terms/0/layers", [[0, [0, 0, 0]]]), "damaged .*3 amounts where there are 4"),
    (_set("model/terms/0/coefficient", 1e308), "damaged .*the dense network would take"),
    (_set("network/min_widths", [0, 1, 1]), "damaged .*a least width is outside"),
    (_set("network/min_widths", [10**9, 1, 1]), "damaged .*a least width is outside"),
    (_set("model/terms", 5), "damaged .*TypeError"),
    (_set("origin/meter", {}), "damaged"),
    (_set("origin/settings", {"unheard": 1}), "damaged .*TypeError"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_a_damaged_file_is_refused_by_name(damage: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "a.model"
    random_model("bilinear", "chain").save(path)
    data = json.loads(path.read_text())
    damage(data)
    path.write_text(json.dumps(data))
    with pytest.raises(BadFile, match=rf"a\.model.*{said}"):
        EnergyModel.load(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "5", '{"format": "other"}', "[" * 100_000])
def test_files_that_are_no_model_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.model").write_text(text)
    with pytest.raises(BadFile, match=r"a\.model is (damaged|not an energy model)"):
        EnergyModel.load(tmp_path / "a.model")


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.model"
    random_model("bilinear", "chain").save(path)
    data = path.read_bytes()
    for end in range(0, len(data) - 2, 97):
        path.write_bytes(data[:end])
        with pytest.raises(BadFile, match=r"a\.model is damaged"):
            EnergyModel.load(path)


def test_a_missing_file_and_a_missing_folder_are_told(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"cannot read .*missing: No such file"):
        EnergyModel.load(tmp_path / "missing")
    with pytest.raises(BadFile, match=r"cannot write .*: No such file"):
        random_model("bilinear", "chain").save(tmp_path / "missing" / "a.model")
