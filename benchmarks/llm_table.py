"""The section of RESULTS.md about language models, from results/llm.json, or from the printed output of a run."""

from __future__ import annotations

import ast
import re
from typing import Any

from result_tables import RESULTS, load, origin, table

FILE = "llm.json"
LOG = "llm_h200.log"
ENCODER = "encoder.json"
CELL = re.compile(r"^ *\d+ s (\w+) (\w+) ([\d.]+) (\d+) (\{.*\})$")
TRAINING_FREE_GOAL, HEALED_GOAL = 24.0, 21.0  # perplexity at 80 % of the decode energy
BAND = (0.98, 1.0)


def llm_section() -> str:
    """The section; empty if it has not been measured."""
    if (RESULTS / FILE).exists():
        return section_of(load(FILE), origin(FILE))
    return section_of_log((RESULTS / LOG).read_text(encoding="utf-8")) if (RESULTS / LOG).exists() else ""


def main_perplexities() -> tuple[float, float] | None:
    """Perplexity of `one_shot` at 80 % of the decode energy, without training and healed; None if one is missing."""
    if (RESULTS / FILE).exists():
        cells = [
            (one["method"], one["share"], one)
            for one in load(FILE)["cells"]
            if one["resource"] == "decode" and one["seed"] == 0
        ]
    elif (RESULTS / LOG).exists():
        cells = _cells_of_log((RESULTS / LOG).read_text(encoding="utf-8"))
    else:
        return None
    found = next((one for name, share, one in cells if (name, share) == ("one_shot", 0.8)), None)
    if found is None or "healed_perplexity" not in found:
        return None
    return found["perplexity"], found["healed_perplexity"]


def _cells_of_log(text: str) -> list[tuple[str, float, dict[str, Any]]]:
    """(method, share, values) of what a run printed."""
    matches = [match for line in text.splitlines() if (match := CELL.match(line))]
    return [(match[1], float(match[3]), ast.literal_eval(match[5])) for match in matches]


def section_of_log(text: str) -> str:
    """Text and table of what a run printed, for a run whose record was lost."""
    lines = text.splitlines()
    notes = " ".join(
        line.removeprefix("# ") + "." * (not line.endswith(".")) for line in lines[1:] if line.startswith("#")
    )
    dense = next(line.split()[-1] for line in lines if "dense perplexity" in line)
    costs = {
        name: found[1] for name in ("decode", "prefill") if (found := re.search(rf"{name} ([\d.]+) mJ/token", text))
    }
    cells = _cells_of_log(text)
    rows = [
        [
            f"{share:.0%}",
            name,
            f"{one['of_budget']:.1%}",
            f"{one['perplexity']:.2f}",
            f"{one['healed_perplexity']:.2f}",
            f"{one['prefill_of_dense']:.1%}",
        ]
        for name, share, one in sorted(cells, key=lambda cell: float(cell[2]["perplexity"]))
    ]
    ours = next(one for name, _, one in cells if name == "one_shot")
    goals = [
        f"{name} {value:.2f}, goal {goal:g}: {'met' if value <= goal else 'missed'}"
        for name, value, goal in (
            ("without training", ours["perplexity"], TRAINING_FREE_GOAL),
            ("healed", ours["healed_perplexity"], HEALED_GOAL),
        )
    ]
    parts = [
        "## Language models",
        f"SmolLM2-135M in bfloat16, calibrated and healed on WikiText-2 valid, perplexity on WikiText-2 test: {dense} for the dense "
        f"model.\nMeasured: {costs['decode']} mJ per token for decode (64 sequences, 1,024 tokens in the cache) and "
        f"{costs['prefill']} mJ for prefill. Perplexity of\nECC (`one_shot`): {'; '.join(goals)}. One seed. Healing trains on text "
        "of the same kind as the test text, so healed\nmodels are better than the dense model, which was not trained on it. "
        "Budgets on the decode energy:",
        table(["budget", "method", "of budget", "perplexity", "healed", "prefill, of dense"], rows),
        f"`results/{LOG}`: {notes} `{lines[0].removeprefix('# ')}`\n\n",
    ]
    return "\n\n".join(parts)


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
        "budget.",
        _goals(found["cells"]),
    ]
    for resource in ("decode", "prefill"):
        rows = [_line(one) for one in _ordered(found["cells"], resource)]
        if rows:
            heads = ["budget", "method", "of budget", "perplexity", "healed", "blocks removed"]
            parts += [f"Budgets on {resource}, as fractions of the dense energy:", table(heads, rows)]
    if spread := _spread(found["cells"]):
        parts += ["Perplexity at 80 % of the decode energy, smallest to largest over the seeds:", spread]
    return "\n\n".join([*parts, source + "\n\n"])


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
        f"{one['healed_perplexity']:.2f}" if "healed_perplexity" in one else "",
        f"{removed['attention']} attention, {removed['mlp']} MLP",
    ]


def _goals(cells: list[dict[str, Any]]) -> str:
    """Each goal as met, missed or open."""
    mine = [one for one in cells if one["resource"] == "decode" and one["share"] == 0.8 and one["seed"] == 0]
    ours = next((one for one in mine if one["method"] == "one_shot" and "error" not in one), None)
    others = [one for one in mine if one["method"] != "one_shot" and "error" not in one]
    done = [one for one in cells if "error" not in one and one["method"] == "one_shot"]
    checks = {
        f"perplexity at most {TRAINING_FREE_GOAL:g} without training at 80 % of the decode energy": None
        if ours is None
        else ours["perplexity"] <= TRAINING_FREE_GOAL,
        f"at most {HEALED_GOAL:g} healed": None
        if ours is None or "healed_perplexity" not in ours
        else ours["healed_perplexity"] <= HEALED_GOAL,
        "below every baseline there": None
        if ours is None or len(others) < 6
        else all(ours["perplexity"] < one["perplexity"] for one in others),
        "every budget met at 98 to 100 %": None
        if not done
        else all(BAND[0] <= one["of_budget"] <= BAND[1] for one in done),
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
