from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from ecc.energy import EnergyModel, fit
from ecc.errors import BadMeasurement
from ecc.measure import Profile
from ecc.methods.cost_evaluator import REPEATS, CostEvaluator, MeasuredCost, SharedCostEvaluator, check_source
from ecc.training import DistributedContext
from energy.cases import origin
from measure.fakes import FakeBoard, FakeMeter
from measure.profile_cases import EXAMPLE, FakeCosts, SmallNet, measured, run_seconds, small_graph
from measure.profile_cases import computed as computed_profile
from methods.jobs import Truth, true_model, wide, wrong_model


@cache
def board_profile() -> Profile:
    """Of a fake board, read by a meter."""
    with TemporaryDirectory() as folder:
        return measured(Path(folder) / "a.profile", FakeBoard())


@cache
def board_model(resource: str = "energy") -> EnergyModel:
    return fit(board_profile(), resource=resource)


# ---------------------------------------------------------------- three ways to weigh


def test_a_platform_is_asked_for_what_it_knows() -> None:
    net, example, graph = wide("residual")
    true, wrong = true_model(graph), wrong_model(graph, 0.8)
    source = Truth(true, true_model(graph, "latency"))
    scales = CostEvaluator(net, graph, example, {"energy": wrong}, source)
    widths = {"stem": 20, "conv1": 7}
    found = scales(widths)
    assert found.amounts == {"energy": true.at(widths), "latency": true_model(graph, "latency").at(widths)}
    assert (found.label, found.relative_ci) == ("estimated", None)
    assert scales({}).amounts["energy"] == pytest.approx(true.dense)
    assert source.calls == 2


def test_without_a_source_the_model_has_the_word_and_is_called_so() -> None:
    net, example, graph = wide("residual")
    energies = {name: wrong_model(graph, 0.8, name) for name in ("energy", "latency")}
    found = CostEvaluator(net, graph, example, energies, None)({"stem": 20})
    assert found == MeasuredCost({name: model.at({"stem": 20}) for name, model in energies.items()}, "predicted", None)


def test_without_a_source_the_dense_network_is_as_the_profile_has_it() -> None:
    net, example, graph = wide("residual")
    model = wrong_model(graph, 0.8, "energy")
    model = replace(model, dense_sample=model.dense / 0.8)
    found = CostEvaluator(net, graph, example, {"energy": model}, None)({})
    assert found.amounts == {"energy": pytest.approx(1.25 * model.dense)}


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_meter_measures_the_network_of_these_widths(noise: float) -> None:
    board = FakeBoard(noise=noise, seed=4)
    meter = FakeMeter(board)
    scales = CostEvaluator(SmallNet(board), small_graph(), EXAMPLE, {"energy": board_model()}, meter, clock=board.clock)
    for widths in ({}, {"first": 8}, {"first": 5, "second": 3}):
        found = scales(widths)
        seconds = run_seconds(widths.get("first", 16), widths.get("second", 12))
        assert found.label == "measured"
        assert found.amounts["latency"] == pytest.approx(seconds, rel=0.02)
        assert found.amounts["energy"] == pytest.approx(board.busy_watts * seconds, rel=0.02)
        assert found.relative_ci is not None
        assert 0 < found.relative_ci < 0.05


def test_what_decides_is_measured_more_often_than_a_row_of_a_profile() -> None:
    board = FakeBoard(noise=0.2)
    scales = CostEvaluator(
        SmallNet(board), small_graph(), EXAMPLE, {"energy": board_model()}, FakeMeter(board), clock=board.clock
    )
    settings = board_model().origin.settings
    assert settings is not None
    assert scales._bench is not None
    careful = scales._bench._settings
    assert (careful.min_repeats, careful.max_repeats) == REPEATS
    assert careful.target_relative_ci < settings.target_relative_ci
    assert careful == replace(
        settings,
        min_repeats=careful.min_repeats,
        max_repeats=careful.max_repeats,
        target_relative_ci=careful.target_relative_ci,
    )  # all else as in the profile
    assert max(REPEATS) > settings.min_repeats


def test_who_asks_for_less_waits_less() -> None:
    took = {}
    for target in (0.001, 0.05):
        board = FakeBoard()
        meter, energies = FakeMeter(board), {"energy": board_model()}
        scales = CostEvaluator(
            SmallNet(board),
            small_graph(),
            EXAMPLE,
            energies,
            meter,
            clock=board.clock,
            repeats=(3, 3),
            target_ci=target,
        )
        started = board.clock.now()
        scales({"first": 8})
        took[target] = board.clock.now() - started
    assert took[0.05] < 0.8 * took[0.001]


def test_a_measurement_that_must_not_be_trusted_is_refused() -> None:
    board = FakeBoard()
    scales = CostEvaluator(
        SmallNet(board), small_graph(), EXAMPLE, {"energy": board_model()}, FakeMeter(board), clock=board.clock
    )
    board.fault = lambda joules, now: 7.0  # the counter stands still from now on
    with pytest.raises(BadMeasurement):
        scales({"first": 8})


# ---------------------------------------------------------------- refused before anything is run


def test_another_device_is_refused_by_name() -> None:
    net, example, graph = wide("residual")
    source = Truth(true_model(graph), device="other paper")
    with pytest.raises(BadMeasurement, match="energy model was fitted on paper, and the meter reads other paper"):
        CostEvaluator(net, graph, example, {"energy": true_model(graph)}, source)
    assert source.calls == 0


def test_every_model_must_be_of_the_device() -> None:
    _, _, graph = wide("residual")
    energy, latency = true_model(graph), true_model(graph, "latency")
    elsewhere = replace(origin(), meter=replace(origin().meter, device="stone"))
    source = Truth(energy, latency)
    check_source(source, [energy, latency])
    check_source(None, [energy, replace(latency, origin=elsewhere)])
    with pytest.raises(BadMeasurement, match="latency model was fitted on stone, and the meter reads paper"):
        check_source(source, [energy, replace(latency, origin=elsewhere)])


def test_a_computed_model_is_not_weighed_by_a_meter(tmp_path: Path) -> None:
    model = fit(computed_profile(tmp_path / "a.profile"))
    board = FakeBoard()
    with pytest.raises(BadMeasurement, match="energy model is computed, and fake measures"):
        CostEvaluator(SmallNet(board), small_graph(), EXAMPLE, {"energy": model}, FakeMeter(board, device="paper"))
    assert board.num_reads == 0
    assert CostEvaluator(SmallNet(), small_graph(), EXAMPLE, {"energy": model}, FakeCosts())({}).label == "estimated"


# ---------------------------------------------------------------- several processes


class TwoWorlds(DistributedContext):
    """The second of two processes; what the first one holds is known."""

    def __init__(self, rank: int, first: list[Tensor]) -> None:
        super().__init__("cpu")
        self.rank, self.size, self.first = rank, 2, first

    def gather(self, tensor: Tensor) -> Tensor:
        if self.rank == 0:
            self.first.append(tensor)
        return torch.stack([self.first[-1], tensor])


class Said:
    """CostEvaluator that say what they were given."""

    def __init__(self, weighed: MeasuredCost) -> None:
        self.weighed = weighed

    def __call__(self, widths: Mapping[str, int]) -> MeasuredCost:
        return self.weighed


@pytest.mark.parametrize(
    "first",
    [
        MeasuredCost({"energy": 1.25, "latency": 0.5}, "measured (on-chip model)", 0.0123),
        MeasuredCost({"energy": 1.25, "latency": 0.5}, "estimated"),
        MeasuredCost({"latency": 0.1}, "CPU time x declared 15 W", 0.0),
        MeasuredCost({"energy": 3.0}, "predicted"),
    ],
)
def test_all_processes_believe_the_first_in_every_field(first: MeasuredCost) -> None:
    second = MeasuredCost({"energy": 9.0, "latency": 9.0}, "predicted")
    shelf: list[Tensor] = []
    scales: Any = [Said(first), Said(second)]
    found = [SharedCostEvaluator(one, TwoWorlds(rank, shelf))({}) for rank, one in enumerate(scales)]
    assert found == [first, first]


def test_one_process_believes_itself() -> None:
    net, example, graph = wide("chain")
    scales = CostEvaluator(net, graph, example, {"energy": true_model(graph)}, Truth(true_model(graph)))
    assert SharedCostEvaluator(scales, DistributedContext("cpu"))({"conv1": 9}) == scales({"conv1": 9})


def test_what_was_weighed_comes_back_from_a_checkpoint_and_nonsense_does_not() -> None:
    weighed = MeasuredCost({"energy": 1.25, "latency": 0.5}, "estimated", 0.01)
    assert MeasuredCost.restored(asdict(weighed)) == weighed
    assert MeasuredCost.restored(asdict(replace(weighed, relative_ci=None))).relative_ci is None
    for amounts in ([1.0], {"energy": "much"}, {"energy": 0.0}, {"energy": float("nan")}, None):
        with pytest.raises((AttributeError, TypeError, ValueError)):
            MeasuredCost.restored({**asdict(weighed), "amounts": amounts})
