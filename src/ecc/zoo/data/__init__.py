"""Image data sets in their official layouts."""

from __future__ import annotations

from ecc.zoo.data.images import VOID
from ecc.zoo.data.layouts import find_data
from ecc.zoo.data.sets import ImageData, Packed, Photos, Scenes

__all__ = ["VOID", "ImageData", "Packed", "Photos", "Scenes", "find_data"]
