from __future__ import annotations

from ecc import constants
from ecc.export.formats import FORMATS
from ecc.methods.registry import METHODS
from ecc.zoo.image_task import NETWORKS


def test_the_names_in_the_help_are_those_of_the_package() -> None:
    """The constants are written out, so that help can be shown without importing torch."""
    assert ("digits", *NETWORKS) == constants.BUNDLED_TASKS
    assert tuple(METHODS) == constants.METHOD_NAMES
    assert ("safetensors", *FORMATS) == constants.EXPORT_FORMATS
    assert constants.SCRATCH not in METHODS
