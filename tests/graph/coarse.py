"""Coarse arithmetic, emulated on the CPU: how a GPU computes float32 convolutions and matrix products.

On a GPU float32 operands are rounded to TF32 (10 explicit mantissa bits) where the settings of torch allow it, and
which kernels do so depends on the shapes. So the masked and the slim network, whose shapes differ, are rounded in
different places. `CoarseArithmetic` does the same: it rounds the operands of a product whose second operand has an even
sum of sizes. As on a GPU, float64 stays as it is, and `torch.backends.*.fp32_precision` (or the older `allow_tf32` and
`set_float32_matmul_precision`) turn it off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

TF32_BITS, BF16_BITS = 10, 7
"""Explicit mantissa bits."""
_FLOAT32_BITS = 23

_CONVOLUTIONS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys([f"conv{dims}d" for dims in (1, 2, 3)], (0, 1)),
    "conv_transpose1d": (0, 1),
    "conv_transpose2d": (0, 1),
    "conv_transpose3d": (0, 1),
    "convolution": (0, 1),
    "_convolution": (0, 1),
    "convolution_backward": (0, 1, 2),
}
_PRODUCTS: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(["mm", "bmm", "mv", "matmul", "linear"], (0, 1)),
    **dict.fromkeys(["addmm", "addmv", "addbmm", "baddbmm"], (1, 2)),
    "einsum": (1,),
    "scaled_dot_product_attention": (0, 1, 2),
    "_scaled_dot_product_flash_attention_for_cpu": (0, 1, 2),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (0, 1, 2, 3),
    "_scaled_dot_product_attention_math": (0, 1, 2),
    "_native_multi_head_attention": (0, 1, 2, 5, 7),
    "_transformer_encoder_layer_fwd": (0, 3, 5, 14, 16),
}
"""Operators, with the positions of the operands that are rounded; the second of them decides whether they are."""


class CoarseArithmetic(TorchDispatchMode):
    """Rounds float32 operands to some mantissa bits; inside, the settings of torch allow TF32 everywhere."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits
        self.rounded = 0
        """Number of products rounded so far."""

    def __enter__(self) -> Any:
        self.before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_float32_matmul_precision(self.before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        return func(*self._operands(name, args), **(kwargs or {}))

    def _operands(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        positions = _CONVOLUTIONS.get(name) or _PRODUCTS.get(name)
        if positions is None or not _allows_tf32(convolution=name in _CONVOLUTIONS):
            return args
        if name == "einsum":
            operands = [_rounded(operand, self.bits) for operand in args[1]] if _is_rounded(args[1][-1]) else args[1]
            self.rounded += operands is not args[1]
            return (args[0], operands, *args[2:])
        if not _is_rounded(args[positions[1]]):
            return args
        self.rounded += 1
        return tuple(_rounded(arg, self.bits) if i in positions else arg for i, arg in enumerate(args))


def _allows_tf32(*, convolution: bool) -> bool:
    """What the settings of torch say, also those of versions before 2.9."""
    settings: Any = getattr(torch.backends.cudnn, "conv", None) if convolution else torch.backends.cuda.matmul
    if hasattr(settings, "fp32_precision"):
        return bool(settings.fp32_precision == "tf32")
    return bool((torch.backends.cudnn if convolution else torch.backends.cuda.matmul).allow_tf32)


def _is_rounded(operand: Tensor) -> bool:
    """Whether the product is done by a kernel with coarse arithmetic."""
    return operand.dtype == torch.float32 and operand.device.type != "meta" and sum(operand.shape) % 2 == 0


def _rounded(operand: Tensor, bits: int) -> Tensor:
    return round_mantissa(operand, bits) if operand.dtype == torch.float32 else operand


def round_mantissa(tensor: Tensor, bits: int) -> Tensor:
    """The nearest float32 numbers with this many explicit mantissa bits; ties to even."""
    dropped = _FLOAT32_BITS - bits
    integers = tensor.contiguous().view(torch.int32)
    to_even = (integers >> dropped) & 1
    integers = (integers + (1 << (dropped - 1)) - 1 + to_even) & -(1 << dropped)
    return torch.where(tensor.isfinite(), integers.view(torch.float32), tensor)
