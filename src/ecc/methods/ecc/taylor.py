"""`Taylor`: what the loss says of each channel, in the place of the norm of the weights that read it.

To first order, scaling a channel by 1 - t changes the loss by -t times the sum of w g over the weights that read it.
The mean square of that sum over batches is the curvature of the loss along this scaling (Fisher information), and so
the harm of removing the channel (Molchanov et al., Importance Estimation for Neural Network Pruning, 2019). Unlike a
norm of weights it means the same in every layer, whatever batch norms do to the scale of their weights.

Every few steps are looked at, so that training is hardly slower.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EVERY = 4
"""Steps from one look to the next."""
DECAY = 0.98
"""Of the running mean from look to look: it remembers some 50 of them."""


class Taylor:
    """The running mean of squares. State is replaced and never changed in place.

    Args:
        count: Number of channels.
        device: Where their scores live.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._mean = torch.zeros(count, device=device)
        self._looks = 0

    @property
    def state(self) -> tuple[Tensor, int]:
        """The mean, which begins at zero, and the number of looks."""
        return self._mean, self._looks

    def load(self, state: Sequence[Tensor | int]) -> None:
        """Puts a state back."""
        mean, looks = state
        self._mean = torch.as_tensor(mean).to(self._mean, copy=True)
        self._looks = int(looks)

    def is_due(self, step: int) -> bool:
        """Whether to look at this step, counted from 1; the first is among them."""
        return step % EVERY == 1

    @torch.no_grad()
    def look(self, products: Tensor) -> None:
        """Takes in one step.

        Args:
            products: The sum of w g of each channel. A step whose gradients exploded is not taken in.
        """
        self._looks += 1
        self._mean = self._mean.lerp(torch.nan_to_num(products, nan=0.0, posinf=0.0, neginf=0.0).square(), 1 - DECAY)

    @property
    def scores(self) -> Tensor:
        """a of each channel."""
        return self._mean / (1 - DECAY**self._looks) if self._looks else self._mean
