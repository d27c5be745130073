"""Measure the energy and latency of networks on a device."""

from ecc.settings import PROFILE_SETTINGS, Design, MeasureSettings

from .counter import CounterProbe, probe_counter
from .design import sample_widths
from .measurement import Measurement, Window
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
    Timed,
    close_meter,
)
from .profile import CorrectedSample, Profile, ProfileHeader, Sample, merge_profiles
from .profiler import Progress, profile
from .registry import FALLBACKS, Attempt, find_meter, probe_meters
from .runners import InferenceRunner, PreparedRunner, prepare_runner
from .samplers import DeviceProfiler
from .window import measure, measure_model

__all__ = [
    "FALLBACKS",
    "PROFILE_SETTINGS",
    "Analytic",
    "Attempt",
    "Clock",
    "CorrectedSample",
    "CounterProbe",
    "Declared",
    "Design",
    "DeviceProfiler",
    "DeviceState",
    "EnergySource",
    "Estimated",
    "InferenceRunner",
    "MeasureSettings",
    "Measured",
    "Measurement",
    "Meter",
    "MeterInfo",
    "PowerIntegrator",
    "PreparedRunner",
    "Profile",
    "ProfileHeader",
    "Progress",
    "Provenance",
    "Reading",
    "Sample",
    "Timed",
    "Window",
    "close_meter",
    "find_meter",
    "measure",
    "measure_model",
    "merge_profiles",
    "prepare_runner",
    "probe_counter",
    "probe_meters",
    "profile",
    "sample_widths",
]
