"""A meter of your own: a class with two methods. This one reads a file of microwatts, as Linux shows many sensors.

    python examples/custom_meter.py /sys/class/hwmon/hwmon3/power1_input
    ecc profile TASK --meter examples/custom_meter.py:FileMeter -o net.profile      # the file from POWER_FILE

Without a file there is nothing to read: then a stand-in says 4.5 W at all times, and the joules are labelled estimated.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

import ecc
from ecc.measure import Estimated, Measured, MeterInfo, PowerIntegrator

STAND_IN_WATTS = 4.5


class FileMeter:
    """Integrates the power in a file to joules."""

    def __init__(self, file: str | None = None) -> None:
        file = file or os.environ.get("POWER_FILE")
        self._file = Path(file) if file else None
        self._counter = PowerIntegrator(self._watts, period_seconds=0.01)  # its first sample is taken here

    def read(self) -> float:
        """Joules so far; never falls."""
        return self._counter.read()

    def describe(self) -> MeterInfo:
        """Where the joules come from: this goes into every file and table."""
        return MeterInfo(
            name="file",
            device="the board" if self._file else "no sensor",
            provenance=Measured() if self._file else Estimated(source="a stand-in"),
            scope="what the sensor sees",
            reads="integrated power",
        )

    def close(self) -> None:
        """Ends the thread."""
        self._counter.close()

    def _watts(self) -> float:
        return float(self._file.read_text()) * 1e-6 if self._file else STAND_IN_WATTS


def main(file: str | None) -> None:
    meter = FileMeter(file)
    settings = ecc.measure.MeasureSettings(window_seconds=0.2, probe_seconds=0.5, max_repeats=3)
    for channels in (16, 64):
        net = nn.Sequential(nn.Conv2d(3, channels, 3), nn.ReLU(), nn.Conv2d(channels, 16, 3)).eval()
        found = ecc.measure_model(net, torch.randn(1, 3, 64, 64), meter, settings)
        print(f"{channels} channels: {1e3 * found.joules:.2f} mJ, {1e3 * found.seconds:.2f} ms ({found.meter.label})")
    meter.close()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
