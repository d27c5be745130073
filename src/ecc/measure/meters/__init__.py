"""Meters, one file per device. Each has `open_meter(argument)`, which reads the device once or raises `NoMeter`."""
