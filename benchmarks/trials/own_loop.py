"""Trial: a residual network in a loop with bf16 autocast, accumulation, clipping, OneCycle, and a resumed checkpoint."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import ecc


class Residual(nn.Module):
    def __init__(self, i, o, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
        self.conv2, self.bn2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        self.shortcut = None
        if stride > 1 or i != o:
            self.shortcut = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, 1, 1), nn.Linear(64, 10)
        self.layers = nn.Sequential(Residual(16, 16), Residual(16, 32, 2), Residual(32, 32), Residual(32, 64, 2))

    def forward(self, x):
        return self.head(self.layers(F.relu(self.stem(x))).mean((2, 3)))


torch.manual_seed(0)
labels = torch.randint(0, 10, (512,))
images = torch.randn(512, 3, 16, 16) * 0.5
images[torch.arange(512), labels % 3, labels] += 3
loader = DataLoader(TensorDataset(images, labels), 32, shuffle=True)

model, step = Net(), sys.argv[1]
graph = ecc.trace_channels(model, images[:32])
meter = ecc.find_meter("platform:jetson-tx2")
energy = ecc.fit(ecc.profile(model, graph, images[:32], meter, "net.profile", samples=80))
epochs, accumulate = 6, 2
total = epochs * len(loader) // accumulate
adam = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
solver = ecc.EccSolver(model, graph, energy, budget="50%", steps=total, optimizer=adam)
schedule = torch.optim.lr_scheduler.OneCycleLR(solver, 3e-3, total_steps=total)
parts = {"model": model, "solver": solver, "schedule": schedule}
first = 0
if step == "resume":
    saved = torch.load("checkpoint.pt")
    first = saved.pop("epoch")
    for name, state in saved.items():
        parts[name].load_state_dict(state)
for epoch in range(first, epochs):
    for number, (x, y) in enumerate(loader, 1):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y) / accumulate
        loss.backward()
        if number % accumulate == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            solver.step()
            schedule.step()
            solver.zero_grad()
    torch.save({**{name: part.state_dict() for name, part in parts.items()}, "epoch": epoch + 1}, "checkpoint.pt")
    if step == "stop" and epoch == 2:
        print(f"stopped at {float(solver.cost[0]) / energy.dense_profiled:.1%} of the energy")
        sys.exit()
slim = ecc.slim(model.eval(), graph)
ecc.save_slim(slim, "slim.safetensors")
with torch.no_grad():
    difference = float((model(images) - slim(images)).abs().max())
    accuracy = float((slim(images).argmax(1) == labels).float().mean())
size = Path("slim.safetensors").stat().st_size
print(
    f"{float(solver.cost[0]) / energy.dense_profiled:.1%} of the energy ({energy.label}), accuracy {accuracy:.3f}, {size} bytes"
)
assert difference < 1e-4
