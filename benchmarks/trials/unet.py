"""Trial: a U-Net; frozen layers, an interrupted and resumed run, exports, a new process, wrong budgets."""

import itertools
import os
import signal
import sys

import onnxruntime
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ecc


class DoubleConv(nn.Sequential):
    def __init__(self, i, o):
        layers = [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True)]
        super().__init__(*layers, nn.Conv2d(o, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.down1, self.down2, self.bottom = DoubleConv(3, c), DoubleConv(c, 2 * c), DoubleConv(2 * c, 4 * c)
        self.up2, self.merge2 = nn.ConvTranspose2d(4 * c, 2 * c, 2, 2), DoubleConv(4 * c, 2 * c)
        self.up1, self.merge1 = nn.ConvTranspose2d(2 * c, c, 2, 2), DoubleConv(2 * c, c)
        self.out = nn.Conv2d(c, 2, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        z = self.bottom(F.max_pool2d(b, 2))
        z = self.merge2(torch.cat([self.up2(z), b], 1))
        return self.out(self.merge1(torch.cat([self.up1(z), a], 1)))


torch.manual_seed(0)
images = torch.rand(96, 3, 32, 32)
masks = (F.avg_pool2d(images, 5, 1, 2).mean(1) > 0.5).long()
loader = DataLoader(TensorDataset(images, masks), 8, shuffle=True)


def iou(model):
    with torch.no_grad():
        found = model.eval()(images).argmax(1)
    return float(((found == 1) & (masks == 1)).sum() / ((found == 1) | (masks == 1)).sum())


def loss(outputs, targets):
    if step == "interrupt" and next(calls) == 40:  # Ctrl-C in the middle of the training
        os.kill(os.getpid(), signal.SIGINT)
    return F.cross_entropy(outputs, targets)


net, step, calls = UNet(), sys.argv[1], itertools.count()
settings = {"loss": loss, "evaluate": iou, "epochs": 6, "lr": 3e-3, "meter": "platform:jetson-tx2"}
if step == "freeze":
    for parameter in net.down1.parameters():
        parameter.requires_grad_(False)
    result = ecc.compress(net, loader, "macs=50%", folder="frozen", freeze=["down1*"], **{**settings, "epochs": 2})
    print(result)
    print({name: width for name, width in result.widths.items() if name.startswith("down1")})
if step == "freeze_typo":
    ecc.compress(net, loader, "macs=50%", freeze=["encoder.*"], **settings)
if step in ("interrupt", "resume", "other_budget"):
    result = ecc.compress(net, loader, "40%" if step == "other_budget" else "50%", folder="run", **settings)
    result.export("onnx", "safetensors")
    result.report()
    print(result)
if step == "other_weights":
    ecc.compress(UNet(), loader, "50%", folder="run", **settings)
if step == "load":
    net = ecc.load_slim(UNet(), "run").eval()
    session = onnxruntime.InferenceSession("run/export/slim.onnx")
    (entry,) = session.get_inputs()
    with torch.no_grad():
        error = (torch.tensor(session.run(None, {entry.name: images[:8].numpy()})[0]) - net(images[:8])).abs().max()
    print(f"IoU {iou(net):.4f}, input of the ONNX file {entry.shape}, difference {float(error):.0e}")
if step == "load_wrong":
    ecc.load_slim(UNet(c=8), "run")
if step == "one_percent":
    ecc.compress(net, loader, "1%", folder="one", **settings)
if step == "no_unit":
    ecc.compress(net, loader, 0.5, **settings)
