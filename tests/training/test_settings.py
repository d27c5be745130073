from __future__ import annotations

from typing import Any

import pytest

from ecc.errors import EccError
from ecc.training.settings import TrainSettings


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("log_every", 0, "log_every is 0; give a whole number of at least 1"),
        ("micro_batch", 0, "micro_batch is 0; give a whole number of at least 1 or leave it out"),
        ("checkpoint_steps", True, "checkpoint_steps is True"),
        ("precision", "fp8", "precision is 'fp8'; choose one of fp32, bf16, fp16"),
        ("clip_norm", 0.0, "clip_norm is 0.0; give a number above 0 or leave it out"),
        ("checkpoint_seconds", float("nan"), "checkpoint_seconds is nan"),
    ],
)
def test_values_out_of_range_are_told(field: str, value: Any, message: str) -> None:
    with pytest.raises(EccError, match=message):
        TrainSettings(**{field: value})
