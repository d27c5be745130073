from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from ecc.measure import Declared, MeasureSettings, Profile, Progress
from ecc.measure.drift import Drift
from ecc.report.live_profile import ProfileView, profile_facts, profile_summary
from measure.profile_cases import Prices, header, profile_of, reference, sample, small_graph

DRIFT = Drift(references=3, cv=0.004, span=0.01, noise=0.002, is_significant=True)


class Screen:
    """A console that remembers, and a clock that is set by hand."""

    def __init__(self, *, terminal: bool) -> None:
        self.text = io.StringIO()
        self.seconds = 0.0
        console = Console(file=self.text, force_terminal=terminal, width=100, color_system=None)
        self.view = ProfileView(console, now=lambda: self.seconds)

    def show(self, done: int, total: int = 50, **values: Any) -> None:
        self.view(Progress(done=done, total=total, label="measured", **values))


def test_elsewhere_than_in_a_terminal_a_line_comes_every_ten_rows() -> None:
    screen = Screen(terminal=False)
    with screen.view:
        screen.show(0)
        for done in range(1, 51):
            screen.seconds = 4.0 * done
            screen.show(done, sample=sample(done, 0.02471, relative_ci=0.004), error=0.023, drift=DRIFT)
            screen.show(done, sample=reference(0.03))
    lines = screen.text.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[0] == ("10 of 50 networks, 0.02471 J +- 0.4% (measured), fit error 2.3%, reference +-0.4%, 3 min left")
    assert lines[3].endswith("40 s left")
    assert lines[4].endswith("reference +-0.4%")


def test_time_left_counts_from_where_this_run_began() -> None:
    screen = Screen(terminal=False)
    screen.show(30)
    screen.seconds = 10.0
    screen.show(40, sample=sample(1))
    assert screen.text.getvalue().strip().endswith("10 s left")


def test_the_last_line_comes_whatever_the_number() -> None:
    screen = Screen(terminal=False)
    screen.show(7, total=7, sample=sample(1))
    assert screen.text.getvalue() == "7 of 7 networks, 1 J (measured)\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_messages_are_always_shown(terminal: bool) -> None:
    screen = Screen(terminal=terminal)
    with screen.view:
        screen.show(3, message="row 3 failed: too hot. Trying once more. [sic]")
    assert "row 3 failed: too hot. Trying once more. [sic]" in screen.text.getvalue()


def test_a_terminal_shows_a_bar() -> None:
    screen = Screen(terminal=True)
    with screen.view:
        screen.show(20, sample=sample(1, 0.02471), error=0.023)
    assert "20/50" in screen.text.getvalue()
    assert "0.02471 J (measured), fit error 2.3%" in screen.text.getvalue()


def test_the_meter_is_told_before_anything_is_measured() -> None:
    for device, place in ((None, "no network is run"), ("cuda", "networks run on cuda")):
        screen = Screen(terminal=False)
        screen.view.announce(Prices().describe(), device)
        assert screen.text.getvalue() == ""  # an error, if there is one, comes alone
        screen.show(0)
        screen.show(1, message="hello")
        assert screen.text.getvalue() == f"coefficients: paper, all, energy counter (estimated); {place}\nhello\n"


def test_without_a_console_nothing_is_shown() -> None:
    view = ProfileView(None)
    with view:
        view(Progress(done=10, total=20, label="measured", sample=sample(1), message="hello"))
    assert view.so_far("a.profile") == "10 of 20 networks are in a.profile; the same command goes on from there."


def test_before_the_first_row_there_is_nothing_to_go_on_from() -> None:
    assert ProfileView(None).so_far("a.profile") == "nothing was measured yet."


# ---------------------------------------------------------------- in the end


def some_profile(**changes: Any) -> Profile:
    rows = [sample(i, 0.5 + 0.01 * i, (4 + i, 3)) for i in range(12)]
    return profile_of(reference(2.0), *rows, reference(2.02), **changes)


def test_facts_for_programs() -> None:
    facts = profile_facts(some_profile(), small_graph())
    assert facts["label"] == "estimated"
    assert (facts["networks"], facts["references"], facts["batch"]) == (12, 2, 2)
    assert (facts["least_joules"], facts["most_joules"], facts["dense_joules"]) == (0.5, 0.61, 2.02)
    assert facts["steady"] is True
    assert facts["quick_fit_error"] > 0
    assert profile_facts(some_profile())["quick_fit_error"] is None


def test_an_empty_profile_has_facts_too() -> None:
    facts = profile_facts(profile_of())
    assert (facts["networks"], facts["dense_joules"], facts["least_joules"]) == (0, None, None)
    assert profile_summary(profile_of(), "a") == "a: 0 networks, estimated: paper, batch 2"


def test_the_summary_carries_the_label() -> None:
    lines = profile_summary(some_profile(), "a.profile", small_graph()).splitlines()
    assert lines[0] == "a.profile: 12 networks, estimated: paper, batch 2"
    assert lines[1] == "0.5 to 0.61 J an inference; dense 2.02 J"
    assert lines[2].startswith("a quick fit errs by ")
    assert len(lines) == 3  # arithmetic does not drift


def test_drift_and_repeats_of_measured_profiles_are_told() -> None:
    profile = profile_of(
        reference(2.0, measured_at="2026-01-01T00:00:01+00:00"),
        sample(0, measured_at="2026-01-01T00:00:01.750+00:00"),
        sample(0, 1.01, round=1),
        reference(2.3),
        device_type="cpu",
    )
    lines = profile_summary(profile, "a").splitlines()
    assert "0.75 s a network in all" in lines
    assert "repeats differ by 0.70% (standard deviation)" in lines
    assert any(line.startswith("reference measured 2 times: spread 9.87%") for line in lines)
    assert lines[-1].startswith("warning: the reference varied too much")
    assert lines[-1].endswith("ecc fit --allow-drift (allow_drift=True).")


def test_the_mode_is_told_with_its_reason() -> None:
    profile = some_profile(settings=MeasureSettings(mode="graph"), mode_reason="it can be captured")
    assert "mode graph: it can be captured" in profile_summary(profile, "a").splitlines()
    facts = profile_facts(profile)
    assert (facts["mode"], facts["mode_reason"]) == ("graph", "it can be captured")
    assert (profile_facts(some_profile())["mode"], profile_facts(some_profile())["mode_reason"]) == (None, None)


def test_a_floor_under_the_energy_is_told() -> None:
    profile = profile_of(reference(1.0), sample(0, 0.97))
    assert "even the least network takes 97% of the dense one" in profile_summary(profile, "a")
    wide = profile_of(reference(1.0), replace(sample(0, 0.97), widths=profile.header.full_widths))
    assert "even the least" not in profile_summary(wide, "a")  # nothing narrow was measured


def test_the_label_is_that_of_the_meter() -> None:
    meter = header().meter
    declared = some_profile(meter=type(meter)(**{**vars(Prices().describe()), "provenance": Declared(15)}))
    assert "CPU time x declared 15 W" in profile_summary(declared, "a")
