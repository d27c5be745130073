"""A run becomes verified files: all or none, and nothing that exists is lost. The model card is part of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from ecc.constants import EXPORT_FORMATS
from ecc.errors import BadFile, CannotExport
from ecc.export import onnx_tools, run_export
from ecc.export.formats import FORMATS, Format
from ecc.export.model_card import escape, model_card
from ecc.export.run_export import export_model, export_run
from ecc.export.slim_file import load_slim
from ecc.graph import max_relative_diff
from ecc.io import lock_folder
from ecc.run_records import BudgetResult, SparseSummary
from ecc.training import save_state
from export.runs import SmallNet, finished_run, small_task, summary_of

FILES = ["model_card.md", "slim.safetensors", "widths.json"]


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def replace_writer(monkeypatch: pytest.MonkeyPatch, name: str, write: Any) -> None:
    form = FORMATS[name]
    monkeypatch.setattr(run_export, "FORMATS", {**FORMATS, name: Format(form.file, write, form.run, form.needs)})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    finished_run(tmp_path / "run", small_task())
    return tmp_path / "run"


@pytest.mark.slow  # the first ONNX export of a process takes seconds
def test_every_format_is_written_and_verified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in FORMATS["onnx"].needs:
        pytest.importorskip(module)
    monkeypatch.setattr(onnx_tools, "BLOCK_SECONDS", 0.001)
    task, lines = small_task(), []
    slim = finished_run(tmp_path / "run", task)
    found = export_run(tmp_path / "run", task, formats=EXPORT_FORMATS, int8="static", log=lines.append)
    assert found.folder == tmp_path / "run" / "export"
    files = ["slim.safetensors", "slim.pt2", "slim.onnx", "slim.torchscript", "slim.int8-static.onnx"]
    assert [file.file for file in found.files] == files
    assert names(found.folder) == sorted([*files, "widths.json", "model_card.md"])
    for file in found.files[:-1]:
        assert file.tolerance is not None
        assert file.error <= file.tolerance
        assert file.bytes == (found.folder / file.file).stat().st_size
    exact, program, onnx, _, int8 = found.files
    assert (exact.error, program.latency) == (0, None)
    assert onnx.latency is not None
    assert onnx.latency.batch == 2
    assert onnx.beside_bytes is not None
    assert onnx.beside_bytes > onnx.bytes
    assert (int8.tolerance, int8.beside_bytes) == (None, onnx.bytes)
    assert int8.score is not None
    assert "quantizing to int8 (static)" in lines
    assert max_relative_diff(slim, load_slim(SmallNet(), found.folder), task.example_input) == 0
    assert json.loads((found.folder / "widths.json").read_text()) == {"conv1": 5, "conv2": 7}
    export_run(tmp_path / "run", task, formats=["safetensors", "pt2", "onnx"])  # the same bytes again


def test_files_that_differ_are_kept_unless_forced(run: Path, tmp_path: Path) -> None:
    task, out = small_task(), tmp_path / "out"
    out.mkdir()
    (out / "slim.safetensors").write_text("mine")
    with pytest.raises(BadFile, match=r"slim\.safetensors exists and differs; use force=True"):
        export_run(run, task, output=out)
    assert names(out) == ["slim.safetensors"]
    assert (out / "slim.safetensors").read_text() == "mine"
    assert export_run(run, task, output=out, force=True).notes == ()
    assert names(out) == FILES
    (out / "model_card.md").write_text("my own words")
    (note,) = export_run(run, task, output=out, licence="mit").notes
    assert "it was kept" in note
    assert (out / "model_card.md").read_text() == "my own words"
    assert export_run(run, task, output=out, licence="mit", force=True).notes == ()
    assert 'license: "mit"' in (out / "model_card.md").read_text()
    (tmp_path / "folder" / "slim.safetensors").mkdir(parents=True)
    with pytest.raises(BadFile, match=r"slim\.safetensors exists and is not a file"):
        export_run(run, task, output=tmp_path / "folder", force=True)
    assert names(tmp_path / "folder") == ["slim.safetensors"]  # and no card


def test_a_failed_verification_or_a_full_disk_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, run: Path, tmp_path: Path
) -> None:
    def other_network(model: nn.Module, example_input: Any, path: Path) -> None:
        FORMATS["torchscript"].write(SmallNet().eval(), example_input, path)

    def full_disk(model: nn.Module, example_input: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    replace_writer(monkeypatch, "torchscript", other_network)
    with pytest.raises(CannotExport, match=r"verification failed: the outputs of slim\.torchscript differ"):
        export_run(run, small_task(), formats=["safetensors", "torchscript"])
    assert not (run / "export").exists()
    replace_writer(monkeypatch, "pt2", full_disk)
    (tmp_path / "out").mkdir()
    with pytest.raises(BadFile, match=r"cannot write into .*: No space left on device"):
        export_model(SmallNet(), torch.randn(1, 3, 8, 8), tmp_path / "out" / "net.pt2")
    assert names(tmp_path / "out") == []


@pytest.mark.parametrize("suffix", ["pt2", "torchscript"])
def test_any_network_can_be_written_hooks_included(suffix: str, tmp_path: Path) -> None:
    net, seen = SmallNet(), []
    net.conv1.register_forward_hook(lambda module, args, output: seen.append(output.mean().item()))
    net.register_forward_hook(lambda module, args, output: output * 3)
    made = export_model(net, torch.randn(1, 3, 8, 8), tmp_path / f"net.{suffix}")
    assert (made.format, made.file, made.batches) == (suffix, f"net.{suffix}", (1, 4))
    assert made.tolerance is not None
    assert made.error <= made.tolerance
    assert seen == []
    assert len(net.conv1._forward_hooks) == 1
    with pytest.raises(CannotExport, match=r"is no export format; use \.pt2, \.onnx, \.torchscript"):
        export_model(net, torch.randn(1, 3, 8, 8), tmp_path / "net.bin")


def test_a_network_that_cannot_run_is_refused(run: Path) -> None:
    class Fixed(SmallNet):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(8), persistent=False)  # not in the file, so it is not pruned

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images) + self.bn1(self.conv1(images)).mean((2, 3)) @ self.scale[:, None]  # type: ignore[no-any-return,index]

    with pytest.raises(BadFile, match=r"the slim network of .*run cannot run on the task's example input: "):
        export_run(run, small_task(model=Fixed()))
    assert not (run / "export").exists()


def test_the_dense_network_has_the_weights_of_the_run(tmp_path: Path) -> None:
    trained, fresh, ones = SmallNet(), SmallNet(), torch.ones(1, 3, 8, 8)
    assert max_relative_diff(fresh, run_export._dense_network(fresh, tmp_path), ones) == 0
    save_state(tmp_path / "dense.safetensors", trained.state_dict())
    assert max_relative_diff(trained, run_export._dense_network(fresh, tmp_path), ones) == 0
    save_state(tmp_path / "dense.safetensors", nn.Linear(2, 2).state_dict())
    with pytest.raises(BadFile, match="belongs to another network"):
        run_export._dense_network(fresh, tmp_path)


@pytest.mark.skipif(os.name != "posix", reason="needs locks and modes")
def test_files_are_published_under_a_lock_with_usual_permissions(
    monkeypatch: pytest.MonkeyPatch, run: Path, tmp_path: Path
) -> None:
    """Without the lock two exports could both find the folder empty, and one would overwrite the other."""
    import fcntl

    publish, published = run_export._publish, []

    def lock(folder: Path) -> None:
        other = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(other)

    def checked(files: Any, folder: Path, *, force: bool) -> None:
        with pytest.raises(BlockingIOError):
            lock(folder)
        published.append(folder)
        publish(files, folder, force=force)

    monkeypatch.setattr(run_export, "_publish", checked)
    folder = export_run(run, small_task(), output=tmp_path / "out").folder
    assert published == [tmp_path / "out"]
    lock(folder)  # free again
    (tmp_path / "new").write_text("")
    assert {entry.stat().st_mode for entry in folder.iterdir()} == {(tmp_path / "new").stat().st_mode}


# ---------------------------------------------------------------- model card

CONFIG = {"task": "small", "budgets": ["50%"], "network": "abc", "settings": {"prune_steps": 10}}


def front_matter(card: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(card.split("---\n", 2)[1])
    return found


def test_the_card_has_costs_scores_budget_device_and_licence() -> None:
    card = model_card(summary_of(small_task()), CONFIG, licence="apache-2.0")
    assert front_matter(card)["license"] == "apache-2.0"
    for text in (
        "| energy (estimated) | 1.00 J | 490 mJ | 500 mJ | met |",
        "| score | 0.9000 | 0.8750 |  |  |",
        "meets its budget on NVIDIA Jetson TX2; costs are **estimated**",
        "batch of 2",
        'ecc.load_slim(YourNetwork(), "slim.safetensors")',
        '"prune_steps": 10',
    ):
        assert text in card
    assert "abc" not in card


def test_the_card_of_counted_budgets_names_no_device_and_no_cost_twice() -> None:
    macs = BudgetResult(budget="macs=50%", limit=1e6, unit="", dense=2e6, result=1e6, label="counted", met=True)
    card = model_card(summary_of(small_task(), device="", label="counted", budgets={"macs": macs}), CONFIG)
    assert "meets its budget; costs are **counted**" in card
    assert card.lower().count("| macs (counted) |") == 1
    assert "| parameters (counted) |" in card


class OneBatchSize(SmallNet):
    """With a batch size in the code."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images).view(2, 4)


def test_a_network_with_a_batch_size_in_its_code_is_exported(tmp_path: Path) -> None:
    task = small_task(model=OneBatchSize())
    finished_run(tmp_path / "run", task)
    made = export_run(tmp_path / "run", task, formats=["safetensors", "torchscript"], output=tmp_path / "files")
    assert {one.batches for one in made.files} == {(2,)}
    card = (tmp_path / "files/model_card.md").read_text(encoding="utf-8")
    assert "They were compared at batch size 2; the network does not run at 1 and 5." in card
    assert "any batch size" not in card


def test_a_folder_of_several_budgets_is_refused_with_its_runs(tmp_path: Path) -> None:
    task = small_task()
    for name in ("macs_50pct", "macs_30pct"):
        finished_run(tmp_path / "front" / name, task)
    (tmp_path / "front/front.json").write_text("{}", encoding="utf-8")
    with pytest.raises(BadFile, match=r"several budgets; give one of them: .*front/macs_30pct, .*front/macs_50pct\."):
        export_run(tmp_path / "front", task)


def test_the_card_shows_missed_budgets_and_assumptions() -> None:
    card = model_card(summary_of(small_task(), met=False, note="pruning ended early"), CONFIG)
    for text in ("does NOT meet its budget", "| NOT met |", "Note: pruning ended early"):
        assert text in card
    assert front_matter(card)["license"] == "unknown"
    sparse = SparseSummary(assumes="zeros cost nothing", base=0.0, coefficients={}, weights={}, nonzeros={})
    card = model_card(summary_of(small_task(), sparse=sparse), {})
    assert "The estimate assumes: zeros cost nothing." in card
    assert '"sparse.safetensors"' in card


@pytest.mark.parametrize(("metric", "better"), [("score", "higher"), ("perplexity", "lower")])
def test_the_card_says_which_scores_are_better(metric: str, better: str) -> None:
    card = model_card(summary_of(small_task(), metric=metric), {})
    assert f"The {metric} is that of the task's own evaluation on its test split; {better} is better." in card


def test_untrusted_text_stays_text() -> None:
    evil = "a | b\n---\n# <script>alert(1)</script> [x](javascript:y) `c`"
    summary = summary_of(small_task(name=evil), device=evil, note=evil)
    card = model_card(summary, {"task": evil + "\n```"}, licence='x"\ntags: [evil]\n---')
    assert front_matter(card)["license"] == 'x"\ntags: [evil]\n---'
    assert front_matter(card)["tags"] == ["pruning", "model-compression", "energy", "ecc"]
    lines = card.splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        f"# {escape(evil)}, compressed by ecc", "## How to load", "## How it was made",
    ]  # fmt: skip
    assert lines.count("---") == 2
    assert "<script>" not in "\n".join(line for line in lines if not line.startswith("    "))
    shown = card.split("Configuration of `ecc compress`:\n\n")[1]
    assert all(line.startswith("    ") for line in shown.splitlines())
    assert json.loads(shown)["task"] == evil + "\n```"
    assert escape("a\n\tb|c*d_e") == r"a b\|c\*d\_e"


def test_folders_of_killed_exports_are_removed_and_those_of_running_ones_stay(tmp_path: Path) -> None:
    for name in ("killed", "running"):
        (tmp_path / f".export.{name}").mkdir()
    with lock_folder(tmp_path / ".export.running"):
        export_model(nn.Linear(2, 2), torch.zeros(1, 2), tmp_path / "net.torchscript")
    assert {path.name for path in tmp_path.iterdir()} == {".export.running", "net.torchscript"}
