"""Networks of the paper, readers of their data sets, and `digits`, a small task for examples.

`find_task` builds a `Task` from its name on the command line. `image_task` combines a bundled network with an
`ImageData`, which `find_data` reads from a folder.
"""

from __future__ import annotations

from ecc.constants import BUNDLED_TASKS
from ecc.zoo.alexnet import AlexNet
from ecc.zoo.data import ImageData, find_data
from ecc.zoo.digits import DigitsNet, digits
from ecc.zoo.erfnet import ERFNet
from ecc.zoo.image_task import image_task
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
