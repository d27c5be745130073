"""Each format writes what its own program runs, at any batch size, and fails in one line."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecc.errors import BadTask, CannotExport, EccError
from ecc.export import TOLERANCE, export_model
from ecc.export.formats import FORMATS, library
from ecc.task import Inputs, with_batch_size
from ecc.torch_utils import tensors_in
from export.runs import SmallNet


class Two(nn.Module):
    """Two inputs by name, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, left: Tensor, right: Tensor) -> dict[str, Any]:
        total = self.left(left) + self.right(right)
        return {"total": total, "shares": total.softmax(1), "class": total.argmax(1)}


CASES: dict[str, tuple[type[nn.Module], Inputs]] = {
    "one": (SmallNet, torch.randn(1, 3, 8, 8)),
    "tuple": (Two, (torch.randn(2, 4), torch.randn(2, 5))),
    "dict": (Two, {"right": torch.randn(2, 5), "left": torch.randn(2, 4)}),
}


@pytest.mark.slow  # the first ONNX export of a process takes seconds
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FORMATS)
def test_a_file_computes_what_the_network_does_at_any_batch(name: str, case: str, tmp_path: Path) -> None:
    for module in FORMATS[name].needs:
        pytest.importorskip(module)
    build, example = CASES[case]
    model, how = build().eval(), FORMATS[name]
    how.write(model, example, tmp_path / how.file)
    run = how.run(tmp_path / how.file)
    for batch in (1, 2, 5):
        inputs = with_batch_size(example, batch)
        with torch.no_grad():
            wanted = model(**inputs) if isinstance(inputs, dict) else model(*([inputs] if case == "one" else inputs))
        found = run(inputs)
        for left, right in zip(tensors_in(wanted), found, strict=True):
            torch.testing.assert_close(left, right)


@pytest.mark.parametrize("name", ["pt2", "onnx"])
def test_files_do_not_tell_where_the_source_lay(name: str, tmp_path: Path) -> None:
    for module in FORMATS[name].needs:
        pytest.importorskip(module)
    FORMATS[name].write(SmallNet().eval(), torch.randn(1, 3, 8, 8), tmp_path / "net")
    here = str(Path(__file__).parent).encode()
    data = (tmp_path / "net").read_bytes()
    if name == "pt2":
        with zipfile.ZipFile(tmp_path / "net") as archive:
            data = b"".join(archive.read(entry) for entry in archive.namelist())
    assert data
    assert here not in data
    assert b"x = F.relu" not in data


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else x  # type: ignore[no-any-return]


class FixedBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(2, 2, 2) + 1


@pytest.mark.parametrize("model", [Branching(), FixedBatch()])
def test_what_torch_cannot_follow_is_one_line(model: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(CannotExport, match=r"^torch\.export cannot follow this network: ") as caught:
        FORMATS["pt2"].write(model, torch.randn(2, 4), tmp_path / "net.pt2")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "net.pt2").exists()


def test_a_missing_library_is_named() -> None:
    with pytest.raises(EccError, match=r"no_such_thing cannot be imported .*pip install no_such_thing"):
        library("no_such_thing")


def test_code_that_fixes_the_batch_is_told_what_to_write(tmp_path: Path) -> None:
    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.token = nn.Conv2d(3, 4, 1), nn.Parameter(torch.zeros(1, 1, 4))

        def forward(self, images: Tensor) -> Tensor:
            found = self.conv(images).flatten(2).transpose(1, 2)
            return torch.cat([self.token.expand(len(images), -1, -1), found], 1)

    with pytest.raises(CannotExport, match=r"its code fixes the batch size, as len\(x\) does; write x\.shape\[0\]\.$"):
        FORMATS["pt2"].write(Token(), torch.randn(2, 3, 4, 4), tmp_path / "a.pt2")


@pytest.mark.slow  # the first ONNX export of a process takes seconds
def test_a_file_that_its_program_cannot_open_is_told_in_one_line(tmp_path: Path) -> None:
    for module in FORMATS["onnx"].needs:
        pytest.importorskip(module)
    with pytest.raises(CannotExport, match=r"^a\.onnx cannot be opened by the program that runs onnx: ") as told:
        export_model(SmallNet().double(), torch.randn(2, 3, 8, 8).double(), tmp_path / "a.onnx")
    assert "\n" not in str(told.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_half_precision_is_proved_as_exactly_as_it_can_be(tmp_path: Path) -> None:
    for module in FORMATS["onnx"].needs:
        pytest.importorskip(module)
    found = export_model(SmallNet().half(), torch.randn(2, 3, 8, 8).half(), tmp_path / "a.onnx")
    assert found.tolerance == 8 * torch.finfo(torch.float16).eps
    assert found.error <= found.tolerance


def test_positional_inputs_may_come_in_a_list_of_tensors(tmp_path: Path) -> None:
    inputs = [torch.randn(2, 4), torch.randn(2, 5)]
    assert export_model(Two(), inputs, tmp_path / "a.pt2").error <= TOLERANCE  # type: ignore[arg-type]
    with pytest.raises(BadTask, match="the example input holds bool at 1; give a tensor"):
        export_model(Two(), (inputs[0], True), tmp_path / "b.pt2")  # type: ignore[arg-type]
