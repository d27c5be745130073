"""One run folder as plain facts: what a page shows of it, read from its files and nothing else.

Numbers keep the units of the files, joules for the whole batch among them, and the label that they were written with.
A run that is still at work has facts too, those of its last lines. What a folder of an older ecc lacks is named in
`missing`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ecc.energy import EnergyModel
from ecc.energy.fitting import describe_learning_curve, describe_outlier_widths
from ecc.errors import BadFile

from .history import Follower, History, thinned
from .reading import number, positive, read_json, reading

_UNITS = {"energy": "J", "latency": "s"}


def is_run(folder: Path) -> bool:
    """Whether a compression was begun in the folder."""
    return (folder / "config.json").is_file()


def cell_facts(folder: str | Path, follower: Follower | None = None) -> dict[str, Any]:
    """What a run's folder says.

    Args:
        folder: Of the run.
        follower: Reads its history, and knows what it has read before.

    Raises:
        BadFile: If it is no run of `ecc compress`, or a file in it is damaged; the file is named.
    """
    folder = Path(folder)
    config = _config(folder)
    with reading(folder / "config.json"):
        facts: dict[str, Any] = {
            "name": folder.name,
            "task": str(config["task"]),
            "method": str((config.get("method") or {}).get("name", "ecc")),
            "budget": ", ".join(str(budget) for budget in config["budgets"]),
            "seed": int(config["settings"]["seed"]),
            "settings": dict(config["settings"]),
            "what": "weights" if config.get("unstructured") else "channels",
            "missing": {},
        }
        dense = positive(config["energy"]["energy"][1]) if "energy" in config.get("energy", {}) else None
    history = (follower or Follower()).read(folder / "history.jsonl")
    with reading(folder / "history.jsonl"):
        facts |= history.facts(dense)
    summary = folder / "summary.json"
    if summary.exists():
        found = read_json(summary)
        with reading(summary):
            facts |= _finished(found)
    else:
        with reading(folder / "history.jsonl"):
            facts |= _running(config, history)
    facts["sessions"] = _sessions(folder, facts)
    facts |= _priced(folder, facts)
    facts["widths"] = [row for row in facts["widths"] if row["full"]]  # of a run at work, the model tells them
    return facts


# ---------------------------------------------------------------- files


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        raise BadFile(f"{folder} holds no run; give the folder of `ecc compress` or `ecc compare`.")
    config = read_json(file).get("config")
    if not isinstance(config, dict) or config.get("verb") != "compress":
        raise BadFile(f"{file} is no config of `ecc compress`; give the folder of a compression.")
    return config


def _sessions(folder: Path, facts: dict[str, Any]) -> list[dict[str, str]]:
    file = folder / "environment.json"
    if not file.exists():
        facts["missing"]["environment"] = "the folder has no environment.json."
        return []
    found = read_json(file)
    with reading(file):
        sessions = [{str(key): str(value) for key, value in session.items()} for session in found["sessions"]]
    if not any("command" in session for session in sessions):
        facts["missing"]["command"] = "the run was made by an ecc that did not write its command down."
    return sessions


# ---------------------------------------------------------------- what came out


def _finished(summary: Mapping[str, Any]) -> dict[str, Any]:
    rows = [{"resource": str(name), **_amounts(row)} for name, row in summary["budgets"].items()]
    known = {row["resource"] for row in rows}
    for name, measured in summary.get("measured", {}).items():
        if name not in known:
            row = {"unit": _UNITS.get(name, ""), **measured}
            rows.append({"resource": str(name), **_amounts({**row, "label": summary["label"]})})
    for name, budget in (("macs", "macs"), ("parameters", "params")):
        if summary.get(name) and budget not in known:
            rows.append({"resource": name, **_amounts({**summary[name], "unit": "", "label": "counted"})})
    names = {"dense": "dense", "pruned": "before", "finetuned": "after"}
    sparse = summary.get("sparse") or {}
    full, kept = (sparse["weights"], sparse["nonzeros"]) if sparse else (summary["full_widths"], summary["widths"])
    return {
        "status": "finished",
        "device": str(summary["device"]),
        "batch": int(positive(summary["batch"])),
        "label": str(summary["label"]),
        "met": bool(summary["met"]),
        "note": str(summary.get("note", "")),
        "assumes": str(sparse.get("assumes", "")),
        "resources": rows,
        "scores": {names[name]: number(score) for name, score in summary["scores"].items() if name in names},
        "widths": [
            {"group": str(name), "full": int(positive(full[name])), "kept": int(number(kept[name]))} for name in full
        ],
        "relative_ci": _number(summary.get("relative_ci")),
        "max_relative_diff": _number(summary.get("max_relative_diff")),
        "batches": summary.get("batches"),
        "coefficients": sparse.get("coefficients"),
        "base": _number(sparse.get("base")),
    }


def _amounts(row: Mapping[str, Any]) -> dict[str, Any]:
    """A resource before and after; limit and met are None where there was no budget."""
    return {
        "unit": str(row["unit"]),
        "dense": positive(row["dense"]),
        "result": _number(row["result"]),
        "limit": None if row.get("limit") is None else positive(row["limit"]),
        "asked": str(row.get("budget", "")),
        "label": str(row["label"]),
        "met": row.get("met"),
    }


def _running(config: Mapping[str, Any], history: History) -> dict[str, Any]:
    """What can be told before the end: the budget, and where the last lines say the run is."""
    rows = []
    for text, limit in zip(config["budgets"], config["limits"], strict=True):
        name = str(text).partition(" ")[0]
        if name in config.get("energy", {}):
            row = {"unit": _UNITS[name], "dense": config["energy"][name][1], "result": history.spent.get(name)}
            rows.append({"resource": name, **_amounts({**row, "limit": limit, "budget": text, "label": "predicted"})})
    return {
        "status": "running",
        "device": str(config.get("meter") or ""),
        "batch": None,
        "label": "predicted",
        "met": None,
        "note": "",
        "assumes": "",
        "resources": rows,
        "scores": {},
        "widths": [{"group": name, "full": None, "kept": int(width)} for name, width in history.widths.items()],
        "relative_ci": None,
        "max_relative_diff": None,
        "batches": None,
        "coefficients": None,
        "base": None,
        "now": history.now,
    }


def _number(value: Any) -> float | None:
    return None if value is None else number(value)


# ---------------------------------------------------------------- priced by the energy model


def _priced(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Energy by layer, and how well the model predicts."""
    if facts["what"] == "weights":
        with reading(folder / "summary.json"):
            return {"layers": _priced_weights(facts), "model": None}
    file = folder / "energy.json"
    if not file.exists():
        why = "the run was made by an ecc that did not keep the energy model in the folder."
        facts["missing"] |= {"layers": why, "model": why}
        return {"layers": [], "model": None}
    model = EnergyModel.load(file)
    full = dict(zip(model.groups, model.full_widths, strict=True))
    for row in facts["widths"]:
        row["full"] = full.get(row["group"], row["full"])
    kept = {row["group"]: row["kept"] for row in facts["widths"] if row["group"] in full}
    if facts["batch"] is None:
        facts["batch"] = model.origin.batch
    with reading(file):
        dense, result = model.per_layer(), model.per_layer(kept)
        layers = [
            {"layer": name or "(outside any layer)", "dense": number(dense[name]), "result": number(result[name])}
            for name in sorted(dense, key=lambda name: name == "")  # what belongs to none comes last
            if dense[name] > 0
        ]
        facts_of_model = _model_facts(model)
        json.dumps(facts_of_model, allow_nan=False)  # a page cannot hold what is infinite
        return {"layers": layers, "model": facts_of_model}


def _priced_weights(facts: dict[str, Any]) -> list[dict[str, Any]]:
    coefficients = facts["coefficients"]
    if coefficients is None:
        if facts["status"] == "finished":
            facts["missing"]["layers"] = (
                "the run was made by an ecc that did not write the coefficients of its weights down."
            )
        return []
    rows = [
        {
            "layer": row["group"].removesuffix(".weight"),
            "dense": number(coefficients[row["group"]] * row["full"]),
            "result": number(coefficients[row["group"]] * row["kept"]),
        }
        for row in facts["widths"]
    ]
    rows.append({"layer": "(whatever the weights)", "dense": facts["base"], "result": facts["base"]})
    return [row for row in rows if row["dense"] > 0]


def _model_facts(model: EnergyModel) -> dict[str, Any]:
    meter, quality = model.origin.meter, model.quality
    settings = model.origin.settings
    return {
        "kind": model.kind,
        "label": model.label,
        "rows": model.origin.rows,
        "batch": model.origin.batch,
        "dense": number(model.dense),
        "least": number(model.least),
        "meter": meter.name,
        "device": meter.device,
        "scope": meter.scope,
        "reads": meter.reads,
        "source": str(getattr(meter.provenance, "source", "")),
        "notes": list(meter.notes),
        "device_type": model.origin.device_type,
        "measuring": None if settings is None else {key: str(value) for key, value in vars(settings).items()},
        "families": {
            str(name): {key: _number(value) for key, value in found.items()}
            for name, found in quality.get("families", {}).items()
        },
        "noise": _number(quality.get("noise")),
        "learning_curve": [[int(rows), number(error)] for rows, error in quality.get("learning_curve", [])],
        "held_out": [
            [positive(value), positive(predicted)] for value, predicted in thinned(quality.get("held_out", []), 2000)
        ],
        "advice": " ".join(filter(None, (describe_learning_curve(quality), describe_outlier_widths(quality)))),
    }
