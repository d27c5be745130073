"""Data sets in their official layouts, and what is refused."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ecc.errors import BadTask
from ecc.zoo.data import find_data
from ecc.zoo.data.images import VOID, load_scene
from ecc.zoo.data.layouts import (
    CAMVID_CLASSES,
    CAMVID_FROM_CITYSCAPES,
    CITYSCAPES_CLASSES,
    CITYSCAPES_TABLE,
    stratified,
)
from ecc.zoo.data.sets import Packed, cores, every_tenth, map_in_threads, thread_pool
from zoo.data.trees import camvid, cifar10, cityscapes, folders, noise, save

# name, number of classes, pixels, and items of train, held_out and test
LAYOUTS: list[tuple[Callable[[Path], Path], str, int, bool, tuple[int, int, int]]] = [
    (lambda root: folders(root, classes=3, train=21, test=2), "set", 3, False, (54, 9, 6)),
    (lambda root: cityscapes(root, train=12, val=3), "cityscapes", 19, True, (10, 2, 3)),
    (camvid, "camvid", 11, True, (3, 2, 2)),
    (lambda root: cifar10(root, each=20), "cifar10", 10, False, (90, 10, 20)),
    (lambda root: cifar10(root, each=20) / "cifar-10-batches-bin", "cifar10", 10, False, (90, 10, 20)),
]


@pytest.mark.parametrize(("make", "name", "classes", "pixels", "sizes"), LAYOUTS)
def test_a_layout_is_recognised_and_split(
    make: Callable[[Path], Path], name: str, classes: int, pixels: bool, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    data = find_data(str(make(tmp_path / "set")))
    assert (data.name, len(data.classes), data.has_pixels) == (name, classes, pixels)
    assert (len(data.train), len(data.held_out), len(data.test)) == sizes


def test_class_folders_are_sorted_and_disjoint(tmp_path: Path) -> None:
    root = folders(tmp_path / "set", classes=3, train=21, test=2)
    (root / "val").rename(root / "test")  # test replaces val
    (root / "train" / "n00000000" / "notes.txt").write_text("")
    (root / "train" / "readme.md").write_text("")
    data: Any = find_data(root)
    assert data.classes == ("n00000000", "n00000001", "n00000002")
    for split, folder in ((data.train, "train"), (data.held_out, "train"), (data.test, "test")):
        for path, label in zip(split.paths, split.labels, strict=True):
            assert path.suffix == ".JPEG"
            assert (path.parent.parent.name, path.parent.name) == (folder, data.classes[label])
    assert not set(data.train.paths) & set(data.held_out.paths)


def test_cityscapes_photos_match_their_labels(tmp_path: Path) -> None:
    data: Any = find_data(cityscapes(tmp_path, train=12, val=3))
    assert (data.size, data.batch_size, data.published) == ((512, 1024), 4, {20: tuple(range(19))})
    for split in (data.train, data.held_out, data.test):
        for photo, labels in zip(split.photos, split.maps, strict=True):
            assert photo.name.removesuffix("_leftImg8bit.png") == labels.name.removesuffix("_gtFine_labelIds.png")
    photo = save(tmp_path / "photo.png", noise(2, 17, 3))
    labels = save(tmp_path / "map.png", np.arange(34, dtype=np.uint8).reshape(2, 17))
    _, found = load_scene(photo, labels, CITYSCAPES_TABLE, None)
    assert found.flatten().tolist() == [
        *[VOID] * 7, 0, 1, VOID, VOID, 2, 3, 4, VOID, VOID, VOID, 5, VOID, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
        VOID, VOID, 16, 17, 18,
    ]  # fmt: skip


def test_camvid_is_kept_in_memory_and_knows_the_nearest_cityscapes_classes(tmp_path: Path) -> None:
    packed = find_data(camvid(tmp_path)).test.packed  # type: ignore[union-attr]
    assert (packed.images.dtype, packed.images.shape) == (torch.uint8, (2, 3, 24, 32))
    assert (packed.images[1].permute(1, 2, 0).numpy() == noise(24, 32, 3, seed=1)).all()
    labels = noise(24, 32, seed=1, below=12)
    assert (packed.labels[1].numpy() == np.where(labels == 11, VOID, labels)).all()
    names = list(CITYSCAPES_CLASSES)
    pairs = dict(zip(CAMVID_CLASSES, (names[row] for row in CAMVID_FROM_CITYSCAPES), strict=True))
    assert {ours: theirs for ours, theirs in pairs.items() if ours != theirs} == {
        "pavement": "sidewalk", "tree": "vegetation", "sign": "traffic sign",
        "pedestrian": "person", "bicyclist": "rider",
    }  # fmt: skip


def test_cifar_records_become_images_and_each_class_is_held_out_alike(tmp_path: Path) -> None:
    test: Any = find_data(cifar10(tmp_path, each=20)).test
    assert test.labels.tolist() == [number % 10 for number in range(20)]
    record = noise(20, 3073, seed=5)[3]  # the first 1,024 bytes after the class are the red plane, row by row
    assert (test.images[3, 0].flatten().numpy() == record[1:1025]).all()
    assert (test.images[3, 2, 31].numpy() == record[-32:]).all()
    labels = torch.arange(200) % 4
    kept, held = stratified(labels)
    assert torch.bincount(labels[held]).tolist() == [5] * 4
    assert torch.cat([kept, held]).sort().values.tolist() == list(range(200))


# ---------------------------------------------------------------- what is refused


def remove(pattern: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        for path in list(root.rglob(pattern)):
            path.unlink()

    return change


def put(name: str, data: bytes | np.ndarray) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = min(root.rglob(name), default=root / name)
        save(path, data) if isinstance(data, np.ndarray) else path.write_bytes(data)

    return change


def move_val(root: Path) -> None:
    (root / "val").rename(root / "other")


def flat_val(root: Path) -> None:
    move_val(root)
    save(root / "val" / "ILSVRC2012_val_00000001.JPEG", noise(4, 4, 3))


def add(*names: str) -> Callable[[Path], None]:
    return lambda root: [(root / name / "n00000005").mkdir() for name in names] and None


FAULTS: list[tuple[Callable[[Path], Path], Callable[[Path], None], str]] = [
    (folders, move_val, "has the folder train, but neither val nor test"),
    (folders, flat_val, "val has no class folders; sort its photos into folders such as"),
    (folders, add("train", "val"), "n00000005 has no photos"),
    (folders, add("train"), "val lacks the class folder 'n00000005'"),
    (folders, add("val"), "val has, unlike train, the class folder 'n00000005'"),
    (cityscapes, remove("lindau_000000*_labelIds.png"), "labelIds.png is missing, the label map of lindau/lindau_"),
    (cityscapes, remove("aachen*_leftImg8bit.png"), "train has no photo CITY"),
    (camvid, lambda root: (root / "valannot" / "0001TP_000001.png").unlink(), "0001TP_000001.png is missing"),
    (lambda root: camvid(root, counts=(2, 2, 0)), lambda root: None, "test has no photo"),
    (camvid, put("test/0001TP_000000.png", noise(8, 8, 3)), "has 8x8 pixels; all images"),
    (cifar10, remove("data_batch_3.bin"), "data_batch_3.bin: No such file"),
    (cifar10, put("data_batch_2.bin", b"\0" * 3000), "data_batch_2.bin has 3000 bytes, not a multiple of 3073"),
    (cifar10, put("test_batch.bin", b""), "test_batch.bin has 0 bytes"),
    (cifar10, put("test_batch.bin", bytes([10] * 3073)), "test_batch.bin has class 10 at record 0"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "change", "message"), FAULTS)
def test_incomplete_and_damaged_layouts_are_named(
    make: Callable[[Path], Path], change: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    root = make(tmp_path / "set")
    change(root)
    with pytest.raises(BadTask) as caught:
        find_data(root)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_missing_and_forbidden_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        BadTask, match=r"has no known layout: leftImg8bit/.*trainannot/.*data_batch_1.bin.*train/CLASS/"
    ):
        find_data(tmp_path)
    with pytest.raises(BadTask, match="there is no data folder"):
        find_data(tmp_path / "nothing")
    folders(tmp_path)

    def refuse(path: Path) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(BadTask, match=r"cannot read .*train: Permission denied"):
        find_data(tmp_path)


# ---------------------------------------------------------------- splits and threads


@pytest.mark.parametrize(("count", "held"), [(0, []), (1, []), (2, [0]), (10, [0]), (11, [0, 10]), (25, [0, 10, 20])])
def test_every_tenth_is_held_out(count: int, held: list[int]) -> None:
    kept, ours = every_tenth(count)
    assert ours == held
    assert sorted(kept + ours) == list(range(count))


def test_packed_images_are_bytes_and_are_copied_to_a_device_once() -> None:
    for images, labels in (
        (torch.zeros(2, 3, 4, 4), torch.zeros(2)),
        (torch.zeros(2, 3, 4, dtype=torch.uint8), torch.zeros(2)),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(3)),
    ):
        with pytest.raises(BadTask, match="give uint8"):
            Packed(images, labels)
    packed = Packed(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    assert packed.on(torch.device("cpu")) is packed
    elsewhere = packed.on(torch.device("meta"))
    assert elsewhere.images.device.type == elsewhere.labels.device.type == "meta"
    assert packed.on(torch.device("meta")) is elsewhere


def test_threads_keep_the_order_raise_errors_and_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert map_in_threads(lambda number: number * number, range(50)) == [number * number for number in range(50)]
    with pytest.raises(ZeroDivisionError):
        map_in_threads(lambda number: 1 // (number - 3), range(5))
    assert set(map_in_threads(lambda _: threading.current_thread().name.rpartition("_")[0], range(3))) == {"ecc-data"}
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = cores()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(alone))
    assert cores() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    assert cores() == alone >= 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_starts_its_own_threads() -> None:
    thread_pool().submit(int).result()
    child = os.fork()
    if child == 0:
        os._exit(0 if map_in_threads(abs, [-7]) == [7] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
