"""What every worker of `trace_coverage.py` imports, for the server process that they are forked from."""

from contextlib import suppress

import coverage_worker  # noqa: F401
from torchvision_ops import define_missing_operators

define_missing_operators()
with suppress(ImportError):
    import timm  # noqa: F401
    import torch_pruning  # noqa: F401
    import torchvision  # noqa: F401
