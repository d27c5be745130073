"""`BatchStream`: the counted stream of training batches that every method draws from.

Methods are compared at equal numbers of batches, so batches are counted in one place. The stream never ends: it opens
epoch after epoch of the task. Its position is a few numbers, from which a resumed run continues.

With several processes, all of them go through the same stream, and process r of n takes batches r, r + n, r + 2n, ...
Each counts the batches of all processes, so the count does not depend on the number of processes.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils import data
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ecc.errors import BadFile, BadTask, EccError, EccWarning, wrap_user_errors
from ecc.task import Batch, Task

from .rng import derived_seed, fork_rng

EPOCHS_PER_SEED = 100_000
"""A task may shuffle by the number of the epoch alone, so seed s starts with epoch s * EPOCHS_PER_SEED."""

_SAMPLERS = (
    data.SequentialSampler,
    data.RandomSampler,
    data.SubsetRandomSampler,
    data.WeightedRandomSampler,
    data.BatchSampler,
)
_END = object()


class BatchCounter:
    """Number of batches drawn by a stream and all its forks."""

    def __init__(self) -> None:
        self.total = 0


class BatchStream:
    """An endless, counted stream of batches on a device, which depends on the seed and the position only.

    The global generators of Python, NumPy and torch are seeded by epoch and batch while the task's code runs, and
    restored afterwards. So shuffling and augmentation do not depend on what the network draws, and a resumed run sees
    the same batches.

    - A DataLoader is iterated once per epoch. Its explicit generators, if it has any, are seeded as well. An
      `EccWarning` says why if the same batches cannot be promised after resuming.
    - Where an epoch is a sequence, only the batches of this process are fetched, and a resumed run starts at its
      position. Where it has a method `skip(n)`, which returns an iterable without the first n batches, resuming uses
      it. Otherwise a resumed run draws the batches before its position once more.
    - An epoch with the attribute `is_seeded = True` uses no global generator, and these are not seeded for it.

    Raises:
        BadTask: If the task has no training batches.
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
            raise EccError(f"rank {rank} is outside 0..{world_size - 1}, the ranks of {world_size} processes.")
        self.device = torch.device(device)
        self.rank, self.world_size = rank, world_size
        self.lineage = 0
        """Batches on the way to this position; batches of abandoned forks do not count."""
        self.seconds = 0.0
        """Time that was spent on drawing batches."""
        self._counter = BatchCounter()
        self._task, self._seed = task, seed
        self._loader = _Loader(task) if not callable(task.train_batches) else None
        self._epoch = 0
        self._index = 0  # of the next batch in the epoch
        self._batches: Iterator[Batch] | None = None
        self._sequence: Sequence[Batch] | None = None
        self._is_seeded = False
        if self._loader is not None and rank == 0 and (reason := self._loader.why_inexact()):
            warnings.warn(
                f"A resumed run may see other batches: {reason}. Resuming works, but not bit for bit.",
                EccWarning,
                stacklevel=2,
            )

    @property
    def total(self) -> int:
        """Batches drawn altogether, those of abandoned forks included."""
        return self._counter.total

    @property
    def epoch(self) -> int:
        """Epoch of the last batch."""
        return self._epoch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch of this process, on the device."""
        started = time.perf_counter()
        own: Batch = None
        for rank in range(self.world_size):
            batch = self._draw(fetch=rank == self.rank)
            own = batch if rank == self.rank else own
        self.lineage += self.world_size
        self._counter.total += self.world_size
        own = to_device(own, self.device)
        self.seconds += time.perf_counter() - started
        return own

    def fork(self) -> BatchStream:
        """A second stream that starts at this position; `total` counts the batches of both.

        A method that trains several candidates gives each a fork and continues with that of the winner. `lineage` then
        counts the batches of the winner, and `total` those of all. All candidates see the same batches.
        """
        other = BatchStream.__new__(BatchStream)
        other.__dict__.update(self.__dict__)  # the counter is shared
        other._batches = other._sequence = None
        other._loader = None if self._loader is None else self._loader.fork()
        return other

    def state(self) -> dict[str, int]:
        """The position, for `restore`."""
        return {"epoch": self._epoch, "index": self._index, "lineage": self.lineage, "total": self.total}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue at a position of `state`.

        Raises:
            BadFile: If it is not a position.
        """
        try:
            numbers = {name: int(state[name]) for name in ("epoch", "index", "lineage", "total")}
            if min(numbers.values()) < 0:
                raise ValueError("negative")
        except (KeyError, TypeError, ValueError, OverflowError):
            raise BadFile(f"the position in the batches is {state!r}; expected epoch, index and counts.") from None
        self._epoch, self._index = numbers["epoch"], numbers["index"]
        self.lineage, self._counter.total = numbers["lineage"], numbers["total"]
        self._batches = self._sequence = None

    def _draw(self, *, fetch: bool) -> Batch:
        """Advance by one batch. With `fetch=False` the result is undefined: a sequence need not compute the batch."""
        if self._batches is None and self._sequence is None:
            self._open()
        batch: Batch = None
        with self._user_code(self._index), self._seeded(f"epoch {self._epoch} batch {self._index}"):
            if self._sequence is not None:
                ended = self._index >= len(self._sequence)
                batch = self._sequence[self._index] if fetch and not ended else None
            else:
                assert self._batches is not None, "an open epoch is a sequence or an iterator"
                batch = next(self._batches, _END)
                ended = batch is _END
        if not ended:
            self._index += 1
            return batch
        if self._index == 0:
            raise BadTask(
                f"epoch {self._epoch} of train_batches of task {self._task.name!r} has no batch; an epoch needs at "
                "least one (is the batch size larger than the data set, with drop_last?)."
            )
        self._epoch, self._index = self._epoch + 1, 0
        self._batches = self._sequence = None
        return self._draw(fetch=fetch)

    def _open(self) -> None:
        """Open the current epoch at the current position."""
        missing = False
        number = self._seed * EPOCHS_PER_SEED + self._epoch
        with self._user_code(0), fork_rng(derived_seed(self._seed, f"epoch {self._epoch}")):
            batches: Any = self._loader.batches if self._loader is not None else self._task.epoch_batches(number)
            self._is_seeded = getattr(batches, "is_seeded", False) is True
            if self._loader is not None:
                self._loader.start_epoch(number, derived_seed(self._seed, f"loader of epoch {self._epoch}"))
            if isinstance(batches, Sequence):
                self._sequence = batches
                missing = self._index > len(batches)
            elif self._index and callable(skip := getattr(batches, "skip", None)):
                self._batches = iter(skip(self._index))
            else:
                with self._generators():
                    self._batches = iter(batches)
                missing = not self._skip(self._index)
        if missing:
            self._batches = self._sequence = None
            raise BadTask(
                f"epoch {self._epoch} of task {self._task.name!r} has fewer batches than the {self._index} that were "
                "drawn from it before; resume with the same data, or start a new run."
            )

    def _skip(self, count: int) -> bool:
        """Draw batches once more that were used before; False if there are fewer."""
        assert self._batches is not None, "the epoch is open"
        for index in range(count):
            with self._seeded(f"epoch {self._epoch} batch {index}"):
                if next(self._batches, _END) is _END:
                    return False
        return True

    @contextmanager
    def _seeded(self, position: str) -> Iterator[None]:
        """A block in which the generators depend on the position only."""
        seeded = nullcontext() if self._is_seeded else fork_rng(derived_seed(self._seed, position))
        with seeded, self._generators():
            yield

    def _generators(self) -> AbstractContextManager[None]:
        return nullcontext() if self._loader is None else self._loader.seeded_generators()

    def _user_code(self, index: int) -> AbstractContextManager[None]:
        return wrap_user_errors(f"train_batches of task {self._task.name!r}, at epoch {self._epoch}, batch {index},")


class _Loader:
    """What makes a DataLoader or another re-iterable give the same batches in the same epoch.

    torch's samplers draw a permutation when iteration starts: from the global generator, which `BatchStream` seeds, or
    from an explicit generator of the loader or sampler. The latter are seeded here at the start of an epoch. Between
    draws they hold the state that the user left them in.
    """

    def __init__(self, task: Task) -> None:
        self.batches: Any = task.train_batches
        loader: Any = self.batches if isinstance(self.batches, data.DataLoader) else None
        if loader is not None and loader.persistent_workers:
            # Persistent workers keep their random state from epoch to epoch, and allow one iterator at a time.
            self.batches = loader = copy.copy(loader)
            loader.__dict__.update(persistent_workers=False, _iterator=None)
        batch_sampler = getattr(loader, "batch_sampler", None)
        self._samplers = [one for one in (getattr(loader, "sampler", None), batch_sampler) if one is not None]
        if isinstance(batch_sampler, data.BatchSampler):
            self._samplers.append(batch_sampler.sampler)
        if any(isinstance(one, data.distributed.DistributedSampler) for one in self._samplers):
            raise BadTask(
                f"train_batches of task {task.name!r} has a DistributedSampler; ECC distributes batches over the "
                "processes itself, so give a loader with a plain sampler."
            )
        found = [getattr(one, "generator", None) for one in (loader, *self._samplers)]
        self._owners = {id(one): one for one in found if isinstance(one, torch.Generator)}
        self._states: dict[int, Tensor] = {}

    def why_inexact(self) -> str:
        """Why a second pass over an epoch may give other batches; empty if it does not."""
        if isinstance(self.batches, Sequence):
            return ""
        kind = type(self.batches).__name__
        if not isinstance(self.batches, data.DataLoader):
            return f"train_batches is a {kind}, whose order is exact only if it uses seeded global generators"
        if isinstance(self.batches.dataset, data.IterableDataset):
            return f"the data set {type(self.batches.dataset).__name__} is an IterableDataset"
        unknown = [type(one).__name__ for one in self._samplers if not isinstance(one, _SAMPLERS)]
        if unknown:
            return f"the order of the sampler {unknown[0]} is not known to depend on torch's generator"
        return ""

    def fork(self) -> _Loader:
        """The same loader for a second stream, which has its own states of the generators."""
        other = copy.copy(self)
        other._states = {}
        return other

    def start_epoch(self, epoch: int, seed: int) -> None:
        """Seed the explicit generators for an epoch, and tell samplers the epoch that want to know it."""
        for number, (key, generator) in enumerate(self._owners.items()):
            kept = generator.get_state()
            self._states[key] = generator.manual_seed(seed + number).get_state()
            generator.set_state(kept)
        for one in (self.batches, *self._samplers):
            if callable(set_epoch := getattr(one, "set_epoch", None)):
                set_epoch(epoch)

    @contextmanager
    def seeded_generators(self) -> Iterator[None]:
        """A block in which explicit generators have the state of this epoch; the user's state is restored."""
        kept = {key: generator.get_state() for key, generator in self._owners.items()}
        for key, generator in self._owners.items():
            if key in self._states:
                generator.set_state(self._states[key])
        try:
            yield
        finally:
            for key, generator in self._owners.items():
                self._states[key] = generator.get_state()
                generator.set_state(kept[key])


def to_device(value: Any, device: torch.device) -> Any:
    """The same nested tuples, lists and dicts with tensors, and other objects that have a method `to`, on a device.

    Copies to a GPU start from pinned memory, so that they run in parallel to the host.
    """

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if device.type == "cuda" and leaf.device.type == "cpu":
                leaf = leaf.pin_memory()
            return leaf.to(device, non_blocking=True)
        return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf

    return tree_map(move, _as_dict(value))


def _as_dict(batch: Any) -> Any:
    """A mapping that is not a dict, such as Hugging Face's BatchEncoding, as a dict; pytree knows only dicts."""
    if isinstance(batch, Mapping):
        return batch if type(batch) is dict else dict(batch)
    if type(batch) in (tuple, list) and any(isinstance(item, Mapping) for item in batch):
        return type(batch)(_as_dict(item) for item in batch)
    return batch


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dicts, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def micro_batches(batch: Batch, size: int | None) -> Iterator[tuple[Batch, float]]:
    """Split a batch into parts of at most `size` items, each with its fraction of the batch.

    Every tensor as long as the first one is split along its first axis. For a loss that is a mean over items, the sum
    of the losses of the parts times their fractions is the loss of the batch.

    Raises:
        EccError: If the batch has no tensor with items.
    """
    if size is None:
        yield batch, 1.0
        return
    count = next((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), 0)
    if count == 0:
        raise EccError("micro_batch needs batches of tensors, and this batch has none; leave out micro_batch.")
    for start in range(0, count, size):
        part = slice(start, start + size)

        def cut(tensor: Tensor, part: slice = part) -> Tensor:
            return tensor[part] if tensor.dim() and len(tensor) == count else tensor

        yield tree_map_only(Tensor, cut, batch), min(size, count - start) / count
