"""When the energy falls, and how far: `Schedule`, in plain numbers.

    warm-up        the optimizer's metric settles, nothing is removed           2 % of the steps
    ramp           e_t = b + (e_0 - b) (1 - tau)^3, fast first, then with care  60 %
    settled        the final structure trains on                                the rest

The cube is that of gradual pruning (Zhu and Gupta, 2017): a network loses its many unimportant channels soon, and has
the most time to mend where each channel counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from ecc.methods.ecc.taylor import EVERY

WARM_UP = 0.02
RAMP = 0.6
MAX_UPDATES = 400  # so that updates stay a small part of the training
ENOUGH_UPDATES = 100  # beyond these, a look at the gradients (every few steps, see `taylor.py`) comes before the next
PLANS = 8  # of the end of a descent, see `pace.py`; each takes as long as two updates


@dataclass(frozen=True)
class Schedule:
    """One descent; steps are counted from 1.

    Args:
        start: What may be spent before it, one share of the dense cost for each budget.
        end: What may be spent after it; no descent where it is above `start`.
        steps: All training steps.
        warm_up: Share of the steps before the ramp.
        ramp: Share of the steps of the ramp.
    """

    start: tuple[float, ...]
    end: tuple[float, ...]
    steps: int
    warm_up: float = WARM_UP
    ramp: float = RAMP

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps={self.steps} is below 1, the least a solve can have.")
        if not 0 <= self.warm_up < 1 or not 0 < self.ramp <= 1 or self.warm_up + self.ramp > 1:
            raise ValueError(
                f"warm_up={self.warm_up} and ramp={self.ramp} are shares of the steps: at least 0, "
                "ramp above 0, and at most 1 together."
            )

    @property
    def ramp_steps(self) -> int:
        """At least one."""
        return max(1, int(self.ramp * self.steps))

    @property
    def ramp_start(self) -> int:
        """The last step of the warm-up."""
        return min(-int(-self.warm_up * self.steps // 1), self.steps - self.ramp_steps)

    @property
    def ramp_end(self) -> int:
        """The step after which the budget is met."""
        return self.ramp_start + self.ramp_steps

    @property
    def every(self) -> int:
        """Steps from one update to the next."""
        return max(1, self.ramp_steps // MAX_UPDATES, min(EVERY, self.ramp_steps // ENOUGH_UPDATES))

    def updates_at(self, step: int) -> bool:
        """Whether channels are removed at this step; the last step of the ramp is always among them."""
        done = step - self.ramp_start
        return 0 < done <= self.ramp_steps and (done % self.every == 0 or done == self.ramp_steps)

    def plans_at(self, step: int) -> bool:
        """Whether the end is planned anew before the update at this step: the first and the last, and some between."""
        done = step - self.ramp_start
        update = -(-done // self.every)  # counted from 1
        apart = max(1, self.ramp_steps // self.every // PLANS)
        return update == 1 or update % apart == 0 or done == self.ramp_steps

    def shares(self, step: int) -> tuple[float, ...]:
        """What each cost may be at a step, as a share of the dense network's."""
        left = 1 - min(max(step - self.ramp_start, 0), self.ramp_steps) / self.ramp_steps
        return tuple(end + max(start - end, 0) * left**3 for start, end in zip(self.start, self.end, strict=True))
