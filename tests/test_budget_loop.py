"""The simulation of the measured loop, on a recorded profile."""

from __future__ import annotations

import budget_loop
import numpy as np
import pytest

from ecc.energy import fit
from ecc.measure import Profile
from ecc.run_records import CostCheck

PROFILE = budget_loop.ROOT / "results" / "evidence" / "e1.profile.gz"


@pytest.mark.parametrize("kind", budget_loop.DEVICES)
def test_a_simulated_run_meets_its_budget_and_shares_its_readings(kind: str) -> None:
    model, rng = fit(Profile.load(PROFILE), "bilinear", allow_drift=True), np.random.default_rng(0)
    device = budget_loop.Device(model, rng, error=0.03, noise=0.003, kind=kind)
    known: list[CostCheck] = []
    for _ in range(2):
        before = device.readings
        row = budget_loop.run(model, 8, 0.65, rng, device, known)
        assert row["is_met"]
        assert 0.97 <= row["result"] <= 1.01
        assert row["readings"] == device.readings - before >= 2  # the dense network, and one at the end
    assert len(known) >= device.readings - 2
