"""The section of RESULTS.md about language models, from results/llm.json."""

from __future__ import annotations

from typing import Any

from result_tables import RESULTS, load, origin, table

FILE = "llm.json"
FIGURES = {"decode": "llm-decode.svg", "prefill": "llm-prefill.svg"}
ENCODER = "encoder.json"
TRAINING_FREE_GOAL, HEALED_GOAL = 24.0, 21.0  # perplexity at 80 % of the decode energy
BAND = (0.98, 1.0)
LEVEL = 0.1  # difference of the perplexity, about the range over three seeds of healing


def llm_section() -> str:
    """The section; empty if it has not been measured."""
    return section_of(load(FILE), origin(FILE)) if (RESULTS / FILE).exists() else ""


def main_perplexities() -> tuple[float, float] | None:
    """Perplexity of `one_shot` at 80 % of the decode energy, without training and healed; None if one is missing."""
    if not (RESULTS / FILE).exists():
        return None
    found = _at(load(FILE)["cells"], "one_shot", 0.8)
    if found is None or "healed_perplexity" not in found:
        return None
    return found["perplexity"], found["healed_perplexity"]


def _at(cells: list[dict[str, Any]], method: str, share: float, resource: str = "decode") -> dict[str, Any] | None:
    """The cell of a method at a share of the energy with the first seed, unless it failed."""
    key = (method, resource, share, 0)
    cells = [one for one in cells if "error" not in one]
    return next((one for one in cells if (one["method"], one["resource"], one["share"], one["seed"]) == key), None)


def budget_sentence() -> str | None:
    """For the summary page: perplexity at decode and prefill budgets; None without the record."""
    if not (RESULTS / FILE).exists():
        return None
    record = load(FILE)
    cells, shares = record["cells"], sorted({one["share"] for one in record["cells"]}, reverse=True)
    sentences = []
    for resource in FIGURES:
        ours = {share: found for share in shares if (found := _at(cells, "one_shot", share, resource))}
        best = []
        for share in ours:
            others = [
                one
                for one in cells
                if (one["share"], one["resource"], one["seed"]) == (share, resource, 0)
                and one["method"] != "one_shot"
                and "error" not in one
            ]
            if others:
                first = min(others, key=lambda one: float(one["perplexity"]))
                best.append(f"{first['method']} {first['perplexity']:.1f} at {share:.0%}")
        if ours:
            ends = sorted(one["of_budget"] for one in ours.values())
            sentences.append(
                f"budgets on {resource}: "
                + ", ".join(f"{one['perplexity']:.1f} at {share:.0%}" for share, one in ours.items())
                + f" of the joules per token, each within {ends[0]:.1%} to {ends[-1]:.1%} of its budget; the best baselines have "
                + ", ".join(best)
            )
    return (
        f"SmolLM2-135M (perplexity {record['dense']['perplexity']:.1f}) pruned without training to measured "
        + ". Measured ".join(sentences)
        + f". One seed, {_seeds(cells)} on decode at 80%."
    )


def _seeds(cells: list[dict[str, Any]]) -> int:
    """How many runs `one_shot` has at 80 % of the decode energy."""
    return sum(one["resource"] == "decode" and one["share"] == 0.8 for one in _done(cells))


def goal_rows() -> list[tuple[str, str, bool, str]]:
    """Goals of the summary page about all runs: their text, the result, whether it is met, and the reason if not."""
    if not (RESULTS / FILE).exists():
        return []
    cells = load(FILE)["cells"]
    ours, rows = _done(cells), []
    for key, words in (("perplexity", "without training"), ("healed_perplexity", "distilled (healed)")):
        pairs = _pairs(cells, key)
        below = sum(mine[key] < one[key] for mine, one in pairs)
        text = f"SmolLM2-135M, {words}: below every baseline at the same measured budget"
        level = sum(abs(mine[key] - one[key]) < LEVEL for mine, one in pairs)
        number = f"{below} of {len(pairs)} pairs" + (f", {level} of them by less than {LEVEL:g}" if level else "")
        rows.append((text, number, below == len(pairs), ""))
    inside = _inside(ours)
    text = "SmolLM2-135M: every budget met at 98 to 100 % on the meter"
    return [*rows, (text, f"{inside} of {len(ours)} runs", inside == len(ours), "")]


def section_of(found: dict[str, Any], source: str) -> str:
    """Text and tables of a record."""
    dense = found["dense"]
    decode, prefill = dense["decode"], dense.get("prefill")  # the latter is measured for its own budgets only
    prompts = (
        f"Prefill: {prefill['batch']} prompts of {prefill['length']} tokens, {_energy(prefill)} per token. "
        if prefill
        else ""
    )
    parts = [
        "## Language models",
        f"SmolLM2-135M on an {found['device']} in bfloat16; energy is {found['label']}. Decode: one token for each of "
        f"{decode['batch']} sequences with {decode['length']}\ntokens in the cache, {_energy(decode)} per token. {prompts}The dense "
        "model\nhas a "
        f"perplexity of {dense['perplexity']:.2f} on WikiText-2 test. Methods are calibrated on {dense['calibration_tokens']:,} "
        f"tokens of WikiText-2 valid and healed\non {dense['heal_tokens']:,}, with the same batches, under the same measured "
        "budget. Healing trains on\ntext of the same kind as the test text, so healed models may be better than the dense model, "
        "which was not trained on it.\n*uniform* keeps the same share of every group, chosen by the norm of its weights. Widths of MLPs are "
        "multiples of 8 for all\nmethods. Budgets are fractions of the dense energy that the same call measured, which differs between calls.\n"
        f"One seed, except where stated. {_open(found)}",
        _goals(found["cells"]),
    ]
    for resource in FIGURES:
        rows = [_line(one) for one in _ordered(found["cells"], resource)]
        if rows:
            heads = ["budget", "method", "of budget", "perplexity", "healed", "blocks removed"]
            parts += [f"Budgets on {resource}, as fractions of the dense energy:", table(heads, rows)]
            parts.append(f"![perplexity against measured {resource} energy](results/figures/{FIGURES[resource]})")
    if spread := _spread(found["cells"]):
        parts += ["Perplexity at 80 % of the decode energy, smallest to largest over the seeds:", spread]
    return "\n\n".join([*parts, source + "\n\n"])


def _open(found: dict[str, Any]) -> str:
    """How many of the pairs of a method and a budget were run, and healed."""
    done = [one for one in found["cells"] if one["seed"] == 0]
    methods, shares = ({one[part] for one in done} for part in ("method", "share"))
    plan, healed = 2 * len(methods) * len(shares), len(_healed(done))
    if healed == plan:
        return ""
    return f"{len(done)} of {plan} pairs of a method and a budget were run, and {healed} of them were healed."


def _spread(cells: list[dict[str, Any]]) -> str:
    """Methods that were run with several seeds, which draw the text for calibration and the order of that for healing."""
    mine: dict[str, list[dict[str, Any]]] = {}
    for one in cells:
        if one["resource"] == "decode" and one["share"] == 0.8 and "error" not in one:
            mine.setdefault(one["method"], []).append(one)
    rows = [
        [name, str(len(many)), _range([one["perplexity"] for one in many]), _range(_healed(many))]
        for name, many in mine.items()
        if len(many) > 1
    ]
    return table(["method", "seeds", "perplexity", "healed"], rows) if rows else ""


def _healed(cells: list[dict[str, Any]]) -> list[float]:
    return [one["healed_perplexity"] for one in cells if "healed_perplexity" in one]


def _range(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}" if values else ""


def _energy(workload: dict[str, Any]) -> str:
    return f"{1e3 * workload['joules_per_token']:.3g} mJ"


def _ordered(cells: list[dict[str, Any]], resource: str) -> list[dict[str, Any]]:
    mine = [one for one in cells if one["resource"] == resource and one["seed"] == 0]
    return sorted(mine, key=lambda one: (-one["share"], one["method"] != "one_shot", one.get("perplexity", 1e9)))


def _line(one: dict[str, Any]) -> list[str]:
    start = [f"{one['share']:.0%}", one["method"]]
    if "error" in one:
        return [*start, "failed", "", "", ""]
    removed = one["removed"]
    return [
        *start,
        f"{one['of_budget']:.1%}" + ("" if one["met"] else " (not met)"),
        f"{one['perplexity']:.2f}",
        f"{one['healed_perplexity']:.2f}" if "healed_perplexity" in one else "not run",
        f"{removed['attention']} attention, {removed['mlp']} MLP",
    ]


def _done(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one for one in cells if "error" not in one and one["method"] == "one_shot"]


def _inside(cells: list[dict[str, Any]]) -> int:
    """How many used 98 to 100 % of their budget."""
    return sum(BAND[0] <= one["of_budget"] <= BAND[1] for one in cells)


def _pairs(cells: list[dict[str, Any]], key: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Runs of `one_shot` and of a baseline with the same budget and seed that have this result."""
    return [
        (mine, one)
        for mine in _done(cells)
        for one in cells
        if one["method"] != "one_shot"
        and "error" not in one
        and key in mine
        and key in one
        and all(one[part] == mine[part] for part in ("resource", "share", "seed"))
    ]


def _level(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """Pairs in which the healed networks are about equal."""
    key = "healed_perplexity"
    close = [f"{o['method']} at {o['share']:.0%} of {o['resource']}" for m, o in pairs if abs(m[key] - o[key]) < LEVEL]
    return f", by less than {LEVEL:g}, which other seeds may change, against {' and '.join(close)}" if close else ""


def _goals(cells: list[dict[str, Any]]) -> str:
    """Each goal as met, missed or open."""
    ours = _at(cells, "one_shot", 0.8)
    done = _done(cells)
    inside = _inside(done)
    pairs, healed = _pairs(cells, "perplexity"), _pairs(cells, "healed_perplexity")
    checks = {
        f"perplexity at most {TRAINING_FREE_GOAL:g} without training at 80 % of the decode energy": None
        if ours is None
        else ours["perplexity"] <= TRAINING_FREE_GOAL,
        f"at most {HEALED_GOAL:g} healed": None
        if ours is None or "healed_perplexity" not in ours
        else ours["healed_perplexity"] <= HEALED_GOAL,
        f"below the baseline without training, in {len(pairs)} pairs at the same budget": None
        if not pairs
        else all(mine["perplexity"] < one["perplexity"] for mine, one in pairs),
        f"and healed, in {len(healed)} pairs{_level(healed)}": None
        if not healed
        else all(mine["healed_perplexity"] < one["healed_perplexity"] for mine, one in healed),
        f"budgets met at 98 to 100 %, in {inside} of {len(done)} runs of one_shot": None
        if not done
        else inside == len(done),
    }
    verdicts = {True: "met", False: "missed", None: "open"}
    return "Goals: " + ";\n".join(f"{goal} ({verdicts[state]})" for goal, state in checks.items()) + "."


# ---------------------------------------------------------------- the encoder


def encoder_section() -> str:
    """MiniLM at measured energy budgets; empty without its record."""
    if not (RESULTS / ENCODER).exists():
        return ""
    found = load(ENCODER)
    rows = []
    for one in found["cells"]:
        if "error" in one:
            rows.append([one["budget"], one["method"], "not reached: " + one["error"].partition(". ")[0], "", "", ""])
            continue
        energy = f"{one['of_dense']:.1%} ({one['label']})"
        scores = [f"{one['scores'][when]:.4f}" for when in ("pruned", "finetuned")]
        rows.append([one["budget"], one["method"], energy, f"{one['of_budget']:.1%}", *scores])
    skipped = f" Not run: {', '.join(found['skipped'])}." if found["skipped"] else ""
    return (
        "### A sentence encoder\n\nMiniLM-L6 (22.7 M parameters), "
        f"{found['batch']} sentences of {found['length']} tokens at once. Trained on WikiText-2 valid to keep the "
        f"embeddings of the dense encoder, {found['steps']} steps of pruning and as many of fine-tuning; the score is the mean "
        f"cosine similarity to them on\nWikiText-2 test (dense: 1). One seed.{skipped}\n\n"
        + table(["budget", "method", "energy / dense", "of the budget", "pruned", "fine-tuned"], rows)
        + f"\n\n{origin(ENCODER)}\n\n"
    )
