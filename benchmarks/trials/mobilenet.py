"""Trial: a network like MobileNetV2 with squeeze-and-excitation; workers, CPU time as a meter, several budgets."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ecc


class SqueezeExcite(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(c, c // 4, 1), nn.Conv2d(c // 4, c, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.expand(F.relu(self.reduce(F.adaptive_avg_pool2d(x, 1)))))


class InvertedResidual(nn.Module):
    def __init__(self, i, o, stride, ratio=4, excite=False):
        super().__init__()
        c, self.residual = i * ratio, stride == 1 and i == o
        self.conv = nn.Sequential(
            nn.Conv2d(i, c, 1, bias=False),
            nn.BatchNorm2d(c),
            nn.ReLU6(inplace=True),
            nn.Conv2d(c, c, 3, stride, 1, groups=c, bias=False),
            nn.BatchNorm2d(c),
            nn.ReLU6(inplace=True),
            SqueezeExcite(c) if excite else nn.Identity(),
            nn.Conv2d(c, o, 1, bias=False),
            nn.BatchNorm2d(o),
        )

    def forward(self, x):
        return x + self.conv(x) if self.residual else self.conv(x)


class MobileNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU6(inplace=True),
            InvertedResidual(16, 24, 2),
            InvertedResidual(24, 24, 1),
            InvertedResidual(24, 32, 2, excite=True),
            InvertedResidual(32, 32, 1, excite=True),
            InvertedResidual(32, 32, 1),
            nn.Conv2d(32, 128, 1, bias=False),
            nn.BatchNorm2d(128),
            nn.ReLU6(inplace=True),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(128, 10))

    def forward(self, x):
        return self.classifier(self.features(x).mean([2, 3]))


torch.manual_seed(0)
labels = torch.randint(0, 10, (320,))
images = torch.randn(320, 3, 32, 32) * 0.5
images[torch.arange(320), labels % 3, labels] += 3
train = DataLoader(TensorDataset(images[:256], labels[:256]), 32, shuffle=True, num_workers=2)
test = DataLoader(TensorDataset(images[256:], labels[256:]), 64)


def accuracy(model):
    model.eval()
    with torch.no_grad():
        return sum(int((model(x).argmax(1) == y).sum()) for x, y in test) / 64


def prints_only(model):
    print("accuracy", accuracy(model))


step, settings = sys.argv[1], {"loss": nn.CrossEntropyLoss(), "evaluate": accuracy, "epochs": 4, "lr": 3e-3}
if step == "dataset":
    ecc.compress(MobileNet(), train.dataset, "macs=50%", **settings)
if step == "prints_only":
    ecc.compress(MobileNet(), train, "macs=50%", folder="none", **{**settings, "evaluate": prints_only})
if step == "test_loader":
    ecc.compress(MobileNet(), train, "macs=50%", **{**settings, "evaluate": test})
if step == "cpu_time":
    result = ecc.compress(MobileNet(), train, "60%", meter="cputime:15W", samples=25, folder="run", **settings)
    result.export("onnx")
    print(result)
if step == "several":
    result = ecc.compress(MobileNet(), train, budgets=["macs=80%", "macs=50%"], folder="several", **settings)
    print(*result.front, sep="\n")
if step == "load":
    print("accuracy", accuracy(ecc.load_slim(MobileNet(), "run")))
