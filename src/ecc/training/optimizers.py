"""What the optimizers of all phases have in common."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def fused_on_gpu(parameters: Iterable[Tensor]) -> bool | None:
    """The argument `fused` of torch's optimizers: True where all parameters are on a GPU, None leaves it to torch.

    A fused step is a few kernels in place of many, and takes the host a fraction of the time. On a CPU the result of
    torch's default is kept, bit for bit.
    """
    found = list(parameters)
    return True if found and all(tensor.is_cuda and tensor.is_floating_point() for tensor in found) else None
