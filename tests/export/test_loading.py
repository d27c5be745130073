"""`load_slim` needs the dense network and a file, and trusts neither."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import ecc
from ecc.errors import BadFile
from ecc.export.loading import load_slim, on_cpu, weights_file
from ecc.graph import max_relative_diff, trace_channels, with_widths
from ecc.training import save_state
from ecc.zoo import ERFNet, MobileNetV1, digits, resnet20
from export.runs import SmallNet, finished_run, small_task


@pytest.mark.parametrize(
    ("build", "shape"),
    [(lambda: digits().model, (1, 8, 8)), (resnet20, (3, 32, 32)), (ERFNet, (3, 32, 64)), (MobileNetV1, (3, 32, 32))],
)
def test_the_slim_network_comes_back_without_tracing(build, shape, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    dense, example = build(), torch.randn(2, *shape)
    graph = trace_channels(dense, example, verify=False)
    widths = {group.name: max(group.min_width, group.width // 2) for group in graph.prunable}
    slim = with_widths(dense, graph, widths)
    save_state(tmp_path / "slim.safetensors", slim.state_dict())

    again = ecc.load_slim(build(), tmp_path)
    assert max_relative_diff(slim, again, example) == 0
    sizes = [[p.requires_grad for p in model.parameters()] for model in (slim, again)]
    assert sizes[0] == sizes[1]
    for name, module in again.named_modules():
        other = slim.get_submodule(name)
        for field in ("in_channels", "out_channels", "groups", "num_features", "in_features", "out_features"):
            assert getattr(module, field, None) == getattr(other, field, None), (name, field)


def test_the_dense_network_is_left_as_it_is(tmp_path: Path) -> None:
    task = small_task()
    slim = finished_run(tmp_path / "run", task)
    before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    again = load_slim(task.model, tmp_path / "run" / "slim.safetensors")
    assert again.training == task.model.training
    assert max_relative_diff(slim, again, task.example_input) == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in task.model.state_dict().items())


def test_a_network_without_memory_is_enough(tmp_path: Path) -> None:
    task = small_task()
    slim = finished_run(tmp_path / "run", task)
    with torch.device("meta"):
        hollow = SmallNet()
    assert max_relative_diff(slim, load_slim(hollow, tmp_path / "run"), task.example_input) == 0


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)
            self.two = nn.Linear(4, 4)
            self.two.weight = self.one.weight

    save_state(tmp_path / "slim.safetensors", Tied().state_dict())
    again = load_slim(Tied(), tmp_path)
    assert again.one.weight is again.two.weight


def changed(**layers: nn.Module) -> SmallNet:
    model = SmallNet()
    for name, layer in layers.items():
        setattr(model, name, layer)
    return model


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            changed(conv1=nn.Conv2d(3, 4, 3)),
            "conv1.weight is float32 [5, 3, 3, 3] there, and float32 [4, 3, 3, 3] here",
        ),
        (changed(conv1=nn.Conv1d(3, 8, 3)), "conv1.weight is float32 [5, 3, 3, 3] there, and float32 [8, 3, 3] here"),
        (changed(head=nn.Identity()), "this network has no head.weight"),
        (changed(more=nn.Linear(2, 2)), "the file lacks more.weight"),
        (SmallNet().double(), "conv1.weight is float32 [5, 3, 3, 3] there, and float64 [8, 3, 3, 3] here"),
    ],
)
def test_another_network_is_refused_in_one_line(model: nn.Module, words: str, tmp_path: Path) -> None:
    finished_run(tmp_path / "run", small_task())
    with pytest.raises(BadFile) as caught:
        load_slim(model, tmp_path / "run")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_axis_may_not_be_empty(tmp_path: Path) -> None:
    state = SmallNet().state_dict()
    save_state(tmp_path / "slim.safetensors", {**state, "conv1.weight": torch.empty(0, 3, 3, 3)})
    with pytest.raises(BadFile, match=r"conv1.weight is float32 \[0, 3, 3, 3\]"):
        load_slim(SmallNet(), tmp_path)


def test_what_is_no_file_of_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"has no slim\.safetensors; give the folder of a finished run"):
        load_slim(SmallNet(), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadFile, match="is a run that is not finished"):
        load_slim(SmallNet(), tmp_path)
    save_state(tmp_path / "slim.safetensors", {"step": 3})
    with pytest.raises(BadFile, match="holds no weights of a network"):
        load_slim(SmallNet(), tmp_path)
    (tmp_path / "slim.safetensors").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(BadFile, match="no safetensors file"):
        load_slim(SmallNet(), tmp_path)
    with pytest.raises(BadFile, match="cannot read"):
        load_slim(SmallNet(), tmp_path / "none.safetensors")


def test_single_weights_are_found_too(tmp_path: Path) -> None:
    save_state(tmp_path / "sparse.safetensors", SmallNet().state_dict())
    assert weights_file(tmp_path).name == "sparse.safetensors"


def test_a_network_on_the_cpu_neither_trains_nor_learns() -> None:
    model = on_cpu(SmallNet())
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_network_cut_in_a_loop_of_ones_own_is_saved_and_comes_back(tmp_path: Path) -> None:
    dense, example = SmallNet(), small_task().example_input
    graph = trace_channels(dense, example, verify=False)
    slim = with_widths(dense, graph, {group.name: max(group.min_width, group.width // 2) for group in graph.prunable})
    ecc.save_slim(slim, tmp_path / "mine.safetensors")
    assert max_relative_diff(slim, ecc.load_slim(SmallNet(), tmp_path / "mine.safetensors"), example) == 0


def test_a_network_that_cannot_be_saved_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="mine"):
        ecc.save_slim(SmallNet(), tmp_path / "no folder" / "mine.safetensors")


class Blur(nn.Module):
    """A buffer for each channel that torch does not save, and a state that is no tensor."""

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


def test_buffers_that_torch_does_not_save_and_extra_states_come_back(tmp_path: Path) -> None:
    net, images = Blur(), torch.randn(1, 3, 8, 8)
    net.version = 7
    graph = trace_channels(net, images)
    ecc.graph.mask_channels_(net, graph, {"conv": [0, 3, 5]})
    small = ecc.slim(net, graph)
    ecc.save_slim(small, tmp_path / "a.safetensors")
    again = ecc.load_slim(Blur(), tmp_path / "a.safetensors")
    assert again.kernel.shape == (13, 1, 1, 3)
    assert max_relative_diff(small, again, images) == 0
    assert again.version == 7
    save_state(tmp_path / "older.safetensors", net.state_dict())
    fresh = Blur()
    assert torch.equal(ecc.load_slim(fresh, tmp_path / "older.safetensors").kernel, fresh.kernel)


def test_weights_are_found_by_what_the_state_calls_them(tmp_path: Path) -> None:
    def build() -> nn.Module:
        inner = checkpoint_wrapper(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()))
        return nn.Sequential(inner, nn.Conv2d(8, 4, 1))

    net, images = build(), torch.randn(1, 3, 8, 8)
    ecc.save_slim(net, tmp_path / "a.safetensors")
    assert max_relative_diff(net, ecc.load_slim(build(), tmp_path / "a.safetensors"), images) == 0
