"""Ten kinds of networks, each compressed as a new user would from the README: one call, and no option but the budget.

    python3 benchmarks/new_user_trials.py --out results/new_user_trials.json

Data are random: the trials show whether the call works, meets its budget and how long it takes, not accuracy. Seconds are
processor time. A trial whose package is missing is recorded as such.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import machine, write_record
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ecc
from ecc.errors import EccError

BUDGET = "macs=50%"


def random_loader(inputs: Tensor, targets: Tensor) -> DataLoader[tuple[Tensor, ...]]:
    """Batches of 16."""
    return DataLoader(TensorDataset(inputs, targets), batch_size=16)


def conv(inside: int, outside: int, stride: int = 1) -> nn.Sequential:
    """Convolution, batch norm and ReLU."""
    return nn.Sequential(nn.Conv2d(inside, outside, 3, stride, 1), nn.BatchNorm2d(outside), nn.ReLU())


class Detector(nn.Module):
    """Boxes and classes as a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(conv(3, 16, 2), conv(16, 32, 2))
        self.box, self.classes = nn.Conv2d(32, 4, 1), nn.Conv2d(32, 3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """See the class."""
        found = self.backbone(x)
        return {"box": self.box(found), "classes": self.classes(found)}


class UNet(nn.Module):
    """Two levels with skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.middle = conv(3, 16), conv(16, 32), conv(32, 64)
        self.up1, self.after1 = nn.ConvTranspose2d(64, 32, 2, 2), conv(64, 32)
        self.up2, self.after2 = nn.ConvTranspose2d(32, 16, 2, 2), conv(32, 16)
        self.out = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        first = self.first(x)
        second = self.second(F.max_pool2d(first, 2))
        x = self.up1(self.middle(F.max_pool2d(second, 2)))
        x = self.up2(self.after1(torch.cat([x, second], 1)))
        found: Tensor = self.out(self.after2(torch.cat([x, first], 1)))
        return found


class Lstm(nn.Module):
    """A classifier of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.recurrent = nn.Embedding(50, 24), nn.LSTM(24, 32, 2, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        found: Tensor = self.head(self.recurrent(self.embed(x))[0][:, -1])
        return found


class Transformer(nn.Module):
    """Layers of PyTorch itself."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.embed, self.layers = nn.Linear(8, 32), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        found: Tensor = self.head(self.layers(self.embed(x)).mean(1))
        return found


# ---------------------------------------------------------------- the trials


def detector(folder: Path) -> str:
    """A detector that returns a dict."""

    def loss(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs["classes"], targets) + outputs["box"].abs().mean()

    loader = random_loader(torch.randn(64, 3, 32, 32), torch.randint(0, 3, (64, 8, 8)))
    return outcome(ecc.compress(Detector(), loader, BUDGET, loss=loss, folder=folder, progress=False))


def yolo(_folder: Path) -> str:
    """YOLO of ultralytics: passed as it is, then its network."""
    from ultralytics import YOLO  # type: ignore[import-not-found, unused-ignore]

    wrapper = YOLO("yolov8n.yaml")
    try:
        ecc.trace_channels(wrapper, torch.zeros(1, 3, 64, 64))
    except EccError as error:
        said = str(error)
    graph = ecc.trace_channels(wrapper.model, torch.zeros(1, 3, 64, 64))
    return f"{said} Then {len(graph.prunable)} of {len(graph.groups)} groups are prunable."


def transformer(folder: Path) -> str:
    """A transformer of torch.nn."""
    loader = random_loader(torch.randn(64, 6, 8), torch.randint(0, 5, (64,)))
    return outcome(ecc.compress(Transformer(), loader, BUDGET, loss=F.cross_entropy, folder=folder, progress=False))


def bert(folder: Path) -> str:
    """BERT of transformers, with its own loss and dict batches."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, **sizes))
    batches = [{"input_ids": torch.randint(0, 50, (8, 12)), "labels": torch.randint(0, 2, (8,))} for _ in range(8)]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = model(**batch).loss
        return found

    return outcome(ecc.compress(model, batches, BUDGET, loss=loss, folder=folder, progress=False))


def lstm(folder: Path) -> str:
    """An LSTM."""
    loader = random_loader(torch.randint(0, 50, (64, 12)), torch.randint(0, 5, (64,)))
    return outcome(ecc.compress(Lstm(), loader, BUDGET, loss=F.cross_entropy, folder=folder, progress=False))


def unet(folder: Path) -> str:
    """A U-Net."""
    loader = random_loader(torch.randn(64, 3, 32, 32), torch.randint(0, 2, (64, 32, 32)))
    return outcome(ecc.compress(UNet(), loader, BUDGET, loss=F.cross_entropy, folder=folder, progress=False))


def gan(folder: Path) -> str:
    """The generator of a GAN, whose loss is another network; a batch is one tensor."""
    generator = nn.Sequential(
        nn.ConvTranspose2d(16, 32, 4), nn.BatchNorm2d(32), nn.ReLU(), nn.ConvTranspose2d(32, 1, 4, 2, 1), nn.Tanh()
    )
    judge = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(128, 1))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return F.softplus(-judge(model(batch))).mean()

    batches = [torch.randn(16, 16, 1, 1) for _ in range(4)]
    return outcome(ecc.compress(generator, batches, BUDGET, loss=loss, folder=folder, progress=False))


def mobile(folder: Path) -> str:
    """Depthwise and pointwise convolutions."""
    depthwise = [nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, groups=32), conv(32, 32)) for _ in range(3)]
    model = nn.Sequential(conv(3, 32, 2), *depthwise, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    loader = random_loader(torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,)))
    return outcome(ecc.compress(model, loader, BUDGET, loss=F.cross_entropy, folder=folder, progress=False))


def own_loop(_folder: Path) -> str:
    """A training loop of one's own in bfloat16."""
    model, x, y = UNet(), torch.randn(8, 3, 32, 32), torch.randint(0, 2, (8, 32, 32))
    graph = ecc.trace_channels(model, x)
    solver = ecc.EccSolver(model, graph, ecc.counted_cost(graph, "macs"), "50%", steps=20, lr=1e-3)
    for _ in range(20):
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        solver.step()
        solver.zero_grad()
    slim = ecc.slim(model.eval(), graph)
    assert slim(x).shape == model(x).shape
    return f"{float(solver.cost[0]) / float(graph.macs()):.1%} of the MACs are left"


def command_line(folder: Path) -> str:
    """The command line alone."""
    words = f"compress digits --budget {BUDGET} -o {folder} --pretrain-steps 50 --prune-steps 50 --finetune-steps 20"
    done = subprocess.run([sys.executable, "-m", "ecc", *words.split()], capture_output=True, text=True, check=False)
    row = next((line for line in done.stdout.splitlines() if line.startswith("macs")), done.stderr.strip())
    return f"exit code {done.returncode}: {' '.join(row.split())}"


TRIALS: dict[str, Callable[[Path], str]] = {
    one.__name__: one for one in (detector, yolo, transformer, bert, lstm, unet, gan, mobile, own_loop, command_line)
}
PACKAGES = {"yolo": "ultralytics", "bert": "transformers"}


def outcome(result: ecc.CompressResult) -> str:
    """The first line of the summary."""
    return " ".join(str(result).splitlines()[0].split())


def processor_seconds() -> float:
    """Of this process and of those that it started."""
    return sum(os.times()[:4])


def run_trial(name: str) -> dict[str, Any]:
    """One row of the record."""
    trial, package = TRIALS[name], PACKAGES.get(name)
    row: dict[str, Any] = {"network": (trial.__doc__ or "").strip()}
    if package is not None and find_spec(package) is None:
        return {**row, "skipped": f"{package} is not installed"}
    torch.manual_seed(0)
    start = processor_seconds()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            row["result"] = trial(Path(folder) / "run")
        except EccError as error:
            row["error"] = str(error)
    own = [str(one.message) for one in said if issubclass(one.category, ecc.EccWarning)]
    return {**row, "cpu_seconds": round(processor_seconds() - start, 1), "warnings": own}


def main() -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=TRIALS, default=list(TRIALS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = {name: run_trial(name) for name in args.only}
    write_record({"machine": machine(), "budget": BUDGET, "trials": rows}, args.out)
    for name, row in rows.items():
        print(name, row)


if __name__ == "__main__":
    main()
