"""Trial: a DCGAN; the generator is pruned in its adversarial training loop."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import ecc


class Generator(nn.Module):
    def __init__(self, nz=32, ngf=32):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 4, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 4),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 4, ngf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, 1, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z)


def real(count):
    images = -torch.ones(count, 1, 16, 16)
    for image, (row, column) in zip(images, torch.randint(0, 10, (count, 2)).tolist()):
        image[:, row : row + 6, column : column + 6] = 1
    return images


torch.manual_seed(0)
generator, step = Generator(), sys.argv[1]
discriminator = nn.Sequential(
    nn.Conv2d(1, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(),
    nn.Linear(1024, 1),
)  # fmt: skip
if step == "load":
    dense, slim = Generator(), ecc.load_slim(Generator(), "generator.safetensors")
    print([sum(p.numel() for p in one.parameters()) for one in (dense, slim)], "parameters")
    sys.exit()
z = torch.randn(16, 32, 1, 1)
graph = ecc.trace_channels(generator, z)
energy = ecc.fit(ecc.profile(generator, graph, z, ecc.find_meter("platform:jetson-tx2"), f"{step}.profile", samples=60))
if step == "wrong_optimizer":
    ecc.EccSolver(generator, graph, energy, "50%", steps=90, optimizer=torch.optim.Adam(discriminator.parameters()))
adam = torch.optim.Adam(generator.parameters(), 2e-4, betas=(0.5, 0.999))
solver = ecc.EccSolver(generator, graph, energy, "50%", steps=90, optimizer=adam)
optimizer = torch.optim.Adam(discriminator.parameters(), 2e-4, betas=(0.5, 0.999))
for _ in range(20 if step == "stop_early" else 90):
    x, z = real(16), torch.randn(16, 32, 1, 1)
    optimizer.zero_grad()
    fake = generator(z)
    (F.softplus(-discriminator(x)).mean() + F.softplus(discriminator(fake.detach())).mean()).backward()
    optimizer.step()
    solver.zero_grad()
    F.softplus(-discriminator(fake)).mean().backward()
    solver.step()
slim = ecc.slim(generator.eval(), graph)
ecc.save_slim(slim, "generator.safetensors")
print(f"{float(solver.cost[0]) / energy.dense_profiled:.1%} of the energy ({energy.label}), widths {solver.widths}")
