"""A channel graph for people: which channels exist, who makes and who uses them, and what cannot be cut."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ecc.graph import ChannelGraph, ChannelGroup, Role


def graph_table(graph: ChannelGraph, title: str) -> RenderableType:
    """The groups of a network as a table, named for their first writer, with a summary and notes below."""
    table = Table(title=Text(title), title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("group", overflow="fold")
    table.add_column("width", justify="right")
    table.add_column("also written by", overflow="fold")
    table.add_column("read by", overflow="fold")
    table.add_column("MACs", justify="right")
    table.add_column("cut", overflow="fold")
    for group in graph.groups:
        table.add_row(
            Text(group.name),
            str(group.width) if _channels(group) == group.width else f"{group.width} ({_channels(group)} ch.)",
            Text(_names([path for path in group.layers(Role.PRODUCER) if path != group.name.partition("#")[0]])),
            Text(_names(list(group.layers(Role.CONSUMER)))),
            f"{graph.share_of_macs(group):.1%}",
            Text("yes" if group.frozen is None else f"no: {group.frozen}"),
            style=None if group.frozen is None else "dim",
        )
    return Group(table, Text(_summary(graph)), *[Text(f"note: {note}") for note in graph.notes])


def graph_facts(graph: ChannelGraph) -> dict[str, Any]:
    """The same facts for programs."""
    return {
        "fingerprint": graph.fingerprint,
        "macs": int(graph.macs()),
        "parameters": int(graph.parameters()),
        "weight_bytes": int(graph.weight_bytes()),
        "activation_bytes": int(graph.activation_bytes()),
        "prunable_share_of_parameters": prunable_share(graph),
        "max_relative_diff": graph.max_relative_diff,
        "notes": list(graph.notes),
        "groups": [
            {
                "name": group.name,
                "width": group.width,
                "producers": list(group.layers(Role.PRODUCER)),
                "per_channel": list(group.layers(Role.PER_CHANNEL)),
                "consumers": list(group.layers(Role.CONSUMER)),
                "share_of_macs": graph.share_of_macs(group),
                "frozen": group.frozen,
            }
            for group in graph.groups
        ],
    }


def prunable_share(graph: ChannelGraph) -> float:
    """The part of the parameters that goes when every group is at its least width."""
    least = graph.parameters({group.name: group.min_width for group in graph.prunable})
    return float(1 - least / graph.parameters().clamp(min=1))


def _summary(graph: ChannelGraph) -> str:
    macs, parameters = float(graph.macs()), float(graph.parameters())
    verified = "not verified"
    if graph.max_relative_diff is not None:
        verified = (
            f"verified: max relative difference {graph.max_relative_diff:.0e}" if graph.max_relative_diff else "verified: outputs are equal"
        )
    return (
        f"{len(graph.prunable)} of {len(graph.groups)} groups can be cut; {_short(macs)} MACs, "
        f"{_short(parameters)} parameters, {prunable_share(graph):.0%} of them prunable; {verified}."
    )


def _short(count: float) -> str:
    """Three digits and a letter: 714 M."""
    for size, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:.0f}"


def _channels(group: ChannelGroup) -> int:
    """Output channels of the group's first writer: more than its width where channels are tied."""
    return group.slices[0].index.numel()


def _names(paths: list[str], limit: int = 2) -> str:
    shown = ", ".join(paths[:limit])
    return f"{shown} and {len(paths) - limit} more" if len(paths) > limit else shown
