from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from ecc.errors import BadFile, BadTask, EccError
from ecc.training.batches import SEED_EPOCHS, BatchStream, micro_batches, to_device
from ecc.zoo.digits import digits
from training.toys import data, toy_task


def numbered(epoch: int) -> Iterator[tuple[Tensor, int]]:
    for index in range(5):
        yield torch.tensor([10 * epoch + index]), 0


class Numbered(list[Any]):
    """As `numbered`, in random access; notes what was fetched."""

    fetched: list[int]

    def __init__(self, epoch: int) -> None:
        super().__init__(numbered(epoch))
        self.fetched = []

    def __getitem__(self, index: Any) -> Any:
        self.fetched.append(index)
        return super().__getitem__(index)


class Skipping:
    """As `numbered`, with a quick way over the first batches."""

    skipped: ClassVar[list[int]] = []

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return numbered(self.epoch)

    def skip(self, count: int) -> Iterator[tuple[Tensor, int]]:
        self.skipped.append(count)
        return islice(numbered(self.epoch), count, None)


def loader(epoch: int) -> DataLoader[tuple[Tensor, ...]]:
    """A loader that shuffles by the global generator, as most do."""
    return DataLoader(TensorDataset(*data()), batch_size=4, shuffle=True)


def stream_of(train_batches: Any, **options: Any) -> BatchStream:
    return BatchStream(toy_task(train_batches=train_batches), **options)


def numbers(stream: BatchStream, count: int) -> list[int]:
    return [int(inputs) for inputs, _ in islice(stream, count)]


EXPECTED = [0, 1, 2, 3, 4, 10, 11, 12, 13, 14, 20, 21, 22]


@pytest.mark.parametrize("train_batches", [numbered, Numbered, Skipping])
def test_epochs_follow_each_other_and_batches_are_counted(train_batches: Any) -> None:
    stream = stream_of(train_batches)
    assert numbers(stream, 13) == EXPECTED
    assert (stream.lineage, stream.total, stream.epoch) == (13, 13, 2)


@pytest.mark.parametrize("train_batches", [numbered, Numbered, Skipping])
@pytest.mark.parametrize("before", range(12))
def test_a_restored_stream_goes_on_with_the_next_batch(train_batches: Any, before: int) -> None:
    first = stream_of(train_batches)
    numbers(first, before)
    second = stream_of(train_batches)
    second.restore(first.state())
    assert numbers(second, 13 - before) == EXPECTED[before:]
    assert second.state() == {"epoch": 2, "index": 3, "lineage": 13, "total": 13}


@pytest.mark.parametrize("train_batches", [toy_task().train_batches, loader, digits().train_batches])
@pytest.mark.parametrize("before", [0, 1, 6, 7, 9])
def test_batches_depend_on_their_place_alone(train_batches: Any, before: int) -> None:
    whole = list(islice(stream_of(train_batches, seed=5), 12))
    first = stream_of(train_batches, seed=5)
    random.seed(1)
    list(islice(first, before))
    torch.rand(3)  # a network may draw in between, and a resumed run has drawn less
    second = stream_of(train_batches, seed=5)
    second.restore(first.state())
    for expected, found in zip(whole[before:], second, strict=False):
        assert torch.equal(expected[0], found[0])
        assert torch.equal(expected[1], found[1])


def test_another_seed_walks_through_other_epochs() -> None:
    asked: list[int] = []

    def train_batches(epoch: int) -> list[tuple[Tensor, Tensor]]:
        asked.append(epoch)
        return [(torch.zeros(1), torch.tensor([epoch]))]

    for seed in (0, 2):
        list(islice(stream_of(train_batches, seed=seed), 2))
    assert asked == [0, 1, 2 * SEED_EPOCHS, 2 * SEED_EPOCHS + 1]


def test_the_seed_is_that_of_the_data() -> None:
    one, same, other = (next(stream_of(loader, seed=seed))[1] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_drawing_leaves_the_random_numbers_of_the_network_alone() -> None:
    stream = stream_of(loader)
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    next(stream)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("is_seeded", [False, True])
def test_generators_of_batches_that_have_their_own_are_left_alone(is_seeded: bool) -> None:
    drawn = []

    class Batches(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            drawn.append(random.random())
            return super().__getitem__(index)

    def train_batches(epoch: int) -> Batches:
        batches = Batches(numbered(epoch))
        batches.is_seeded = is_seeded  # type: ignore[attr-defined]  # set as a user would
        return batches

    random.seed(5)
    assert numbers(stream_of(train_batches), 3) == [0, 1, 2]
    after = random.random()
    random.seed(5)
    plain = [random.random() for _ in range(4)]
    assert (drawn == plain[:3]) == is_seeded
    assert after == plain[3 if is_seeded else 0]


def test_a_resumed_sequence_fetches_nothing_twice_and_skip_is_used() -> None:
    made: list[Numbered] = []

    def keep(epoch: int) -> Numbered:
        made.append(Numbered(epoch))
        return made[-1]

    stream = stream_of(keep)
    stream.restore({"epoch": 1, "index": 3, "lineage": 8, "total": 8})
    assert numbers(stream, 2) == [13, 14]
    assert made[0].fetched == [3, 4]

    Skipping.skipped.clear()
    stream = stream_of(Skipping)
    stream.restore({"epoch": 1, "index": 3, "lineage": 8, "total": 8})
    assert numbers(stream, 3) == [13, 14, 20]
    assert Skipping.skipped == [3]


# ---------------------------------------------------------------- several processes


@pytest.mark.parametrize("train_batches", [numbered, Numbered])
def test_processes_take_turns_across_the_ends_of_epochs(train_batches: Any) -> None:
    streams = [stream_of(train_batches, rank=rank, world_size=2) for rank in (0, 1)]
    assert [numbers(stream, 6) for stream in streams] == [EXPECTED[0:12:2], EXPECTED[1:12:2]]
    assert {stream.total for stream in streams} == {12}
    assert streams[0].state() == streams[1].state()
    again = stream_of(train_batches, rank=1, world_size=2)
    again.restore(streams[0].state())
    assert numbers(again, 1) == [23]


def test_a_process_fetches_only_its_own_from_a_sequence() -> None:
    sequence = Numbered(0)
    assert numbers(stream_of(lambda epoch: sequence, rank=1, world_size=2), 2) == [1, 3]
    assert sequence.fetched == [1, 3]


def test_a_rank_outside_of_the_world_is_refused() -> None:
    with pytest.raises(EccError, match=r"rank 2 is outside of 0\.\.1"):
        stream_of(numbered, rank=2, world_size=2)


# ---------------------------------------------------------------- accounts


def test_candidates_see_the_same_batches_and_all_are_counted() -> None:
    stream = stream_of(numbered)
    numbers(stream, 3)
    forks = [stream.fork() for _ in range(3)]
    assert [numbers(fork, 4) for fork in forks] == [[3, 4, 10, 11]] * 3
    winner = forks[1]
    assert (winner.lineage, winner.total) == (7, 15)
    assert (stream.lineage, stream.total) == (3, 15)
    assert numbers(winner, 1) == [12]
    assert (winner.lineage, winner.total) == (8, 16)
    resumed = stream_of(numbered)
    resumed.restore(winner.state())
    assert (numbers(resumed, 1), resumed.lineage, resumed.total) == ([13], 9, 17)


# ---------------------------------------------------------------- refusals


def test_a_task_without_batches_is_refused() -> None:
    with pytest.raises(BadTask, match="'toy' has no train_batches"):
        stream_of(None)


@pytest.mark.parametrize("empty", [list, iter])
def test_an_empty_epoch_is_told(empty: Any) -> None:
    with pytest.raises(BadTask, match=r"train_batches\(0\) of task 'toy' gave no batch"):
        next(stream_of(lambda epoch: empty([])))


def test_an_epoch_that_has_become_empty_is_told() -> None:
    stream = stream_of(lambda epoch: [] if epoch else [(torch.zeros(1), 0)])
    next(stream)
    with pytest.raises(BadTask, match=r"train_batches\(1\)"):
        next(stream)


@pytest.mark.parametrize("batch", [torch.zeros(2, 3), (1, 2, 3), {"x": 1}])
def test_a_batch_that_is_no_pair_is_told(batch: Any) -> None:
    with pytest.raises(BadTask, match=r"it must give pairs \(inputs, targets\)"):
        next(stream_of(lambda epoch: [batch]))


@pytest.mark.parametrize("train_batches", [numbered, Numbered])
def test_data_that_has_shrunk_is_told(train_batches: Any) -> None:
    stream = stream_of(train_batches)
    stream.restore({"epoch": 0, "index": 9, "lineage": 9, "total": 9})
    with pytest.raises(BadTask, match="has fewer than the 9 batches that were drawn"):
        next(stream)


def test_a_state_that_is_none_is_refused() -> None:
    with pytest.raises(BadFile, match="the place in the batch stream"):
        stream_of(numbered).restore({"epoch": 1})


# ---------------------------------------------------------------- nested batches


class Point(NamedTuple):
    x: Tensor
    label: str


def test_nested_tensors_are_moved_and_the_rest_is_kept() -> None:
    value = {"a": [torch.zeros(2), "text"], "b": Point(torch.ones(1), "p"), "c": (1, None)}
    there = to_device(value, torch.device("meta"))
    assert there["a"][0].device.type == there["b"].x.device.type == "meta"
    assert (there["a"][1], there["b"].label, there["c"]) == ("text", "p", (1, None))
    assert type(there["b"]) is Point


def test_a_batch_is_cut_into_parts_with_their_shares() -> None:
    batch = ({"x": torch.arange(5.0), "scale": torch.tensor(2.0)}, (torch.arange(5), torch.zeros(3)))
    parts = list(micro_batches(batch, 2))
    assert [share for _, share in parts] == [0.4, 0.4, 0.2]
    assert torch.equal(torch.cat([inputs["x"] for (inputs, _), _ in parts]), torch.arange(5.0))
    assert torch.equal(torch.cat([targets[0] for (_, targets), _ in parts]), torch.arange(5))
    assert all(len(targets[1]) == 3 and inputs["scale"] == 2 for (inputs, targets), _ in parts)


def test_without_a_size_the_batch_is_whole() -> None:
    batch = (torch.zeros(4), torch.zeros(4))
    ((whole, share),) = micro_batches(batch, None)
    assert whole is batch
    assert share == 1


def test_a_batch_without_items_cannot_be_cut() -> None:
    with pytest.raises(EccError, match="leave out micro_batch"):
        list(micro_batches((torch.tensor(1.0), "text"), 2))


@pytest.mark.gpu
def test_batches_come_on_the_gpu() -> None:
    inputs, labels = next(stream_of(loader, device="cuda"))
    assert inputs.is_cuda
    assert torch.equal(labels.cpu(), next(stream_of(loader))[1])
