"""The section of RESULTS.md about energy models of networks that were drawn at random."""

from __future__ import annotations

from typing import Any

from result_tables import RESULTS, load, origin, table

FILE = "unseen_networks.json"
ERROR_GOAL = 0.03


def unseen_section() -> str:
    """The section; empty if it has not been measured."""
    return section_of(load(FILE), origin(FILE)) if (RESULTS / FILE).exists() else ""


def unseen_goal() -> tuple[str, str, bool | None, str]:
    """The goal, the result, whether it is met (None if it has not been measured) and why not, for the summary."""
    if (RESULTS / FILE).exists():
        return goal_of(load(FILE))
    goal = f"energy model of ten random networks of torchvision: error at most {ERROR_GOAL:.0%} from 100 samples"
    return goal, "", None, ""


def goal_of(found: dict[str, Any]) -> tuple[str, str, bool, str]:
    """As `unseen_goal`, of a record."""
    about, (multiple, *others) = found["settings"], multiples_of(found)
    cells = done_cells(found, multiple)
    names = found["draw"]["names"]
    goal = (
        f"energy model of {len(names)} random networks of {found['draw']['library'].partition(' ')[0]}: error at most "
        f"{ERROR_GOAL:.0%} from {about['samples']} samples"
    )
    text = f"{_count(found, multiple)}, {_widths(multiple)}" + _largest(cells)
    text += "".join(f"; {_count(found, other)}, {_widths(other)}" for other in others)
    is_met = bool(cells) and len(cells) == len(names) and all(map(is_goal_met, cells))
    noises = [cell["noise"] for cell in cells if not is_goal_met(cell) and cell["noise"] is not None]
    why = f"repeats of the dense network differ by at most {max(noises):.1%}" if noises else ""
    if len(cells) < len(names):
        why = "; ".join([f"{len(names) - len(cells)} networks failed or were not measured", *([why] if why else [])])
    return goal, text, is_met, why


def section_of(found: dict[str, Any], source: str) -> str:
    """Text and tables of a record."""
    about, drawn = found["settings"], found["draw"]
    parts = [
        "## Energy models of random networks",
        f"{len(drawn['names'])} of the {drawn['of']} classifiers of {drawn['library']}, drawn with seed {drawn['seed']}, with "
        f"random weights, profiled on an {found['device']}\nwith {found['options']}: batch {about['batch']}. The model is "
        f"fitted to {about['samples']} samples. *Cross-validated* is its ten-fold\nerror, as `ecc fit` reports it, *held out* "
        f"the error on {about['held_out']} further samples (± standard error), *noise* the standard deviation of\nrepeated "
        f"measurements of the dense network. Profiles are in `results/{FILE.partition('.')[0]}/`.",
    ]
    for multiple in multiples_of(found):
        parts.append(
            f"Widths: {_widths(multiple)}. Goal: both errors at most {ERROR_GOAL:.0%}. It is met for "
            f"{_count(found, multiple)} networks{_largest(done_cells(found, multiple))}."
        )
        parts.append(
            table(
                ["network", "groups", "samples", "cross-validated", "p90", "held out", "noise", "s per sample", "goal"],
                [_line(found, name, multiple) for name in drawn["names"]],
            )
        )
    return "\n\n".join([*parts, source + "\n\n"])


def multiples_of(found: dict[str, Any]) -> list[str]:
    """Width multiples of the record in order, the default of `ecc profile` first."""
    every = {cell["width_multiple"] for cell in found["cells"]} or {"any"}
    return sorted(every, key=lambda multiple: (multiple != "any", multiple))


def done_cells(found: dict[str, Any], multiple: str) -> list[dict[str, Any]]:
    """Cells of drawn networks with a result."""
    return [
        cell
        for cell in found["cells"]
        if cell["width_multiple"] == multiple and cell["network"] in found["draw"]["names"] and "error" not in cell
    ]


def is_goal_met(cell: dict[str, Any]) -> bool:
    """Whether both errors of a network are within the goal."""
    return largest_error(cell) <= ERROR_GOAL


def largest_error(cell: dict[str, Any]) -> float:
    """The cross-validated error or that on held-out samples, whichever is larger."""
    held = cell["held_out"]
    return max(float(cell["cross_validated"]), 0.0 if held is None else float(held["mean"]))


def _count(found: dict[str, Any], multiple: str) -> str:
    met = sum(map(is_goal_met, done_cells(found, multiple)))
    return f"{met} of {len(found['draw']['names'])}"


def _widths(multiple: str) -> str:
    return "any width (default)" if multiple == "any" else f"multiples of {multiple}"


def _largest(cells: list[dict[str, Any]]) -> str:
    if not cells:
        return ""
    worst = max(cells, key=largest_error)
    return f"; largest error {largest_error(worst):.2%}, {worst['network']}"


def _line(found: dict[str, Any], name: str, multiple: str) -> list[str]:
    cells = [cell for cell in found["cells"] if (cell["network"], cell["width_multiple"]) == (name, multiple)]
    if not cells:
        return [name, *["-"] * 7, "not measured"]
    cell = cells[0]
    if "error" in cell:
        return [name, *["-"] * 7, f"failed: {cell['error'][:80].replace('|', '/')}"]
    held, noise, seconds = cell["held_out"], cell["noise"], cell["seconds_per_sample"]
    spread = "" if held is None or held["standard_error"] is None else f" ± {held['standard_error']:.2%}"
    return [
        name,
        str(cell["groups"]),
        str(cell["samples"]),
        f"{cell['cross_validated']:.2%}",
        f"{cell['errors'][cell['family']]['p90']:.2%}",
        "-" if held is None else f"{held['mean']:.2%}{spread}",
        "-" if noise is None else f"{noise:.2%}",
        "-" if seconds is None else f"{seconds:.2f}",
        "met" if is_goal_met(cell) else "**missed**",
    ]
