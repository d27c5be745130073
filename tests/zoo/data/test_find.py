from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ecc.errors import BadTask
from ecc.zoo.data import find_data
from zoo.data import trees


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (trees.folders, "set"),
        (trees.cityscapes, "cityscapes"),
        (trees.camvid, "camvid"),
        (trees.cifar10, "cifar10"),
    ],
)
def test_a_layout_is_told_by_its_contents(make: Callable[[Path], Path], name: str, tmp_path: Path) -> None:
    assert find_data(str(make(tmp_path / "set"))).name == name


def test_an_unknown_layout_gets_a_list_of_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(BadTask) as caught:
        find_data(tmp_path)
    message = str(caught.value)
    assert "\n" not in message
    for word in ("has none of the layouts", "leftImg8bit/", "trainannot/", "data_batch_1.bin", "train/CLASS/"):
        assert word in message


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadTask, match="there is no folder"):
        find_data(tmp_path / "nothing")


def test_a_folder_that_may_not_be_listed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees.folders(tmp_path)

    def refuse(path: Path) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(BadTask, match=r"cannot read .*train: Permission denied"):
        find_data(tmp_path)
