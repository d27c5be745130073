"""A residual network: shortcuts tie channels of many layers together, and nobody has to say so.

python examples/residual.py
"""

from __future__ import annotations

import torch

import ecc
from ecc.graph import Role
from ecc.zoo import resnet20


def main() -> None:
    torch.manual_seed(0)
    model, example_input = resnet20().eval(), torch.randn(2, 3, 32, 32)
    graph = ecc.trace_channels(model, example_input)

    # A group is what must be cut together: here, all that a chain of shortcuts adds up.
    for group in sorted(graph.prunable, key=lambda group: -len(group.layers(Role.PRODUCER)))[:3]:
        print(f"{group.name}: {group.width} channels, written by {', '.join(group.layers(Role.PRODUCER))}")
    for group in graph.groups:
        if group.frozen is not None:
            print(f"{group.name}: kept whole, since {group.frozen}")

    # Silence the second half of every group, then remove it. The outputs are the same; only the work is less.
    dead = {group.name: torch.arange(group.width) >= group.width // 2 for group in graph.prunable}
    ecc.graph.mask_channels_(model, graph, dead)
    small = ecc.slim(model, graph)
    with torch.no_grad():
        masked, cut = model(example_input), small(example_input)
    print(f"largest difference of the outputs: {float((masked - cut).abs().max() / masked.abs().max()):.1e}")
    left = float(graph.macs(ecc.graph.live_channels(model, graph)) / graph.macs())
    print(f"multiply-accumulates left: {left:.0%}")


if __name__ == "__main__":
    main()
