"""Room 2: joules and seconds of a network, read off a real device or refused."""

from .counter import CounterProbe, probe_counter
from .design import sample_widths
from .measurement import Measurement, MeasureSettings, Window
from .merge_profiles import merge_profiles
from .meter import (
    Analytic,
    Clock,
    Declared,
    DeviceState,
    EnergySource,
    Estimated,
    Measured,
    Meter,
    MeterInfo,
    PowerIntegrator,
    Provenance,
    Reading,
    close_meter,
)
from .profile import CorrectedSample, Profile
from .profiler import PROFILE_SETTINGS, Progress, profile
from .registry import Attempt, find_meter, probe_meters
from .samples import Sample
from .window import measure, measure_model

__all__ = [
    "PROFILE_SETTINGS",
    "Analytic",
    "Attempt",
    "Clock",
    "CorrectedSample",
    "CounterProbe",
    "Declared",
    "DeviceState",
    "EnergySource",
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
    "Sample",
    "Window",
    "close_meter",
    "find_meter",
    "measure",
    "measure_model",
    "merge_profiles",
    "probe_counter",
    "probe_meters",
    "profile",
    "sample_widths",
]
