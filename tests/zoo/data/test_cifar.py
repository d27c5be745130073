from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ecc.errors import BadTask
from ecc.zoo.data.layouts import is_cifar10, read_cifar10, stratified
from ecc.zoo.data.sets import Packed
from zoo.data.trees import cifar10, noise


def test_records_become_images_and_classes(tmp_path: Path) -> None:
    data = read_cifar10(cifar10(tmp_path, each=20))
    assert (data.name, len(data.classes), data.has_pixels) == ("cifar10", 10, False)
    assert (len(data.train), len(data.held_out), len(data.test)) == (90, 10, 20)
    assert isinstance(data.test, Packed)
    assert data.test.labels.tolist() == [number % 10 for number in range(20)]
    # The first 1,024 bytes after the class are the red plane, row by row.
    record = noise(20, 3073, seed=5)[3]
    assert (data.test.images[3, 0].flatten().numpy() == record[1:1025]).all()
    assert (data.test.images[3, 2, 31].numpy() == record[-32:]).all()


def test_the_files_may_lie_in_the_folder_itself(tmp_path: Path) -> None:
    root = cifar10(tmp_path)
    assert is_cifar10(root)
    assert is_cifar10(root / "cifar-10-batches-bin")
    assert not is_cifar10(tmp_path.parent)
    assert len(read_cifar10(root / "cifar-10-batches-bin").test) == 8


def test_every_class_is_held_out_alike() -> None:
    labels = torch.arange(200) % 4
    kept, held = stratified(labels)
    assert torch.bincount(labels[held]).tolist() == [5] * 4
    assert torch.bincount(labels[kept]).tolist() == [45] * 4
    assert torch.cat([kept, held]).sort().values.tolist() == list(range(200))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("data_batch_3.bin", None, r"cannot read .*data_batch_3\.bin: No such file"),
        ("data_batch_2.bin", b"\0" * 3000, r"data_batch_2\.bin has 3000 bytes, not a whole number of records of 3073"),
        ("test_batch.bin", b"", r"test_batch\.bin has 0 bytes"),
        ("test_batch.bin", np.full(3073, 10, np.uint8).tobytes(), r"test_batch\.bin has the class 10 at record 0"),
    ],
)
def test_a_damaged_file_is_named(name: str, data: bytes | None, message: str, tmp_path: Path) -> None:
    path = cifar10(tmp_path) / "cifar-10-batches-bin" / name
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(BadTask, match=message):
        read_cifar10(tmp_path)
