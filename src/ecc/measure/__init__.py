"""Room 2: joules and seconds of a network, read off a real device or refused."""

from .counter import CounterProbe, probe
from .find import Attempt, find_meter, tried
from .measurement import Measurement, MeasureSettings, Window
from .meter import (
    Clock,
    Declared,
    DeviceState,
    Estimated,
    Measured,
    Meter,
    MeterInfo,
    PowerIntegrator,
    Provenance,
    Reading,
    close_meter,
)
from .window import measure, measure_model

__all__ = [
    "Attempt",
    "Clock",
    "CounterProbe",
    "Declared",
    "DeviceState",
    "Estimated",
    "MeasureSettings",
    "Measured",
    "Measurement",
    "Meter",
    "MeterInfo",
    "PowerIntegrator",
    "Provenance",
    "Reading",
    "Window",
    "close_meter",
    "find_meter",
    "measure",
    "measure_model",
    "probe",
    "tried",
]
