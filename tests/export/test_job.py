"""A run becomes files: proved, all or none, and nothing that was there is lost."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ecc.constants import EXPORT_FORMATS
from ecc.errors import BadFile, BadTask, CannotExport
from ecc.export import job, latency
from ecc.export.formats import FORMATS, Format
from ecc.export.job import dense_of, export_model, export_run
from ecc.export.loading import load_slim
from ecc.graph import max_relative_diff
from ecc.training import save_state
from export.runs import SmallNet, finished_run, small_task


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def breaking(monkeypatch: pytest.MonkeyPatch, name: str, write: Any) -> None:
    how = FORMATS[name]
    monkeypatch.setattr(job, "FORMATS", {**FORMATS, name: Format(how.file, write, how.run, how.needs)})


@pytest.mark.slow  # the first ONNX export of a process takes seconds
def test_every_format_comes_with_its_proof(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in FORMATS["onnx"].needs:
        pytest.importorskip(module)
    monkeypatch.setattr(latency, "BLOCK_SECONDS", 0.001)
    task = small_task()
    slim = finished_run(tmp_path / "run", task)
    told: list[str] = []
    found = export_run(tmp_path / "run", task, formats=EXPORT_FORMATS, int8="static", tell=told.append)
    assert found.folder == tmp_path / "run" / "export"
    files = ["slim.safetensors", "slim.pt2", "slim.onnx", "slim.torchscript", "slim.int8-static.onnx"]
    assert [file.file for file in found.files] == files
    assert names(found.folder) == sorted([*files, "widths.json", "model_card.md"])
    for file in found.files[:-1]:
        assert file.tolerance is not None
        assert file.error <= file.tolerance
        assert file.bytes == (found.folder / file.file).stat().st_size
    exact, program, onnx, _, integers = found.files
    assert (exact.error, program.latency) == (0, None)
    assert onnx.latency is not None
    assert onnx.latency.batch == 2
    assert onnx.beside_bytes is not None
    assert onnx.beside_bytes > onnx.bytes
    assert (integers.tolerance, integers.beside_bytes) == (None, onnx.bytes)
    assert integers.score is not None
    assert "quantising, static" in told
    assert max_relative_diff(slim, load_slim(SmallNet(), found.folder), task.example_input) == 0
    assert json.loads((found.folder / "widths.json").read_text()) == {"conv1": 5, "conv2": 7}

    export_run(tmp_path / "run", task, formats=["safetensors", "pt2", "onnx"])  # the same bytes again


def test_a_file_that_is_there_and_differs_is_kept(tmp_path: Path) -> None:
    task = small_task()
    finished_run(tmp_path / "run", task)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "slim.safetensors").write_text("mine")
    with pytest.raises(BadFile, match=r"slim\.safetensors is there and differs; give --force"):
        export_run(tmp_path / "run", task, output=tmp_path / "out")
    assert names(tmp_path / "out") == ["slim.safetensors"]
    assert (tmp_path / "out" / "slim.safetensors").read_text() == "mine"
    export_run(tmp_path / "run", task, output=tmp_path / "out", force=True)
    assert names(tmp_path / "out") == ["model_card.md", "slim.safetensors", "widths.json"]


def test_a_card_that_someone_wrote_in_is_kept(tmp_path: Path) -> None:
    task = small_task()
    finished_run(tmp_path / "run", task)
    card = export_run(tmp_path / "run", task).folder / "model_card.md"
    assert export_run(tmp_path / "run", task).notes == ()
    card.write_text("my own words")
    (note,) = export_run(tmp_path / "run", task, licence="mit").notes
    assert "kept as it is" in note
    assert card.read_text() == "my own words"
    assert export_run(tmp_path / "run", task, licence="mit", force=True).notes == ()
    assert 'license: "mit"' in card.read_text()


def test_a_file_that_computes_something_else_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def write(model: nn.Module, example_input: Any, path: Path) -> None:
        FORMATS["torchscript"].write(SmallNet().eval(), example_input, path)

    breaking(monkeypatch, "torchscript", write)
    task = small_task()
    finished_run(tmp_path / "run", task)
    with pytest.raises(CannotExport, match=r"slim\.torchscript differs from the network by .* it is not kept"):
        export_run(tmp_path / "run", task, formats=["safetensors", "torchscript"])
    assert not (tmp_path / "run" / "export").exists()


def test_a_full_disk_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def write(model: nn.Module, example_input: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    breaking(monkeypatch, "pt2", write)
    (tmp_path / "out").mkdir()
    with pytest.raises(BadFile, match=r"cannot write into .*: No space left on device"):
        export_model(SmallNet(), torch.randn(1, 3, 8, 8), tmp_path / "out" / "net.pt2")
    assert names(tmp_path / "out") == []


def test_any_network_can_be_written(tmp_path: Path) -> None:
    model, example = SmallNet(), torch.randn(1, 3, 8, 8)
    made = export_model(model, example, tmp_path / "net.torchscript")
    assert (made.format, made.file, made.error) == ("torchscript", "net.torchscript", 0)
    assert made.batches == (1, 4)
    with pytest.raises(CannotExport, match=r"names no format by its ending; end it in \.pt2, \.onnx, \.torchscript"):
        export_model(model, example, tmp_path / "net.bin")


@pytest.mark.parametrize("ending", ["pt2", "torchscript"])
def test_a_network_with_hooks_can_be_written(ending: str, tmp_path: Path) -> None:
    net, heard = SmallNet(), []
    first = next(module for module in net.modules() if isinstance(module, nn.Conv2d))
    first.register_forward_hook(lambda module, args, output: heard.append(output.mean().item()))
    net.register_forward_hook(lambda module, args, output: output * 3)
    made = export_model(net, small_task().example_input, tmp_path / f"net.{ending}")
    assert made.tolerance is not None
    assert made.error <= made.tolerance
    assert heard == []
    assert len(first._forward_hooks) == 1


def test_what_cannot_be_done_is_said_before_anything_is_written(tmp_path: Path) -> None:
    task = small_task()
    finished_run(tmp_path / "run", task)
    before = names(tmp_path / "run")
    with pytest.raises(CannotExport, match="format 'tflite' is unknown; there are safetensors, pt2, onnx, torchscript"):
        export_run(tmp_path / "run", task, formats=["tflite"])
    with pytest.raises(CannotExport, match="int8 is made of the ONNX file"):
        export_run(tmp_path / "run", task, int8="static")
    with pytest.raises(BadFile, match="compressed the task 'small', and this is 'other'"):
        export_run(tmp_path / "run", small_task(name="other"))
    with pytest.raises(BadTask, match="no train_batches"):
        export_run(tmp_path / "run", small_task(train_batches=None), formats=["onnx"], int8="static")
    with pytest.raises(BadFile, match=r"cannot read .*summary\.json: No such file"):
        export_run(tmp_path / "nothing", task)
    assert names(tmp_path / "run") == before


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_a_damaged_summary_is_refused(text: str, tmp_path: Path) -> None:
    finished_run(tmp_path / "run", small_task())
    (tmp_path / "run" / "summary.json").write_text(text)
    with pytest.raises(BadFile, match=r"summary\.json is damaged"):
        export_run(tmp_path / "run", small_task())


def test_a_network_that_cannot_run_is_refused_first(tmp_path: Path) -> None:
    class Fixed(SmallNet):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(8), persistent=False)  # is not in the file, so it is not cut

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images) + self.bn1(self.conv1(images)).mean((2, 3)) @ self.scale[:, None]  # type: ignore[no-any-return,index]

    finished_run(tmp_path / "run", small_task())
    with pytest.raises(BadFile, match=r"the slim network of .*run cannot be run on the task's example input: "):
        export_run(tmp_path / "run", small_task(model=Fixed()))
    assert not (tmp_path / "run" / "export").exists()


def test_files_are_as_readable_as_any_new_file(tmp_path: Path) -> None:
    task = small_task()
    finished_run(tmp_path / "run", task)
    (tmp_path / "new").write_text("")
    folder = export_run(tmp_path / "run", task).folder
    assert {entry.stat().st_mode for entry in folder.iterdir()} == {(tmp_path / "new").stat().st_mode}


def test_a_batch_that_is_nonsense_is_not_followed(tmp_path: Path) -> None:
    task = small_task()
    for batch, timed in ((16, 16), (10**12, 2), (-1, 2), ("many", 2)):
        assert job._batch({"batch": batch}, task.example_input) == timed


def test_the_dense_network_has_the_weights_that_the_run_trained(tmp_path: Path) -> None:
    trained, fresh = SmallNet(), SmallNet()
    assert max_relative_diff(fresh, dense_of(fresh, tmp_path), torch.ones(1, 3, 8, 8)) == 0
    save_state(tmp_path / "dense.safetensors", trained.state_dict())
    assert max_relative_diff(trained, dense_of(fresh, tmp_path), torch.ones(1, 3, 8, 8)) == 0
    save_state(tmp_path / "dense.safetensors", nn.Linear(2, 2).state_dict())
    with pytest.raises(BadFile, match="belongs to another network"):
        dense_of(fresh, tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="needs locks")
def test_the_workshop_of_an_export_that_was_killed_goes_with_the_next_one(tmp_path: Path) -> None:
    task = small_task()
    finished_run(tmp_path / "run", task)
    (tmp_path / "out" / ".export.12345678").mkdir(parents=True)
    (tmp_path / "out" / ".export.12345678" / "slim.safetensors").write_text("half")
    export_run(tmp_path / "run", task, output=tmp_path / "out")
    assert names(tmp_path / "out") == ["model_card.md", "slim.safetensors", "widths.json"]


def test_a_folder_in_the_place_of_a_file_is_told_before_any_file_has_its_name(tmp_path: Path) -> None:
    task = small_task()
    finished_run(tmp_path / "run", task)
    (tmp_path / "out" / "slim.safetensors").mkdir(parents=True)
    with pytest.raises(BadFile, match=r"slim\.safetensors is there and is no file"):
        export_run(tmp_path / "run", task, output=tmp_path / "out", force=True)
    assert names(tmp_path / "out") == ["slim.safetensors"]  # and no card


def test_a_name_that_is_too_long_is_one_line(tmp_path: Path) -> None:
    task = small_task()
    finished_run(tmp_path / "run", task)
    with pytest.raises(BadFile, match="File name too long"):
        export_run(tmp_path / "run", task, output=tmp_path / ("a" * 300))


def test_a_summary_that_no_card_can_show_is_refused_before_the_work(tmp_path: Path) -> None:
    task = small_task()
    for number, budgets in enumerate((3, {"energy": []}, {"energy": {"unit": "\ud800", "dense": 1.0}})):
        finished_run(tmp_path / f"run{number}", task, budgets=budgets)
        with pytest.raises(BadFile, match=r"summary\.json or config\.json is damaged"):
            export_run(tmp_path / f"run{number}", task, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.name != "posix", reason="needs locks")
def test_two_exports_into_one_folder_give_their_names_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Or both could find the folder empty, and the second would overwrite the first without --force."""
    import fcntl

    real, waited = job._publish, []

    def publish(files: Any, folder: Path, *, force: bool) -> None:
        other = os.open(folder, os.O_RDONLY)
        try:
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(other)
        waited.append(folder)
        real(files, folder, force=force)

    monkeypatch.setattr(job, "_publish", publish)
    task = small_task()
    finished_run(tmp_path / "run", task)
    export_run(tmp_path / "run", task, output=tmp_path / "out")
    assert waited == [tmp_path / "out"]
    other = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free again
    os.close(other)
