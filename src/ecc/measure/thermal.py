"""Throttling as the Linux kernel reports it, for devices whose meter does not read it, such as a Raspberry Pi."""

from __future__ import annotations

from pathlib import Path

_LIMITING = ("processor", "cpufreq", "devfreq", "gpu")  # types of cooling devices that slow down; fans do not
_PI_FLAGS = {0x1: "under-voltage", 0x2: "frequency capped", 0x4: "throttled", 0x8: "soft temperature limit"}
_PI_FILE = "devices/platform/soc/soc:firmware/get_throttled"


def throttling_reasons(sys: Path = Path("/sys")) -> tuple[str, ...] | None:
    """Active reasons for reduced clocks; None if the kernel tells nothing."""
    known, found = False, []
    for device in sorted((sys / "class" / "thermal").glob("cooling_device*")):
        kind, state = read_or_empty(device / "type"), read_or_empty(device / "cur_state")
        if any(word in kind.lower() for word in _LIMITING) and state.isdecimal():
            known = True
            if int(state) > 0:
                found.append(f"{kind} at cooling state {state}")
    flags = read_or_empty(sys / _PI_FILE)
    if flags:
        known = True
        value = int(flags, 16)
        found += [reason for bit, reason in _PI_FLAGS.items() if value & bit]
    return tuple(found) if known else None


def read_or_empty(path: Path) -> str:
    """Text of a small file of the kernel; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
