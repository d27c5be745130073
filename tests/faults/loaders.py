"""Every file that ECC reads: how to make a good one, how to damage it, and what a user does with it."""

from __future__ import annotations

import gzip
import io
import json
import random
import shutil
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from rich.console import Console, RenderableType

from ecc.energy import EnergyModel, fit
from ecc.energy.regression import samples_from_profile
from ecc.graph import ChannelGraph
from ecc.measure import Profile, find_meter
from ecc.measure.meters.command import parse
from ecc.measure.profile_writer import open_profile
from ecc.methods import Compression, CompressSettings
from ecc.methods.grid import Cell, Comparison
from ecc.options import settings_from
from ecc.records import to_builtins
from ecc.report.load import load_grid
from ecc.report.terminal import compress_table, fit_summary, grid_table, profile_text
from ecc.training import load_state, save_state
from faults import fuzz
from faults.trying import Target
from measure import profile_cases
from methods.jobs import Truth, example_of, true_model, wide_task

# ---------------------------------------------------------------- profiles, models, graphs


def _profile(folder: Path) -> Path:
    profile_cases.computed(folder / "a.profile")
    return folder / "a.profile"


def _use_profile(path: Path) -> None:
    profile = Profile.load(path)
    _ = profile.drift, profile.repeat_noise, profile.seconds_per_sample, profile.label
    widths = profile.header.structure.widths()
    assert profile.header.structure.costs.macs(widths) >= 0
    for resource in ("energy", "latency"):
        assert len(samples_from_profile(profile, resource)) >= 0
    to_builtins(fit_summary(fit(profile, "bilinear")))
    assert profile_text(profile, path).replace("\n", " ").isprintable()  # no code for a terminal gets through
    assert len(profile.missing_samples()) >= 0


def _zipped(folder: Path) -> Path:
    (folder / "a.profile.gz").write_bytes(gzip.compress(_profile(folder).read_bytes()))
    (folder / "a.profile").unlink()
    return folder / "a.profile.gz"


def _zipped_json(data: bytes, rng: random.Random) -> bytes:
    return gzip.compress(fuzz.json_changed(gzip.decompress(data), rng))


def _append(path: Path) -> None:
    """As `ecc profile` does when it goes on."""
    profile_cases.computed(path)
    with open_profile(path) as file:
        file.profile()


def _energy(folder: Path) -> Path:
    true_model(_chain().graph).save(folder / "energy.json")
    return folder / "energy.json"


def _use_energy(path: Path) -> None:
    model = EnergyModel.load(path)
    assert model.min_cost <= model.dense
    _ = model.label, model.unit, model.kind
    model.gradient(torch.tensor(model.full_widths, dtype=torch.float64))
    assert sum(model.per_layer().values()) >= 0
    json.dumps(to_builtins(fit_summary(model)))
    Compression(wide_task("chain"), _chain().budgets, model, settings=CompressSettings(prune_steps=2))._begin()


def _fitted(folder: Path) -> Path:
    fit(Profile.load(_profile(folder)), "physical").save(folder / "energy.json")
    return folder / "energy.json"


def _use_fitted(path: Path) -> None:
    model = EnergyModel.load(path)
    assert model.min_cost <= model.dense
    model.gradient(torch.tensor(model.full_widths, dtype=torch.float64))
    assert sum(model.per_layer().values()) >= 0
    json.dumps(to_builtins(fit_summary(model)))
    model.check(profile_cases.small_graph())


def _graph(folder: Path) -> Path:
    profile_cases.small_graph().save(folder / "net.graph")
    return folder / "net.graph"


def _use_graph(path: Path) -> None:
    graph = ChannelGraph.load(path)
    _ = str(graph), graph.structure, graph.full_shapes, graph.channel_id_of_index, graph.prunable
    assert float(graph.macs()) >= 0
    _ = graph.weight_bytes(), graph.activation_bytes(), [graph.share_of_macs(group) for group in graph.groups]


def _signed_graph(data: bytes, rng: random.Random) -> bytes:
    """Changed by someone who knows how the fingerprint is made."""
    changed = fuzz.json_changed(data, rng)
    try:
        tree = json.loads(changed)
        tree["fingerprint"] = ChannelGraph._from_json(tree).fingerprint
    except Exception:  # noqa: BLE001 - then it stays unsigned
        return changed
    return json.dumps(tree).encode()


# ---------------------------------------------------------------- states and runs


def _state(folder: Path) -> Path:
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": [1, 2.5, None, ("x", True)], "c": {1: torch.ones(2).bfloat16()}}
    save_state(folder / "a.safetensors", state | {"d": torch.ones(3, dtype=torch.complex64)})
    return folder / "a.safetensors"


def signed_state(data: bytes, rng: random.Random) -> bytes:
    """The header or the tree in it changed, with a checksum that fits."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if rng.random() < 0.6:
        part = rng.choice(("tree", "names"))
        header["__metadata__"][part] = fuzz.as_json(
            fuzz.changed_tree(json.loads(header["__metadata__"][part]), rng)
        ).decode()
        text = json.dumps(header, separators=(",", ":")).encode()
    else:
        text = fuzz.as_json(fuzz.changed_tree(header, rng)).replace(b'": ', b'":').replace(b", ", b",")
    found = text.find(b'"crc32":"')
    body = data[8 + length :]
    if found >= 0:
        start = found + 9
        text = text[:start] + b"00000000" + text[start + 8 :]
        text = text[:start] + b"%08x" % zlib.crc32(body, zlib.crc32(text)) + text[start + 8 :]
    return len(text).to_bytes(8, "little") + text + body


SETTINGS = settings_from(
    CompressSettings, dict(pretrain_steps=1, prune_steps=3, finetune_steps=1, lr=1e-3, log_every=1, checkpoint_steps=1)
)


@cache
def _chain() -> Compression:
    from ecc.energy import parse_budgets
    from ecc.graph import trace_channels

    task = replace(wide_task("chain"), evaluate=lambda model: 0.5)
    graph = trace_channels(task.model.eval(), example_of("chain"), verify=False)
    source = Truth(true_model(graph))
    return Compression(task, parse_budgets(["60%"]), true_model(graph), meter=source, settings=SETTINGS)


class Enough(Exception):
    pass


def _run_until(phase: str | None, file: str) -> Callable[[Path], Path]:
    """A run that was killed in a phase; None for one that ended."""

    def make(folder: Path) -> Path:
        def tell(text: str) -> None:
            if phase is not None and text.startswith(phase):
                raise Enough

        try:
            _chain().run(folder / "run", progress=tell)
        except Enough:
            assert phase is not None
        return folder / "run" / file

    return make


def _go_on(path: Path) -> None:
    run = next(parent for parent in path.parents if parent.name == "run")
    result = _chain().run(run, progress=lambda _: None)
    _print(compress_table(result.summary, run))


def _grid(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        run = folder / "grid" / "seed-0" / "ecc-60"
        _run_until(None, "summary.json")(folder)
        _comparison().begin(folder / "grid")
        run.parent.mkdir(parents=True)
        shutil.move(folder / "run", run)
        facts = {"method": "ecc", "budget": "60%", "seed": 0}
        (run / "cell.json").write_text(json.dumps({**facts, "seconds": 1.0, "peak_bytes": 5}))
        (run.parent / "lcp-60.failed.json").write_text(json.dumps({**facts, "method": "lcp", "error": "why"}))
        return folder / "grid" / name

    return make


def _use_grid(path: Path) -> None:
    rows = load_grid(next(parent for parent in path.parents if parent.name == "grid"))
    json.dumps(to_builtins(rows), allow_nan=False)
    _print(grid_table(rows))


def _print(what: RenderableType) -> None:
    """On a terminal that must not be sent control codes."""
    file = io.StringIO()
    Console(file=file, width=200).print(what)
    assert file.getvalue().replace("\n", " ").isprintable()


def _comparison() -> Comparison:
    return Comparison(
        _chain().task, [_chain().energy_models["energy"]], methods=("ecc", "scratch"), budgets=("60%",), seeds=1
    )


def _asked(path: Path) -> None:
    """As `ecc compare` does when it goes on: what was asked, and the widths that scratch trains."""
    root = next(parent for parent in path.parents if parent.name == "grid")
    _comparison().begin(root)
    method = _comparison()._method(Cell("scratch", "60%", 0), root)
    assert method is not None
    method.start(SimpleNamespace(graph=_chain().graph, model=_chain().task.model))  # type: ignore[arg-type]


# ---------------------------------------------------------------- what programs print


def _printed(folder: Path) -> Path:
    (folder / "out.txt").write_text("at 12:00 the plug counted 1234.5 J\n")
    return folder / "out.txt"


def _use_printed(path: Path) -> None:
    text = path.read_bytes().decode("utf-8", errors="replace")
    for unit in (None, "J"):
        parse(text, unit)


def _replayed(path: Path) -> None:
    find_meter(f"replay:{path}").describe()


_RUN_FILES = {
    "solving": ("solving", ("config.json", "history.jsonl", "environment.json")),
    "tuning": ("tuning", ("history.jsonl", "dense.safetensors")),
    "finished": (None, ("config.json", "summary.json", "history.jsonl", "slim.safetensors", "environment.json")),
}
TARGETS: tuple[Target, ...] = (
    Target("profile", _profile, _use_profile),
    Target("profile, compressed", _zipped, _use_profile, _zipped_json),
    Target("profile that goes on", _profile, _append, writes=True),
    Target("replay meter", _profile, _replayed),
    Target("energy model", _energy, _use_energy),
    Target("energy model with steps", _fitted, _use_fitted),
    Target("channel graph", _graph, _use_graph, _signed_graph),
    Target("state", _state, load_state, signed_state),
    *(
        Target(f"run, {state}: {file}", _run_until(phase, file), _go_on, mutator, writes=True)
        for state, (phase, files) in _RUN_FILES.items()
        for file in files
        for mutator in [signed_state if file.endswith("safetensors") else fuzz.json_changed]
    ),
    *(
        Target(f"run, {phase}: checkpoint", _run_until(phase, "checkpoint.safetensors"), _go_on, signed_state, True)
        for phase in ("solving", "tuning")
    ),
    *(
        Target(f"grid: {Path(file).name}", _grid(file), _use_grid)
        for file in ("seed-0/ecc-60/cell.json", "seed-0/ecc-60/summary.json", "seed-0/lcp-60.failed.json")
    ),
    *(Target(f"grid: {Path(file).name}", _grid(file), _asked) for file in ("grid.json", "seed-0/ecc-60/widths.json")),
    Target("command meter", _printed, _use_printed, None),
)
