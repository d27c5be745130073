"""`save_slim` and `load_slim` need the dense network and a file, and trust neither."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ecc
from ecc.errors import BadFile
from ecc.export.slim_file import load_slim, on_cpu, save_slim
from ecc.graph import mask_channels_, max_relative_diff, slim, trace_channels, with_widths
from ecc.training import save_state
from ecc.zoo import digits, resnet20
from export.runs import SmallNet, finished_run, small_task

FIELDS = ("in_channels", "out_channels", "groups", "num_features", "in_features", "out_features")


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (SmallNet, (3, 8, 8)),
        (lambda: digits().model, (1, 8, 8)),
        (resnet20, (3, 32, 32)),
    ],
)
def test_a_slim_network_round_trips_without_tracing(
    build: Callable[[], nn.Module], shape: tuple[int, ...], tmp_path: Path
) -> None:
    dense, example = build(), torch.randn(2, *shape)
    graph = trace_channels(dense, example, verify=False)
    small = with_widths(dense, graph, {g.name: max(g.min_width, g.width // 2) for g in graph.prunable})
    save_slim(small, tmp_path / "slim.safetensors")
    again = ecc.load_slim(build(), tmp_path)
    assert max_relative_diff(small, again, example) == 0
    assert [p.requires_grad for p in small.parameters()] == [p.requires_grad for p in again.parameters()]
    for name, module in again.named_modules():
        other = small.get_submodule(name)
        for field in FIELDS:
            assert getattr(module, field, None) == getattr(other, field, None), (name, field)


def test_the_dense_network_is_not_changed_and_may_be_on_the_meta_device(tmp_path: Path) -> None:
    task = small_task()
    small = finished_run(tmp_path / "run", task)
    before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    again = load_slim(task.model, tmp_path / "run" / "slim.safetensors")
    assert again.training == task.model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in task.model.state_dict().items())
    with torch.device("meta"):
        empty = SmallNet()
    for found in (again, load_slim(empty, tmp_path / "run")):
        assert max_relative_diff(small, found, task.example_input) == 0
    model = on_cpu(again)
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


class Blur(nn.Module):
    """A buffer per channel that torch does not save, and an extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head, self.version = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 5, 1), 1
        self.register_buffer("kernel", torch.rand(16, 1, 1, 3), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"version": self.version}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.version = state["version"]

    def forward(self, images: Tensor) -> Tensor:
        found = torch.relu(self.conv(images))
        return self.head(nn.functional.conv2d(found, self.kernel, padding=(0, 1), groups=found.shape[1]))  # type: ignore[no-any-return]


def test_unsaved_buffers_and_extra_states_round_trip(tmp_path: Path) -> None:
    net, images = Blur(), torch.randn(1, 3, 8, 8)
    net.version = 7
    graph = trace_channels(net, images)
    mask_channels_(net, graph, {"conv": [0, 3, 5]})
    small = slim(net, graph)
    save_slim(small, tmp_path / "a.safetensors")
    again = load_slim(Blur(), tmp_path / "a.safetensors")
    assert again.kernel.shape == (13, 1, 1, 3)
    assert max_relative_diff(small, again, images) == 0
    assert again.version == 7
    save_state(tmp_path / "without.safetensors", net.state_dict())
    fresh = Blur()
    assert torch.equal(load_slim(fresh, tmp_path / "without.safetensors").kernel, fresh.kernel)


def test_tied_weights_stay_tied_and_renamed_weights_are_found(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.two.weight = self.one.weight

    save_state(tmp_path / "slim.safetensors", Tied().state_dict())
    again = load_slim(Tied(), tmp_path)
    assert again.one.weight is again.two.weight

    def build() -> nn.Module:
        return nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())), nn.Conv2d(8, 4, 1))

    net = build()  # state_dict hooks remove the name of the wrapper
    save_slim(net, tmp_path / "a.safetensors")
    assert max_relative_diff(net, load_slim(build(), tmp_path / "a.safetensors"), torch.randn(1, 3, 8, 8)) == 0


def changed(**layers: nn.Module) -> SmallNet:
    model = SmallNet()
    for name, layer in layers.items():
        setattr(model, name, layer)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            changed(conv1=nn.Conv2d(3, 4, 3)),
            "conv1.weight is float32 [5, 3, 3, 3] in the file, float32 [4, 3, 3, 3] in",
        ),
        (
            changed(conv1=nn.Conv1d(3, 8, 3)),
            "conv1.weight is float32 [5, 3, 3, 3] in the file, float32 [8, 3, 3] in the",
        ),
        (changed(head=nn.Identity()), "the network lacks head.weight"),
        (changed(more=nn.Linear(2, 2)), "the file lacks more.weight"),
        (SmallNet().double(), "conv1.weight is float32 [5, 3, 3, 3] in the file, float64 [8, 3, 3, 3] in the network"),
    ],
)
def test_another_network_is_refused_in_one_line(model: nn.Module, message: str, tmp_path: Path) -> None:
    finished_run(tmp_path / "run", small_task())
    with pytest.raises(BadFile) as caught:
        load_slim(model, tmp_path / "run")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
