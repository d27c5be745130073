from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import cells
import pytest
import resnet56
import resnet56_methods as methods
import resnet56_step as step
import resnet56_table as table
import resnet56_training as training
import torch
import torch.nn.functional as F

from ecc.energy import counted_cost, fit
from ecc.graph import trace_channels, with_widths
from ecc.measure.profile import Profile
from ecc.training import load_state
from ecc.zoo.resnet_cifar import CifarResNet, resnet20
from ecc.zoo.resnet_cifar import resnet56 as resnet56_model

SHARE = 0.47


def arguments_of(method: str, model: torch.nn.Module, **recipe: Any) -> tuple[Any, ...]:
    """What `run_cell` gets for a small data set: four batches an epoch."""
    torch.manual_seed(0)
    images, labels = torch.randint(0, 256, (32, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 10, (32,))
    data = {
        "train": training.Images(training.padded(images), labels),
        "score": training.Images(images.permute(0, 2, 3, 1).contiguous(), labels),
    }
    chosen = training.Recipe(**{"epochs": 3, "batch": 8, "precision": "fp32"} | recipe)
    return method, 0, chosen, SHARE, model, data, training.teacher_logits(model, data["train"], chosen, 0), None


def rows(method: str, *scores: float, met: bool = True) -> list[dict[str, Any]]:
    share = 1.0 if method.startswith("dense") else 0.47
    facts = {"share": share, "macs_share": share, "params": 400_000, "commit": "abc", "share_is_met": met}
    return [{"method": method, "seed": seed, "accuracy": score / 100, **facts} for seed, score in enumerate(scores)]


def record(found: list[dict[str, Any]]) -> dict[str, Any]:
    settings = {"lr": 0.04, "batch": 256, "epochs": 60, "distill": 0.5}
    settings |= {"tune_epochs": 0, "scratch": False, "held_out": False}
    return {"cells": found, "headline": "ecc", "settings": settings}


def test_paired_differences_have_the_interval_of_students_t() -> None:
    found = table.paired_difference({0: 93.0, 1: 93.2, 2: 93.1}, {0: 92.8, 1: 92.9, 2: 93.0, 3: 1.0})
    assert found.pairs == 3
    assert found.mean == pytest.approx(0.2)
    assert found.half_width == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-5)
    assert found.side == "undecided"
    assert table.paired_difference({0: 93.0, 1: 93.1}, {0: 92.0, 1: 92.1 + 1e-9}).side == "ahead"
    assert table.paired_difference({0: 93.0, 1: 93.1}, {0: 94.0, 1: 94.1 + 1e-9}).side == "behind"
    assert table.paired_difference({0: 93.0}, {0: 92.0}).side == "undecided"  # one seed shows nothing
    assert table.paired_difference({0: 93.0}, {1: 92.0}) is None


def test_goals_are_judged_by_the_cells() -> None:
    found = [
        *rows("ecc", 93.0, 93.1, 93.2),
        *rows("uniform", 92.6, 92.7, 92.8),
        *rows("tp_magnitude", 92.3, 92.7, 92.5),
        *rows("dense", 93.3, 93.4, 93.5),
        *rows("dense_distilled", 93.1, 93.2, 93.3),
        *rows("tp_taylor", 99.0, 99.0, 99.0, met=False),  # another share of the MACs does not count
        *rows("ecc_widths", 99.0, 99.0, 99.0),  # a variant is no baseline
    ]
    lead, dense, distilled = table.goals(found, record(found))
    assert "+0.40 (± 0.00)" in lead
    assert lead.endswith("met") and "missed" not in lead  # noqa: PT018
    assert "-0.30" in dense and dense.endswith("missed")  # noqa: PT018
    assert "-0.10" in distilled and distilled.endswith("met")  # noqa: PT018
    of_energy = record(found)
    of_energy["settings"] |= {"profile": "one.profile.gz", "multiple": 4}
    _, distilled = table.goals(found, of_energy)
    assert "at most 0.3 points below the dense" in distilled and distilled.endswith("met")  # noqa: PT018
    assert "to 47% of the energy" in table.section_of(of_energy, 0.47, "source")


def test_the_section_shows_every_method_and_is_empty_without_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = {"method": "tp_taylor", "seed": 1, "error": "RuntimeError: no", "commit": "abc", "share": 0.47}
    other = [{**cell, "share": 0.39} for cell in rows("ecc", 90.0)]
    found = [*rows("ecc", 93.0, 93.1), *rows("uniform", 92.0, 92.1), failed, *other]
    text = table.section_of(record(found), 0.47, "source")
    assert "| ECC (default) | 93.05 | 0.07 | 2 | - | - | 47.0% | 400 k |" in text
    assert "| uniform, Taylor | 92.05 |" in text
    assert "tp_taylor (seed 1)" in text
    assert "93.77" in text
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    assert table.resnet56_section() == ""


def test_the_section_shows_published_numbers_of_about_the_same_macs_and_names_the_protocol() -> None:
    assert {row[1] for row in table.published_near(0.469)} == {
        "2.13x fewer",
        "2.11x fewer",
        "2.12x fewer",
        "2.25x fewer",
        "1.90x fewer",
    }
    assert {row[1] for row in table.published_near(0.389)} == {"2.57x fewer", "2.51x fewer"}
    found = [*rows("ecc", 93.0), *rows("dense_distilled", 93.0)]
    published = record(found)
    published["settings"]["protocol"] = "published"
    text = table.section_of(published, 0.47, "source")
    assert "2.13x fewer MACs, published protocol\n" in text
    assert "Methods with a search see more batches" in text
    assert "network with as many epochs of fine-tuning" in text
    other = table.section_of(record(found), 0.47, "source")
    assert "2.13x fewer MACs\n" in other
    assert "network with the same epochs" in other


@pytest.mark.parametrize(("best", "said"), [(92.5, "is above"), (93.5, "is not above")])
def test_the_summary_says_whether_ecc_is_above_the_best_other_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: float, said: str
) -> None:
    found = [*rows("ecc", 93.0), *rows("uniform", best), *rows("dense_distilled", 95.0)]  # far below the dense network
    (tmp_path / table.FILES[0]).write_text(json.dumps(record(found)), encoding="utf-8")
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    monkeypatch.setattr(table, "load", lambda name: json.loads((tmp_path / name).read_text(encoding="utf-8")))
    assert f"ResNet-56 ECC {said} the best other method: ECC (default) 93.00" in table.long_training()


def test_every_method_has_a_name_in_the_table() -> None:
    assert set(methods.METHODS) == set(table.NAMES)
    assert set(methods.DEFAULT_METHODS) <= set(methods.METHODS)
    assert methods.HEADLINE in methods.DEFAULT_METHODS


def test_macs_are_those_of_the_graph_and_of_the_paper() -> None:
    model = resnet20()
    graph = trace_channels(model, torch.randn(1, 3, 32, 32))
    assert methods.count_macs(model) == counted_cost(graph, "macs").dense == 40_551_040


def test_uniform_widths_use_up_the_macs() -> None:
    graph = trace_channels(resnet20(), torch.randn(1, 3, 32, 32))
    cost = counted_cost(graph, "macs")
    full = {group.name: group.width for group in graph.groups}
    least = {group.name: 1 if group.frozen is None else group.width for group in graph.groups}
    for share in (0.8, 0.47, 0.3):
        limit = share * cost.dense
        widths = methods.match_widths(full, least, lambda some: float(cost.value(graph.widths(some))), limit)
        macs = float(cost.value(graph.widths(widths)))
        assert limit * 0.985 <= macs <= limit  # a channel of ResNet-20 is up to 1 % of it
        ratios = [widths[group.name] / group.width for group in graph.prunable]
        assert max(ratios) - min(ratios) <= 1 / 8


def test_widths_of_an_energy_share_are_multiples() -> None:
    energy = fit(Profile.load(Path(__file__).parent.parent / "results/depth/resnet56-m4.profile.gz"))
    model = resnet56_model()
    graph = trace_channels(model, torch.randn(1, 3, 32, 32), verify=False)
    limit = 0.6 * energy.dense_profiled
    least = {group.name: 4 if group.frozen is None else group.width for group in graph.groups}
    widths = methods.match_widths(
        graph.full_widths, least, lambda some: float(energy.value(graph.widths(some))), limit, 4
    )
    assert 0.95 * limit <= float(energy.value(graph.widths(widths))) <= limit
    assert all(widths[group.name] % 4 == 0 for group in graph.prunable)
    is_met = methods.is_met_by_energy(model, graph, energy, 0.6)
    assert not is_met()
    for name, layer in methods.layers_of(model):
        if name.startswith("layer") and name.endswith("conv1"):
            layer.out_channels = 4
    assert is_met()  # at 56 % of the energy, the least without the trunk
    assert not methods.is_met_by_energy(model, graph, energy, 0.5)()


def test_crops_are_shifted_and_flipped_images() -> None:
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8)
    padded = training.padded(images)
    rows = torch.tensor([[2, 4, 4, 0], [1, 4, 4, 1], [0, 0, 8, 0]])
    found = training.crops(padded, rows)
    whole = training.normalised(images.permute(0, 2, 3, 1))
    torch.testing.assert_close(found[0], whole[2])
    torch.testing.assert_close(found[1], whole[1].flip(-1))
    torch.testing.assert_close(found[2][:, 4:, :28], whole[0][:, :28, 4:])
    assert torch.equal(training.augmentation(50, 3, 1), training.augmentation(50, 3, 1))
    assert not torch.equal(training.augmentation(50, 3, 1), training.augmentation(50, 3, 2))


@pytest.mark.parametrize(
    "method",
    [
        "ecc",
        "uniform",
        *(pytest.param(n, marks=pytest.mark.thorough) for n in ("dense", "ecc_early", "greedy_taylor")),
    ],
)
def test_a_cell_uses_all_batches_and_meets_the_share(method: str) -> None:
    cell = methods.run_cell(*arguments_of(method, resnet20(), weight_decay=1e-3))
    assert cell["batches"] == 12
    if method == "dense":
        assert cell["macs_share"] == 1
    else:
        assert SHARE - 0.012 <= cell["macs_share"] <= SHARE  # a channel of ResNet-20 is up to 1 % of it
        assert cell["macs"] == round(cell["macs_share"] * 40_551_040)
    assert 0 <= cell["accuracy"] <= 1


def slim_resnet() -> torch.nn.Module:
    """A ResNet-20 with odd widths, also on the residual stream, and without two branches."""
    torch.manual_seed(1)
    model = resnet20()
    graph = trace_channels(model, torch.randn(1, 3, 32, 32))
    widths = {group.name: max(1, group.width * 5 // 7) for group in graph.prunable}
    for branch in [one for one in graph.branches if "layer1.1" in one.name or "layer3.2" in one.name]:
        widths |= dict.fromkeys(branch.groups, 0)
    return with_widths(model, graph, widths)


def test_the_fast_step_trains_as_sgd_does() -> None:
    model = slim_resnet()
    usual, wide = copy.deepcopy(model).double().train(), step.widened(model).double().train()
    widths = [layer.out_channels for layer in wide.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert all(width % 8 == 0 for width in widths)
    assert widths != [layer.out_channels for layer in model.modules() if isinstance(layer, torch.nn.Conv2d)]
    optimizer = torch.optim.SGD(usual.parameters(), lr=0.0, momentum=0.9, nesterov=True, weight_decay=5e-4)
    sgd, forward = step.Sgd(wide, 0.9, 5e-4), step.Forward()
    whole = step.WholeStep(wide, sgd, lambda batch: F.cross_entropy(forward(wide, batch[0]), batch[1]))
    for number in range(3):
        images, labels = torch.randn(8, 3, 32, 32, dtype=torch.double), torch.randint(0, 10, (8,))
        rate = 0.1 / (number + 1)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = F.cross_entropy(usual(images), labels)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(whole((images, labels), rate), loss.detach())
    result = copy.deepcopy(model).double()
    step.narrow_(result, wide)
    for name, value in usual.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(result.state_dict()[name], value, rtol=1e-6, atol=1e-9)
    for name, value in step.widened(result).state_dict().items():  # the added channels are still zero
        torch.testing.assert_close(wide.state_dict()[name], value, rtol=0, atol=0)


class EndsAfter:
    """A deadline that is over after some looks at the clock."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    @property
    def is_over(self) -> bool:
        self.looks -= 1
        return self.looks < 0


@pytest.mark.parametrize(("method", "looks"), [("ecc", (1, 4)), ("uniform", (1,)), ("dense", (2,)), ("tp_like", (1,))])
def test_a_paused_cell_continues_as_if_it_had_not_been_stopped(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    looks: tuple[int, ...],
) -> None:
    monkeypatch.setattr(training, "CHECK_EVERY", 2)
    if method == "tp_like":  # a network that another package has pruned in place
        monkeypatch.setattr(
            methods, "run_torch_pruning", lambda run, model, settings: run.finish_pruned(prune_inner(model, settings))
        )
        method = "tp_magnitude"
    arguments = arguments_of(method, CifarResNet(blocks_per_stage=1))
    whole = methods.run_cell(*arguments, result=tmp_path / "whole")
    for count in looks:
        file = tmp_path / f"{count}.state"
        with pytest.raises(cells.Paused):
            methods.run_cell(*arguments, pause=cells.Pause(file, EndsAfter(count), {"a": 1}))
        assert cells.Pause(file, EndsAfter(9), {"a": 2}).load() is None  # of other settings
        pause = cells.Pause(file, EndsAfter(99), {"a": 1})
        resumed = methods.run_cell(*arguments, pause=pause, result=tmp_path / "resumed")
        assert resumed["batches"] == whole["batches"] == 12
        assert resumed["widths"] == whole["widths"]
        assert resumed["seconds_before"] > 0
        one, other = (load_state(tmp_path / name) for name in ("whole", "resumed"))
        for name, value in one.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5)


def prune_inner(model: torch.nn.Module, settings: object) -> torch.nn.Module:
    del settings
    for block in (*model.layer1, *model.layer2, *model.layer3):  # type: ignore[misc]
        count = block.conv1.out_channels * 3 // 7
        block.conv1.weight = torch.nn.Parameter(block.conv1.weight.detach()[:count])
        block.conv2.weight = torch.nn.Parameter(block.conv2.weight.detach()[:, :count])
        block.conv1.out_channels = block.conv2.in_channels = block.bn1.num_features = count
        for name in ("weight", "bias"):
            setattr(block.bn1, name, torch.nn.Parameter(getattr(block.bn1, name).detach()[:count]))
        for name in ("running_mean", "running_var"):
            setattr(block.bn1, name, getattr(block.bn1, name)[:count])
    return model


def test_the_published_protocol_adds_the_search() -> None:
    arguments = arguments_of("ecc", CifarResNet(blocks_per_stage=1), epochs=2)
    cell = methods.run_cell(*arguments, is_published=True)
    assert cell["batches"] == 16
    assert cell["prune_batches"] == 8


def test_a_continued_cell_of_the_published_protocol_has_all_logits(tmp_path: Path) -> None:
    pause = cells.Pause(tmp_path / "a.state", EndsAfter(99))
    assert resnet56.first_epoch(pause, 4) == 0
    pause.save({"step": 9})
    assert resnet56.first_epoch(pause, 4) == 2
    assert resnet56.first_epoch(pause, 4, is_published=True) == 0  # after the search the epochs begin again


def test_goals_of_the_public_table_are_open_met_or_missed() -> None:
    assert [met for _, _, met, _ in table.public_goals({"cells": []})] == [None, None, None]

    def cell(method: str, share: float, seed: int, accuracy: float) -> dict[str, Any]:
        return {"method": method, "share": share, "seed": seed, "accuracy": accuracy, "share_is_met": True}

    cells = [cell("ecc", 0.469, seed, 0.94) for seed in range(2)]
    cells += [cell("ecc", 0.389, seed, 0.93) for seed in range(2)]  # the shares must not be mixed
    cells += [cell("dense_distilled", 1.0, seed, 0.9365) for seed in range(2)]
    found = table.public_goals({"headline": "ecc", "settings": {"epochs": 200}, "cells": cells})
    assert [met for _, _, met, _ in found] == [True, True, False]
    assert found[0][0].startswith("200 epochs, 2.13 times fewer MACs: at least 0.3 points above the dense network")
    assert found[0][1].startswith("+0.35")
    assert found[2][1] == "93.00 % (2 seeds)"

    facts = {"train_loss": 0.07, "params": 400_000, "macs_share": 0.4, "commit": "abc"}
    public = record([{**one, **facts} for one in cells])
    public["settings"] |= {"epochs": 200}
    text = table.section_of(public, 0.389, "source")
    assert "Goals: 200 epochs, 2.57 times fewer MACs: above the best published result with at most 200 epochs" in text
    assert "2.13 times" not in text
    assert "ends at 0.070" in table.public_goals(public)[0][3]


def test_the_section_says_how_far_repeated_measurements_differ() -> None:
    first, second, other = rows("uniform", 92.0, 92.1, 92.2)
    for cell, joules, width in ((first, 6.0, 8), (second, 6.3, 8), (other, 9.0, 16)):
        cell |= {"joules": joules, "widths": {"conv1": width}}
    assert table.repeated_energy([first, second, other]) == pytest.approx(0.05)
    found = [*rows("ecc", 93.0), first, second, other]
    assert "differ by up to 5.0% in energy" in table.section_of(record(found), 0.47, "source")
    second["joules"] = 6.01
    assert "in energy" not in table.section_of(record(found), 0.47, "source")
