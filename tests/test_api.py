"""`ecc.compress` and `ecc.inspect`."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ecc
from ecc.errors import BadMeasurement, BadTask, EccError, EccWarning, InfeasibleBudget, NoMeter, UntraceableModel
from ecc.measure import Profile
from ecc.methods.optimizers import optimizer_factory
from ecc.zoo import find_task
from methods.jobs import digits_model

TX2 = "platform:jetson-tx2"


def network(width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4)),
    )


def loader(count: int = 64, batch: int = 16) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(4, (count,), generator=draw)
    images = torch.randn(count, 3, 8, 8, generator=draw) + labels[:, None, None, None]
    return DataLoader(TensorDataset(images, labels), batch_size=batch, shuffle=True)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


compress = partial(ecc.compress, loss=F.cross_entropy, epochs=4, progress=False)


# ---------------------------------------------------------------- the whole job


def test_one_call_profiles_prunes_measures_and_prints_five_lines(capsys: pytest.CaptureFixture[str]) -> None:
    model, data = network(), loader()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = compress(model, data, "60%", evaluate=lambda net: 0.5, meter=TX2, samples=40)
    assert result.met
    assert result.energy is not None
    energy = result.summary.budgets["energy"]
    assert result.energy == energy.result <= energy.limit == pytest.approx(0.6 * energy.dense)
    assert result.score == 0.5
    assert set(result.widths) == {"0", "3", "7"}
    assert result.model(torch.zeros(2, 3, 8, 8)).shape == (2, 4)
    lines = str(result).splitlines()
    assert len(lines) == 5
    assert "per batch of 16 (estimated, NVIDIA Jetson TX2), budget" in lines[0]
    assert lines[0].endswith("met")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert capsys.readouterr() == ("", "")  # progress=False

    assert result.folder == Path("run")
    assert Profile.load("run/network.profile").header.batch == 16
    assert result.report() == Path("run/report.html")
    assert result.report("page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [path.name for path in result.export("torchscript")] == ["slim.torchscript"]

    again = compress(network(), loader(), "60%", evaluate=lambda net: 1 / 0, meter=TX2, samples=40)
    assert again.summary == result.summary  # the finished run, not a new one
    with pytest.raises(EccError, match="run"):
        compress(network(), loader(), "70%", meter=TX2, samples=40)


def test_an_unmet_budget_is_a_warning() -> None:
    """The platform takes more than the model predicts, and there is no step left to correct it."""
    digits_model().save("energy.json")
    lists = re.compile(r'("coefficients": \[)([^]]+)')
    scaled = lists.sub(
        lambda found: found[1] + ",".join(str(0.7 * float(x)) for x in found[2].split(",")),
        Path("energy.json").read_text(),
    )
    Path("low.json").write_text(scaled)
    task = find_task("digits")
    with pytest.warns(EccWarning, match="the budget is not met"):
        result = compress(
            task.model,
            task.train_batches,
            "9 mJ",
            energy_model=ecc.EnergyModel.load("low.json"),
            example_input=task.example_input,
            prune_steps=1,
            finetune_steps=0,
        )
    assert not result.met
    assert "NOT MET" in str(result)


# ---------------------------------------------------------------- what can be passed


class WithLoss(nn.Module):
    """As a Hugging Face model: keyword arguments, and the loss is one of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(pixels)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


class TwoHeads(nn.Module):
    """As a detector: several outputs, others in training than in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 24, 3, padding=1), nn.ReLU())
        self.boxes, self.classes = nn.Conv2d(24, 4, 1), nn.Conv2d(24, 3, 1)

    def forward(self, x: Tensor) -> Any:
        x = self.body(x)
        outputs = [self.boxes(x), self.classes(x)]
        return outputs if self.training else torch.cat(outputs, 1).flatten(2)


def dict_batches() -> list[dict[str, Tensor]]:
    return [{"pixels": x, "labels": y} for x, y in loader()]


def test_a_loss_inside_the_model_and_dict_batches() -> None:
    result = ecc.compress(
        WithLoss(), dict_batches(), "macs=60%", loss=lambda model, batch: model(**batch)["loss"], progress=False
    )
    assert result.met
    assert set(result.model(torch.zeros(1, 3, 8, 8))) == {"logits"}


def test_only_the_loss_knows_what_is_in_a_batch() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        images, labels, weights = batch
        return (weights * F.cross_entropy(model(images), labels, reduction="none")).mean()

    batches = [(x, y, torch.ones(len(y))) for x, y in loader()]
    assert ecc.compress(network(), batches, "60%", loss=loss, meter=TX2, samples=40, distill=0, progress=False).met
    with pytest.raises(BadTask, match="a batch is a tuple of 3 items"):
        compress(network(), batches, "60%", meter="unknown", folder="other")  # before a meter is opened


def test_the_learning_rate_is_that_of_the_preset_unless_it_is_given() -> None:
    def lr(folder: str, **arguments: Any) -> float:
        compress(network(), loader(), "macs=60%", folder=folder, epochs=1, **arguments)
        found: float = json.loads(Path(folder, "config.json").read_text())["config"]["settings"]["lr"]
        return found

    assert lr("default") == ecc.CompressSettings().lr == 1e-4  # as on the command line
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EccWarning)  # four steps are too few for the solver of the paper
        assert lr("paper", preset="paper") == 1e-5
        assert lr("faster", preset="paper", lr=2e-4) == 2e-4
    with pytest.raises(EccError, match="lr is 0"):
        lr("zero", lr=0)


def test_all_networks_are_scored_in_eval_mode() -> None:
    """Also if `evaluate` does not ask for it: dropout, and batch norm that would learn from the test images."""
    net, images = nn.Sequential(network(), nn.Dropout(0.9)), loader().dataset.tensors[0]  # type: ignore[attr-defined]
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}

    @torch.no_grad()
    def evaluate(model: nn.Module) -> float:
        return float(model(images).sum())

    result = compress(net, loader(), "macs=60%", evaluate=evaluate, folder="run", epochs=1)
    assert net.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert result.summary.scores["dense"] == pytest.approx(evaluate(net.eval()), rel=1e-5)


def test_a_detector_whose_outputs_cannot_be_distilled() -> None:
    def loss(outputs: list[Tensor], targets: Tensor) -> Tensor:
        return outputs[0].square().mean() + F.cross_entropy(outputs[1].mean((2, 3)), targets % 3)

    with pytest.warns(EccWarning, match="without distillation"):
        result = ecc.compress(TwoHeads(), loader(), "macs=60%", loss=loss, progress=False)
    assert result.met
    with pytest.raises(EccError, match="distill"):
        ecc.compress(TwoHeads(), loader(), "macs=60%", loss=loss, distill=0.5, progress=False, folder="other")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": lambda outputs, targets: outputs(targets)}, "name the first parameter `model`"),
        ({"loss": lambda net, batch: net(batch[0])[0].mean()}, "name the first parameter `model`"),
        ({"loss": lambda net, batch: len(dict([batch]))}, "name the first parameter `model`"),
        (
            {"loss": lambda model, batch: {"total": model(batch[0])[0].mean()}},
            "the loss returned dict; return a tensor",
        ),
        ({"loss": lambda model, batch: model(batch[0])[0]}, r"the loss returned a tensor of shape \(16, "),
        ({"evaluate": lambda model: None}, "returned NoneType; return one number"),
    ],
)
def test_a_wrong_loss_or_score_is_explained(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"loss": lambda outputs, targets: outputs[0].square().mean()}
    with pytest.raises(BadTask, match=message):
        ecc.compress(TwoHeads(), loader(), "macs=60%", progress=False, distill=0, **{**arguments, **change})


def batches_of_epoch(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(epoch)
    for _ in range(4):
        yield torch.randn(8, 3, 8, 8, generator=draw), torch.randint(4, (8,), generator=draw)


def test_a_function_of_the_epoch_needs_numbers_of_steps() -> None:
    with pytest.raises(BadTask, match="prune_steps= and finetune_steps="):
        compress(network(), batches_of_epoch, "macs=60%")
    result = compress(network(), batches_of_epoch, "macs=60%", prune_steps=8, finetune_steps=2)
    assert result.summary.batches is not None
    assert result.summary.batches.lineage == 10


def test_epochs_are_split_into_pruning_and_finetuning() -> None:
    result = compress(network(), loader(), "macs=60%", epochs=2.5)  # of 4 batches
    assert result.summary.batches is not None
    assert result.summary.batches.lineage == 10


class Wrapper:
    def __init__(self, model: nn.Module) -> None:
        self.model = model


class Yolo(nn.Module):
    """As ultralytics' YOLO: a module whose `train` starts a training run."""

    def __init__(self) -> None:
        super().__init__()
        self.model = network()

    def train(self, trainer: Any = None, **options: Any) -> Any:
        raise AssertionError("a training run was started")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Wrapper(network()), r"pass `wrapper\.model`"),
        (Yolo(), r"pass `yolo\.model`"),
        ("resnet18", "model is str; give a torch.nn.Module"),
        (nn.Linear, r"the class Linear; give an instance, such as Linear\(\)"),
    ],
)
def test_what_is_not_a_module_is_refused(model: Any, message: str) -> None:
    with pytest.raises(BadTask, match=message):
        compress(model, loader(), "macs=50%")
    with pytest.raises(BadTask, match=message):
        ecc.inspect(model, torch.zeros(1, 3, 8, 8))
    if isinstance(model, nn.Module):
        with pytest.raises(BadTask, match=message):
            ecc.trace_channels(model, torch.zeros(1, 3, 8, 8))


def test_a_network_without_values_is_refused() -> None:
    with pytest.raises(BadTask, match=r"0\.weight of the model is on the device meta and has no values; build"):
        compress(network().to("meta"), loader(), "macs=50%")


def narrow(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, width), nn.ReLU(), nn.Linear(width, 4))


def test_a_network_with_few_widths_is_profiled_with_enough_samples() -> None:
    result = compress(narrow(20), loader(), "99.5%", meter=TX2)
    drawn = [one for one in Profile.load("run/network.profile").samples if one.index is not None]
    assert len(drawn) == 12  # as many as a fit needs, of 20 that are possible
    assert result.met
    with pytest.raises(BadMeasurement, match=r"8 width configurations are possible, .* needs 12.*budget='macs=50%'"):
        compress(narrow(8), loader(), "80%", meter=TX2, folder="other")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"budget": "150%"}, EccError, "150"),
        ({"budget": 0.5}, EccError, "write 50%"),
        ({"budget": "macs=0.1%"}, InfeasibleBudget, "reach"),
        ({"train_loader": []}, BadTask, "no batches"),
        ({"train_loader": None}, BadTask, "train_loader is NoneType; give a DataLoader"),
        ({"train_loader": lambda _: 5}, BadTask, "train_loader returned int; give a DataLoader"),
        ({"train_loader": [3]}, BadTask, "example_input="),
        ({"device": "gpu"}, EccError, "device 'gpu' cannot be used: .*Give device='cpu', or leave it out"),
        ({"train_loader": [{"img": torch.zeros(2, 3, 8, 8)}] * 9}, UntraceableModel, "keys img.*give example_input="),
        (
            {"train_loader": [torch.zeros(2, 5, 8, 8)] * 9},
            UntraceableModel,
            r"shape \(2, 5, 8, 8\).*give example_input=",
        ),
        ({"epochs": 0.1}, EccError, "need 2 or more"),
        ({"prune_step": 3}, EccError, "did you mean 'prune_steps'"),
        ({"distill": 3}, EccError, "kd_weight is 3"),
        ({"preset": "best"}, EccError, "default, paper"),
        ({"method": "magic"}, EccError, "magic"),
        ({"meter": "platform:jetson-tx1", "budget": "50%"}, NoMeter, "did you mean 'jetson-tx2'"),
        ({"meter": "none", "budget": "50%"}, NoMeter, "give energy_model"),
        ({"optimizer": 3}, EccError, "optimizer is int"),
    ],
)
def test_wrong_input_is_refused_before_training(change: dict[str, Any], error: type[EccError], message: str) -> None:
    arguments: dict[str, Any] = {"train_loader": loader(), "budget": "macs=50%"}
    with pytest.raises(error, match=message):
        compress(network(), **{**arguments, **change})
    assert not Path("run").exists()


# ---------------------------------------------------------------- optimizers


class NeedsRate(torch.optim.SGD):
    """An optimizer without a default learning rate."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)


@pytest.mark.parametrize(
    ("optimizer", "lr", "expected"),
    [
        (torch.optim.SGD, None, {"lr": 1e-3, "momentum": 0}),
        (torch.optim.SGD, 0.2, {"lr": 0.2, "momentum": 0}),
        (NeedsRate, None, {"lr": 1e-4, "momentum": 0}),
        (torch.optim.SGD(network().parameters(), lr=0.1, momentum=0.9), None, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.SGD(network().parameters(), lr=0.1, momentum=0.9), 0.3, {"lr": 0.3, "momentum": 0.9}),
        (partial(torch.optim.AdamW, lr=0.01), None, {"lr": 0.01, "weight_decay": 0.01}),
        (lambda parameters: torch.optim.RMSprop(parameters, lr=0.05), None, {"lr": 0.05, "alpha": 0.99}),
    ],
)
def test_the_forms_of_optimizer(optimizer: Any, lr: float | None, expected: dict[str, float]) -> None:
    make = optimizer_factory(optimizer, lr)
    assert make is not None
    (group,) = make(network().parameters()).param_groups
    assert {name: group[name] for name in expected} == expected


def test_an_optimizer_that_cannot_be_used_is_refused() -> None:
    parameters = [{"params": [one]} for one in network().parameters()]
    with pytest.raises(EccError, match="parameter groups"):
        optimizer_factory(torch.optim.SGD(parameters, lr=0.1))
    make = optimizer_factory(lambda parameters: None)
    assert make is not None
    with pytest.raises(EccError, match="returned NoneType"):
        make(network().parameters())


# ---------------------------------------------------------------- inspect


def test_inspect_prints_the_table_of_the_channel_groups() -> None:
    found = ecc.inspect(network(), torch.zeros(1, 3, 8, 8), freeze="0")
    assert [group.name for group in found.graph.prunable] == ["3"]
    text = str(found)
    assert "Channel groups of Sequential" in text
    assert math.isclose(max(map(len, text.splitlines())), 120, abs_tol=40)
    html = found._repr_html_()
    assert html.startswith("<pre")
    assert "Channel groups of Sequential" in html
