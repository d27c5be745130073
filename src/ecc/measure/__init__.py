"""Room 2: joules and seconds of a network, read off a real device or refused."""

from .counter import CounterProbe, probe
from .design import design
from .measurement import Measurement, MeasureSettings, Window
from .merge_profiles import merge
from .meter import (
    Analytic,
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
    Source,
    close_meter,
)
from .profile import Profile, Sample
from .profiler import PROFILE_SETTINGS, Progress, profile
from .registry import Attempt, find_meter, tried
from .rows import Row
from .window import measure, measure_model

__all__ = [
    "PROFILE_SETTINGS",
    "Analytic",
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
    "Profile",
    "Progress",
    "Provenance",
    "Reading",
    "Row",
    "Sample",
    "Source",
    "Window",
    "close_meter",
    "design",
    "find_meter",
    "measure",
    "measure_model",
    "merge",
    "probe",
    "profile",
    "tried",
]
