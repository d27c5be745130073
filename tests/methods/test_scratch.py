from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ecc.energy import parse_budgets
from ecc.errors import BadTask, BadWidths
from ecc.graph import live_masks
from ecc.methods import Compression, CompressSettings, PruningContext, Uniform
from ecc.methods.base import magnitudes
from ecc.methods.baselines.scratch import Scratch, redraw_
from ecc.options import settings_from
from ecc.training import BatchStream
from ecc.zoo import find_task
from ecc.zoo.digits import DigitsNet
from methods.jobs import digits_model, platform, wide_task
from methods.nets import NETS, macs_cost, traced


def work_of(net: str = "chain", seed: int = 0) -> PruningContext:
    model, _, graph = traced(net)
    return PruningContext(
        model=model,
        graph=graph,
        costs=(macs_cost(graph),),
        targets=[1e-12],
        settings=settings_from(CompressSettings, dict(seed=seed)),
        width_multiple=1,
        stream=BatchStream(wide_task("chain")),
        teacher=None,
        held_out=lambda model: 0.0,
        train=lambda model, steps, lr, stream: None,
        log=lambda facts: None,
    )


def halves(work: PruningContext) -> dict[str, int]:
    return {group.name: group.width // 2 for group in work.graph.prunable if group.width >= 4}


def scratched(work: PruningContext, **fields: Any) -> PruningContext:
    method = Scratch(halves(work), **fields)
    method.start(work)
    assert not method.is_done
    method.step()
    assert method.is_done
    return work


def states_equal(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("net", ["chain", "residual", "depthwise", "digits"])
def test_channels_are_silent_as_given_and_all_weights_are_new(net: str) -> None:
    work = work_of(net)
    dense, scores, asked = copy.deepcopy(work.model), magnitudes(work), halves(work)
    before = torch.get_rng_state()
    scratched(work)
    assert torch.equal(before, torch.get_rng_state())
    assert dict(zip(work.graph.full_widths, work.widths(), strict=True)) == {**work.graph.full_widths, **asked}
    for group, mask in zip(work.graph.groups, live_masks(work.model, work.graph), strict=True):
        if group.name in asked:
            assert scores[group.name][mask].min() >= scores[group.name][~mask].max()
    for name, weight in work.model.state_dict().items():
        old = dense.state_dict()[name]
        if weight.dim() > 1:
            assert ((weight != old) | (weight == 0)).all()


def test_the_seed_gives_the_weights() -> None:
    one, same, other = (scratched(work_of(seed=seed)).model for seed in (0, 0, 1))
    assert states_equal(one, same)
    assert not states_equal(one, other)


def test_statistics_of_normalisation_are_forgotten() -> None:
    work = work_of("digits")
    with torch.no_grad():
        for name, buffer in work.model.named_buffers():
            if name.endswith("running_mean"):
                buffer.fill_(7)
    redraw_(work.model, 0)
    assert all(not buffer.any() for name, buffer in work.model.named_buffers() if name.endswith("running_mean"))


def test_a_network_may_be_built_anew_in_its_own_way() -> None:
    build, _ = NETS["digits"]
    work = work_of("digits")
    before = torch.get_rng_state()
    redraw_(work.model, 3, build)
    assert torch.equal(before, torch.get_rng_state())
    twin = work_of("digits").model
    redraw_(twin, 3, build)
    assert states_equal(work.model, twin)
    assert not states_equal(work.model, traced("digits")[0])
    assert scratched(work_of("digits"), build=build).widths() == scratched(work_of("digits")).widths()


def test_weights_that_nobody_can_draw_anew_are_refused_unless_the_network_is_built() -> None:
    work = work_of("tied")
    with pytest.raises(BadTask, match="weight would keep trained values"):
        Scratch(halves(work)).start(work)
    scratched(work, build=NETS["tied"][0])


def test_a_new_network_that_reads_nothing_is_refused() -> None:
    def silent() -> nn.Module:
        net = NETS["chain"][0]()
        nn.init.zeros_(net.get_submodule("head").weight)  # type: ignore[arg-type]  # a convolution's
        return net

    work = work_of()
    method = Scratch(halves(work), build=silent)
    method.start(work)
    with pytest.raises(BadTask, match="with zeros"):
        method.step()


def test_widths_that_do_not_fit_are_refused() -> None:
    work = work_of()
    group = work.graph.prunable[0]
    frozen = next(group for group in work.graph.groups if group.frozen is not None)
    for wrong in ({"nobody": 3}, {group.name: 0}, {group.name: group.width + 1}, {frozen.name: frozen.width - 1}):
        with pytest.raises(BadWidths, match=r"nobody|cannot have width"):
            Scratch(wrong).start(work)


def test_its_state_says_that_it_was_cut() -> None:
    work = work_of()
    one, other = Scratch(halves(work)), Scratch(halves(work))
    one.start(work)
    one.step()
    other.start(work)
    other.load_state_dict(one.state_dict())
    assert other.is_done
    assert one.config() == other.config() == {"widths": halves(work), "builds": False}


# ---------------------------------------------------------------- digits, from end to end


def job(method: Any, budget: str, finetune_steps: int = 4) -> Compression:
    return Compression(
        find_task("digits"),
        parse_budgets([budget]),
        digits_model(),
        meter=platform(),
        settings=settings_from(
            CompressSettings,
            dict(pretrain_steps=4, prune_steps=1, finetune_steps=finetune_steps, lr=1e-3, kd_weight=0.0),
        ),
        method=method,
    )


def test_widths_that_another_method_found_are_trained_from_scratch(tmp_path: Path) -> None:
    rival = job(Uniform(), "60%").run(tmp_path / "rival")
    method = Scratch(rival.widths, build=DigitsNet)
    found = job(method, "60%", 8).run(tmp_path / "scratch")
    assert found.widths == rival.widths
    assert found.summary["method"] == "scratch"
    assert found.summary["budgets"]["energy"]["result"] == rival.summary["budgets"]["energy"]["result"]
    again = job(Scratch(rival.widths, build=DigitsNet), "60%", 8).run(tmp_path / "scratch")
    assert states_equal(found.model, again.model)


def test_the_dense_control_is_a_compression_that_may_cost_what_it_costs(tmp_path: Path) -> None:
    result = job(Uniform(), "100%").run(tmp_path / "dense")
    assert result.widths == result.graph.full_widths
