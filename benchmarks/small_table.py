"""The section of RESULTS.md about all methods on small networks, from the records of `small_grid.py` in results/."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from paired import Interval, paired_interval
from result_tables import RESULTS, load, origin, table
from small_grid import DENSE_BUDGET, METHODS

from ecc.methods.registry import SEARCH_STEPS

FILE, LONG, PUBLISHED = "small_grid.json", "small_long.json", "small_published.json"
"""All methods; with ten times as many batches; in the published protocol."""
BEFORE = "small_grid_before.json"
"""ECC before a change of what removed channels and branches lose."""
OURS = ("ecc", "ecc_widths", "ecc_early")
TITLES = {
    "digits": "Digits",
    "resnet8": "ResNet with three blocks on 16x16 pixels of CIFAR-10",
    "vit": "ViT with four blocks on 16x16 pixels of CIFAR-10",
}
NAMES = {"ecc": "ECC", "ecc_widths": "ECC, widths only", "ecc_early": "ECC, early"}

Cells = Sequence[dict[str, Any]]


def scores(cells: Cells, task: str, method: str, budget: str) -> dict[int, float]:
    """Test accuracy in per cent after fine-tuning, by seed."""
    return {
        cell["seed"]: 100 * cell["scores"]["finetuned"]
        for cell in cells
        if (cell["task"], cell["method"], cell["budget"]) == (task, method, budget) and "scores" in cell
    }


def difference(ours: dict[int, float], theirs: dict[int, float]) -> Interval | None:
    """ECC minus another method, over the seeds that both have."""
    both = sorted(set(ours) & set(theirs))
    return paired_interval([ours[seed] - theirs[seed] for seed in both]) if both else None


def small_section() -> str:
    """The section; empty without the record."""
    makers = {FILE: section_of, LONG: long_of, PUBLISHED: published_of}
    if not (RESULTS / FILE).exists():
        return ""
    return "".join(make(load(name), origin(name)) for name, make in makers.items() if (RESULTS / name).exists())


def small_sentence() -> str | None:
    """For the summary page: at how many budgets ECC has the highest mean; None without the record."""
    if not (RESULTS / FILE).exists():
        return None
    cells = load(FILE)["cells"]
    places, pairs, compared = first_places(cells)
    sides = [gap.side for method, gap in overall(cells).items() if method not in OURS]
    return (
        f"On {_networks(cells)} that a CPU trains in seconds ECC has the highest mean accuracy within the budget at {places} of "
        f"{pairs} budgets, among {compared} baselines (estimated energy, {_seeds(cells)}). Over all budgets it is ahead of "
        f"{sides.count('ahead')} of them, behind {sides.count('behind')}, and undecided against {sides.count('undecided')}."
        + _long_sentence()
    )


def _long_sentence() -> str:
    if not (RESULTS / LONG).exists():
        return ""
    cells = load(LONG)["cells"]
    places, pairs, compared = first_places(cells)
    return (
        f" With ten times as many batches it has the highest mean at {places} of {pairs} budgets on {_networks(cells)}, among "
        f"{compared} baselines ({_seeds(cells)})."
    )


def published_sentence() -> str | None:
    """For the summary page: the same, where the batches of a search are not limited."""
    if not (RESULTS / PUBLISHED).exists():
        return None
    cells = load(PUBLISHED)["cells"]
    places, pairs, compared = first_places(cells)
    return (
        f"On {_networks(cells)} ECC has the highest mean within the budget at {places} of {pairs} budgets, among {compared} "
        f"baselines with as many batches for their search as they need ({_seeds(cells)})."
    )


def first_places(cells: Cells) -> tuple[int, int, int]:
    """At how many budgets ECC has the highest mean of those within the budget; how many budgets; how many baselines."""
    places, compared = 0, set[str]()
    pairs = {(cell["task"], cell["budget"]): None for cell in cells if cell["budget"] != DENSE_BUDGET}
    for task, budget in pairs:
        methods = {cell["method"] for cell in cells if (cell["task"], cell["budget"]) == (task, budget)}
        others = [one for one in methods if one not in OURS and not _over(cells, task, one, budget)]
        means = [statistics.fmean(scores(cells, task, one, budget).values()) for one in others]
        compared |= methods - set(OURS)
        places += statistics.fmean(scores(cells, task, OURS[0], budget).values()) >= max(means)
    return places, len(pairs), len(compared)


def section_of(record: dict[str, Any], source: str) -> str:
    """A table for each task, and which baselines are below uniform pruning."""
    cells, about = record["cells"], record["settings"]
    intro = (
        f"{_networks(cells).capitalize()} that a CPU trains in seconds, {_seeds(cells)}, budgets on the energy of "
        f"`{about['meter']}` (estimated), and every\nmethod corrects its targets by the estimated cost. Every method has "
        f"{_batches(cells)} batches after {about['pretrain']:,} of the dense network, and the same learning rate and\n"
        "distillation. *Dense* has as many batches. Test accuracy in %, mean ± standard deviation over seeds; in parentheses "
        "ECC minus the method,\nwith its 95 % interval. † over the budget in some run: Torch-Pruning prunes inner widths of "
        "residual blocks only. These networks say little of large ones; the grid shows whether a baseline is weak,\nand "
        "anyone can repeat it."
    )
    if any(cell["task"] == "vit" for cell in cells):
        intro += (
            " `tp_group_norm` cannot be compared on the ViT, since its global ranking removes all heads of a\nblock, and `amc` was "
            "left out there, since 400 evaluations with masked layer norms take too long on a CPU."
        )
    return _section("## All methods on small networks", intro, cells, source, after=_before(cells))


def long_of(record: dict[str, Any], source: str) -> str:
    """The same tables for trainings that are ten times as long."""
    cells, about = record["cells"], record["settings"]
    intro = (
        f"{_networks(cells).capitalize()} of those above with all {about['images']:,} training images, {about['pretrain']:,} "
        f"batches of the dense network and {_batches(cells)} of every\nmethod, {_seeds(cells)}."
    )
    return _section("### With longer trainings", intro, cells, source)


def published_of(record: dict[str, Any], source: str) -> str:
    """The same tables where the batches of a search are not limited, with the batches of each method."""
    cells, about = record["cells"], record["settings"]
    used: dict[str, list[int]] = {}
    for cell in cells:
        if "batches" in cell and cell["budget"] != DENSE_BUDGET:
            used.setdefault(cell["method"], []).append(cell["batches"])
    counts = {one: (min(found), max(found)) for one, found in used.items()}
    words = [
        f"{NAMES.get(one, one)} {low:,}" + (f" to {high:,}" if high > low else "")
        for one, (low, high) in sorted(counts.items(), key=lambda item: -item[1][1])
    ]
    intro = (
        f"The budgets of above, {_networks(cells)}, {_seeds(cells)}. The batches of a search are not limited, and every result "
        f"has {about['finetune']} batches of fine-tuning; ECC\nprunes for {about['prune']} batches before. NetAdapt trains every "
        f"candidate for {SEARCH_STEPS} batches, and energy-aware pruning and HALP train for {SEARCH_STEPS}\nafter every pass. "
        f"Batches in all: {', '.join(words)}. *Dense* has {about['finetune']} batches."
    )
    return _section("### Each method with the search of its paper", intro, cells, source)


def _section(title: str, intro: str, cells: Cells, source: str, after: str = "") -> str:
    commits = ", ".join(sorted({str(cell["commit"])[:10] for cell in cells}))
    parts = [title, intro, *_tables(cells), _overall(cells), after, f"Commits of the cells: {commits}.", source]
    return "\n\n".join(part for part in parts if part) + "\n\n"


def _tables(cells: Cells) -> list[str]:
    """For each task: its name, all methods at all budgets, and who is ahead."""
    parts = []
    for task in dict.fromkeys(cell["task"] for cell in cells):
        dense = list(scores(cells, task, "uniform", DENSE_BUDGET).values())
        level = f" Dense: {_mean(dense)}." if dense else ""
        parts.append(f"{TITLES.get(task, task)}.{level}")
        own = [cell for cell in cells if cell["task"] == task]
        methods = sorted({cell["method"] for cell in own}, key=METHODS.index)
        budgets = sorted({cell["budget"] for cell in own} - {DENSE_BUDGET}, reverse=True)
        parts.append(
            table(
                ["method", *budgets],
                [[NAMES.get(one, one), *(_entry(cells, task, one, budget) for budget in budgets)] for one in methods],
            )
        )
        parts.append(_against_uniform(cells, task, budgets, methods))
    return parts


def _overall(cells: Cells) -> str:
    """ECC and uniform pruning against every method over all networks and budgets; empty for one network of one seed."""
    if len({(cell["task"], cell["seed"]) for cell in cells}) < 2:
        return ""
    methods = _methods(cells)
    references = [one for one in (*OURS, "uniform") if one in methods]
    columns = [overall(cells, one) for one in references]
    rows = []
    for method in methods:
        gaps = [found.get(method) for found in columns]
        rows.append([NAMES.get(method, method), *("" if gap is None else f"{gap}, {gap.side}" for gap in gaps)])
    text = (
        "Over all networks and budgets, in points: differences are averaged over the budgets of a network, and networks and seeds "
        "are the\npairs. The 95 % intervals are wider because there are several methods (Bonferroni). Methods over their budget (†) are included,\n"
        "in their favour."
    )
    if "ecc_widths" in methods:
        text += " Only ECC removes branches: *widths only* shows what it gains\nwithout."
    if "ecc_early" in methods:
        text += " *early* prunes in a tenth of the steps, almost as one-shot methods do."
    return f"{text}\n\n" + table(["method", *(f"{NAMES.get(one, one)}, minus the method" for one in references)], rows)


def overall(cells: Cells, reference: str = OURS[0]) -> dict[str, Interval]:
    """A reference minus every other method over all networks and budgets, with intervals for as many comparisons."""
    others = [one for one in _methods(cells) if one != reference]
    found = {method: over_budgets(cells, reference, method) for method in others}
    return {method: paired_interval(pairs, comparisons=len(others)) for method, pairs in found.items() if pairs}


def _methods(cells: Cells) -> list[str]:
    """The methods, without the dense network, in their usual order."""
    return sorted({cell["method"] for cell in cells if cell["budget"] != DENSE_BUDGET}, key=METHODS.index)


def over_budgets(cells: Cells, reference: str, method: str) -> list[float]:
    """A reference minus a method for each network and seed, the mean over the budgets that both have."""
    differences: dict[tuple[str, int], list[float]] = {}
    for task, budget in dict.fromkeys((cell["task"], cell["budget"]) for cell in cells):
        ours, theirs = scores(cells, task, reference, budget), scores(cells, task, method, budget)
        for seed in sorted(set(ours) & set(theirs)):
            differences.setdefault((task, seed), []).append(ours[seed] - theirs[seed])
    return [statistics.fmean(found) for found in differences.values()]


def _batches(cells: Cells) -> str:
    used = sorted({cell["batches"] for cell in cells if "batches" in cell})
    return " to ".join(f"{one:,}" for one in dict.fromkeys([*used[:1], *used[-1:]]))


def _networks(cells: Cells) -> str:
    count = len({cell["task"] for cell in cells})
    return {1: "one small network", 2: "two small networks", 3: "three small networks"}[count]


def _seeds(cells: Cells) -> str:
    count = len({cell["seed"] for cell in cells})
    return "one seed" if count == 1 else f"{count} seeds"


def _mean(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


def _entry(cells: Cells, task: str, method: str, budget: str) -> str:
    own, ours = scores(cells, task, method, budget), scores(cells, task, OURS[0], budget)
    if not own:
        return ""
    mark = " †" if _over(cells, task, method, budget) else ""
    gap = None if method == OURS[0] else difference(ours, own)
    if gap is None or gap.pairs < 2:
        return f"{_mean(list(own.values()))}{mark}"
    return f"{_mean(list(own.values()))}{mark} ({gap.mean:+.2f} ± {gap.half_width:.2f})"


def _over(cells: Cells, task: str, method: str, budget: str) -> bool:
    """Whether a run of a method is over its budget."""
    key = (task, method, budget)
    return any((c["task"], c["method"], c["budget"]) == key and c.get("of_budget", 0) > 1 for c in cells)


def against_best(cells: Cells, task: str, budget: str, methods: Sequence[str]) -> tuple[str | None, Interval | None]:
    """The baseline with the highest mean, of those within the budget, and ECC minus it."""
    found = {one: scores(cells, task, one, budget) for one in methods if one not in OURS}
    means = {
        one: statistics.fmean(values.values())
        for one, values in found.items()
        if values and not _over(cells, task, one, budget)
    }
    name = max(means, key=lambda one: means[one], default=None)
    return name, None if name is None else difference(scores(cells, task, OURS[0], budget), found[name])


def _against_uniform(cells: Cells, task: str, budgets: Sequence[str], methods: Sequence[str]) -> str:
    """How ECC compares with the best baseline within the budget, and which baselines are below uniform pruning."""
    best, below, clearly = [], [], []
    for budget in budgets:
        others = {one: found for one in methods if one not in OURS and (found := scores(cells, task, one, budget))}
        for method, own in others.items():
            gap = difference(own, others.get("uniform", {}))
            if gap is not None and gap.mean < 0:
                below.append(f"{method} at {budget}")
                clearly += [f"{below[-1]} ({gap.mean:+.2f} ± {gap.half_width:.2f})"] if gap.side == "behind" else []
        name, gap = against_best(cells, task, budget, list(others))
        best.append(f"{budget} not compared" if gap is None else f"{budget} {gap} against {name}, {gap.side}")
    return (
        f"ECC minus the best baseline within its budget: {'; '.join(best)}. Below uniform pruning in the mean: "
        f"{', '.join(below) or 'none'}; beyond the 95 % interval: {', '.join(clearly) or 'none'}."
    )


def _before(cells: Cells) -> str:
    """The effect of a change of what channels and removed branches lose; empty without the record of the code before."""
    if not (RESULTS / BEFORE).exists():
        return ""
    old = load(BEFORE)["cells"]
    commits = ", ".join(sorted({str(cell["commit"])[:10].rstrip("+") for cell in old}))
    found = []
    for task, budget in dict.fromkeys((cell["task"], cell["budget"]) for cell in old):
        gap = difference(scores(cells, task, OURS[0], budget), scores(old, task, OURS[0], budget))
        if gap is not None:
            found.append(f"{task} {budget} {gap}, {gap.side}")
    return (
        f"Before, at commit {commits}, the loss of removed channels was divided by the share of the channels that remain, and a branch "
        f"lost at\nleast as much as its minimum widths. ECC now minus ECC then, in points: {'; '.join(found)} (`results/{BEFORE}`)."
    )
