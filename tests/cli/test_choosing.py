from __future__ import annotations

import pytest

from ecc.cli.options import parse_image_size, source_of, usable_device
from ecc.errors import BadMeasurement, EccError, NoMeter
from methods.jobs import digits_model


def test_a_device_is_named_back_if_torch_can_use_it() -> None:
    assert usable_device("cpu") == "cpu"
    with pytest.raises(EccError, match=r"device 'warp' cannot be used here: .* Give --device cpu or leave it out"):
        usable_device("warp")
    with pytest.raises(EccError, match="device 'meta' cannot be used here"):
        usable_device("meta")


def test_results_are_weighed_by_what_the_model_was_fitted_on() -> None:
    model = digits_model()
    found = source_of("auto", model)
    assert found is not None
    assert found.describe() == model.origin.meter
    assert source_of("none", model) is None
    with pytest.raises(NoMeter):
        source_of("magic", model)


def test_a_meter_that_is_not_here_is_no_reason_to_trust_the_model_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    model = digits_model()
    meter = replace(model.origin.meter, name="nvml", device="NVIDIA H200")
    elsewhere = replace(model, origin=replace(model.origin, meter=meter, device_type="cuda"))

    def missing(spec: str, **_: object) -> None:
        raise NoMeter(f"{spec} is not here.")

    monkeypatch.setattr("ecc.measure.find_meter", missing)
    with pytest.raises(BadMeasurement, match=r"was measured by nvml on NVIDIA H200, .*--meter none"):
        source_of("auto", elsewhere)


@pytest.mark.parametrize(("text", "size"), [("128", (128, 128)), ("360x480", (360, 480)), (" 8x16 ", (8, 16))])
def test_a_size_is_one_number_or_height_and_width(text: str, size: tuple[int, int]) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "12x", "x12", "1.5", "-3", "128x128x3", "999999"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(EccError, match=r"cannot be read; write 128, or height x width"):
        parse_size(text)
