"""Every file that ECC reads: how to make a good one, how to damage it, and how a user reads it.

`test_hostile_files.py` damages them in a few ways, `benchmarks/reliability.py` in hundreds.
"""

from __future__ import annotations

import atexit
import gzip
import io
import json
import os
import random
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import torch
from rich.console import Console, RenderableType

from ecc.cli.options import parse_image_size, recipe_options
from ecc.energy import EnergyModel, fit, parse_budgets
from ecc.energy.regression import samples_from_profile
from ecc.errors import EccError
from ecc.export import export_run, load_slim
from ecc.graph import ChannelGraph, trace_channels
from ecc.graph.channel_graph import ChannelGraphFile
from ecc.measure import Profile, find_meter
from ecc.measure.meters.command import parse
from ecc.measure.profile_writer import open_profile
from ecc.methods import Compression, CompressSettings
from ecc.methods.grid import Comparison, GridRun
from ecc.methods.registry import find_method
from ecc.options import settings_from
from ecc.records import from_json, to_builtins, write_record
from ecc.report.load import load_grid, load_report
from ecc.report.page import page_content
from ecc.report.terminal import compress_table, fit_summary, grid_table, profile_text
from ecc.run_records import GridFailure, GridRunInfo
from ecc.task import Task
from ecc.training import load_state, save_state
from ecc.zoo import find_task
from ecc.zoo.image_task import PixelLoss
from ecc.zoo.recipe import read_recipe
from export.runs import SmallNet, finished_run, small_task
from faults import fuzz
from measure import profile_cases
from methods.jobs import Truth, example_of, true_model, wide_task
from report.folders import write_grid, write_run
from zoo.data import trees

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TIMEOUT_SECONDS = 20
MAX_MESSAGE = 4000


@dataclass(frozen=True)
class Target:
    """A kind of file."""

    name: str
    make: Callable[[Path], Path]
    """Writes good files into an empty folder, and returns the one to damage."""
    use: Callable[[Path], object]
    """Reads the file and uses everything in it."""
    change_content: fuzz.Mutator | None = fuzz.change_json
    writes: bool = False
    """Whether a use that succeeds may change files in the folder."""


@dataclass(frozen=True)
class Outcome:
    """The result of reading one damaged file."""

    kind: str
    """`refused` with one clear error, `accepted` because the damage does no harm, or `lost`."""
    message: str
    seconds: float


def attempt(target: Target, damaged: bytes | None, folder: Path) -> Outcome:
    """Damage the file in a fresh copy of its folder (None: leave it), use it, and check the folder afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    home = folder / "home"
    template, name = _made(target)
    shutil.copytree(template, home)
    (folder / "beside").write_text("mine")
    file = home / name
    if damaged is not None:
        file.write_bytes(damaged)
    before, here = _contents(home), Path.cwd()
    started = time.monotonic()
    os.chdir(home)
    try:
        with _timeout():
            target.use(file)
        kind, message = "accepted", ""
    except EccError as error:
        kind, message = "refused", str(error)
    except Exception as error:  # noqa: BLE001 - any other exception is what we look for
        kind, message = "lost", f"{type(error).__name__}: {error}"[:300]
    finally:
        os.chdir(here)
    seconds = time.monotonic() - started
    after = _contents(home)
    changed = [name for name, data in before.items() if after.get(name) != data]
    if (home / "EXECUTED").exists() or sorted(path.name for path in folder.iterdir()) != ["beside", "home"]:
        kind, message = "lost", "something was executed, or written outside"
    elif kind == "refused" and changed:
        kind, message = "lost", f"{changed} changed although it was refused: {message}"[:300]
    elif kind == "refused" and (len(message) > MAX_MESSAGE or not message.replace("\n", " ").isprintable()):
        kind, message = "lost", f"a message of {len(message)} characters: {message[:200]!r}"
    elif kind == "accepted" and not target.writes and after != before:
        kind, message = "lost", "reading changed a file"
    return Outcome(kind, message, seconds)


def good_bytes(target: Target) -> bytes:
    """The undamaged file."""
    folder, file = _made(target)
    return (folder / file).read_bytes()


@contextmanager
def _timeout() -> Iterator[None]:
    def ring(number: int, frame: object) -> None:
        raise TimeoutError(f"no answer within {TIMEOUT_SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(TIMEOUT_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _contents(folder: Path) -> dict[str, bytes]:
    ignored = (".ecc-lock", "environment.json")  # a session is noted before its checkpoint is read
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in ignored)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@cache
def _made(target: Target) -> tuple[Path, Path]:
    folder = Path(mkdtemp(prefix="ecc-faults-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder, target.make(folder).relative_to(folder)


def _check_printable(what: RenderableType) -> None:
    """Print on a terminal, which must not get control codes."""
    file = io.StringIO()
    Console(file=file, width=200).print(what)
    assert file.getvalue().replace("\n", " ").isprintable()


def _parent(path: Path, *names: str) -> Path:
    return next(parent for parent in path.parents if parent.name in names)


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
    assert profile_text(profile, path).replace("\n", " ").isprintable()
    assert len(profile.missing_samples()) >= 0


def _zipped(folder: Path) -> Path:
    (folder / "a.profile.gz").write_bytes(gzip.compress(_profile(folder).read_bytes()))
    (folder / "a.profile").unlink()
    return folder / "a.profile.gz"


def _change_zipped(data: bytes, rng: random.Random) -> bytes:
    return gzip.compress(fuzz.change_json(gzip.decompress(data), rng))


def _resume_profile(path: Path) -> None:
    profile_cases.computed(path)
    with open_profile(path) as file:
        file.profile()


def _energy(folder: Path) -> Path:
    true_model(_job().graph).save(folder / "energy.json")
    return folder / "energy.json"


def _fitted(folder: Path) -> Path:
    fit(Profile.load(_profile(folder)), "physical").save(folder / "energy.json")
    return folder / "energy.json"


def _use_energy(path: Path) -> EnergyModel:
    model = EnergyModel.load(path)
    assert model.min_cost <= model.dense
    _ = model.label, model.unit, model.kind
    model.gradient(torch.tensor(model.full_widths, dtype=torch.float64))
    assert sum(model.per_layer().values()) >= 0
    json.dumps(to_builtins(fit_summary(model)))
    return model


def _compress_with(path: Path) -> None:
    Compression(
        wide_task("chain"), _job().budgets, _use_energy(path), settings=CompressSettings(prune_steps=2)
    )._check()


def _graph(folder: Path) -> Path:
    profile_cases.small_graph().save(folder / "net.graph")
    return folder / "net.graph"


def _use_graph(path: Path) -> None:
    graph = ChannelGraph.load(path)
    _ = str(graph), graph.structure, graph.full_shapes, graph.channel_id_of_index, graph.prunable
    assert float(graph.macs()) >= 0
    _ = graph.weight_bytes(), graph.activation_bytes(), [graph.share_of_macs(group) for group in graph.groups]


def _change_signed_graph(data: bytes, rng: random.Random) -> bytes:
    """By someone who knows how the fingerprint is made."""
    changed = fuzz.change_json(data, rng)
    try:
        tree, record = json.loads(changed), from_json(changed, ChannelGraphFile, "graph")
        record.check_size()
        groups = tuple(group.unpack() for group in record.groups)
        graph = ChannelGraph(groups=groups, layers=record.layers, tensors=record.tensors, features=record.features)
        tree["fingerprint"] = graph.fingerprint
    except Exception:  # noqa: BLE001 - then it stays unsigned
        return changed
    return json.dumps(tree).encode()


# ---------------------------------------------------------------- states, runs, grids


def _state(folder: Path) -> Path:
    state = {"a": torch.arange(6.0).reshape(2, 3), "b": [1, 2.5, None, ("x", True)], "c": {1: torch.ones(2).bfloat16()}}
    save_state(folder / "a.safetensors", state)
    return folder / "a.safetensors"


def change_signed_state(data: bytes, rng: random.Random) -> bytes:
    """The header or the layout in it changed, by someone who knows how the checksum is made."""
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    if rng.random() < 0.6:
        metadata = json.loads(header["__metadata__"]["ecc"])
        metadata["layout"] = fuzz.as_json(fuzz.changed_tree(json.loads(metadata["layout"]), rng)).decode()
        found = zlib.crc32(metadata["layout"].encode())
        for name in sorted(set(header) - {"__metadata__"}):
            one, (start, end) = header[name], header[name]["data_offsets"]
            dtype = {"F32": "torch.float32", "BF16": "torch.bfloat16"}.get(one["dtype"], one["dtype"])
            found = zlib.crc32(body[start:end], zlib.crc32(f"{name} {dtype} {one['shape']}".encode(), found))
        metadata["crc32"] = f"{found:08x}"
        header["__metadata__"]["ecc"] = json.dumps(metadata)
        text = json.dumps(header).encode()
    else:
        text = fuzz.as_json(fuzz.changed_tree(header, rng))
    return len(text).to_bytes(8, "little") + text + body


@cache
def _job() -> Compression:
    values = {"pretrain_steps": 1, "prune_steps": 3, "finetune_steps": 1, "lr": 1e-3}
    settings = settings_from(CompressSettings, {**values, "log_every": 1, "checkpoint_steps": 1})
    task = replace(wide_task("chain"), evaluate=lambda model: 0.5)
    model = true_model(trace_channels(task.model.eval(), example_of("chain"), verify=False))
    return Compression(task, parse_budgets(["60%"]), model, meter=Truth(model), settings=settings)


class Stopped(Exception):
    pass


def _run_until(phase: str | None, file: str) -> Callable[[Path], Path]:
    """A run that was killed at the start of a phase; None for a finished one."""

    def make(folder: Path) -> Path:
        def stop(line: str) -> None:
            if phase is not None and line.startswith(phase):
                raise Stopped

        try:
            _job().run(folder / "run", progress=stop)
        except Stopped:
            assert phase is not None
        return folder / "run" / file

    return make


def _resume_run(path: Path) -> None:
    run = _parent(path, "run")
    _check_printable(compress_table(_job().run(run).summary, run))


def _comparison() -> Comparison:
    model = _job().energy_models["energy"]
    return Comparison(_job().task, [model], methods=("ecc", "scratch"), budgets=("60%",), seeds=1)


def _grid(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        root, one = folder / "grid", GridRun("ecc", "60%", 0)
        _run_until(None, "summary.json")(folder)
        _comparison().open(root)
        one.folder(root).parent.mkdir(parents=True)
        shutil.move(folder / "run", one.folder(root))
        info = GridRunInfo(method="ecc", budget="60%", seed=0, seconds=1.0, sessions=1, peak_bytes=5)
        write_record(one.folder(root) / "cell.json", info)
        write_record(
            root / "seed-0" / "lcp-60.failed.json", GridFailure(method="lcp", budget="60%", seed=0, error="why")
        )
        return root / name

    return make


def _use_grid(path: Path) -> None:
    rows = load_grid(_parent(path, "grid"))
    json.dumps(to_builtins(rows), allow_nan=False)
    _check_printable(grid_table(rows))


def _resume_grid(path: Path) -> None:
    """As `ecc compare` does: its config, and the widths that scratch trains."""
    root = _parent(path, "grid")
    _comparison().open(root)
    method = _comparison()._method(GridRun("scratch", "60%", 0), root)
    method.start(SimpleNamespace(graph=_job().graph, model=_job().task.model))  # type: ignore[arg-type]


# ---------------------------------------------------------------- exports and pages


@cache
def _task() -> Task:
    return small_task()


def _finished(file: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        finished_run(folder / "run", _task())
        return folder / "run" / file

    return make


def _export(path: Path) -> None:
    export_run(path.parent, _task(), output="out")


def _exported(folder: Path) -> Path:
    finished_run(folder / "run", _task())
    export_run(folder / "run", _task(), output=folder / "out")
    shutil.rmtree(folder / "run")
    return folder / "out" / "slim.safetensors"


def _load_exported(path: Path) -> None:
    load_slim(SmallNet(), path.parent)(_task().example_input)


def _page(file: str, *, finished: bool = True) -> Callable[[Path], Path]:
    return lambda folder: write_run(folder / "run", finished=finished) / file


def _page_of_grid(folder: Path) -> Path:
    write_grid(folder / "grid")
    return folder / "grid" / "seed-0" / "ecc-40" / "cell.json"


def _use_page(path: Path) -> None:
    json.dumps(page_content(load_report(_parent(path, "run", "grid"))), allow_nan=False)


# ---------------------------------------------------------------- recipes, weights, data, output of programs

RECIPE = """task = "resnet20"
data = "cifar"
image_size = [16, 24]
batch_size = 4
budgets = ["60%", "3mJ"]
methods = ["ecc", "lcp"]
seeds = 2
meter = "none"
[settings]
prune_steps = 7
lr = 1e-3
clip_norm = 2
precision = "fp32"
channels_last = true
"""


def _recipe(folder: Path) -> Path:
    trees.cifar10(folder / "cifar", each=4)
    (folder / "a.toml").write_text(RECIPE)
    return folder / "a.toml"


def _use_recipe(path: Path) -> None:
    """As `ecc compare` does before it traces."""
    recipe = read_recipe(path)
    options = recipe_options(recipe)
    json.dumps(options)
    size = parse_image_size(options["image_size"]) if "image_size" in options else None
    parse_budgets(recipe.budgets[:1] if recipe.budgets else [])
    for name in recipe.methods or []:
        find_method(name)
    assert find_task(recipe.task, recipe.data, recipe.weights, image_size=size, batch_size=recipe.batch_size).name


def _change_toml(data: bytes, rng: random.Random) -> bytes:
    tree = fuzz.changed_tree(tomllib.loads(data.decode()), rng)
    if not isinstance(tree, dict):
        return fuzz.as_json(tree)
    settings = tree.pop("settings", {})
    lines = [f"{key} = {fuzz.as_json(value).decode()}" for key, value in tree.items()]
    if isinstance(settings, dict):
        lines += ["[settings]", *(f"{key} = {fuzz.as_json(value).decode()}" for key, value in settings.items())]
    else:
        lines.insert(0, f"settings = {fuzz.as_json(settings).decode()}")
    return "\n".join(lines).encode("utf-8", errors="surrogatepass") + b"\n"


def _weights(folder: Path) -> Path:
    save_state(folder / "w.safetensors", find_task("resnet20").model.state_dict())
    return folder / "w.safetensors"


def _use_weights(path: Path) -> None:
    models = find_task("resnet20", weights=path).model, find_task("resnet20").model
    shapes = [[tensor.shape for tensor in model.state_dict().values()] for model in models]
    assert shapes[0] == shapes[1]


def _change_header(data: bytes, rng: random.Random) -> bytes:
    length = int.from_bytes(data[:8], "little")
    text = fuzz.as_json(fuzz.changed_tree(json.loads(data[8 : 8 + length]), rng))
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def _data(make: Callable[[Path], Path], file: str) -> Callable[[Path], Path]:
    return lambda folder: make(folder / "data") / file


def _use_data(network: str) -> Callable[[Path], None]:
    def use(path: Path) -> None:
        task = find_task(network, _parent(path, "data"), image_size=(16, 24), batch_size=3)
        assert task.evaluate is not None
        for images, _ in task.epoch_batches(0):
            assert images.shape[1:] == (3, 16, 24)
        if isinstance(task.loss, PixelLoss):
            assert task.loss.weights.isfinite().all()
        assert 0 <= task.evaluate(task.model) <= 1

    return use


def _printed(folder: Path) -> Path:
    (folder / "out.txt").write_text("at 12:00 the plug counted 1234.5 J\n")
    return folder / "out.txt"


def _use_printed(path: Path) -> None:
    text = path.read_bytes().decode("utf-8", errors="replace")
    for unit in (None, "J"):
        parse(text, unit)


def _content_mutator(file: str) -> fuzz.Mutator:
    return change_signed_state if file.endswith("safetensors") else fuzz.change_json


_RUNS = {
    "pruning": ("config.json", "history.jsonl", "environment.json", "checkpoint.safetensors"),
    "finetuning": ("history.jsonl", "dense.safetensors", "checkpoint.safetensors"),
    None: ("config.json", "summary.json", "history.jsonl", "slim.safetensors", "environment.json"),
}
_PAGE = ("config.json", "summary.json", "history.jsonl", "environment.json", "energy.json")
_ALL = (
    Target("profile", _profile, _use_profile),
    Target("profile, compressed", _zipped, _use_profile, _change_zipped),
    Target("profile that is resumed", _profile, _resume_profile, writes=True),
    Target("replay meter", _profile, lambda path: find_meter(f"replay:{path}").describe()),
    Target("energy model", _energy, _compress_with),
    Target("energy model with steps", _fitted, lambda path: _use_energy(path).check(profile_cases.small_graph())),
    Target("channel graph", _graph, _use_graph, _change_signed_graph),
    Target("state", _state, load_state, change_signed_state),
    *(
        Target(
            f"run, {phase or 'finished'}: {file}", _run_until(phase, file), _resume_run, _content_mutator(file), True
        )
        for phase, files in _RUNS.items()
        for file in files
    ),
    *(
        Target(f"grid: {Path(file).name}", _grid(file), _use_grid)
        for file in ("seed-0/ecc-60/cell.json", "seed-0/ecc-60/summary.json", "seed-0/lcp-60.failed.json")
    ),
    *(
        Target(f"grid: {Path(file).name}", _grid(file), _resume_grid)
        for file in ("grid.json", "seed-0/ecc-60/widths.json")
    ),
    *(
        Target(f"export: {file}", _finished(file), _export, _content_mutator(file), writes=True)
        for file in ("config.json", "summary.json", "widths.json", "slim.safetensors")
    ),
    Target("exported weights", _exported, _load_exported, change_signed_state),
    *(Target(f"page: {file}", _page(file), _use_page) for file in _PAGE),
    *(Target(f"page of an unfinished run: {file}", _page(file, finished=False), _use_page) for file in _PAGE[:3:2]),
    Target("page of a grid: cell.json", _page_of_grid, _use_page),
    Target("recipe", _recipe, _use_recipe, _change_toml),
    Target("published weights", _weights, _use_weights, _change_header),
    Target(
        "photo",
        _data(lambda root: trees.folders(root, classes=2, train=3, test=1), "train/n00000000/n00000000_1.JPEG"),
        _use_data("resnet20"),
        None,
    ),
    Target("scene", _data(trees.camvid, "train/0001TP_000001.png"), _use_data("erfnet"), None),
    Target("label map", _data(trees.camvid, "trainannot/0001TP_000001.png"), _use_data("erfnet"), None),
    Target(
        "CIFAR records",
        _data(lambda root: trees.cifar10(root, each=4), "cifar-10-batches-bin/data_batch_2.bin"),
        _use_data("resnet20"),
        None,
    ),
    Target("command meter", _printed, _use_printed, None),
)
TARGETS: dict[str, Target] = {target.name: target for target in _ALL}
