"""Traps for the tracer, by kind. Importing this fills the catalogue in `base.py`."""

from __future__ import annotations

from importlib import import_module

for kind in ("modes", "gradients", "widths", "branches", "idle", "state", "hiding", "channels", "weights", "common"):
    import_module(f"graph.traps.{kind}")
