"""Figures 4 to 8 and 11 of the paper in its own form, from the records of E1 to E3.

PYTHONPATH=src python3 benchmarks/paper_figures.py    # as benchmarks/write_results.py does

One row for each network: accuracy against energy after fine-tuning (Figures 4 and 5) and before (Figures 7 and 8) for ECC,
NetAdapt and AMC, the three methods of the paper, and the channels that ECC keeps in each layer (Figures 6 and 11). Table 2
is in the section of E2. The records are those with all three methods.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from evidence_data import AFTER, BEFORE, OURS, SHORT, Experiment, experiments
from evidence_figures import accuracy_panel, widths_panel
from evidence_page import FIGURES, FOLDER
from paper_table import COMPARED, FIGURE
from plotting import in_rows, save_figure

TITLES = {
    "e1": ("Figure 4: MobileNet", "Figure 7: MobileNet, before fine-tuning", "Figures 6 and 11: MobileNet, ECC"),
    "e3": ("Figure 5: AlexNet", "Figure 8: AlexNet, before fine-tuning", "Figures 6 and 11: AlexNet, ECC"),
}


def methods_of_paper(found: Experiment) -> Experiment:
    """The runs of the methods that the paper compares."""
    cells = tuple(cell for cell in found.cells if cell.method in (OURS, *COMPARED))
    return replace(found, cells=cells, trained=())


def draw(records: Path, out: Path) -> Path | None:
    """The figure; None without a record that has all methods."""
    found = {one.name: methods_of_paper(one) for one in [*experiments(records), *experiments(records / SHORT)]}
    panels = []
    for name, titles in TITLES.items():
        one = found.get(name)
        if one is not None and {OURS, *COMPARED} <= set(one.methods):
            drawn = (accuracy_panel(one, AFTER), accuracy_panel(one, BEFORE), widths_panel(one))
            panels += [panel.properties(title=title) for panel, title in zip(drawn, titles, strict=True)]
    if not panels:
        return None
    title = "The paper's methods on an NVIDIA H200, Imagenette; mean and range of the seeds"
    return save_figure(in_rows(panels, 3), out / FIGURE, title)


def main() -> None:
    print(draw(FOLDER, FIGURES))


if __name__ == "__main__":
    main()
