"""Trial: an anchor-free detector of one's own: dict targets, a loss inside the model, a feature pyramid, group norm."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import ecc


class Boxes(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        image = torch.rand(3, 64, 64, generator=g) * 0.2
        xy = torch.randint(0, 44, (2, 2), generator=g).float()
        wh = torch.randint(8, 20, (2, 2), generator=g).float()
        for (x, y), (w, h) in zip(xy.int().tolist(), wh.int().tolist()):
            image[:, y : y + h, x : x + w] = 1
        return image, {"boxes": torch.cat([xy, xy + wh], 1), "labels": torch.zeros(2, dtype=torch.long)}


def collate(items):
    return torch.stack([image for image, _ in items]), [target for _, target in items]


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.conv2, self.bn2 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class Detector(nn.Module):
    strides = (4, 8)

    def __init__(self, classes=1):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.stage1 = nn.Sequential(Block(32), nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU())
        self.stage2 = nn.Sequential(Block(64), nn.Conv2d(64, 96, 3, 2, 1), nn.BatchNorm2d(96), nn.ReLU())
        self.lateral1, self.lateral2 = nn.Conv2d(64, 48, 1), nn.Conv2d(96, 48, 1)
        self.tower = nn.Sequential(nn.Conv2d(48, 48, 3, 1, 1), nn.GroupNorm(8, 48), nn.ReLU())
        self.classify, self.regress = nn.Conv2d(48, classes, 3, 1, 1), nn.Conv2d(48, 4, 3, 1, 1)

    def heads(self, x):
        c3 = self.stage1(self.stem(x))
        p4 = self.lateral2(self.stage2(c3))
        p3 = self.lateral1(c3) + F.interpolate(p4, scale_factor=2.0, mode="nearest")
        towers = [self.tower(p) for p in (p3, p4)]
        return [(self.classify(t), F.softplus(self.regress(t))) for t in towers]

    def centres(self, h, w, stride):
        y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        return (x + 0.5) * stride, (y + 0.5) * stride

    def forward(self, images, targets=None):
        outs = self.heads(images)
        if targets is not None:
            return self.losses(outs, targets)
        boxes, scores = [], []
        for (classes, sides), stride in zip(outs, self.strides):
            x, y = self.centres(*classes.shape[2:], stride)
            left, top, right, bottom = (sides * stride).unbind(1)
            boxes.append(torch.stack([x - left, y - top, x + right, y + bottom], -1).flatten(1, 2))
            scores.append(classes.sigmoid().flatten(2).transpose(1, 2))
        return {"boxes": torch.cat(boxes, 1), "scores": torch.cat(scores, 1)}

    def losses(self, outs, targets):
        total = 0.0
        for (classes, sides), stride in zip(outs, self.strides):
            x, y = self.centres(*classes.shape[2:], stride)
            for i, target in enumerate(targets):
                goal, wanted = torch.zeros_like(x), torch.zeros(4, *x.shape)
                for x1, y1, x2, y2 in target["boxes"]:
                    inside = (x > x1) & (x < x2) & (y > y1) & (y < y2)
                    goal[inside] = 1
                    wanted[:, inside] = (torch.stack([x - x1, y - y1, x2 - x, y2 - y]) / stride)[:, inside]
                total = total + F.binary_cross_entropy_with_logits(classes[i, 0], goal)
                if goal.any():
                    total = total + 0.1 * F.l1_loss(sides[i][:, goal > 0], wanted[:, goal > 0])
        return total / len(targets)


torch.manual_seed(0)
loader = DataLoader(Boxes(), batch_size=8, shuffle=True, collate_fn=collate)
step = sys.argv[1]
if step == "net":

    def wrong(net, batch):
        images, targets = batch
        return net(images, targets)

    ecc.compress(Detector(), loader, "macs=50%", loss=wrong, epochs=2, folder="wrong")
if step == "compress":

    def loss(model, batch):
        images, targets = batch
        return model(images, targets)

    result = ecc.compress(Detector(), loader, "macs=50%", loss=loss, epochs=2, folder="run")
    result.export("onnx")
    result.report()
    print(result)
if step == "load":
    found = ecc.load_slim(Detector(), "run").eval()(torch.zeros(1, 3, 64, 64))
    print({name: tuple(one.shape) for name, one in found.items()})
