"""Small networks with one kind of coupling each, costs counted from their graphs, and a training loop."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ecc.energy.cost import BilinearForm, CostForm
from ecc.graph import AffineSize, ChannelGraph, ChannelGroup, trace_channels
from ecc.zoo.digits import DigitsNet
from graph.layers import conv, named


class Kernels(TorchDispatchMode):
    """Names of the operations that compute something, in order: on a GPU each is at least one kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in {"_unsafe_view", "_record_function_enter_new", "_record_function_exit"}:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class ProductCost:
    """A `Cost` that is a sum of products of widths."""

    products: BilinearForm
    groups: tuple[str, ...]
    full_widths: tuple[int, ...]
    resource: str = "energy"
    unit: str = "J"
    label: str = "counted"
    branches: tuple[str, ...] = ()

    def value(self, widths: Tensor) -> Tensor:
        return self.products.value(widths)

    def gradient(self, widths: Tensor) -> Tensor:
        return self.products.gradient(widths)

    def form(self, budget: float) -> CostForm:
        return self.products.form()

    def to(self, device: torch.device | str) -> ProductCost:
        return replace(self, products=replace(self.products, device=device))


def macs_cost(graph: ChannelGraph, *, joules_per_mac: float = 1e-9) -> ProductCost:
    """Multiply-accumulates as joules."""
    layers = [layer for layer in graph.layers if layer.macs]
    products = BilinearForm(
        0.0,
        tuple(joules_per_mac * layer.macs for layer in layers),
        tuple(layer.incoming for layer in layers),
        tuple(layer.outgoing for layer in layers),
        len(graph.groups),
    )
    return ProductCost(products, tuple(graph.full_widths), tuple(graph.full_widths.values()))


def bytes_cost(graph: ChannelGraph) -> ProductCost:
    """Bytes of inputs and outputs of all layers: linear in the widths."""
    products = BilinearForm(
        0.0,
        tuple(float(layer.item_bytes) for layer in graph.layers for _ in range(2)),
        tuple(extent for layer in graph.layers for extent in (layer.reads, layer.writes)),
        (AffineSize(1),) * (2 * len(graph.layers)),
        len(graph.groups),
    )
    full = graph.full_widths
    return ProductCost(products, tuple(full), tuple(full.values()), "activation_bytes", "B")


def pair_cost(
    full_widths: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    coefficients: Sequence[float],
    linear: Sequence[float] = (),
    base: float = 0.0,
) -> ProductCost:
    """base + sum of coefficients * s_i * s_j + sum of linear * s_i, in units of one channel."""
    width = [AffineSize(0, ((k, 1),)) for k in range(len(full_widths))]
    products = BilinearForm(
        base,
        (*coefficients, *linear),
        tuple([width[i] for i, _ in pairs] + width[: len(linear)]),
        tuple([width[j] for _, j in pairs] + [AffineSize(1)] * len(linear)),
        len(full_widths),
    )
    return ProductCost(products, tuple(f"g{k}" for k in range(len(full_widths))), tuple(full_widths))


# ---------------------------------------------------------------- networks


def chain(first: int = 16, second: int = 24, *, relu: bool = True) -> nn.Module:
    return named(
        conv1=conv(3, first),
        bn1=nn.BatchNorm2d(first),
        relu1=nn.ReLU(),
        conv2=conv(first, second),
        relu2=nn.ReLU() if relu else nn.Identity(),
        head=conv(second, 4),
    )


def flattened() -> nn.Module:
    return named(
        conv=conv(3, 12),
        relu=nn.ReLU(),
        pool=nn.MaxPool2d(4),
        flatten=nn.Flatten(),
        fc1=nn.Linear(12 * 4, 20),
        relu2=nn.ReLU(),
        fc2=nn.Linear(20, 5),
    )


class Residual(nn.Module):
    def __init__(self, stream: int = 16, inner: int = 12) -> None:
        super().__init__()
        self.stem, self.conv1, self.conv2 = conv(3, stream), conv(stream, inner), conv(inner, stream)
        self.bn1, self.bn2 = nn.BatchNorm2d(inner), nn.BatchNorm2d(stream)
        self.head = nn.Linear(stream, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))
        return self.head(x.mean((2, 3)))


def depthwise(first: int = 12, second: int = 20) -> nn.Module:
    return named(
        conv1=conv(3, first),
        relu1=nn.ReLU6(),
        dw=conv(first, first, groups=first),
        bn=nn.BatchNorm2d(first),
        pw=conv(first, second, 1),
        relu2=nn.ReLU6(),
        head=conv(second, 4, 1),
    )


class Concat(nn.Module):
    def __init__(self, left: int = 10, right: int = 14, mix: int = 12) -> None:
        super().__init__()
        self.left, self.right = conv(3, left), conv(3, right)
        self.mix, self.head = conv(left + right, mix), conv(mix, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.mix(torch.cat([self.left(x), F.relu(self.right(x))], dim=1))))


def grouped(width: int = 32, outputs: int = 4) -> nn.Module:
    """Convolution groups of two channels."""
    return named(
        conv1=conv(3, width),
        relu=nn.ReLU(),
        conv2=conv(width, width, groups=width // 2),
        relu2=nn.ReLU(),
        head=conv(width, outputs, 1),
    )


def transposed(first: int = 16, second: int = 12) -> nn.Module:
    return named(
        conv1=conv(3, first),
        up=nn.ConvTranspose2d(first, second, 2, stride=2),
        bn=nn.BatchNorm2d(second),
        relu=nn.ReLU(),
        head=nn.ConvTranspose2d(second, 4, 2, stride=2),
    )


class TransformerMlp(nn.Module):
    def __init__(self, hidden: int = 48) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.fc1, self.fc2 = nn.Linear(8, hidden), nn.Linear(hidden, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(x + self.fc2(F.gelu(self.fc1(self.norm(x)))))


class Tied(nn.Module):
    """One matrix that consumes channels along both of its axes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(6, 16), nn.Parameter(torch.randn(16, 16) / 4)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        x = F.relu(F.linear(x, self.weight))
        return self.head(F.linear(x, self.weight.t()))


def _image() -> Tensor:
    return torch.randn(2, 3, 8, 8)


def _tokens() -> Tensor:
    return torch.randn(2, 5, 6)


NETS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "chain": (chain, _image),
    "flattened": (flattened, _image),
    "residual": (Residual, _image),
    "depthwise": (depthwise, _image),
    "concat": (Concat, _image),
    "grouped": (grouped, _image),
    "transposed": (transposed, _image),
    "transformer MLP": (TransformerMlp, _tokens),
    "tied": (Tied, _tokens),
    "digits": (DigitsNet, lambda: torch.randn(2, 1, 8, 8)),
}

_GRAPHS: dict[str, ChannelGraph] = {}


def traced(name: str, seed: int = 0) -> tuple[nn.Module, Tensor, ChannelGraph]:
    """A network with fresh weights, its example input and its graph."""
    torch.manual_seed(seed)
    build, inputs = NETS[name]
    net, example = build(), inputs()
    if name not in _GRAPHS:  # a trace takes longer than all else a test does
        _GRAPHS[name] = trace_channels(net.eval(), example, verify=False)
    return net.train(), example, _GRAPHS[name]


def train(
    net: nn.Module, solver: Any, example: Tensor, steps: range, after: Callable[[int], None] | None = None
) -> None:
    """Train on random batches and targets, which depend on the number of the step only."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(example.shape, generator=generator)
        output = net(batch)
        loss = (output - torch.randn(output.shape, generator=generator)).square().mean()
        loss.backward()
        solver.step()
        solver.zero_grad()
        if after is not None:
            after(step)


def assert_resumes_exactly(
    net: nn.Module, other: nn.Module, solver: Any, saved: dict[str, Any], example: Tensor, steps: range
) -> None:
    """Assert that a resumed training ends with the same bits as the one that was not interrupted.

    Args:
        net: The network after the whole training.
        other: A network with other weights.
        solver: A new solver of the other network.
        saved: State of the first network ("net") and of its solver ("solver") before these steps.
        example: As for `train`.
        steps: The remaining steps.
    """
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    other.load_state_dict(loaded["net"])
    solver.load_state_dict(loaded["solver"])
    train(other, solver, example, steps)
    for key, value in net.state_dict().items():
        assert torch.equal(value, other.state_dict()[key]), key


def bare_graph(full_widths: Sequence[int]) -> ChannelGraph:
    """Groups g0, g1, ... of given widths and nothing else, for costs of `pair_cost`."""
    return ChannelGraph(tuple(ChannelGroup(f"g{k}", width, ()) for k, width in enumerate(full_widths)), (), ())
