from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from ecc.graph import ChannelGraph, trace_channels
from ecc.report.inspect import graph_facts, graph_table, prunable_share
from graph.cases import CASES, conv, named, traced


def shown(graph: ChannelGraph, *, title: str = "Channel groups", width: int = 200) -> str:
    console = Console(file=StringIO(), width=width, color_system="truecolor", force_terminal=True)
    console.print(graph_table(graph, title))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "".join(part.partition("m")[2] if k else part for k, part in enumerate(text.split("\x1b[")))


def row(text: str, group: str) -> list[str]:
    """The cells of a group's row."""
    (line,) = [line for line in text.splitlines() if line.split("  ")[0].strip() == group]
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


# ---------------------------------------------------------------- for people


def test_every_group_has_a_row_with_its_width_its_readers_and_its_share() -> None:
    text = shown(traced("chain")[2], title="Channel groups of chain")
    assert text.splitlines()[0].strip() == "Channel groups of chain"
    macs = [9 * 3 * 8, 9 * 8 * 6, 6 * 4]
    assert row(text, "conv1") == ["conv1", "8", "conv2", f"{(macs[0] + macs[1]) / sum(macs):.1%}", "yes"]
    assert row(text, "conv2") == ["conv2", "6", "conv3", f"{(macs[1] + macs[2]) / sum(macs):.1%}", "yes"]
    assert row(text, "conv3") == ["conv3", "4", f"{macs[2] / sum(macs):.1%}", "no: it is an output of the network"]


@pytest.mark.parametrize("name", CASES)
def test_every_group_width_and_reason_is_in_the_text(name: str) -> None:
    _, _, graph = traced(name)
    text = shown(graph, width=400)
    for group in graph.groups:
        cells = row(text, group.name)
        assert cells[1].split()[0] == str(group.width)
        assert cells[-1] == ("yes" if group.frozen is None else f"no: {group.frozen}")
    for note in graph.notes:
        assert f"note: {note}" in text


def test_other_writers_are_named() -> None:
    assert row(shown(traced("residual")[2]), "stem")[:4] == ["stem", "8", "conv2", "conv1, head"]


def test_tied_channels_are_counted() -> None:
    assert row(shown(traced("pixel shuffle")[2]), "stem")[1] == "3 (12 ch.)"


class ManyReaders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.heads = conv(3, 8), nn.ModuleList(conv(8, 4, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return sum(head(x) for head in self.heads)


def test_many_readers_are_cut_short() -> None:
    graph = trace_channels(ManyReaders(), torch.randn(1, 3, 8, 8))
    assert row(shown(graph), "stem")[2] == "heads.0, heads.1 and 2 more"


def test_the_summary_tells_what_can_be_cut_and_how_sure_it_is() -> None:
    _, _, graph = traced("chain")
    assert "2 of 3 groups can be cut" in shown(graph)
    assert "not verified." in shown(graph)
    assert "verified: max relative difference 3e-07." in shown(replace(graph, max_relative_diff=2.9e-7))
    assert "verified: outputs are equal." in shown(replace(graph, max_relative_diff=0.0))


def test_names_that_look_like_markup_are_shown_as_they_are() -> None:
    _, _, graph = traced("chain")
    reason = "[bold]because[/bold]"
    groups = (replace(graph.groups[0], name="[red]x"), replace(graph.groups[1], frozen=reason), graph.groups[2])
    text = shown(replace(graph, groups=groups, notes=("[link]note[/link]",)), title="of [red]x")
    assert row(text, "[red]x")[1] == "8"
    assert f"no: {reason}" in text
    assert "note: [link]note[/link]" in text
    assert "of [red]x" in text


def test_modules_that_look_like_markup_are_shown_as_they_are() -> None:
    net = nn.Sequential()
    net.add_module("[red]a", nn.Conv2d(3, 8, 3))
    net.add_module("[/]b", nn.Conv2d(8, 4, 3))
    text = shown(trace_channels(net, torch.randn(1, 3, 8, 8)))
    assert row(text, "[red]a")[2] == "[/]b"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_narrow_terminal_loses_no_name(width: int) -> None:
    _, _, graph = traced("unet")
    text = shown(graph, width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    for name in ("down", "middle", "up", "head"):
        assert name in text


# ---------------------------------------------------------------- for programs


@pytest.mark.parametrize("name", CASES)
def test_facts_are_json_and_the_graphs_own_numbers(name: str) -> None:
    _, _, graph = traced(name, verify=True)
    facts = graph_facts(graph)
    assert json.loads(json.dumps(facts)) == facts
    assert facts["fingerprint"] == graph.fingerprint
    for cost in ("macs", "parameters", "weight_bytes", "activation_bytes"):
        assert facts[cost] == int(getattr(graph, cost)())
    assert facts["max_relative_diff"] == graph.max_relative_diff
    assert facts["notes"] == list(graph.notes)
    assert {g["name"]: (g["width"], g["frozen"]) for g in facts["groups"]} == {
        g.name: (g.width, g.frozen) for g in graph.groups
    }


def test_facts_name_writers_carriers_and_readers() -> None:
    first = graph_facts(traced("residual")[2])["groups"][0]
    assert (first["name"], first["width"], first["frozen"]) == ("stem", 8, None)
    assert first["producers"] == ["stem", "conv2"]
    assert first["per_channel"] == ["bn2"]
    assert first["consumers"] == ["conv1", "head"]
    assert first["share_of_macs"] == 1  # every layer reads or writes the residual stream


def test_the_prunable_share_is_what_goes_when_everything_is_at_width_one() -> None:
    net = named(fc1=nn.Linear(5, 8, bias=False), fc2=nn.Linear(8, 4, bias=False))
    graph = trace_channels(net, torch.randn(1, 5))
    assert prunable_share(graph) == pytest.approx(1 - (5 * 1 + 1 * 4) / (5 * 8 + 8 * 4))
    frozen = trace_channels(net, torch.randn(1, 5), freeze=["*"])
    assert prunable_share(frozen) == 0


def test_a_network_that_only_looks_up_a_table_can_be_shown() -> None:
    graph = trace_channels(named(table=nn.Embedding(10, 8)), torch.tensor([[1, 2]]))
    assert row(shown(graph), "table")[1] == "8"
    assert graph_facts(graph)["macs"] == 0
