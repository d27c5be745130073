from __future__ import annotations

import copy
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ecc.energy import Cost, EnergyModel
from ecc.errors import BadTask, EccError, InfeasibleBudget
from ecc.methods import Amc, Eap, EapSettings, Greedy, Lcp, NetAdapt, PruningContext, Uniform
from ecc.methods.base import magnitudes
from ecc.methods.cost_evaluator import MeasuredCost
from ecc.methods.driving import MAX_CORRECTIONS, Drive, MaskedAdam, first_targets
from ecc.methods.landing import BAND
from ecc.training import Interrupted
from ecc.training.state_tree import tree_of
from methods.jobs import WIDE, history_of, same_result, wide_job, wide_task
from methods.works import work_of


class OneByOne:
    """A method of many steps: each takes the least channel of the widest group."""

    name = "one by one"
    needs_held_out = False

    def config(self) -> dict[str, Any]:
        return {"count": 1}

    def start(self, work: PruningContext) -> None:
        self.work, self.steps = work, 0

    @property
    def is_done(self) -> bool:
        return self.work.constraint_violation(self.work.widths()) <= 0

    def step(self) -> None:
        self.steps += 1
        widths = self.work.widths()
        widest = max(
            (width, number) for number, width in enumerate(widths) if self.work.graph.groups[number].frozen is None
        )[1]
        widths[widest] -= 1
        self.work.keep_channels_(self.work.model, magnitudes(self.work), widths)
        self.work.train(self.work.model, 1, 1e-3, self.work.stream)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = int(state["steps"])


class Stop(Exception):
    pass


def erring(work: PruningContext, factor: float, relative_ci: float | None = None) -> Any:
    cost: Cost = work.costs[0]

    def scales(widths: Mapping[str, int]) -> MeasuredCost:
        true = factor * float(cost.value(work.graph.widths(widths)))
        return MeasuredCost({"energy": true}, "measured", relative_ci)

    return scales


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.3])
def test_a_method_is_asked_until_the_scales_agree(factor: float) -> None:
    work, method = work_of(share=0.5), Uniform()
    limit = work.targets[0]
    method.start(work)
    drive, saves = Drive(method, work, [limit], erring(work, factor)), []
    drive.go(lambda: saves.append(drive.state()))
    assert drive.landed
    assert drive.weighings[-1].weighed["energy"] <= limit
    assert drive.weighings[0].weighed["energy"] == pytest.approx(factor * drive.weighings[0].predicted["energy"])
    assert bool(drive.note) == (drive.weighings[-1].weighed["energy"] < BAND[0] * limit)
    assert len(saves) >= 2


@pytest.mark.parametrize("fixed", [0.02, 0.05, 0.15, 0.3])
@pytest.mark.parametrize("method", [Uniform, Greedy])
def test_a_method_that_prunes_from_dense_is_also_asked_for_more(method: Any, fixed: float) -> None:
    """Where the model takes for fixed what falls with the widths, the first network is far too small."""
    work, one = work_of(share=0.5), method()
    limit, dense = work.targets[0], float(work.costs[0].value(work.graph.widths({})))

    def scales(widths: Mapping[str, int]) -> MeasuredCost:
        predicted = float(work.costs[0].value(work.graph.widths(widths)))
        return MeasuredCost({"energy": (predicted - fixed * dense) / (1 - fixed)}, "measured")

    one.start(work)
    drive, states = Drive(one, work, [limit], scales), []
    drive.go(lambda: states.append((copy.deepcopy(drive.state()), copy.deepcopy(work.model.state_dict()))))
    shares = [weighing.weighed["energy"] / limit for weighing in drive.weighings]
    assert drive.landed
    assert 0.95 <= shares[-1] <= BAND[1]  # as near as widths allow
    assert shares[0] < 0.99
    assert len(shares) <= MAX_CORRECTIONS
    assert drive.weighings[-1].widths == dict(zip(work.graph.full_widths, work.widths(), strict=True))

    # Stopped after any step or weighing, it ends with the same network.
    for state, weights in states:
        other, again = work_of(share=0.5), method()
        again.start(other)
        other.model.load_state_dict(weights)
        resumed = Drive(again, other, [limit], scales)
        resumed.restore(state)
        resumed.go(lambda: None)
        assert resumed.weighings == drive.weighings
        assert other.widths() == work.widths()


def test_where_the_next_network_is_too_large_it_goes_back() -> None:
    work, method = work_of(share=0.5), Uniform()
    limit, first = work.targets[0], None

    def scales(widths: Mapping[str, int]) -> MeasuredCost:
        nonlocal first
        first = first or widths
        return MeasuredCost({"energy": (0.9 if widths == first else 1.1) * limit}, "measured")

    method.start(work)
    drive = Drive(method, work, [limit], scales)
    drive.go(lambda: None)
    assert drive.landed
    assert drive.note == "the result lies at 90.0% of the budget."
    assert drive.weighings[-1].widths == first == dict(zip(work.graph.full_widths, work.widths(), strict=True))


class Stubborn(Uniform):
    """Done as soon as it has cut, whatever the targets are."""

    cuts = 0

    @property
    def is_done(self) -> bool:
        return self.cuts > 0

    def step(self) -> None:
        self.cuts += 1
        super().step()


def test_a_network_that_does_not_change_is_weighed_once() -> None:
    """MeasuredCost again and again, it would be found within the budget by chance."""
    work, method = work_of(share=0.5), Stubborn()
    method.start(work)
    readings = iter([1.02, 0.99])
    drive = Drive(
        method, work, list(work.targets), lambda _: MeasuredCost({"energy": next(readings) * limit}, "measured")
    )
    limit = work.targets[0]
    drive.go(lambda: None)
    assert not drive.landed
    assert drive.note == "the result lies at 102.0% of the budget, and uniform goes no lower."
    assert len(drive.weighings) == 1


def test_scales_that_scatter_make_it_aim_lower() -> None:
    targets = []
    for ci in (None, 0.01):
        work, method = work_of(share=0.5), Uniform()
        method.start(work)
        drive = Drive(method, work, list(work.targets), erring(work, 1.3, ci))
        drive.go(lambda: None)
        targets.append(drive.weighings[0].targets["energy"])
    assert targets[1] < targets[0]


def test_scales_that_never_agree_end_it_with_a_note() -> None:
    work, method = work_of(share=0.9), Uniform()
    method.start(work)
    drive = Drive(method, work, list(work.targets), lambda _: MeasuredCost({"energy": 1.01 * work_limit}, "measured"))
    work_limit = work.targets[0]
    drive.go(lambda: None)
    assert not drive.landed
    assert f"after {MAX_CORRECTIONS} corrections" in drive.note


def test_aims_below_the_floors_end_it() -> None:
    work, method = work_of(share=0.5, min_width_ratio=0.6), Uniform()
    method.start(work)
    least = float(work.costs[0].value(torch.tensor(work.min_widths(), dtype=torch.float64)))
    work.targets = [0.9 * least]
    with pytest.raises(InfeasibleBudget, match="cannot meet the budget"):
        Drive(method, work, [0.9 * least], erring(work, 1.0)).go(lambda: None)
    work.targets = [1.01 * least]
    drive = Drive(method, work, [1.01 * least], erring(work, 1.5))
    drive.go(lambda: None)
    assert "the floors allow no less" in drive.note
    assert not drive.landed


def test_the_first_aims_take_the_change_of_the_dense_network_since_the_profile() -> None:
    work = work_of(share=0.5)
    cost = work.costs[0]
    assert isinstance(cost, EnergyModel)
    dense = cost.dense
    missed = replace(cost, dense_sample=cost.dense / 2)
    assert first_targets([missed], [0.3], MeasuredCost({"energy": dense}, "measured")) == pytest.approx([0.15])
    assert first_targets([missed], [0.3], MeasuredCost({"energy": dense / 2}, "measured")) == pytest.approx([0.3])
    assert first_targets([cost], [0.3], MeasuredCost({"energy": 2 * dense}, "measured")) == pytest.approx([0.15])
    assert first_targets([cost], [0.3], MeasuredCost({}, "measured")) == pytest.approx([0.3])


@pytest.mark.parametrize("name", WIDE)
def test_silent_channels_stay_silent_while_others_train(name: str) -> None:
    work = work_of(name)
    widths = work.round_widths([0.5 * group.width for group in work.graph.groups])
    work.keep_channels_(work.model, magnitudes(work), widths)
    before = copy.deepcopy(work.model.state_dict())
    work.train(work.model, 3, 1e-2, work.stream)
    assert work.widths() == widths
    assert any(not torch.equal(before[key], value) for key, value in work.model.state_dict().items())
    assert work.stream.total == 3
    assert isinstance(MaskedAdam(work.model, work.graph, 1e-3, 0.0), torch.optim.Adam)


def test_a_run_that_was_stopped_between_steps_ends_as_one_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job() -> Any:
        made = wide_job("70%", factor=0.9)
        made.method = OneByOne()
        return made

    whole = job().run(tmp_path / "whole")
    with monkeypatch.context() as patched:
        real = OneByOne.step

        def dies(self: OneByOne) -> None:
            if self.steps == 5:
                raise Stop
            real(self)

        patched.setattr(OneByOne, "step", dies)
        with pytest.raises(Stop):
            job().run(tmp_path / "parts")
    again = job().run(tmp_path / "parts")
    assert same_result(whole, again)
    assert again.summary == whole.summary
    assert history_of(tmp_path / "parts") == history_of(tmp_path / "whole")


class Asked(OneByOne):
    """Is asked to stop while it trains."""

    def step(self) -> None:
        if self.steps == 3:
            signal.raise_signal(signal.SIGINT)
        super().step()


def test_a_run_that_was_asked_to_stop_saves_its_state_and_goes_on(tmp_path: Path) -> None:
    def job(method: Any) -> Any:
        made = wide_job("70%", factor=0.9)
        made.method = method
        return made

    whole = job(OneByOne()).run(tmp_path / "whole")
    told = r"stopped by signal 2 after step 4 of one by one, which .*checkpoint.safetensors holds\. Give the same"
    with pytest.raises(Interrupted, match=told):
        job(Asked()).run(tmp_path / "parts")
    assert same_result(whole, job(OneByOne()).run(tmp_path / "parts"))


class Choosing(Uniform):
    def step(self) -> None:
        self._work.held_out(self._work.model)


@pytest.mark.parametrize("method", [NetAdapt(), Amc(), Lcp(), Eap(EapSettings(max_drop=0.1))])
def test_missing_held_out_data_are_refused_before_anything_is_trained(tmp_path: Path, method: Any) -> None:
    def untrainable(epoch: int) -> Any:
        raise AssertionError("it trains")

    job = wide_job("50%", task=wide_task(train_batches=untrainable), pretrain_steps=5)
    job.method = method
    with pytest.raises(BadTask, match=f"{method.name} chooses .*'chain' has no evaluate_held_out.* such as ecc"):
        job.run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_method_that_does_not_say_that_it_judges_is_found_out(tmp_path: Path) -> None:
    job = wide_job("50%")
    job.method = Choosing()
    with pytest.raises(BadTask, match="its needs_held_out must be True"):
        job.run(tmp_path / "run")


@pytest.mark.parametrize("method", [Uniform(), Greedy(), Amc(), Eap(), Lcp(), NetAdapt()])
def test_a_checkpoint_holds_the_network_once(method: Any) -> None:
    """The dense weights never change, and `start` has them."""
    work = work_of(share=0.5)
    method.start(work)
    _, tensors = tree_of(method.state_dict())
    dense = {tensor.shape for tensor in work.model.state_dict().values() if tensor.dim() > 1}
    assert not [tensor.shape for tensor in tensors if tensor.shape in dense]


def test_several_processes_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    job = wide_job("50%")
    job.method = Uniform()
    job.distributed.size = 2
    with pytest.raises(EccError, match="uniform chooses in one process, and this is one of 2"):
        job.run(tmp_path / "run")
    assert not (tmp_path / "run").exists()
