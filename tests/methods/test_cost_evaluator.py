from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from ecc.energy import EnergyModel, fit, parse_budgets
from ecc.errors import BadFile, BadMeasurement, EccError
from ecc.methods import Compression, CompressSettings, CostEvaluator, MeasuredCost
from ecc.methods.cost_evaluator import REPEATS, check_meter
from ecc.methods.grid import Comparison
from ecc.profiling import open_meter
from ecc.records import from_builtins, to_builtins
from ecc.task import Task
from ecc.training import DistributedContext
from energy.cases import origin
from measure.fakes import FakeBoard, FakeMeter
from measure.profile_cases import EXAMPLE, FakeCosts, SmallNet, computed, measured, run_seconds, small_graph
from methods.jobs import Truth, true_model, wide, wrong_model


@cache
def board_model() -> EnergyModel:
    """Fitted to a profile of a fake board, which was read by a meter."""
    with TemporaryDirectory() as folder:
        return fit(measured(Path(folder) / "a.profile", FakeBoard()))


def on_board(board: FakeBoard, **options: Any) -> CostEvaluator:
    models, meter = {"energy": board_model()}, FakeMeter(board)
    return CostEvaluator(SmallNet(board), small_graph(), EXAMPLE, models, meter, clock=board.clock, **options)


# ---------------------------------------------------------------- sources of costs


def test_a_platform_computes_the_cost() -> None:
    net, example, graph = wide("residual")
    true, latency = true_model(graph), true_model(graph, "latency")
    evaluate = CostEvaluator(net, graph, example, {"energy": wrong_model(graph, 0.8)}, Truth(true, latency))
    widths = {"stem": 20, "conv1": 7}
    assert evaluate(widths) == MeasuredCost({"energy": true.at(widths), "latency": latency.at(widths)}, "estimated")
    assert evaluate({}).amounts["energy"] == pytest.approx(true.dense)


def test_without_a_meter_the_models_predict() -> None:
    net, example, graph = wide("residual")
    models = {name: wrong_model(graph, 0.8, name) for name in ("energy", "latency")}
    found = CostEvaluator(net, graph, example, models, None)({"stem": 20})
    assert found == MeasuredCost({name: model.at({"stem": 20}) for name, model in models.items()}, "predicted")
    profiled = replace(
        models["energy"], dense_sample=1.25 * models["energy"].dense
    )  # the model misses the dense network
    dense = CostEvaluator(net, graph, example, {"energy": profiled}, None)({})
    assert dense.amounts == {"energy": pytest.approx(1.25 * profiled.dense)}


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_meter_measures_the_network_of_these_widths(noise: float) -> None:
    board = FakeBoard(noise=noise, seed=4)
    evaluate = on_board(board)
    for widths in ({}, {"first": 8}, {"first": 5, "second": 3}):
        found = evaluate(widths)
        seconds = run_seconds(widths.get("first", 16), widths.get("second", 12))
        assert found.label == "measured"
        assert found.amounts == pytest.approx({"energy": board.busy_watts * seconds, "latency": seconds}, rel=0.02)
        assert found.relative_ci is not None
        assert 0 < found.relative_ci < 0.05


def test_a_check_is_measured_more_carefully_than_a_sample_of_a_profile() -> None:
    profiler, settings = on_board(FakeBoard(noise=0.2))._profiler, board_model().origin.settings
    assert profiler is not None
    assert settings is not None
    used = profiler._settings
    assert (used.min_repeats, used.max_repeats) == REPEATS
    assert used.target_relative_ci < settings.target_relative_ci
    assert replace(used, min_repeats=1, max_repeats=1, target_relative_ci=1) == replace(
        settings, min_repeats=1, max_repeats=1, target_relative_ci=1
    )
    seconds = []
    for target in (0.001, 0.05):  # less precision takes less time
        board = FakeBoard()
        evaluate = on_board(board, repeats=(3, 3), target_ci=target)
        started = board.clock.now()
        evaluate({"first": 8})
        seconds.append(board.clock.now() - started)
    assert seconds[1] < 0.8 * seconds[0]


def test_an_untrustworthy_measurement_is_refused() -> None:
    board = FakeBoard()
    evaluate = on_board(board)
    board.fault = lambda joules, now: 7.0  # the counter stands still from now on
    with pytest.raises(BadMeasurement):
        evaluate({"first": 8})


# ---------------------------------------------------------------- refusals


def test_every_model_must_be_of_the_device_of_the_meter(tmp_path: Path) -> None:
    graph = wide("residual")[2]
    energy, latency = true_model(graph), true_model(graph, "latency")
    elsewhere = replace(latency, origin=replace(origin(), meter=replace(origin().meter, device="stone")))
    check_meter(Truth(energy), [energy, latency])
    check_meter(None, [energy, elsewhere])
    with pytest.raises(BadMeasurement, match="latency model was fitted on stone, but the meter reads paper"):
        check_meter(Truth(energy), [energy, elsewhere])
    model, board = fit(computed(tmp_path / "a.profile")), FakeBoard()
    with pytest.raises(BadMeasurement, match="energy model comes from an analytic platform, but fake measures"):
        CostEvaluator(SmallNet(board), small_graph(), EXAMPLE, {"energy": model}, FakeMeter(board, device="paper"))
    assert CostEvaluator(SmallNet(), small_graph(), EXAMPLE, {"energy": model}, FakeCosts())({}).label == "estimated"


def test_a_model_does_not_choose_code_to_execute(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise AssertionError('executed')\n")
    runner, model, board = f"{tmp_path / 'own.py'}:Runner", board_model(), FakeBoard()
    assert model.origin.settings is not None
    model = replace(model, origin=replace(model.origin, settings=replace(model.origin.settings, runner=runner)))
    given: Any = (SmallNet(board), small_graph(), EXAMPLE, {"energy": model})
    for chosen in (None, "eager", "auto"):
        with pytest.raises(EccError, match=r"measured with the runner '.*own\.py:Runner', which would be executed"):
            CostEvaluator(*given, FakeMeter(board), clock=board.clock, runner=chosen)
    with pytest.raises(EccError, match="cannot be created: AssertionError: executed"):
        CostEvaluator(*given, FakeMeter(board), clock=board.clock, runner=runner)
    assert CostEvaluator(*given, None)({}).label == "predicted"  # nothing runs
    task = Task(name="toy", model=SmallNet(), example_input=EXAMPLE, train_batches=lambda _: [], loss=torch.sub)
    options: dict[str, Any] = {"meter": FakeMeter(board), "settings": CompressSettings()}
    with pytest.raises(EccError, match="which would be executed"):
        Compression(task, parse_budgets(["50%"]), model, **options)
    with pytest.raises(EccError, match="which would be executed"):
        Comparison(task, model, methods=["uniform"], budgets=["50%"], **options)
    meter = open_meter("jetson", torch.device("cpu"), [model], targets=["ssh://user@127.0.0.1:1"])
    with pytest.raises(EccError, match="which would be executed"), meter:
        pass


@pytest.mark.parametrize("amounts", [[1.0], {"energy": "much"}, {"energy": 0.0}, {"energy": -1.0}, None])
def test_costs_are_checked_when_they_come_from_a_checkpoint(amounts: Any) -> None:
    good = MeasuredCost({"energy": 1.25, "latency": 0.5}, "estimated", 0.01)
    assert from_builtins(to_builtins(good), MeasuredCost, "here") == good
    with pytest.raises((BadFile, ValueError)):
        from_builtins({**to_builtins(good), "amounts": amounts}, MeasuredCost, "here")


# ---------------------------------------------------------------- several processes


class TwoProcesses(DistributedContext):
    """One of two processes; what the first one sent is known to the second."""

    def __init__(self, rank: int, sent: list[Tensor]) -> None:
        super().__init__("cpu")
        self.rank, self.size, self.sent = rank, 2, sent

    def gather(self, tensor: Tensor) -> Tensor:
        if self.rank == 0:
            self.sent.append(tensor)
        return torch.stack([self.sent[-1], tensor])


@pytest.mark.parametrize("first", [({"energy": 1.25, "latency": 0.5}, 0.0123), ({"latency": 0.1}, 0.0), ({}, None)])
def test_all_processes_use_the_cost_of_the_first(
    first: tuple[dict[str, float], float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(self: CostEvaluator, widths: Mapping[str, int]) -> MeasuredCost:
        assert self._distributed.is_main
        return MeasuredCost(first[0], self.label, first[1])

    monkeypatch.setattr(CostEvaluator, "_evaluate", evaluate)
    (net, example, graph), sent = wide("chain"), list[Tensor]()
    models, meter = {"energy": true_model(graph)}, Truth(true_model(graph))
    for rank in (0, 1):
        found = CostEvaluator(net, graph, example, models, meter, distributed=TwoProcesses(rank, sent))({})
        assert found == MeasuredCost(first[0], "estimated", first[1])
