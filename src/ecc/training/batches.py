"""`BatchStream`: the one counted stream of training batches that every method draws from.

Comparisons are made at equal batches, so there is one place where batches are counted. The stream never ends: it
asks the task for epoch after epoch. Where it stands is three numbers, which a resumed run starts from.

With several processes all of them walk the same stream, and process r of n takes batches r, r + n, r + 2n and so
on. Each counts the batches of all, so that the number means the same however many processes shared the work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ecc.errors import BadFile, BadTask, EccError
from ecc.task import Task

from .random_state import derived_seed, fork_host_rng
from .user_errors import wrap_user_errors

Batch = tuple[Any, Any]
"""(inputs, targets)"""

SEED_EPOCHS = 100_000
"""Epochs that a seed has for itself."""


class BatchCounter:
    """How many batches were drawn by a stream and all that were forked from it."""

    def __init__(self) -> None:
        self.total = 0


class BatchStream:
    """Batches without end, counted, on the device, the same for everyone who starts at the same place.

    The task's own random numbers (shuffling, augmentation) are seeded by epoch and batch, and kept apart from those
    of the network: a batch depends on its place alone, whatever was drawn in between.

    What says `is_seeded = True` draws from no generator but its own, and these are left alone, which saves time.

    Where `train_batches(epoch)` is a sequence, only the batches of this process are fetched, and a resumed run
    fetches none twice. Where it has a method `skip(n)` that gives the iterable without its first n batches, that is
    used to resume. Otherwise batches are drawn and thrown away.

    Args:
        task: Gives the batches.
        device: Where tensors in the batches are moved to.
        seed: Of the task's random numbers. A task may shuffle by the number of the epoch alone, so another seed walks
            through other epochs: it begins with number `seed * SEED_EPOCHS`.
        rank: Which process this is.
        world_size: Of how many.

    Raises:
        BadTask: If the task has no batches to train with.
    """

    def __init__(
        self,
        task: Task,
        *,
        device: torch.device | str = "cpu",
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if task.train_batches is None:
            raise BadTask(f"task {task.name!r} has no train_batches; training needs them.")
        if not 0 <= rank < world_size:
            raise EccError(f"rank {rank} is outside of 0..{world_size - 1}, the ranks of {world_size} processes.")
        self.device = torch.device(device)
        self.rank, self.world_size = rank, world_size
        self.lineage = 0
        """Batches that led to here: the place in the stream."""
        self.seconds = 0.0
        """Time that the host has spent on drawing batches."""
        self._account = BatchCounter()
        self._name = task.name
        self._train_batches: Callable[[int], Iterable[Batch]] = task.train_batches
        self._seed = seed
        self._epoch = 0
        self._index = 0  # of the next batch in the epoch
        self._batches: Iterator[Batch] | None = None
        self._sequence: Sequence[Batch] | None = None
        self._is_seeded = False

    @property
    def total(self) -> int:
        """Batches drawn altogether, those of forks that were given up included."""
        return self._account.total

    @property
    def epoch(self) -> int:
        """The epoch that the last batch was drawn from."""
        return self._epoch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch of this process, on the device."""
        started = time.perf_counter()
        mine: Batch | None = None
        for rank in range(self.world_size):
            batch = self._draw(wanted=rank == self.rank)
            mine = batch if batch is not None else mine
        assert mine is not None, "one of the ranks is ours"
        self.lineage += self.world_size
        self._account.total += self.world_size
        inputs, targets = mine
        batch = to_device(inputs, self.device), to_device(targets, self.device)
        self.seconds += time.perf_counter() - started
        return batch

    def fork(self) -> BatchStream:
        """A stream that goes on from here by itself: its batches count in the total of both.

        A method that trains candidates gives each a fork, and goes on with the winner's: `lineage` then counts the
        batches that made the winner, and `total` all. Candidates see the same batches.
        """
        other = BatchStream.__new__(BatchStream)
        other.__dict__.update(self.__dict__)  # the account is shared
        other._batches = other._sequence = None
        return other

    def state(self) -> dict[str, int]:
        """Where the stream stands."""
        return {"epoch": self._epoch, "index": self._index, "lineage": self.lineage, "total": self.total}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues with the batch after those that had been drawn when `state` was taken.

        Raises:
            BadFile: If it is no such state.
        """
        try:
            numbers = {name: int(state[name]) for name in ("epoch", "index", "lineage", "total")}
            if min(numbers.values()) < 0:
                raise ValueError("negative")
        except (KeyError, TypeError, ValueError, OverflowError):
            raise BadFile(f"the place in the batch stream is {state!r}; it needs epoch, index and counts.") from None
        self._epoch, self._index = numbers["epoch"], numbers["index"]
        self.lineage, self._account.total = numbers["lineage"], numbers["total"]
        self._batches = self._sequence = None

    def _draw(self, *, wanted: bool) -> Batch | None:
        """Takes one step along the stream; the batch is fetched from a sequence only if it is wanted."""
        if self._batches is None and self._sequence is None:
            self._open()
        batch: Any = None
        with self._blamed(self._index), self._isolated(f"epoch {self._epoch} batch {self._index}"):
            if self._sequence is not None:
                ended = self._index >= len(self._sequence)
                batch = self._sequence[self._index] if wanted and not ended else None
            else:
                assert self._batches is not None, "an open epoch is a sequence or an iterator"
                batch = next(self._batches, _END)
                ended = batch is _END
        if ended:
            if self._index == 0:
                raise BadTask(
                    f"train_batches({self._epoch}) of task {self._name!r} gave no batch; an epoch needs at least one "
                    "(is the batch larger than the data?)."
                )
            self._epoch, self._index = self._epoch + 1, 0
            self._batches = self._sequence = None
            return self._draw(wanted=wanted)
        self._index += 1
        if not wanted:
            return None
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise BadTask(
                f"train_batches of task {self._name!r} gave a {type(batch).__name__}; "
                "it must give pairs (inputs, targets)."
            )
        return batch[0], batch[1]

    def _open(self) -> None:
        """Begins the epoch at the place where the stream stands."""
        with self._blamed(0), fork_host_rng(derived_seed(self._seed, f"epoch {self._epoch}")):
            batches = self._train_batches(self._seed * SEED_EPOCHS + self._epoch)
            self._is_seeded = getattr(batches, "is_seeded", False) is True
            if isinstance(batches, Sequence):
                self._sequence = batches
                missing = self._index > len(batches)
            elif self._index and callable(skip := getattr(batches, "skip", None)):
                self._batches = iter(skip(self._index))
                missing = False
            else:
                self._batches = iter(batches)
                missing = not self._discard(self._index)
        if missing:
            self._batches = self._sequence = None
            raise BadTask(
                f"epoch {self._epoch} of task {self._name!r} has fewer than the {self._index} batches that were drawn "
                "from it before; resume with the same data, or start anew."
            )

    def _isolated(self, place: str) -> AbstractContextManager[None]:
        """A block whose random numbers depend on its place in the stream alone."""
        return nullcontext() if self._is_seeded else fork_host_rng(derived_seed(self._seed, place))

    def _blamed(self, index: int) -> AbstractContextManager[None]:
        """Names the batch at which the task's own code failed."""
        return wrap_user_errors(f"train_batches({self._epoch}) of task {self._name!r}, at batch {index},")

    def _discard(self, count: int) -> bool:
        """Draws batches for nothing, each with the random numbers that it had."""
        assert self._batches is not None, "there is something to discard from"
        for index in range(count):
            with self._isolated(f"epoch {self._epoch} batch {index}"):
                if next(self._batches, _END) is _END:
                    return False
        return True


def to_device(value: Any, device: torch.device) -> Any:
    """The same nest of tuples, lists and dicts with its tensors on a device.

    Copies to a GPU start from pinned memory, so that they run beside the host.
    """
    return mapped(value, lambda tensor: _to(tensor, device))


def micro_batches(batch: Batch, size: int | None) -> Iterator[tuple[Batch, float]]:
    """A batch in parts of at most `size` items, each with its share of the whole.

    Every tensor as long as the first one is cut along its first axis. A loss that is a mean over items, times the
    shares, sums up to the loss of the whole batch.

    Raises:
        EccError: If there is no tensor to cut.
    """
    if size is None:
        yield batch, 1.0
        return
    count = next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), 0)
    if count == 0:
        raise EccError(f"a batch without a tensor of items cannot be cut into {size} at a time; leave out micro_batch.")
    for start in range(0, count, size):
        yield mapped(batch, partial(_cut, count, slice(start, start + size))), min(size, count - start) / count


_END = object()


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _cut(count: int, part: slice, tensor: Tensor) -> Tensor:
    return tensor[part] if tensor.dim() and len(tensor) == count else tensor


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nest of tuples, lists and dicts with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple takes its items one by one
        return type(value)(*(mapped(item, change) for item in value))
    if isinstance(value, tuple | list):
        return type(value)(mapped(item, change) for item in value)
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in a nest of tuples, lists and dicts, in their order."""
    return (leaf for leaf in leaves_in(value) if isinstance(leaf, Tensor))


def leaves_in(value: Any) -> Iterator[Any]:
    """All that such a nest holds, tensors or not."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from leaves_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from leaves_in(item)
    else:
        yield value
