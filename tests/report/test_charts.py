from __future__ import annotations

import re

import pytest

from ecc.report.charts import COLOURS, OTHER, SHAPES, figure, for_file, logarithmic, method_colour, scale_of, var


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("side", [0, 1], ids=["light", "dark"])
def test_text_and_marks_can_be_seen_on_the_page(side: int) -> None:
    paper = COLOURS["paper"][side]
    for name in ("ink", "soft", "good", "bad", "accent"):
        assert contrast(COLOURS[name][side], paper) >= 4.5, name  # text, by WCAG AA
    for name in SHAPES:
        assert contrast(COLOURS[name][side], paper) >= 3, name  # marks


def test_every_method_has_its_own_colour_and_shape() -> None:
    for side in (0, 1):
        assert len({COLOURS[name][side] for name in SHAPES}) == len(SHAPES)
    assert len(set(SHAPES.values())) == len(SHAPES)
    assert method_colour("ecc") == "var(--ecc)"
    assert method_colour("red;} body{") == f"var(--{OTHER[0]})"


@pytest.mark.parametrize(
    ("value", "unit", "factor", "shown"),
    [
        (0.019, "J", 1e-3, "mJ"),
        (7.4e-5, "J", 1e-6, "µJ"),
        (1.0, "s", 1.0, "s"),
        (0.0, "J", 1.0, "J"),
        (2e9, "", 1e9, "G"),
    ],
)
def test_units_get_the_prefix_of_the_largest(value: float, unit: str, factor: float, shown: str) -> None:
    assert scale_of(value, unit) == (factor, shown)


def test_lines_of_a_logarithmic_axis_are_few_and_round() -> None:
    axis = logarithmic([0.011, 2.1])["axis"]["values"]
    assert axis == pytest.approx([0.01, 0.1, 1.0])
    assert logarithmic([3.0, 4.0])["axis"]["values"] == pytest.approx([3, 4, 5])
    low, high = logarithmic([1.0, 100.0], room=0.5)["scale"]["domain"]
    assert (low, high) == pytest.approx((0.9, 1100))


def test_a_figure_for_a_file_knows_nothing_of_a_page() -> None:
    colour = {"field": "method", "legend": None}
    made = figure("a", "A", "b.", 100, {"layer": [{"mark": {"fill": var("ink")}, "encoding": {"color": colour}}]})
    data = {"values": [{"name": "var(--ink)"}]}  # data are left alone, whatever they say
    spec = for_file({**made["spec"], "data": data}, width=300)
    assert (spec["width"], spec["data"], spec["layer"][0]["mark"]["fill"]) == (300, data, COLOURS["ink"][0])
    assert spec["layer"][0]["encoding"]["color"]["legend"] == {"title": None}
    assert not re.search(r"var\(--", str({key: value for key, value in spec.items() if key != "data"}))
    assert made["spec"]["width"] == "container"
