"""Decoding, cropping and flipping of photos and label maps."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image

from ecc.errors import BadTask
from ecc.zoo.data import images
from ecc.zoo.data.images import (
    AREAS,
    ASPECTS,
    VOID,
    label_counts,
    label_table,
    load_center_crop,
    load_random_crop,
    load_random_scene,
    load_scene,
    random_box,
)
from zoo.data.trees import noise, save

TABLE = label_table({7: 0, 8: 1}, {0, 255})


def refusal(call: object, *args: object) -> str:
    with pytest.raises(BadTask) as caught:
        call(*args)  # type: ignore[operator]
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- photos


def test_center_crop_equals_resize_and_crop(tmp_path: Path) -> None:
    ramp = np.tile(np.arange(256, dtype=np.uint8)[None, :, None], (128, 1, 3))
    path = save(tmp_path / "ramp.png", ramp)
    found = load_center_crop(path, (56, 56))
    assert found.shape == (56, 56, 3)
    # The shorter side of 128 becomes 64, of which the middle 56 are kept: two pixels of the photo a pixel.
    expected = np.arange(56) * 2 + 128 - 56 + 0.5
    assert np.abs(found[20, :, 0] - expected).max() <= 1


def test_random_crops_lie_inside_with_the_right_area_and_aspect() -> None:
    for seed in range(300):
        left, top, right, bottom = random_box((500, 300), (100, 200), Random(seed))
        assert -1e-9 <= left < right <= 500 + 1e-9
        assert -1e-9 <= top < bottom <= 300 + 1e-9
        area = (right - left) * (bottom - top) / (500 * 300)
        aspect = (right - left) / (bottom - top) / 2
        assert AREAS[0] - 1e-9 <= area <= AREAS[1] + 1e-9
        assert ASPECTS[0] - 1e-9 <= aspect <= ASPECTS[1] + 1e-9


def test_the_center_is_used_if_no_crop_fits() -> None:
    left, top, right, bottom = random_box((2000, 2), (10, 10), Random(0))
    assert (right - left, bottom - top) == (2, 2)
    assert (left, top) == (999, 0)


def test_random_crops_depend_on_their_random_numbers_alone(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png", noise(50, 60, 3))
    one, same, other = (load_random_crop(path, (16, 24), Random(seed)) for seed in (3, 3, 4))
    assert one.shape == (16, 24, 3)
    assert one.dtype == np.uint8
    assert (one == same).all()
    assert (one != other).any()


def test_half_of_the_photos_are_flipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "a.png", noise(8, 8, 3))
    monkeypatch.setattr(images, "random_box", lambda photo, size, draw: (0.0, 0.0, 8.0, 8.0))
    plain = load_center_crop(path, (8, 8))
    whole = noise(8, 8, 3)
    mirrored = [bool((load_random_crop(path, (8, 8), Random(seed)) == whole[:, ::-1]).all()) for seed in range(200)]
    assert 70 < sum(mirrored) < 130
    assert plain.shape == (8, 8, 3)


def test_a_large_jpeg_decoded_at_reduced_size_looks_the_same(tmp_path: Path) -> None:
    y, x = np.mgrid[0:512, 0:512]
    smooth = np.stack([128 + 100 * np.sin(x / 80), 128 + 100 * np.cos(y / 60), x / 2], axis=2).astype(np.uint8)
    Image.fromarray(smooth).save(tmp_path / "a.jpg", quality=95)
    Image.fromarray(smooth).save(tmp_path / "a.png")
    difference = load_center_crop(tmp_path / "a.jpg", (32, 32)).astype(int) - load_center_crop(
        tmp_path / "a.png", (32, 32)
    )
    assert np.abs(difference).max() <= 6


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "I;16", "LA"])
def test_photos_of_other_modes_become_rgb(mode: str, tmp_path: Path) -> None:
    suffix = ".jpg" if mode == "CMYK" else ".png"
    picture = Image.fromarray(noise(20, 20, 3)).convert("L" if mode == "I;16" else mode)
    picture.convert("I;16" if mode == "I;16" else mode).save(tmp_path / f"a{suffix}")
    assert load_center_crop(tmp_path / f"a{suffix}", (10, 10)).shape == (10, 10, 3)


# ---------------------------------------------------------------- scenes


def scene(folder: Path, size: tuple[int, int] = (20, 30)) -> tuple[Path, Path]:
    """The red channel shows the class of each pixel, so that both can be compared after any crop."""
    classes = np.kron(noise(size[0] // 10, size[1] // 10, below=2), np.ones((10, 10), np.uint8))
    photo = np.stack([classes * 200] * 3, axis=2)
    return save(folder / "photo.png", photo), save(folder / "map.png", classes + 7)


def test_photo_and_labels_are_cropped_and_flipped_alike(tmp_path: Path) -> None:
    photo, labels = scene(tmp_path, (40, 60))
    for seed in range(20):
        picture, classes = load_random_scene(photo, labels, TABLE, (40, 60), Random(seed))
        assert picture.shape == (40, 60, 3)
        assert classes.shape == (40, 60)
        assert set(np.unique(classes)) <= {0, 1}
        assert ((picture[..., 0] > 100) == classes).mean() > 0.9  # except at the border of two classes


def test_a_scene_keeps_its_size_or_is_resized(tmp_path: Path) -> None:
    photo, labels = scene(tmp_path)
    picture, classes = load_scene(photo, labels, TABLE, None)
    assert classes.shape == (20, 30)
    assert {0, 1} == set(np.unique(classes))
    assert (picture == (classes * 200)[..., None]).all()
    picture, classes = load_scene(photo, labels, TABLE, (10, 15))
    assert (picture.shape, classes.shape) == ((10, 15, 3), (10, 15))


def test_void_labels_and_their_count(tmp_path: Path) -> None:
    path = save(tmp_path / "map.png", np.array([[7, 8, 8], [0, 255, 7]], np.uint8))
    counts = label_counts(path, TABLE)
    assert (counts[0], counts[1], counts[VOID], counts.sum()) == (2, 2, 2, 6)


def test_a_palette_image_holds_classes_rather_than_colours(tmp_path: Path) -> None:
    picture = Image.fromarray(np.full((4, 4), 8, np.uint8))
    picture.putpalette([255 - value for value in range(256) for _ in range(3)])
    picture.save(tmp_path / "map.png")
    with Image.open(tmp_path / "map.png") as saved:
        assert saved.mode == "P"
    assert label_counts(tmp_path / "map.png", TABLE)[1] == 16


# ---------------------------------------------------------------- what is refused


def test_unknown_labels_name_file_and_value(tmp_path: Path) -> None:
    path = save(tmp_path / "map.png", np.full((4, 4), 9, np.uint8))
    assert "map.png has the unknown label 9" in refusal(label_counts, path, TABLE)


def test_a_label_map_in_colours_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "map.png", noise(4, 4, 3))
    assert "map.png is an image of mode RGB" in refusal(label_counts, path, TABLE)


def test_labels_of_another_size_are_refused(tmp_path: Path) -> None:
    photo, labels = save(tmp_path / "a.png", noise(8, 8, 3)), save(tmp_path / "b.png", np.full((8, 9), 7, np.uint8))
    for call in (load_scene, load_random_scene):
        rest = ((8, 8), Random(0)) if call is load_random_scene else ((8, 8),)
        assert "b.png has 9x8 pixels and its photo a.png 8x8" in refusal(call, photo, labels, TABLE, *rest)


def test_a_missing_pillow_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert "needs Pillow, which cannot be imported" in refusal(load_center_crop, tmp_path / "a.png", (8, 8))
