from __future__ import annotations

from pathlib import Path

import pytest

from ecc.errors import BadTask
from ecc.zoo.data.layouts import is_folders, read_folders
from ecc.zoo.data.sets import Photos
from zoo.data.trees import folders, noise, save


def test_classes_are_the_sorted_folders_and_every_tenth_photo_is_held_out(tmp_path: Path) -> None:
    data = read_folders(folders(tmp_path / "set", classes=3, train=21, test=2))
    assert data.name == "set"
    assert data.classes == ("n00000000", "n00000001", "n00000002")
    assert not data.has_pixels
    assert (len(data.train), len(data.held_out), len(data.test)) == (3 * 18, 3 * 3, 3 * 2)
    for split, folder in ((data.train, "train"), (data.held_out, "train"), (data.test, "val")):
        assert isinstance(split, Photos)
        for path, label in zip(split.paths, split.labels, strict=True):
            assert path.is_file()
            assert (path.parent.parent.name, path.parent.name) == (folder, data.classes[label])
    assert isinstance(data.train, Photos)
    assert isinstance(data.held_out, Photos)
    assert not set(data.train.paths) & set(data.held_out.paths)


def test_other_files_beside_the_photos_are_left_alone_and_test_does_for_val(tmp_path: Path) -> None:
    root = folders(tmp_path, classes=2)
    (root / "val").rename(root / "test")
    (root / "train" / "n00000000" / "notes.txt").write_text("")
    (root / "train" / "readme.md").write_text("")
    data = read_folders(root)
    assert (len(data.train), len(data.held_out), len(data.test)) == (6, 2, 4)


def test_what_a_tree_of_folders_is(tmp_path: Path) -> None:
    assert not is_folders(tmp_path)
    save(tmp_path / "train" / "a.png", noise(4, 4, 3))
    assert not is_folders(tmp_path)
    (tmp_path / "train" / "cats").mkdir()
    assert is_folders(tmp_path)


def broken(tmp_path: Path, how: str) -> Path:
    root = folders(tmp_path, classes=2)
    if how == "no val":
        (root / "val").rename(root / "other")
    elif how == "flat val":
        (root / "val").rename(root / "other")
        save(root / "val" / "ILSVRC2012_val_00000001.JPEG", noise(4, 4, 3))
    elif how == "empty class":
        (root / "train" / "n00000005").mkdir()
        (root / "val" / "n00000005").mkdir()
    elif how == "class of train alone":
        (root / "train" / "n00000005").mkdir()
    elif how == "class of val alone":
        (root / "val" / "n00000005").mkdir()
    return root


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no val", "has the folder train, but neither val nor test"),
        ("flat val", "val has no class folders; sort its photos into folders named as those in train"),
        ("empty class", "n00000005 holds no photos"),
        ("class of train alone", "lacks the class folder 'n00000005'"),
        ("class of val alone", "has, beyond those of train, the class folder 'n00000005'"),
    ],
)
def test_what_is_wrong_with_a_tree_is_said_in_one_line(how: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadTask) as caught:
        read_folders(broken(tmp_path, how))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["\x1b[2J\x07", "a\udcffb", "a\nb"])
def test_the_name_of_a_folder_can_be_printed(name: str, tmp_path: Path) -> None:
    """It becomes the name of the task, which stands in tables and files."""
    found = read_folders(folders(tmp_path / name, classes=2, train=2, test=1))
    assert found.name.isprintable()
    assert found.name.encode("utf-8")
