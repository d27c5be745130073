"""Hugging Face image classifiers from files: the whole path with a tiny ViT, and wrong input."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import pytest
import torch

from ecc.errors import BadTask
from ecc.zoo import find_task
from zoo.data.trees import camvid, folders

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its dependencies at import
    transformers = pytest.importorskip("transformers", minversion="5", reason="tasks hf: need transformers 5")

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier `vit` with two outputs, and photos of three classes."""
    path = tmp_path_factory.mktemp("vision")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4,
        num_labels=2,
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(path / "vit")
    (path / "vit" / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.25] * 3, "image_std": [2] * 3}))
    folders(path / "photos", train=20)
    return path


def test_an_image_classifier_is_compressed_saved_and_loaded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ecc.cli import main
    from ecc.integrations.huggingface import load_pruned

    run = root / "run"
    words = f"compress hf:{root / 'vit'} --data {root / 'photos'} --budget macs=60% --batch-size 12 -q -o {run}"
    words += " --pretrain-steps 30 --prune-steps 12 --finetune-steps 6 --lr 1e-3"
    monkeypatch.setattr(sys, "argv", ["ecc", *words.split()])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    summary = json.loads((run / "summary.json").read_text())
    assert 0.5 < summary["macs"]["result"] / summary["macs"]["dense"] <= 0.6
    assert summary["scores"]["finetuned"] > 0.6  # each class has a colour of its own
    small = load_pruned(run)
    assert sum(one.numel() for one in small.parameters()) == summary["parameters"]["result"]
    task = find_task(f"hf:{root / 'vit'}", root / "photos")
    assert task.evaluate is not None
    assert task.evaluate(small) == pytest.approx(summary["scores"]["finetuned"])
    assert (run / "model" / "preprocessor_config.json").is_file()
    assert "per token" not in (run / "model" / "README.md").read_text()


def test_images_are_prepared_as_the_folder_says(root: Path) -> None:
    notes: list[str] = []
    task = find_task(f"hf:{root / 'vit'}", root / "photos", batch_size=5, log=notes.append)
    assert callable(task.train_batches)
    batch = next(iter(task.train_batches(0)))
    assert set(batch) == {"pixel_values", "labels"}
    images = batch["pixel_values"]
    assert images.shape == (5, 3, 16, 16)
    assert -0.125 <= images.min() < 0.0 < images.max() <= 0.375  # (0 to 1 - 0.25) / 2
    assert "2 outputs and the data 3 classes" in notes[0]
    assert task.model(**batch).logits.shape == (5, 3)
    alone = find_task(f"hf:{root / 'vit'}", image_size=None)
    assert isinstance(alone.example_input, dict)
    assert alone.example_input["pixel_values"].shape == (1, 3, 16, 16)
    assert alone.train_batches is None


def test_wrong_input_gets_one_clear_message(root: Path, tmp_path: Path) -> None:
    with pytest.raises(BadTask, match="classifies images, but the data set 'camvid' has labels of pixels"):
        find_task(f"hf:{root / 'vit'}", camvid(tmp_path / "camvid"))
    with pytest.raises(BadTask, match="takes no weights; the folder has its weights"):
        find_task(f"hf:{root / 'vit'}", weights="w.safetensors")
    with pytest.raises(BadTask, match=r"batch size 0 is outside 1\.\."):
        find_task(f"hf:{root / 'vit'}", root / "photos", batch_size=0)
    other = tmp_path / "vit"
    other.mkdir()
    for file in (root / "vit").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "preprocessor_config.json").write_text('{"image_std": [0, 1, 1]}')
    with pytest.raises(BadTask, match=r"preprocessor_config\.json cannot be used: image_mean and image_std must"):
        find_task(f"hf:{other}")
