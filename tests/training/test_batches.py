from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, TensorDataset

from ecc.errors import BadTask, EccError, EccWarning
from ecc.training import BatchStream, to_device
from ecc.training.batches import EPOCHS_PER_SEED, micro_batches
from training.toys import data, toy_task


def numbered(epoch: int) -> Iterator[tuple[Tensor, int]]:
    for index in range(5):
        yield torch.tensor([10 * epoch + index]), 0


class Numbered(list[Any]):
    """As `numbered`, in random access; notes what was fetched."""

    def __init__(self, epoch: int) -> None:
        super().__init__(numbered(epoch))
        self.fetched: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.fetched.append(index)
        return super().__getitem__(index)


class Skipping:
    """As `numbered`, with a method `skip`."""

    skipped: ClassVar[list[int]] = []

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return numbered(self.epoch)

    def skip(self, count: int) -> Iterator[tuple[Tensor, int]]:
        self.skipped.append(count)
        return islice(numbered(self.epoch), count, None)


def stream_of(train_batches: Any, **options: Any) -> BatchStream:
    return BatchStream(toy_task(train_batches=train_batches), **options)


def numbers(stream: BatchStream, count: int) -> list[int]:
    return [int(inputs) for inputs, _ in islice(stream, count)]


EXPECTED = [0, 1, 2, 3, 4, 10, 11, 12, 13, 14, 20, 21, 22]


@pytest.mark.parametrize("train_batches", [numbered, Numbered, Skipping])
@pytest.mark.parametrize("before", [0, 3, 5, 12])
def test_a_restored_stream_continues_with_the_next_batch(train_batches: Any, before: int) -> None:
    first = stream_of(train_batches)
    assert numbers(first, before) == EXPECTED[:before]
    second = stream_of(train_batches)
    second.restore(first.state())
    assert numbers(second, 13 - before) == EXPECTED[before:]
    assert second.state() == {"epoch": 2, "index": 3, "lineage": 13, "total": 13}


def test_a_resumed_sequence_fetches_nothing_twice_and_skip_is_used() -> None:
    made: list[Numbered] = []

    def keep(epoch: int) -> Numbered:
        made.append(Numbered(epoch))
        return made[-1]

    position = {"epoch": 1, "index": 3, "lineage": 8, "total": 8}
    stream = stream_of(keep)
    stream.restore(position)
    assert numbers(stream, 2) == [13, 14]
    assert made[0].fetched == [3, 4]
    Skipping.skipped.clear()
    stream = stream_of(Skipping)
    stream.restore(position)
    assert numbers(stream, 3) == [13, 14, 20]
    assert Skipping.skipped == [3]


def test_another_seed_uses_other_epochs() -> None:
    asked: list[int] = []

    def train_batches(epoch: int) -> list[tuple[Tensor, Tensor]]:
        asked.append(epoch)
        return [(torch.zeros(1), torch.tensor([epoch]))]

    for seed in (0, 2):
        list(islice(stream_of(train_batches, seed=seed), 2))
    assert asked == [0, 1, 2 * EPOCHS_PER_SEED, 2 * EPOCHS_PER_SEED + 1]


@pytest.mark.parametrize("is_seeded", [False, True])
def test_batches_that_are_seeded_use_the_global_generators_as_they_are(is_seeded: bool) -> None:
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


# ---------------------------------------------------------------- data loaders


class Noisy(TensorDataset):
    """Augmentation with the global generators."""

    def __getitem__(self, index: Any) -> Any:
        image, label = super().__getitem__(index)
        return image + torch.rand(()) + random.random(), label


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(zip(*data(), strict=True))


class Backwards(Sampler[int]):
    def __init__(self) -> None: ...

    def __iter__(self) -> Iterator[int]:
        return iter(range(27, -1, -1))

    def __len__(self) -> int:
        return 28


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(*data()), **{"batch_size": 4, "shuffle": True, **options})


LOADERS = {
    "shuffled": loader,
    "in order": lambda: loader(shuffle=False),
    "own generator": lambda: loader(generator=torch.Generator().manual_seed(1)),
    "sampler with a generator": lambda: loader(
        shuffle=False, sampler=RandomSampler(range(28), replacement=True, num_samples=28, generator=torch.Generator())
    ),
    "batch sampler": lambda: DataLoader(
        Noisy(*data()), batch_sampler=BatchSampler(RandomSampler(range(28)), 4, drop_last=False)
    ),
    "list": lambda: list(DataLoader(TensorDataset(*data()), batch_size=4)),
    "function with a loader": lambda: lambda epoch: loader(),
    "function of the epoch": lambda: toy_task().train_batches,
}


@pytest.mark.filterwarnings("error::ecc.EccWarning")
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("before", [1, 7, 9])
def test_batches_depend_on_seed_and_position_only(kind: str, before: int) -> None:
    make = LOADERS[kind]
    torch.manual_seed(2)
    batches = make()
    whole = list(islice(stream_of(batches, seed=5), 12))
    first = stream_of(batches, seed=5)
    list(islice(first, before))
    torch.rand(3)  # the network draws in between, and a resumed run has drawn less
    torch.manual_seed(2)
    second = stream_of(make(), seed=5)
    second.restore(first.state())
    for expected, found in zip(whole[before:], second, strict=False):
        assert torch.equal(expected[0], found[0])
        assert torch.equal(expected[1], found[1])


def test_a_loader_is_shuffled_anew_in_every_epoch_and_for_every_seed() -> None:
    def labels(stream: BatchStream) -> list[int]:
        return torch.cat([labels for _, labels in islice(stream, 7)]).tolist()

    shared = torch.Generator().manual_seed(4)
    for batches in (loader(), loader(generator=shared)):
        stream = stream_of(batches)
        orders = [labels(stream), labels(stream), labels(stream_of(batches, seed=1))]
        assert all(sorted(order) == sorted(data()[1].tolist()) for order in orders)
        assert orders[0] != orders[1] != orders[2] != orders[0]
    assert torch.equal(shared.get_state(), torch.Generator().manual_seed(4).get_state())  # the user's generator


@pytest.mark.filterwarnings("error::ecc.EccWarning")
@pytest.mark.parametrize("persistent", [False, True])
def test_worker_processes_give_the_same_batches_to_streams_and_forks(persistent: bool) -> None:
    def make() -> DataLoader[Any]:
        return loader(num_workers=1, persistent_workers=persistent)

    stream = stream_of(make())
    first = [next(stream)[1] for _ in range(2)]
    fork = stream.fork()
    third = next(fork)[1]
    fourth = next(fork)[1]
    assert torch.equal(next(stream)[1], third)
    assert torch.equal(next(stream)[1], fourth)
    again = stream_of(make())
    assert all(torch.equal(next(again)[1], label) for label in (*first, third, fourth))


@pytest.mark.parametrize(
    ("batches", "reason"),
    [
        (lambda: DataLoader(Endless(), batch_size=4), "the data set Endless is an IterableDataset"),
        (lambda: loader(shuffle=False, sampler=Backwards()), "the order of the sampler Backwards"),
        (lambda: Skipping(0), "train_batches is a Skipping"),
    ],
)
def test_batches_that_may_differ_after_resuming_are_announced_once(batches: Any, reason: str) -> None:
    with pytest.warns(EccWarning, match=reason) as caught:
        stream = stream_of(batches())
    next(stream.fork())
    assert len(caught) == 1
    assert len(list(islice(stream, 8))) == 8


def test_a_distributed_sampler_is_refused() -> None:
    sampler = torch.utils.data.DistributedSampler(Noisy(*data()), num_replicas=2, rank=0)
    with pytest.raises(BadTask, match="has a DistributedSampler; ECC distributes batches"):
        stream_of(loader(shuffle=False, sampler=sampler))


# ---------------------------------------------------------------- several processes, forks


@pytest.mark.parametrize("train_batches", [numbered, Numbered])
def test_processes_take_turns_across_the_ends_of_epochs(train_batches: Any) -> None:
    streams = [stream_of(train_batches, rank=rank, world_size=2) for rank in (0, 1)]
    assert [numbers(stream, 6) for stream in streams] == [EXPECTED[0:12:2], EXPECTED[1:12:2]]
    assert {stream.total for stream in streams} == {12}
    assert streams[0].state() == streams[1].state()
    again = stream_of(train_batches, rank=1, world_size=2)
    again.restore(streams[0].state())
    assert numbers(again, 1) == [23]
    sequence = Numbered(0)
    assert numbers(stream_of(lambda epoch: sequence, rank=1, world_size=2), 2) == [1, 3]
    assert sequence.fetched == [1, 3]


def test_candidates_see_the_same_batches_and_all_are_counted() -> None:
    stream = stream_of(numbered)
    numbers(stream, 3)
    forks = [stream.fork() for _ in range(3)]
    assert [numbers(fork, 4) for fork in forks] == [[3, 4, 10, 11]] * 3
    winner = forks[1]
    assert (winner.lineage, winner.total) == (7, 15)
    assert (stream.lineage, stream.total) == (3, 15)
    resumed = stream_of(numbered)
    resumed.restore(winner.state())
    assert (numbers(resumed, 1), resumed.lineage, resumed.total) == ([12], 8, 16)


# ---------------------------------------------------------------- errors


def raising(epoch: int) -> Iterator[Any]:
    yield from islice(numbered(epoch), 2)
    raise KeyError("file 3")


@pytest.mark.parametrize(
    ("train_batches", "position", "message"),
    [
        (lambda epoch: [], None, "epoch 0 of train_batches of task 'toy' has no batch"),
        (lambda epoch: iter([]), None, "epoch 0 of train_batches of task 'toy' has no batch"),
        (lambda epoch: [] if epoch else Numbered(0), (0, 5), "epoch 1 .* has no batch"),
        (numbered, (0, 9), "has fewer batches than the 9 that were drawn"),
        (Numbered, (0, 9), "has fewer batches than the 9 that were drawn"),
        (raising, (0, 2), "train_batches of task 'toy', at epoch 0, batch 2, raised KeyError: 'file 3'"),
    ],
)
def test_an_epoch_that_is_empty_shorter_or_broken_is_reported(train_batches: Any, position: Any, message: str) -> None:
    stream = stream_of(train_batches)
    if position:
        stream.restore({"epoch": position[0], "index": position[1], "lineage": 0, "total": 0})
    with pytest.raises(BadTask, match=message):
        next(stream)


# ---------------------------------------------------------------- nested batches


class Point(NamedTuple):
    x: Tensor
    label: str


class Encoding(dict[str, Any]):
    """As Hugging Face's BatchEncoding."""


class Graph:
    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def to(self, device: torch.device) -> Graph:
        return Graph(str(device))


def test_nested_tensors_are_moved_and_the_rest_is_kept() -> None:
    value = {"a": [torch.zeros(2), "text"], "b": Point(torch.ones(1), "p"), "c": (1, None), "d": Graph()}
    found = to_device(value, torch.device("meta"))
    assert found["a"][0].device.type == found["b"].x.device.type == found["d"].device == "meta"
    assert (found["a"][1], found["b"].label, found["c"]) == ("text", "p", (1, None))
    assert type(found["b"]) is Point
    pair = to_device((Encoding(ids=torch.zeros(2)), torch.zeros(1)), torch.device("meta"))
    assert pair[0]["ids"].device.type == "meta"


def test_a_batch_is_split_with_the_fractions_of_its_parts() -> None:
    batch = ({"x": torch.arange(5.0), "scale": torch.tensor(2.0)}, (torch.arange(5), torch.zeros(3)))
    parts = list(micro_batches(batch, 2))
    assert [fraction for _, fraction in parts] == [0.4, 0.4, 0.2]
    assert torch.equal(torch.cat([inputs["x"] for (inputs, _), _ in parts]), torch.arange(5.0))
    assert torch.equal(torch.cat([targets[0] for (_, targets), _ in parts]), torch.arange(5))
    assert all(len(targets[1]) == 3 and inputs["scale"] == 2 for (inputs, targets), _ in parts)
    ((whole, fraction),) = micro_batches(batch, None)
    assert (whole is batch, fraction) == (True, 1.0)
    with pytest.raises(EccError, match="leave out micro_batch"):
        list(micro_batches((torch.tensor(1.0), "text"), 2))


@pytest.mark.gpu
def test_batches_are_moved_to_the_gpu() -> None:
    inputs, labels = next(stream_of(loader(), device="cuda"))
    assert inputs.is_cuda
    assert torch.equal(labels.cpu(), next(stream_of(loader()))[1])
