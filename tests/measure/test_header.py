from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from ecc.measure.profile_header import Design, ProfileHeader, disagreement, input_of, network_of

from ecc.errors import BadFile, BadMeasurement
from ecc.measure import CounterProbe, Declared, Measured, MeasureSettings, MeterInfo
from measure.profile_cases import header, small_graph

PLAN = Design(kind="uniform", seed=3, width_multiple=8, samples=20, rounds=2, reference_every=5, shard=(3, 8))
METER = MeterInfo(name="nvml", device="GPU", device_id="GPU-1", provenance=Measured(), scope="board", covers=("cuda",))
MEASURED = header(
    meter=METER,
    device_type="cuda",
    settings=MeasureSettings(mode="graph", precision="tf32"),
    design=PLAN,
    counter=CounterProbe(moves=True, tick_seconds=0.1, read_seconds=1e-4, idle_watts=80.0),
    environment={"torch": "2.9", "python": "3.12", "ecc": "1", "driver": "550"},
    created="2026-01-01T00:00:00.000+00:00",
)


@pytest.mark.parametrize("one", [header(), MEASURED], ids=["estimated", "measured"])
def test_a_header_comes_back_as_it_was(one: ProfileHeader) -> None:
    back = ProfileHeader.from_dict(json.loads(json.dumps(one.to_dict())))
    assert back == one
    assert disagreement(one, back) is None


def test_a_header_says_what_the_numbers_are() -> None:
    data = MEASURED.to_dict()
    assert list(data)[:4] == ["format", "version", "created", "label"]
    assert data["label"] == "measured"
    assert data["units"]["joules"] == "gross, one inference of the whole batch"
    assert data["network"]["groups"] == ["first", "second"]
    assert data["network"]["full_widths"] == [16, 12]
    assert data["input"] == {"batch": 2, "shapes": {"0": [2, 3, 6, 6]}}


def test_inputs_are_told_by_name_or_position() -> None:
    first, second = torch.ones(4, 3), torch.ones(4)
    assert input_of((first, second)) == {"input_shapes": {"0": (4, 3), "1": (4,)}, "batch": 4}
    assert input_of({"ids": first}) == {"input_shapes": {"ids": (4, 3)}, "batch": 4}
    assert input_of(torch.tensor(1.0)) == {"input_shapes": {"0": ()}, "batch": 1}


def test_the_graph_gives_the_groups_that_can_be_cut() -> None:
    assert network_of(small_graph()) == {
        "structure": small_graph().structure,
        "groups": ("first", "second"),
        "full_widths": (16, 12),
    }


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"structure": replace(small_graph().structure, fingerprint="0" * 16)}, "network.fingerprint"),
        ({"groups": ("first", "other")}, "network.groups"),
        ({"full_widths": (16, 7)}, "network.full_widths"),
        ({"batch": 64}, "input.batch"),
        ({"input_shapes": {"0": (2, 3, 8, 8)}}, "input.shapes.0"),
        ({"input_shapes": {"0": (2, 3, 6, 6), "1": (2,)}}, "input.shapes.1"),
        ({"device_type": "cpu"}, "device"),
        ({"meter": replace(METER, name="rapl")}, "meter.name"),
        ({"meter": replace(METER, device="another GPU")}, "meter.device"),
        ({"meter": replace(METER, device_id="GPU-2")}, "meter.device_id"),
        ({"meter": replace(METER, scope="module")}, "meter.scope"),
        ({"meter": replace(METER, reads="integrated power")}, "meter.reads"),
        ({"meter": replace(METER, max_watts=300.0)}, "meter.max_watts"),
        ({"meter": replace(METER, provenance=Declared(15))}, "label"),
        ({"settings": replace(MEASURED.settings, mode="eager")}, "settings.mode"),  # type: ignore[type-var]
        ({"settings": replace(MEASURED.settings, precision="fp16")}, "settings.precision"),  # type: ignore[type-var]
        ({"settings": replace(MEASURED.settings, memory_format="channels_last")}, "settings.memory_format"),  # type: ignore[type-var]
        ({"settings": replace(MEASURED.settings, cudnn_autotune=False)}, "settings.cudnn_autotune"),  # type: ignore[type-var]
        ({"settings": replace(MEASURED.settings, window_seconds=0.7)}, "settings.window_seconds"),  # type: ignore[type-var]
        ({"settings": None}, "settings.mode"),
        ({"design": replace(PLAN, kind="mixed")}, "design.kind"),
        ({"design": replace(PLAN, seed=4)}, "design.seed"),
        ({"design": replace(PLAN, width_multiple=None)}, "design.width_multiple"),
        ({"design": replace(PLAN, reference_every=7)}, "design.reference_every"),
        ({"design": replace(PLAN, shard=(4, 8))}, "design.shard"),
        ({"environment": {**MEASURED.environment, "torch": "2.10"}}, "environment.torch"),
        ({"environment": {**MEASURED.environment, "driver": "560"}}, "environment.driver"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_changes_joules_is_a_disagreement(change: dict[str, Any], field: str) -> None:
    other = replace(MEASURED, **change)
    found = disagreement(MEASURED, other)
    assert found is not None
    assert found[0] == field
    assert found[1] != found[2]
    back = disagreement(other, MEASURED)
    assert back is not None
    assert (back[1], back[2]) == (found[2], found[1]) or back[0].startswith("settings")


@pytest.mark.parametrize(
    "change",
    [
        {"created": None},
        {"counter": None},
        {"mode_reason": "as asked for"},
        {"design": replace(PLAN, samples=200, rounds=3)},
        {"environment": {**MEASURED.environment, "python": "3.13", "ecc": "2"}},
        {"meter": replace(METER, notes=("said better",))},
    ],
)
def test_what_changes_no_joule_is_not(change: dict[str, Any]) -> None:
    assert disagreement(MEASURED, replace(MEASURED, **change)) is None


def test_arithmetic_does_not_depend_on_what_computed_it() -> None:
    assert disagreement(header(), header(environment={"torch": "3"})) is None
    assert disagreement(header(), header(environment={})) is None


def test_fields_can_be_passed_over() -> None:
    other = replace(MEASURED, design=replace(PLAN, shard=None))
    assert disagreement(MEASURED, other, may_differ=frozenset({"design.shard"})) is None


def broken(**changes: Any) -> dict[str, Any]:
    return {**json.loads(json.dumps(MEASURED.to_dict())), **changes}


def network(**changes: Any) -> dict[str, Any]:
    return {**MEASURED.to_dict()["network"], **changes}


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (broken(format="ecc channel graph"), BadFile, "not the header of a profile"),
        (broken(version=7), BadFile, "has version 7; this ecc reads version 2"),
        (broken(network=network(groups=["first"])), ValueError, "do not fit the structure"),
        (broken(network=network(full_widths=[16, 7])), ValueError, "do not fit the structure"),
        (broken(network=network(fingerprint="0")), ValueError, "network 0 with the structure of"),
        (broken(design={"kind": "mixed"}), KeyError, "shard"),
        (broken(settings={"mode": "warp"}), BadMeasurement, "mode='warp' is unknown"),
    ],
)
def test_a_damaged_header_is_refused(data: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ProfileHeader.from_dict(data)


def test_what_a_later_version_adds_is_passed_over() -> None:
    data = broken()
    data["settings"]["warp"] = 9
    data["later"] = True
    assert ProfileHeader.from_dict(data) == MEASURED


@pytest.mark.parametrize(
    "changes",
    [
        {"settings": 0},
        {"settings": ""},
        {"counter": []},
        {"design": {**MEASURED.to_dict()["design"], "samples": 10**18}},
        {"design": {**MEASURED.to_dict()["design"], "samples": "many"}},
        {"design": {**MEASURED.to_dict()["design"], "shard": [1]}},
        {"design": {**MEASURED.to_dict()["design"], "kind": 5}},
        {"meter": {**MEASURED.to_dict()["meter"], "device": ["a"]}},
        {"meter": {**MEASURED.to_dict()["meter"], "device": "\x1b[2J"}},
        {"environment": 5},
        {"merged_from": [5]},
        {"device": 5},
    ],
)
def test_values_of_another_kind_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises((BadFile, BadMeasurement, LookupError, TypeError, ValueError, AttributeError)):
        ProfileHeader.from_dict(broken(**changes))


def test_the_reason_of_the_mode_is_kept_and_older_headers_have_none() -> None:
    made = replace(MEASURED, mode_reason="it can be captured")
    data = made.to_dict()
    assert ProfileHeader.from_dict(data).mode_reason == "it can be captured"
    del data["mode_reason"]
    assert ProfileHeader.from_dict(data).mode_reason is None
    with pytest.raises(ValueError, match="reason of the mode"):
        ProfileHeader.from_dict({**data, "mode_reason": 3})
