"""Small networks with residual branches, and traps that look like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Basic(nn.Module):
    """Post-activation block, written in place as torchvision does."""

    def __init__(self, c: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        shortcut = nn.Sequential(nn.Conv2d(c, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.shortcut = None if c == out and stride == 1 else shortcut

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.shortcut is None else self.shortcut(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(c, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3, padding=1), nn.BatchNorm2d(6),
            nn.ReLU(), nn.Conv2d(6, c, 1), nn.BatchNorm2d(c),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class PreActivation(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(c), nn.Conv2d(c, 6, 3, padding=1)
        self.bn2, self.conv2 = nn.BatchNorm2d(6), nn.Conv2d(6, c, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))


class Inverted(nn.Module):
    """MobileNetV2."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(c, 12, 1, bias=False), nn.BatchNorm2d(12), nn.ReLU6(inplace=True),
            nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False), nn.BatchNorm2d(12), nn.ReLU6(inplace=True),
            nn.Conv2d(12, c, 1, bias=False), nn.BatchNorm2d(c),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x)


class Squeeze(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.pool, self.down, self.up = nn.AdaptiveAvgPool2d(1), nn.Conv2d(c, 4, 1), nn.Conv2d(4, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.silu(self.down(self.pool(x)))))


class MBConv(nn.Module):
    """EfficientNet, with squeeze-excitation and stochastic depth."""

    def __init__(self, c: int, survival: float = 0.8) -> None:
        super().__init__()
        self.expand, self.bn0 = nn.Conv2d(c, 12, 1, bias=False), nn.BatchNorm2d(12)
        self.depthwise, self.bn1 = nn.Conv2d(12, 12, 3, padding=1, groups=12, bias=False), nn.BatchNorm2d(12)
        self.se = Squeeze(12)
        self.project, self.bn2 = nn.Conv2d(12, c, 1, bias=False), nn.BatchNorm2d(c)
        self.survival = survival

    def forward(self, x: Tensor) -> Tensor:
        out = F.silu(self.bn0(self.expand(x)))
        out = self.bn2(self.project(self.se(F.silu(self.bn1(self.depthwise(out))))))
        if self.training:
            keep = torch.rand(out.shape[0], 1, 1, 1, device=out.device, dtype=out.dtype) < self.survival
            out = out / self.survival * keep
        return x + out


class ConvNeXt(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(c, c, 7, padding=3, groups=c)
        self.norm = nn.LayerNorm(c)
        self.pwconv1, self.pwconv2 = nn.Linear(c, 4 * c), nn.Linear(4 * c, c)
        self.gamma = nn.Parameter(0.1 * torch.ones(c))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        y = self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))
        return x + y.permute(0, 3, 1, 2)


class NonBottleneck(nn.Module):
    """ERFNet."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(c, c, (3, 1), padding=(1, 0)), nn.Conv2d(c, c, (1, 3), padding=(0, 1))
        self.bn = nn.BatchNorm2d(c)
        self.drop = nn.Dropout2d(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.drop(self.bn(self.b(F.relu(self.a(x))))) + x)


class Attention(nn.Module):
    def __init__(self, c: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(c, 3 * c), nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(b, n, -1))


class Transformer(nn.Module):
    """Pre-norm block; `returns` is tensor or tuple, `inplace` writes into the trunk, `scale` is a layer scale."""

    def __init__(self, c: int, *, returns: str = "tensor", inplace: bool = False, scale: bool = False) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(c), Attention(c)
        self.norm2 = nn.LayerNorm(c)
        self.mlp = nn.Sequential(nn.Linear(c, 2 * c), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * c, c), nn.Dropout(0.1))
        self.returns, self.inplace = returns, inplace
        self.gamma1, self.gamma2 = ((nn.Parameter(torch.rand(c)) if scale else None) for _ in range(2))

    def forward(self, x: Tensor, mask: Any = None) -> Any:
        a = self.attn(self.norm1(x))
        a = a if self.gamma1 is None else self.gamma1 * a
        if self.inplace:
            x = x.clone()  # torch refuses to change what the norm needs for its gradient
            x += a
        else:
            x = x + a
        m = self.mlp(self.norm2(x))
        x = x + (m if self.gamma2 is None else m * self.gamma2)
        return (x, mask) if self.returns == "tuple" else x


class InBlock(nn.Module):
    """A transformer block that computes attention itself, between its layers."""

    def __init__(self, c: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(c), nn.LayerNorm(c)
        self.qkv, self.proj = nn.Linear(c, 3 * c), nn.Linear(c, c)
        self.fc1, self.fc2 = nn.Linear(c, 2 * c), nn.Linear(2 * c, c)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, -1))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Parallel(nn.Module):
    """Attention and MLP of the same norm, added to each other first."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(c), Attention(c)
        self.mlp = nn.Sequential(nn.Linear(c, 2 * c), nn.GELU(), nn.Linear(2 * c, c))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.attn(y) + self.mlp(y) + x


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class PostNorm(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.attn, self.norm1, self.norm2 = Attention(c), nn.LayerNorm(c), nn.LayerNorm(c)
        self.fc1, self.fc2 = nn.Linear(c, 2 * c), nn.Linear(2 * c, c)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.fc2(F.gelu(self.fc1(x))))


class Tuples(nn.Module):
    """Blocks that return tuples."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x, mask=None)
        return x


def image_net(*blocks: nn.Module, c: int = 8) -> nn.Sequential:
    stem = [nn.Conv2d(3, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LazyLinear(5))


def token_net(*blocks: nn.Module, c: int = 16) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, c), *blocks, nn.LayerNorm(c), nn.Linear(c, 5))


IMAGE, TOKENS = (2, 3, 8, 8), (2, 7, 6)

NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, int]] = {
    "basic": (lambda: image_net(Basic(8, 8), Basic(8, 12, 2), Basic(12, 12)), IMAGE, 3, 2),
    "bottleneck": (lambda: image_net(Bottleneck(8), Bottleneck(8)), IMAGE, 2, 2),
    "preactivation": (lambda: image_net(PreActivation(8), PreActivation(8)), IMAGE, 2, 2),
    "inverted": (lambda: image_net(Inverted(8), Inverted(8)), IMAGE, 2, 2),
    "mbconv": (lambda: image_net(MBConv(8), MBConv(8)), IMAGE, 2, 2),
    "convnext": (lambda: image_net(ConvNeXt(8), ConvNeXt(8)), IMAGE, 2, 2),
    "erfnet": (lambda: image_net(NonBottleneck(8), NonBottleneck(8)), IMAGE, 2, 2),
    "transformer": (lambda: token_net(Transformer(16), Transformer(16)), TOKENS, 4, 2),
    "layer scale": (lambda: token_net(Transformer(16, scale=True), Transformer(16, scale=True)), TOKENS, 4, 2),
    "in place": (lambda: token_net(Transformer(16, inplace=True), Transformer(16, inplace=True)), TOKENS, 4, 2),
    "tuples": (
        lambda: token_net(Tuples(Transformer(16, returns="tuple"), Transformer(16, returns="tuple"))), TOKENS, 4, 2,
    ),
    "in block": (lambda: token_net(InBlock(16), InBlock(16)), TOKENS, 4, 2),
    "parallel": (lambda: token_net(Parallel(16), Parallel(16)), TOKENS, 4, 2),
    "post norm": (lambda: token_net(PostNorm(16), PostNorm(16)), TOKENS, 4, 0),
    "wrappers": (
        lambda: token_net(Residual(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16)))),
        TOKENS, 1, 1,
    ),
    "nested": (
        lambda: image_net(Residual(nn.Sequential(PreActivation(8), PreActivation(8), nn.Conv2d(8, 8, 1)))), IMAGE, 2, 2,
    ),
}  # fmt: skip
"""Name -> (build, input shape, branches, blocks that return their input without their branches)."""


# --- traps: branches that must not be removed, or not in this way --------------------------------


class UsedTwice(nn.Module):
    """The output of the branch is used a second time."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(c, 24), nn.Linear(24, c), nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(F.gelu(self.a(x)))
        return self.c(F.gelu(x + y)) * torch.sigmoid(y)


class ScaledTrunk(nn.Module):
    """The trunk is scaled, so the block is no identity without its branch."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(c, 24), nn.Linear(24, c)

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.b(F.gelu(self.a(x))), x, alpha=0.5)


class Dense(nn.Module):
    """A dense connection: the branch is concatenated."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(c, 24), nn.Linear(24, c), nn.Linear(2 * c, c)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.cat([x, self.b(F.gelu(self.a(x)))], -1))


class SharedLayer(nn.Module):
    """The layer of the branch is used outside it too."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(c, 24), nn.Linear(24, c)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.b(F.gelu(self.a(x)))
        return F.gelu(self.b(F.gelu(self.a(x))))


class Gelu(nn.Module):
    """The sum passes an activation that is not idempotent."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(c, 24), nn.Linear(24, c)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x + self.b(F.gelu(self.a(x))))


class Functional(nn.Module):
    """The branch has no modules."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.rand(24, c) - 0.5), nn.Parameter(torch.rand(c, 24) - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(F.gelu(F.linear(x, self.a)), self.b)


class ReadsShape(nn.Module):
    """Python code reads the shape of the branch."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(c, 24), nn.Linear(24, c)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(F.gelu(self.a(x)))
        return F.gelu(x[..., : y.shape[-1]] + y)


class ReadsWeight(nn.Module):
    """Python code reads a weight inside the branch."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(c, 24), nn.Linear(24, c)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(F.gelu(self.a(x)).to(self.b.weight.dtype))
        return x + y


class Softplus(nn.Module):
    """The branch does not end in a layer that can be zero."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(c, 24), nn.Linear(24, c)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.softplus(self.b(F.gelu(self.a(x))))


class Held(nn.Module):
    """Blocks whose inputs are kept, while the next block writes into them."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Transformer(c, inplace=True) for _ in range(3))
        self.mix = nn.Linear(c, c)

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for block in self.blocks:
            x = block(x)
            seen.append(x.mean(1, keepdim=True))
        return x + F.gelu(self.mix(seen[0] + seen[1] + seen[2]))


TRAPS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "used twice": (lambda: token_net(UsedTwice(16)), 0, 0),
    "scaled trunk": (lambda: token_net(ScaledTrunk(16)), 1, 0),
    "dense": (lambda: token_net(Dense(16)), 0, 0),
    "shared layer": (lambda: token_net(SharedLayer(16)), 0, 0),
    "gelu": (lambda: token_net(Gelu(16)), 1, 0),
    "functional": (lambda: token_net(Functional(16)), 0, 0),
    "reads shape": (lambda: token_net(ReadsShape(16)), 1, 0),
    "reads weight": (lambda: token_net(ReadsWeight(16)), 1, 1),
    "softplus": (lambda: token_net(Softplus(16)), 0, 0),
    "held": (lambda: token_net(Held(16)), 6, 3),
}
"""Name -> (build, branches, blocks that return their input without their branches)."""


def built(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> tuple[nn.Module, Tensor]:
    """A network and its example input."""
    torch.manual_seed(0)
    net, x = build(), torch.randn(shape)
    net(x)  # lazy layers
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.2)  # type: ignore[union-attr]
            module.bias.data.normal_(0, 0.2)
    return net.eval(), x
