from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, jaccard_score, top_k_accuracy_score
from torch import Tensor, nn

from ecc.errors import BadTask
from ecc.zoo.data.images import VOID
from ecc.zoo.image_task import confusion, judged, mean_iou, pair_counts, top_k


class Told(nn.Module):
    """Gives its input as scores, and remembers whether it was judged in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.bn = nn.BatchNorm2d(1).eval()

    def forward(self, scores: Tensor) -> Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        return scores * self.scale


def batches(scores: Tensor, labels: Tensor, size: int = 7):  # type: ignore[no-untyped-def]
    def on(device: torch.device) -> Iterable[tuple[Tensor, Tensor]]:
        assert device.type == "cpu"
        return zip(scores.split(size), labels.split(size), strict=True)

    return on


def test_top_k_is_that_of_scikit_learn() -> None:
    scores, labels = torch.randn(100, 9), torch.randint(0, 9, (100,))
    found = top_k(Told(), batches(scores, labels), (1, 3, 5))
    for k, share in zip((1, 3, 5), found, strict=True):
        assert share == pytest.approx(top_k_accuracy_score(labels, scores, k=k, labels=range(9)))


def test_top_five_of_three_classes_is_all() -> None:
    assert top_k(Told(), batches(torch.randn(8, 3), torch.zeros(8, dtype=torch.int64)))[1] == 1.0


def test_confusion_is_that_of_scikit_learn_without_void() -> None:
    scores, labels = torch.randn(20, 5, 6, 8), torch.randint(0, 5, (20, 6, 8))
    labels[torch.rand(labels.shape) < 0.2] = VOID
    counts = confusion(Told(), batches(scores, labels), 5)
    known = labels != VOID
    truth, said = labels[known].numpy(), scores.argmax(1)[known].numpy()
    assert (counts.numpy() == confusion_matrix(truth, said, labels=range(5))).all()
    assert mean_iou(counts) == pytest.approx(jaccard_score(truth, said, average="macro"))


def test_mean_iou_by_hand_as_the_paper_defines_it() -> None:
    # TP / (FP + TP + FN): class 0 has 3 / (3 + 1 + 2), class 1 has 4 / (4 + 2 + 1).
    counts = torch.tensor([[3, 2], [1, 4]])
    assert mean_iou(counts) == pytest.approx((3 / 6 + 4 / 7) / 2)


def test_a_class_that_is_nowhere_does_not_count_and_one_that_is_missed_does() -> None:
    assert mean_iou(torch.tensor([[5, 0, 0], [0, 5, 0], [0, 0, 0]])) == 1.0
    assert mean_iou(torch.tensor([[5, 0, 0], [0, 5, 0], [5, 0, 0]])) == pytest.approx((0.5 + 1 + 0) / 3)


def test_modes_are_put_back_even_after_an_error() -> None:
    net = Told().train()
    net.bn.eval()
    with pytest.raises(ValueError, match="stop"), judged(net):
        raise ValueError("stop")
    assert net.training
    assert not net.bn.training


def test_nothing_to_judge_by_and_labels_out_of_range_are_refused() -> None:
    with pytest.raises(BadTask, match="the split gave no batch"):
        top_k(Told(), lambda _: [])
    with pytest.raises(BadTask, match="every pixel is void"):
        mean_iou(pair_counts(torch.zeros(4, dtype=torch.int64), torch.full((4,), VOID), 3)[:-1].view(3, 3))
    with pytest.raises(BadTask, match="2 labels are neither classes, 0 to 2, nor 255 for void"):
        confusion(nn.Identity(), lambda _: [(torch.zeros(1, 3, 2, 2), torch.tensor([[[0, 3], [VOID, -1]]]))], 3)


def test_counts_of_one_batch_match_a_slow_twin() -> None:
    said, truth = torch.randint(0, 3, (4, 5)), torch.randint(0, 3, (4, 5))
    slow = np.zeros((3, 3), int)
    for one, other in zip(truth.flatten().tolist(), said.flatten().tolist(), strict=True):
        slow[one, other] += 1
    *counts, strange = pair_counts(said, truth, 3).tolist()
    assert (np.array(counts).reshape(3, 3) == slow).all()
    assert strange == 0
