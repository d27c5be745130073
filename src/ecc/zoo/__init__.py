"""The networks of the paper, data sets in their official layouts, and a small task to try things on.

`find_task` turns a name from the command line into a `Task`; the networks are here as classes as well. `image_task`
joins a bundled network and an `ImageData`, which `find_data` reads from a folder.
"""

from __future__ import annotations

from ecc.constants import BUNDLED_TASKS
from ecc.zoo.alexnet import AlexNet
from ecc.zoo.data import ImageData, find_data
from ecc.zoo.digits import DigitsNet, digits
from ecc.zoo.erfnet import ERFNet
from ecc.zoo.imaging import image_task
from ecc.zoo.mobilenet import MobileNetV1
from ecc.zoo.registry import find_task
from ecc.zoo.resnet_cifar import CifarResNet, resnet20, resnet56

__all__ = [
    "BUNDLED_TASKS",
    "AlexNet",
    "CifarResNet",
    "DigitsNet",
    "ERFNet",
    "ImageData",
    "MobileNetV1",
    "digits",
    "find_data",
    "find_task",
    "image_task",
    "resnet20",
    "resnet56",
]
