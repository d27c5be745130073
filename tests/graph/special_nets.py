"""Small networks with gates, attention, norms, shared weights, or hard-coded sizes; see `cases.py`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graph.layers import conv, named

# ---------------------------------------------------------------- gates


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.reduce, self.expand, self.head = conv(3, 8), nn.Linear(8, 3), nn.Linear(3, 8), conv(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        gate = torch.sigmoid(self.expand(F.relu(self.reduce(x.mean((2, 3))))))
        return self.head(x * gate[:, :, None, None])


class SpatialGate(nn.Module):
    """One value for each pixel scales all channels: the gate is not prunable."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.gate, self.head = conv(3, 8), conv(8, 1, 1), conv(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x * torch.sigmoid(self.gate(x)))


# ---------------------------------------------------------------- attention and norms over channels


class TransformerBlock(nn.Module):
    """Pre-norm attention and a feed-forward pair."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.query, self.key, self.value, self.project = (nn.Linear(8, 8) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        batch, tokens, _ = x.shape
        normal = self.norm1(x)
        query, key, value = (
            layer(normal).view(batch, tokens, 2, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        x = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return self.head(x)


def group_norm() -> nn.Sequential:
    """All channels in one group."""
    return named(conv1=conv(3, 8), norm=nn.GroupNorm(1, 8), conv2=conv(8, 6), head=conv(6, 4, 1))


def group_norm_of_groups() -> nn.Sequential:
    return named(conv1=conv(3, 8), norm=nn.GroupNorm(4, 8), conv2=conv(8, 6), head=conv(6, 4, 1))


def layer_norm() -> nn.Sequential:
    return named(fc1=nn.Linear(5, 8), norm=nn.LayerNorm(8), fc2=nn.Linear(8, 6), fc3=nn.Linear(6, 4))


def softmax() -> nn.Sequential:
    return named(conv1=conv(3, 8), softmax=nn.Softmax(dim=1), conv2=conv(8, 6), head=conv(6, 4, 1))


def instance_norm() -> nn.Sequential:
    """A norm without tensors: only the graph has its number of channels."""
    return named(conv1=conv(3, 8), norm=nn.InstanceNorm2d(8), head=conv(8, 4, 1))


# ---------------------------------------------------------------- shared and tied


class Shared(nn.Module):
    """One convolution runs twice: it produces the channels that it consumes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = conv(3, 8), conv(8, 8), conv(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.body(F.relu(self.body(F.relu(self.stem(x)))))))


class Tied(nn.Module):
    """One parameter under two names: fc2 and fc3 share it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.fc3.weight = self.fc2.weight
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.fc3(F.relu(self.fc2(F.relu(self.fc1(x))))))


# ---------------------------------------------------------------- inputs and outputs


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = conv(3, 8), conv(1, 8), conv(8, 4, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(F.relu(self.left(x) + self.right(mask)))


class DictOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.features, self.head = conv(3, 8), conv(8, 6), conv(6, 4, 1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        features = self.features(F.relu(self.stem(x)))
        return {"features": features, "scores": [self.head(features)]}


# ---------------------------------------------------------------- code that does not follow


class UnknownOperator(nn.Module):
    """A QR decomposition of every channel: the tracer has no rule for it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = conv(3, 8), conv(8, 6), conv(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(F.relu(self.body(torch.linalg.qr(x)[0])))


class HardCodedView(nn.Module):
    """The number of features is hard-coded."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.fc = conv(3, 8), conv(8, 6), nn.Linear(6 * 64, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.body(F.relu(self.stem(x))))
        return self.fc(x.view(-1, 384))


class Squeezes(nn.Module):
    """Drops every axis of size one: with one channel it would drop the channel axis too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.fc = conv(3, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.adaptive_avg_pool2d(self.stem(x), 1).squeeze())


class ValueDependent(nn.Module):
    """Python reads a value: the trace needs real tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.head = conv(3, 8), conv(8, 6), conv(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        bright = float(x.abs().mean()) > 0.1
        x = self.conv1(x)
        return self.head(self.conv2(F.relu(x) if bright else x))


class AuxiliaryHead(nn.Module):
    """A second head that runs in train mode only: it consumes `body` too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head, self.aux = conv(3, 8), conv(8, 6), conv(6, 4, 1), conv(6, 4, 1)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.body(F.relu(self.stem(x))))
        return (self.head(x), self.aux(x)) if self.training else self.head(x)


class BranchesOnChannels(nn.Module):
    """The value that Python reads is a sum over channels: pruning one could change the decision."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv(3, 8), conv(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(F.relu(x) if x.sum() > 0 else x)
