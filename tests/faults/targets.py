"""Every file that is read, by name: what `test_hostile_files.py` damages, and `benchmarks/reliability.py` counts."""

from __future__ import annotations

from faults import loaders, output_loaders, zoo_loaders
from faults.trying import Target

TARGETS: dict[str, Target] = {
    target.name: target for target in (*loaders.TARGETS, *output_loaders.TARGETS, *zoo_loaders.TARGETS)
}
