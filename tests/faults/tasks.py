"""The file `net.py` of `invocations.TABLE`: a sound task, and many that are not."""

from __future__ import annotations

NET = """
import torch
import torch.nn.functional as F
from torch import nn
from ecc import Task


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 12, 1), nn.ReLU(), nn.Conv2d(12, 4, 1),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten())


def batches(epoch):
    for _ in range(3):
        yield torch.randn(4, 3, 6, 6), torch.randint(0, 4, (4,))


def task(**fields):
    values = dict(name="toy", model=net(), example_input=torch.ones(1, 3, 6, 6), loss=F.cross_entropy)
    values |= dict(train_batches=batches, evaluate=lambda model: 0.5)
    return Task(**values | fields)


def build(): return net(), torch.ones(1, 3, 6, 6)
def raises(): raise ValueError("the first line\\nand a second one")
def leaves(): raise SystemExit(7)
def wrong(): return 3
def triple(): return 1, 2, 3
def needs(size): return size
def misfit(): return nn.Conv2d(3, 8, 3), torch.randn(1, 5, 8, 8)
def no_network(): return net, torch.ones(1)
def a_class(): return nn.ReLU, torch.ones(1)
def no_input(): return net(), None
def no_tensors(): return net(), ("a", "b")
def toy(): return task(train_batches=None, loss=None)
def empty_input(): return net(), torch.ones(0, 3, 6, 6)
def nothing_to_cut(): return nn.Linear(3, 2), torch.ones(1, 3)
def no_parameters(): return nn.ReLU(), torch.ones(1, 3)
def no_name(): return task(name=" ")
def no_loss(): return task(loss=None)
def loss_in_words(): return task(loss="cross entropy")
def empty(): return task(train_batches=lambda epoch: [])
def none(): return task(train_batches=lambda epoch: None)
def no_pairs(): return task(train_batches=lambda epoch: [torch.ones(4, 3, 6, 6)])
def labels(): return task(train_batches=lambda epoch: [(torch.ones(4, 3, 6, 6), torch.full((4,), 9))])
def shapes(): return task(train_batches=lambda epoch: [(torch.ones(4, 5, 6, 6), torch.zeros(4, dtype=torch.long))])
def types(): return task(train_batches=lambda epoch: [(torch.ones(4, 3, 6, 6), torch.zeros(4, dtype=torch.bool))])
def vectors(): return task(loss=lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none"))
def numbers(): return task(loss=lambda outputs, targets: 0.5)
def infinite(): return task(loss=lambda outputs, targets: F.cross_entropy(outputs, targets) * float("inf"))
def frozen(): return task(model=net().requires_grad_(False))
def unjudged(): return task()
def judged(): return task(evaluate=lambda model: "good")
def judge(): return task(evaluate=lambda model: 1 / 0)
def other(): return task(model=nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 4), nn.Flatten()))


def nan():
    model = net()
    model[2].weight.data[0] = float("nan")
    return task(model=model)


def loader(epoch):
    yield from batches(epoch)
    raise OSError("the disk of the images is gone")


def breaks(): return task(train_batches=loader)


class Prices:
    pass


text = "a text"
"""
