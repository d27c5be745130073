"""The blocks that random networks are made of, by kind. Importing any of them fills the catalogue in `base.py`."""

from __future__ import annotations

from importlib import import_module

# In this order: hypothesis shrinks towards the blocks that come first.
for kind in (
    "convolutions",
    "elementwise",
    "sums",
    "parts",
    "space",
    "sequences",
    "mixing",
    "flow",
    "transformers",
    "residual",
    "leaks",
    "by_number",
    "hidden",
    "heads",
):
    import_module(f"graph.blocks.{kind}")
