"""The diagrams of docs/prunable.md (what can be pruned in a CNN, a transformer and a recurrent network) and docs/concepts.md.

    PYTHONPATH=src python3 benchmarks/draw_structures.py [--out results/figures]

Boxes are layers, arrows are tensors. A colour is one kind of unit; everything of one colour and label is pruned together.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from ecc.methods.budget_controller import CHECKPOINTS

ROOT = Path(__file__).resolve().parent.parent
GREY, TEXT = "#5f6b73", "#1f2a30"
KINDS = {
    "width": ("#00796b", "channels or hidden units"),
    "head": ("#5e35b1", "attention heads"),
    "residual": ("#c77700", "residual width"),
    "branch": ("#c0392b", "branch that can be removed"),
}


@dataclass
class Drawing:
    """An SVG picture that grows by boxes and arrows."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(
        self, x: float, y: float, words: str, *, size: int = 13, colour: str = TEXT, anchor: str = "middle"
    ) -> None:
        """One line of text whose baseline is at y."""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, words: str, *, width: float = 150, colour: str = GREY, height: float = 30
    ) -> None:
        """A layer, centred at x, with its upper edge at y."""
        self.parts.append(
            f'<rect x="{x - width / 2}" y="{y}" width="{width}" height="{height}" rx="5" fill="white" stroke="{colour}" '
            f'stroke-width="1.5"/>'
        )
        self.text(x, y + height / 2 + 4.5, words)

    def line(self, *points: tuple[float, float], arrow: bool = True, colour: str = GREY) -> None:
        """A polyline, with an arrow head at its end."""
        path = " ".join(f"{x},{y}" for x, y in points)
        head = ' marker-end="url(#head)"' if arrow else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{head}/>')

    def unit(self, x: float, y: float, kind: str, words: str, *, height: float = 14) -> None:
        """A tensor whose units can be pruned: a coloured bar on an arrow, with a label to its right."""
        colour = KINDS[kind][0]
        for number in range(6):
            self.parts.append(
                f'<rect x="{x - 24 + 8 * number}" y="{y}" width="6" height="{height}" fill="{colour}" '
                f'opacity="{0.25 if number in (2, 5) else 1}"/>'
            )
        self.text(x + 32, y + 11, words, size=12, colour=colour, anchor="start")

    def branch(self, x: float, y: float, width: float, height: float, words: str) -> None:
        """A dashed frame around what is removed together."""
        colour = KINDS["branch"][0]
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="9" fill="{colour}" fill-opacity="0.05" '
            f'stroke="{colour}" stroke-dasharray="5 4" stroke-width="1.3"/>'
        )
        self.text(x + width - 10, y + 18, words, size=12, colour=colour, anchor="end")

    def plus(self, x: float, y: float) -> None:
        """A residual addition."""
        self.parts.append(f'<circle cx="{x}" cy="{y}" r="10" fill="white" stroke="{GREY}" stroke-width="1.5"/>')
        self.text(x, y + 5, "+", size=16)

    def legend(self, kinds: list[str]) -> None:
        """The colours, below the picture."""
        x, y = 16.0, self.height - 14.0
        for kind in kinds:
            colour, words = KINDS[kind]
            self.parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
            self.text(x + 18, y, words, size=12, anchor="start")
            x += 36 + 6.6 * len(words)

    def svg(self) -> str:
        """The file."""
        head = (
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{GREY}"/></marker></defs>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" font-family="system-ui, sans-serif" role="img" aria-label="{escape(self.title)}">\n'
            f'<rect width="100%" height="100%" fill="white"/>{head}\n' + "\n".join(self.parts) + "\n</svg>\n"
        )


def cnn() -> Drawing:
    """A residual block of a CNN."""
    d = Drawing(640, 430, "Prunable units of a residual block of a CNN")
    d.text(320, 24, "Residual block of a CNN", size=15)
    d.unit(250, 40, "width", "residual width: all layers that add to it lose the same channels")
    d.line((250, 54), (250, 92))
    d.branch(120, 96, 500, 222, "removable branch")
    d.box(250, 104, "conv1 + batch norm")
    d.line((250, 134), (250, 148))
    d.unit(250, 150, "width", "inner width: any number of channels")
    d.line((250, 166), (250, 180))
    d.box(250, 182, "depthwise conv (if any)", width=180)
    d.line((250, 212), (250, 240))
    d.box(250, 242, "conv2 + batch norm")
    d.line((250, 272), (250, 340))
    d.line((250, 72), (60, 72), (60, 352), (238, 352))
    d.text(70, 210, "identity", size=12, colour=GREY, anchor="start")
    d.plus(250, 352)
    d.line((250, 362), (250, 392))
    d.text(264, 385, "at inner width 0 the whole block becomes the identity", size=12, colour=GREY, anchor="start")
    d.legend(["width", "branch"])
    return d


def transformer() -> Drawing:
    """A block of a transformer."""
    d = Drawing(720, 660, "Prunable units of a transformer block")
    d.text(360, 24, "Transformer block", size=15)
    x = 290
    d.unit(x, 40, "residual", "residual width: embedding, every block, output head")
    d.line((x, 54), (x, 92))
    d.branch(110, 96, 590, 222, "removable attention branch")
    d.box(x, 104, "norm")
    d.line((x, 134), (x, 146))
    for shift, name in ((-105, "q"), (0, "k"), (105, "v")):
        d.box(x + shift, 148, name, width=70)
        d.line((x + shift, 178), (x + shift, 194))
        d.unit(x + shift, 196, "head", "" if shift < 105 else "heads; with GQA, KV groups")
        d.line((x + shift, 212), (x + shift, 226))
    d.box(x, 228, "attention", width=290)
    d.line((x, 258), (x, 270))
    d.box(x, 272, "output projection", width=170)
    d.line((x, 302), (x, 340))
    d.line((x, 74), (60, 74), (60, 350), (x - 12, 350))
    d.plus(x, 350)
    d.line((x, 360), (x, 398))
    d.branch(110, 402, 590, 182, "removable MLP branch")
    d.box(x, 410, "norm")
    d.line((x, 440), (x, 452))
    d.box(x, 454, "up (and gate) projection", width=190)
    d.line((x, 484), (x, 496))
    d.unit(x, 498, "width", "hidden width")
    d.line((x, 514), (x, 526))
    d.box(x, 528, "down projection", width=170)
    d.line((x, 558), (x, 600))
    d.line((x, 380), (60, 380), (60, 610), (x - 12, 610))
    d.plus(x, 610)
    d.legend(["width", "head", "residual", "branch"])
    return d


def recurrent() -> Drawing:
    """An LSTM between an embedding and a classifier."""
    d = Drawing(640, 330, "Prunable units of a recurrent network")
    d.text(320, 24, "Recurrent network", size=15)
    d.box(230, 40, "embedding")
    d.line((230, 70), (230, 84))
    d.unit(230, 86, "width", "embedding width")
    d.line((230, 102), (230, 120))
    d.box(230, 122, "LSTM or GRU", width=200, height=44)
    d.line((330, 132), (420, 132), (420, 158), (332, 158))
    d.text(430, 142, "recurrence: a unit loses its rows of all gates", size=12, colour=GREY, anchor="start")
    d.text(430, 158, "and its column of the recurrent weight", size=12, colour=GREY, anchor="start")
    d.line((230, 166), (230, 184))
    d.unit(230, 186, "width", "hidden units; each direction and each layer has its own")
    d.line((230, 202), (230, 224))
    d.box(230, 226, "linear")
    d.line((230, 256), (230, 280))
    d.legend(["width"])
    d.width = 700
    return d


def energy_model() -> Drawing:
    """The terms of the energy model."""
    d = Drawing(720, 300, "The energy model: terms that depend on the widths add up to joules")
    d.text(360, 24, "Energy model", size=15)
    d.box(90, 120, "widths", width=120)
    d.text(90, 170, "channels of each group", size=12, colour=GREY)
    terms = ("fixed part", "width of each group", "inputs x outputs of each layer", "steps where kernels change")
    for number, words in enumerate(terms):
        y = 44 + 50 * number
        d.box(340, y, words, width=210)
        if number:
            d.line((150, 135), (190, 135), (190, y + 15), (234, y + 15))
        d.line((445, y + 15), (500, y + 15), (500, 135), (528, 135), arrow=number == 0)
    d.plus(540, 135)
    d.line((550, 135), (592, 135))
    d.box(645, 120, "joules", width=100, colour=KINDS["width"][0])
    d.text(
        360, 262, "Each term has one coefficient of at least 0. All are fitted to measurements", size=12, colour=GREY
    )
    d.text(360, 280, "of the network at many widths on your device (the profile).", size=12, colour=GREY)
    return d


def budget() -> Drawing:
    """How the cost falls during a run, and when it is measured."""
    d = Drawing(720, 330, "The cost during the three phases of a run, and the four measurements")
    d.text(360, 24, "From the dense network to the budget", size=15)
    left, bottom, top, limit = 60.0, 270.0, 60.0, 190.0
    d.line((left, bottom), (690, bottom))
    d.line((left, bottom), (left, 44))
    d.text(left + 8, 52, "energy", size=12, colour=GREY, anchor="start")
    d.text(690, 288, "training step", size=12, colour=GREY, anchor="end")
    start, end, width = 200.0, 510.0, 0.6 * 310.0
    for place, words in ((130, "pretrain"), (355, "prune"), (590, "finetune")):
        d.text(place, 306, words)
    for x in (start, end):
        d.parts.append(f'<path d="M{x},{bottom} V60" stroke="{GREY}" stroke-dasharray="2 4"/>')
    colour = KINDS["width"][0]
    curve = [(start + width * i / 40, limit + (top - limit) * (1 - i / 40) ** 3) for i in range(41)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in [(left, top), *curve, (690, limit)])
    d.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
    d.parts.append(f'<path d="M{left},{limit - 4} H690" stroke="{KINDS["branch"][0]}" stroke-dasharray="6 4"/>')
    d.text(left + 8, limit - 10, "budget", size=12, colour=KINDS["branch"][0], anchor="start")
    for fraction in CHECKPOINTS[:-1]:
        x, y = curve[round(40 * fraction)]
        d.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{TEXT}"/>')
    d.text(300, 92, "● the planned final widths are measured,", size=12, anchor="start")
    d.text(300, 109, "and the target is corrected", size=12, anchor="start")
    return d


def solver() -> Drawing:
    """The order in which channels are removed."""
    d = Drawing(720, 300, "Channels of all groups in one order: importance per joule")
    d.text(360, 24, "One step of the solver", size=15)
    heights = (12, 18, 25, 31, 40, 46, 58, 70, 77, 90, 104, 116, 127, 140, 150)
    owners = (0, 1, 0, 2, 1, 0, 2, 2, 1, 0, 1, 2, 0, 1, 2)
    colours = [KINDS[kind][0] for kind in ("width", "head", "residual")]
    for number, (height, owner) in enumerate(zip(heights, owners, strict=True)):
        x, gone = 70 + 40 * number, number < 5
        style = f'fill="none" stroke="{colours[owner]}" stroke-dasharray="3 3"' if gone else f'fill="{colours[owner]}"'
        d.parts.append(f'<rect x="{x}" y="{220 - height}" width="26" height="{height}" {style}/>')
    d.line((50, 220), (690, 220), arrow=False)
    d.text(50, 64, "importance per joule", size=12, colour=GREY, anchor="start")
    d.parts.append(f'<path d="M263,224 V150" stroke="{KINDS["branch"][0]}" stroke-width="1.5" stroke-dasharray="6 4"/>')
    d.text(
        256,
        246,
        "removed, until the cost is what the schedule allows",
        size=12,
        colour=KINDS["branch"][0],
        anchor="middle",
    )
    for number, words in enumerate(("layer 1", "layer 2", "layer 3")):
        d.parts.append(f'<rect x="{60 + 110 * number}" y="268" width="12" height="12" fill="{colours[number]}"/>')
        d.text(78 + 110 * number, 279, words, size=12, anchor="start")
    return d


DRAWINGS = {
    "prunable-cnn": cnn,
    "prunable-transformer": transformer,
    "prunable-recurrent": recurrent,
    "concept-energy-model": energy_model,
    "concept-budget": budget,
    "concept-solver": solver,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "figures")
    options = parser.parse_args()
    for name, draw in DRAWINGS.items():
        path = options.out / f"{name}.svg"
        path.write_text(draw().svg(), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
