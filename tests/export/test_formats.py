"""Formats: files compute what the network computes at any batch size, and failures are one line."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecc.errors import CannotExport
from ecc.export import TOLERANCE, export_model
from ecc.export.formats import FORMATS, verified_batches, verify_export
from ecc.graph import trace_channels, with_widths
from ecc.measure.runners.runtime import import_runtime
from ecc.task import Inputs, with_batch_size
from ecc.torch_utils import tensors_in
from export.runs import SmallNet
from graph.branch_nets import NETWORKS, built


def need(name: str) -> None:
    for module in FORMATS[name].needs:
        pytest.importorskip(module)


class TwoInputs(nn.Module):
    """Two named inputs, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Any]:
        total = self.left(left) + self.right(right)
        return {"total": total, "shares": total.softmax(1), "class": total.argmax(1)}


CASES: dict[str, tuple[type[nn.Module], Inputs]] = {
    "one": (SmallNet, torch.randn(1, 3, 8, 8)),
    "tuple": (TwoInputs, (torch.randn(2, 4), torch.randn(2, 5))),
    "dict": (TwoInputs, {"right": torch.randn(2, 5), "left": torch.randn(2, 4)}),
}


@pytest.mark.slow  # the first ONNX export of a process takes seconds
@pytest.mark.parametrize(
    ("name", "case"), [(name, case) for name in FORMATS for case in CASES if (name, case) != ("onnx", "tuple")]
)
def test_a_file_computes_the_same_at_any_batch_size(name: str, case: str, tmp_path: Path) -> None:
    need(name)
    build, example = CASES[case]
    model, form = build().eval(), FORMATS[name]
    form.write(model, example, tmp_path / form.file)
    run = form.run(tmp_path / form.file)
    for batch in (1, 2, 5):
        inputs = with_batch_size(example, batch)
        with torch.no_grad():
            wanted = model(**inputs) if isinstance(inputs, dict) else model(*([inputs] if case == "one" else inputs))
        for left, right in zip(tensors_in(wanted), run(inputs), strict=True):
            torch.testing.assert_close(left, right)


class Recurrent(nn.Module):
    """An LSTM whose first axis is the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


@pytest.mark.slow  # the first ONNX export of a process takes seconds
def test_an_lstm_is_written_without_warnings_and_its_batch_axis_is_named(tmp_path: Path) -> None:
    need("onnx")
    FORMATS["onnx"].write(Recurrent().eval(), torch.randn(2, 3, 4), tmp_path / "net.onnx")  # warnings are errors here
    (entry,) = import_runtime("onnxruntime").InferenceSession(str(tmp_path / "net.onnx")).get_inputs()
    assert entry.shape[1:] == [3, 4]
    if hasattr(torch.onnx.ONNXProgram, "rename_axes"):
        assert entry.shape[0] == "batch"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pt2", "onnx"])
def test_an_encoder_of_transformers_takes_any_number_of_tokens_with_a_mask(name: str, tmp_path: Path) -> None:
    """Its table of positions limits the length, and the mask is as long as the tokens."""
    need(name)
    transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=32, num_labels=3,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config).eval()

    def tokens(batch: int, length: int) -> dict[str, Tensor]:
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[0, length // 2 + 1 :] = 0
        return {"input_ids": torch.randint(20, (batch, length)), "attention_mask": mask}

    path = tmp_path / f"bert.{name}"
    export_model(model, tokens(2, 8), path)
    run = FORMATS[name].run(path)
    for batch, length in ((1, 3), (3, 8), (2, 32)):
        inputs = tokens(batch, length)
        with torch.no_grad():
            wanted = model(**inputs).logits
        torch.testing.assert_close(run(inputs)[0], wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pt2", "onnx"])
@pytest.mark.parametrize(
    "network", ["basic", *(pytest.param(one, marks=pytest.mark.thorough) for one in ("in block", "convnext", "tuples"))]
)
def test_networks_without_some_branches_are_exported(name: str, network: str, tmp_path: Path) -> None:
    """Modules that stand for removed ones, which return their input, a zero, or zeros of some shape."""
    need(name)
    net, x = built(*NETWORKS[network][:2])
    graph = trace_channels(net, x)
    for some in (graph.branches[:1], graph.branches[1:]):
        small = with_widths(net, graph, {group: 0 for branch in some for group in branch.groups}).eval()
        form = FORMATS[name]
        form.write(small, x, tmp_path / form.file)
        run = form.run(tmp_path / form.file)
        for batch in (1, 3):
            inputs = with_batch_size(x, batch)
            (found,) = run(inputs)
            torch.testing.assert_close(small(inputs).detach(), found, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["pt2", "onnx"])
def test_files_contain_no_source_and_no_paths(name: str, tmp_path: Path) -> None:
    need(name)
    FORMATS[name].write(SmallNet().eval(), torch.randn(1, 3, 8, 8), tmp_path / "net")
    data = (tmp_path / "net").read_bytes()
    if name == "pt2":
        with zipfile.ZipFile(tmp_path / "net") as archive:
            data = b"".join(archive.read(entry) for entry in archive.namelist())
    assert data
    assert str(Path(__file__).parent).encode() not in data
    assert b"x = F.relu" not in data


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x


class FixedBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(2, 2, 2) + 1


class Token(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(len(x), -1), x], 1)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Branching(), "torch.export cannot export this network: "),
        (FixedBatch(), "torch.export cannot export this network: "),
        (Token(), "its code fixes the batch size, as len(x) does; use x.shape[0]."),
    ],
)
def test_networks_that_torch_cannot_export_are_refused_in_one_line(
    model: nn.Module, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CannotExport) as caught:
        FORMATS["pt2"].write(model, torch.randn(2, 4), tmp_path / "net.pt2")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "net.pt2").exists()


@pytest.mark.thorough
@pytest.mark.slow  # the first ONNX export of a process takes seconds
def test_unsupported_and_half_precision_in_onnx(tmp_path: Path) -> None:
    need("onnx")
    with pytest.raises(CannotExport, match=r"^a\.onnx cannot be opened by the runtime of onnx: ") as caught:
        export_model(SmallNet().double(), torch.randn(2, 3, 8, 8).double(), tmp_path / "a.onnx")
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    found = export_model(SmallNet().half(), torch.randn(2, 3, 8, 8).half(), tmp_path / "a.onnx")
    assert found.tolerance == 8 * torch.finfo(torch.float16).eps
    assert found.error <= found.tolerance


# ---------------------------------------------------------------- verification

NET = nn.Linear(4, 3)
EXAMPLE = torch.randn(2, 4)


def runner(change: Callable[[Tensor], Tensor]) -> Callable[[Inputs], list[Tensor]]:
    @torch.no_grad()
    def run(inputs: Inputs) -> list[Tensor]:
        assert isinstance(inputs, Tensor)
        return [change(NET(inputs))]

    return run


def test_small_errors_are_reported_and_large_ones_refused() -> None:
    exact = verify_export(NET, runner(lambda y: y), EXAMPLE)
    assert (exact.error, exact.batches) == (0, (1, 2, 5))
    assert verified_batches(torch.zeros(1, 4)) == (1, 4)
    assert 5e-6 < verify_export(NET, runner(lambda y: y * (1 + 1e-5)), EXAMPLE).error < TOLERANCE
    with pytest.raises(CannotExport, match=r"the outputs of slim\.x differ from the network by 0\.01 of the largest"):
        verify_export(NET, runner(lambda y: y * 1.01), EXAMPLE, what="slim.x")
    quantized = verify_export(NET, runner(lambda y: y * 1.01), EXAMPLE, is_exact=False)
    assert quantized.error == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    "run",
    [
        runner(lambda y: y[:1]),
        runner(lambda y: y * float("nan")),
        runner(lambda y: y + (1.0 if len(y) == 5 else 0.0)),  # wrong at one batch size only
        lambda _: [],
    ],
)
def test_other_shapes_nan_and_missing_outputs_are_refused(run: Any) -> None:
    with pytest.raises(CannotExport, match="verification failed"):
        verify_export(NET, run, EXAMPLE)


def test_integer_outputs_and_runtime_errors() -> None:
    class Classes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.argmax(1)

    assert verify_export(Classes(), lambda x: [x.argmax(1)], EXAMPLE).error == 0  # type: ignore[union-attr]
    with pytest.raises(CannotExport, match="verification failed"):
        verify_export(Classes(), lambda x: [x.argmin(1)], EXAMPLE)  # type: ignore[union-attr]

    def run(inputs: Inputs) -> list[Tensor]:
        if len(inputs) == 5:
            raise RuntimeError("fixed size\nand pages more")
        return runner(lambda y: y)(inputs)

    with pytest.raises(CannotExport, match=r"the file cannot be run at batch size 5: RuntimeError: fixed size$"):
        verify_export(NET, run, EXAMPLE)
