"""Distributed training: one process, or those that `torchrun` started.

Hugging Face Accelerate creates the process group and wraps the network. It is imported only if there are several
processes.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ecc.errors import EccError

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}  # as Accelerate chooses them

_RELEASE_SECONDS = 0.5
"""Time for the worker threads of gloo to free the tensors of the last collective operations.

Freeing a tensor needs the GIL. A thread that asks for it after the interpreter has begun to exit is ended, which aborts
the whole process (PyTorch 2.13, with C++ code above it on the stack), so a finished run would end with an error.
"""


class DistributedContext:
    """The processes of a training. This one has number `rank` of `size`; rank 0 writes the files.

    Every process must call the same methods in the same order.
    """

    def __init__(self, device: torch.device | str, accelerator: Any = None) -> None:
        # Accelerate numbers the CPU by rank, and networks and batches would seem to be on different devices.
        self.device = torch.device("cpu") if torch.device(device).type == "cpu" else torch.device(device)
        self.rank: int = 0 if accelerator is None else accelerator.process_index
        self.size: int = 1 if accelerator is None else accelerator.num_processes
        self._accelerator = accelerator

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """The network to call in the forward pass; gradients of its parameters become means over all processes."""
        if self._accelerator is None:
            return model
        if self.device.type == "cuda" and torch.distributed.get_backend() == "gloo":
            # Several processes share a GPU; Accelerate would use the local rank as the number of the GPU.
            return nn.parallel.DistributedDataParallel(model)
        wrapped: nn.Module = self._accelerator.prepare_model(model)
        return wrapped

    def no_sync(self, wrapped: nn.Module) -> AbstractContextManager[Any]:
        """A block in which gradients are accumulated without averaging them over processes."""
        if self._accelerator is None:
            return nullcontext()
        block: AbstractContextManager[Any] = self._accelerator.no_sync(wrapped)
        return block

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes, stacked in the order of ranks; they must have one shape."""
        if self._accelerator is None:
            return tensor[None]
        stacked: Tensor = self._accelerator.gather(tensor[None].to(self.device))
        return stacked

    def gather_object(self, value: Any) -> list[Any]:
        """Values of all processes in the order of ranks."""
        if self._accelerator is None:
            return [value]
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value)
        return values

    def max(self, numbers: Sequence[int]) -> list[int]:
        """The maximum of each number over all processes."""
        if self._accelerator is None:
            return list(numbers)
        return [int(number) for number in self.gather(torch.tensor(numbers)).amax(dim=0).tolist()]

    def broadcast_buffers_(self, model: nn.Module) -> None:
        """Give every process the buffers of rank 0, whose batch norm statistics are the ones saved."""
        if self._accelerator is None:
            return
        broadcast = importlib.import_module("accelerate.utils").broadcast
        for buffer in model.buffers():
            buffer.copy_(broadcast(buffer.clone()))

    def close(self) -> None:
        """Destroy the process group; otherwise NCCL warns at exit, and gloo may abort the process."""
        if self._accelerator is not None:
            self._accelerator.end_training()
            time.sleep(_RELEASE_SECONDS)


def find_distributed(device: torch.device | str = "cpu") -> DistributedContext:
    """One process on `device`, or those that `torchrun` started, each on its own device of that type.

    If there are more processes than GPUs on this machine, several share one GPU. NCCL does not support that, so gloo
    averages the gradients, which is slower.

    Raises:
        EccError: If torchrun started several processes and Accelerate is not installed.
    """
    device = torch.device(device)
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1 or "RANK" not in os.environ:
        return DistributedContext(device)
    try:
        accelerate: Any = importlib.import_module("accelerate")
    except ImportError as error:
        raise EccError(
            f"training in {os.environ['WORLD_SIZE']} processes needs Accelerate, which cannot be imported ({error}); "
            "pip install accelerate, or start without torchrun."
        ) from None
    _init_after_restart(device)
    options = []
    if device.type == "cuda" and _backend(device) == "gloo":
        options = [importlib.import_module("accelerate.utils").InitProcessGroupKwargs(backend="gloo")]
    accelerator = accelerate.Accelerator(
        cpu=device.type == "cpu",
        mixed_precision="no",  # the training loop has its own
        kwargs_handlers=options,
    )
    return DistributedContext(accelerator.device, accelerator)


def _backend(device: torch.device) -> str | None:
    """Backend of the process group: gloo also where processes of this machine share a GPU."""
    if device.type == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():
        return "gloo"
    return _BACKENDS.get(device.type)


def _init_after_restart(device: torch.device) -> None:
    """Create the process group of a job that torchrun has restarted (`--max-restarts`) on one machine.

    The torchrun of torch 2.13 keeps one store for all attempts, so a new process may find the address of a dead one
    there. Each attempt therefore uses its own prefix in the store. Across machines the processes do not know a common
    number of the attempt, so torch creates the group as usual.
    """
    attempt, backend = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), _backend(device)
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    on_one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    if attempt == "0" or backend is None or not has_store or not on_one_machine:
        return
    distributed: Any = importlib.import_module("torch.distributed")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    store = distributed.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own_store = distributed.PrefixStore(f"attempt {attempt}", store)
    distributed.init_process_group(backend, store=own_store, rank=rank, world_size=size)
