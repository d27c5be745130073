from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ecc.methods.ecc import masks
from ecc.methods.ecc.masks import SliceMasks

CPU = torch.device("cpu")


def by_hand(tensors: list[Tensor], axes: list[int], kept: Tensor) -> list[Tensor]:
    """Slice after slice."""
    found = {id(tensor): tensor.detach().clone() for tensor in tensors}
    position = 0
    for tensor, axis in zip(tensors, axes, strict=True):
        for index in range(tensor.shape[axis]):
            if not kept[position]:
                found[id(tensor)].select(axis, index).zero_()
            position += 1
    return [found[id(tensor)] for tensor in tensors]


@pytest.mark.parametrize("small", [0, 100, 2**20])
def test_slices_are_zeroed_as_by_hand(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_SMALL", small)
    draw = torch.Generator().manual_seed(0)
    conv, linear, bias = (torch.randn(shape, generator=draw) for shape in ((6, 4, 3, 3), (5, 7), (9,)))
    half = torch.randn((4, 3), generator=draw, dtype=torch.float64).requires_grad_()
    tensors, axes = [conv, linear, linear, bias, half], [1, 1, 0, 0, 1]
    found = SliceMasks(tensors, axes, CPU)
    for _ in range(3):
        kept = torch.rand(4 + 7 + 5 + 9 + 3, generator=draw) > 0.3
        for tensor in tensors:
            with torch.no_grad():
                tensor.normal_(generator=draw)
        wanted = by_hand(tensors, axes, kept)
        found.set(kept)
        found.apply_()
        for tensor, want in zip(tensors, wanted, strict=True):
            assert torch.equal(tensor, want)


def test_masks_follow_tensors_to_another_memory_format() -> None:
    conv = torch.nn.Conv2d(4, 6, 3)
    found = SliceMasks([conv.weight], [1], CPU)
    found.set(torch.tensor([1, 0, 1, 1]))
    conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in torch's stubs
    found.set(torch.tensor([0, 1, 1, 1]))
    found.apply_()
    assert found._full[0].stride() == conv.weight.stride()
    assert not conv.weight[:, 0].any()
    assert conv.weight[:, 1:].all()


def test_nothing_to_mask_is_no_error() -> None:
    found = SliceMasks([], [], CPU)
    found.set(torch.ones(0))
    found.apply_()
    assert found._vector.numel() == 0
