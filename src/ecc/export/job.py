"""`export_run`: a finished run becomes files for other programs, each proved before it is kept.

Files are made and proved in a folder of their own, and take their names at the end, all or none: an export that fails
leaves nothing behind and overwrites nothing.
"""

from __future__ import annotations

import copy
import filecmp
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from torch import nn

from ecc.constants import EXPORT_FORMATS
from ecc.errors import BadFile, CannotExport
from ecc.graph.forward_pass import as_call
from ecc.graph.hooks import without_observer_hooks
from ecc.graph.model_copy import whole_state
from ecc.graph.numerics import outputs_of
from ecc.io import lock_folder, read_bytes, sync_folder
from ecc.task import Inputs, Task, batch_size_of, check_input, with_batch_size
from ecc.training import load_state, save_state

from .card import model_card
from .formats import FORMATS, library, opened
from .int8 import OnnxNetwork, quantise, refuse_uncalibrated, score_of
from .latency import Latency, compare_latency
from .loading import load_slim, on_cpu, weights_file
from .verification import ExportVerification, verify_export

SAFETENSORS = EXPORT_FORMATS[0]
CARD = "model_card.md"
_SHOP = ".export."
_MAX_BATCH = 4096

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Exported:
    """One file, and how it was proved."""

    format: str
    file: str
    bytes: int
    error: float
    """Largest difference from the slim network at any batch size, relative to the largest output."""
    batches: tuple[int, ...]
    tolerance: float | None
    """The error that was allowed; None for integers, of which no equality is claimed."""
    beside_bytes: int | None = None
    """Of the dense network in the same format, where it was written for comparison; of integers, of the floats."""
    latency: Latency | None = None
    """Beside the dense network; of integers, beside the same network in floats."""
    score: float | None = None
    """Of integers, on the task's test split."""


@dataclass(frozen=True)
class ExportedRun:
    """What came out."""

    folder: Path
    files: tuple[Exported, ...]
    summary: dict[str, Any]
    """Of the run."""
    notes: tuple[str, ...] = ()


def export_model(model: nn.Module, example_input: Inputs, path: str | Path, *, force: bool = False) -> Exported:
    """Writes any network in one format, and proves the file before it is kept.

    Args:
        model: The network; it is in evaluation mode afterwards.
        example_input: One batch; the file takes any batch size.
        path: The file; it ends in .pt2, .onnx or .torchscript, which is its format.
        force: Overwrite another file.

    Raises:
        BadFile: If the file is there and is another one.
        BadTask: If the example input is not of tensors.
        CannotExport: If the network cannot be written so, or the file computes something else.
    """
    path, example_input = Path(path), check_input(example_input)
    name = path.suffix.removeprefix(".")
    if name not in FORMATS:
        raise CannotExport(f"{path} names no format by its ending; end it in .{', .'.join(FORMATS)}.")
    _refuse_impossible([name], None)
    with _workshop(path.parent) as shop:
        made = _made(model, example_input, shop / path.name, name)
        with lock_folder(path.parent):
            _publish([shop / path.name], path.parent, force=force)
    return made


def export_run(
    run: str | Path,
    task: Task,
    *,
    formats: Sequence[str] = (SAFETENSORS,),
    output: str | Path | None = None,
    int8: str | None = None,
    licence: str = "unknown",
    force: bool = False,
    tell: Tell | None = None,
) -> ExportedRun:
    """Writes the slim network of a finished run in other formats, with a model card.

    Args:
        run: The folder of the run.
        task: As it was for the run: its model is the dense network, built anew.
        formats: Of `EXPORT_FORMATS`.
        output: The folder of the files; by default `export` in the run.
        int8: `dynamic` or `static`: an ONNX file with integers beside the one with floats.
        licence: For the model card, such as `apache-2.0`.
        force: Overwrite files that are there and differ.
        tell: Is told each step, in words.

    Raises:
        BadFile: If the run is not finished, belongs to another network, or a file is there and is another one.
        BadTask: If static int8 is asked of a task without training batches.
        CannotExport: If the network cannot be written so, or a file computes something else.
    """
    run, say = Path(run), tell or (lambda _: None)
    _refuse_impossible(formats, int8)
    refuse_uncalibrated(task, int8)
    summary, config = read_json(run / "summary.json"), read_json(run / "config.json").get("config", {})
    if summary.get("task") != task.name:
        raise BadFile(f"{run} compressed the task {summary.get('task')!r}, and this is {task.name!r}.")
    card = _card(run, summary, config, licence)
    slim, dense = on_cpu(load_slim(task.model, run)), on_cpu(dense_of(task.model, run))
    example = _on_cpu(task.example_input)
    timed = with_batch_size(example, _batch(summary, example))
    _refuse_unfit(slim, example, run)
    folder, files = Path(output or run / "export"), []
    with _workshop(folder) as shop:
        for name in dict.fromkeys(formats):
            say(f"writing {name}")
            if name == SAFETENSORS:
                files.append(_safetensors(run, task, slim, dense, example, shop))
                continue
            made = _made(slim, example, shop / FORMATS[name].file, name)
            if name == "onnx":
                say("timing onnxruntime on the dense and on the slim network")
                made = _timed(made, dense, example, timed, shop)
            files.append(made)
        if int8 is not None:
            say(f"quantising, {int8}")
            files.append(_quantised(task, slim, example, timed, shop, int8))
        (shop / CARD).write_bytes(card)
        with lock_folder(folder):  # from the look at what is there until the files have their names
            kept = _is_another(shop / CARD, folder / CARD) and not force
            if kept:  # someone may have written in it
                (shop / CARD).unlink()
            _publish(sorted(shop.iterdir()), folder, force=force)
    notes = (f"{CARD} was there and differs: it is kept as it is; --force writes it anew.",) if kept else ()
    return ExportedRun(folder, tuple(files), summary, notes)


def _card(run: Path, summary: Mapping[str, Any], config: Any, licence: str) -> bytes:
    """The model card; a run of someone else's may say what no card can show, and that is told before the long work."""
    try:
        return model_card(summary, config, licence=licence).encode("utf-8")
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = type(error).__name__
        raise BadFile(f"{run}: summary.json or config.json is damaged ({why}); restore it from a copy.") from None


def dense_of(model: nn.Module, run: Path) -> nn.Module:
    """A copy of the dense network, with the weights it had if the run trained it."""
    dense = copy.deepcopy(model)
    if (run / "dense.safetensors").exists():
        try:
            dense.load_state_dict(load_state(run / "dense.safetensors"))
        except (RuntimeError, TypeError):
            raise BadFile(f"{run / 'dense.safetensors'} belongs to another network.") from None
    return dense


def read_json(path: Path) -> dict[str, Any]:
    """A small file of a finished run.

    Raises:
        BadFile: If it is missing, too large or damaged.
    """
    try:
        found = json.loads(read_bytes(path))
    except BadFile as error:
        raise BadFile(f"{error} Give the folder of a finished run of `ecc compress`.") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BadFile(f"{path} is damaged; restore it from a copy.")
    return found


# ---------------------------------------------------------------- one file


def _refuse_impossible(formats: Sequence[str], int8: str | None) -> None:
    """What is missing is said before the long work."""
    for name in formats:
        if name not in EXPORT_FORMATS:
            raise CannotExport(f"format {name!r} is unknown; there are {', '.join(EXPORT_FORMATS)}.")
        for module in FORMATS[name].needs if name in FORMATS else ():
            library(module)
    if int8 is not None and "onnx" not in formats:
        raise CannotExport("int8 is made of the ONNX file; ask for --format onnx as well.")


def _refuse_unfit(slim: nn.Module, example_input: Inputs, run: Path) -> None:
    """A network that cannot run is refused before the long work."""
    try:
        outputs_of(slim, example_input)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadFile(f"the slim network of {run} cannot be run on the task's example input: {reason[:300]}") from error


def _made(model: nn.Module, example_input: Inputs, path: Path, name: str) -> Exported:
    model.eval()
    with without_observer_hooks(model, *as_call(example_input)) as followed:
        FORMATS[name].write(followed, example_input, path)
        return _record(name, path, verify_export(followed, opened(name, path), example_input, what=path.name))


def _record(name: str, path: Path, proof: ExportVerification) -> Exported:
    return Exported(name, path.name, path.stat().st_size, proof.error, proof.batches, proof.tolerance)


def _safetensors(
    run: Path, task: Task, slim: nn.Module, dense: nn.Module, example_input: Inputs, shop: Path
) -> Exported:
    """The weights by name, and the widths; read back by `load_slim` on the dense network."""
    source = weights_file(run)
    file = shop / source.name
    save_state(file, whole_state(slim))
    widths = run / ("widths.json" if source.name.startswith("slim") else "nonzeros.json")
    (shop / widths.name).write_text(json.dumps(read_json(widths), indent=1) + "\n", encoding="utf-8")
    again = on_cpu(load_slim(task.model, shop))
    proof = verify_export(slim, lambda inputs: outputs_of(again, inputs), example_input, what=file.name)
    save_state(shop / ".dense", dense.state_dict())
    size = (shop / ".dense").stat().st_size
    (shop / ".dense").unlink()
    return replace(_record(SAFETENSORS, file, proof), beside_bytes=size)


def _timed(made: Exported, dense: nn.Module, example_input: Inputs, timed: Inputs, shop: Path) -> Exported:
    """The dense network in the same format, for its size and its latency; it is not kept."""
    other = shop / ".dense.onnx"
    with without_observer_hooks(dense, *as_call(example_input)) as followed:
        FORMATS["onnx"].write(followed, example_input, other)
    latency = compare_latency(other, shop / made.file, timed)
    size = other.stat().st_size
    other.unlink()
    return replace(made, beside_bytes=size, latency=latency)


def _quantised(task: Task, slim: nn.Module, example_input: Inputs, timed: Inputs, shop: Path, mode: str) -> Exported:
    source = shop / FORMATS["onnx"].file
    path = shop / f"slim.int8-{mode}.onnx"
    quantise(source, path, mode, task)
    proof = verify_export(slim, opened("onnx", path), example_input, is_exact=False, what=path.name)
    return replace(
        _record("onnx int8", path, proof),
        beside_bytes=source.stat().st_size,
        latency=compare_latency(source, path, timed),
        score=score_of(task, OnnxNetwork(path, slim, example_input)),
    )


# ---------------------------------------------------------------- files


def _on_cpu(example_input: Inputs) -> Inputs:
    if isinstance(example_input, dict):
        return {name: tensor.cpu() for name, tensor in example_input.items()}
    return tuple(tensor.cpu() for tensor in example_input) if isinstance(example_input, tuple) else example_input.cpu()


def _batch(summary: Mapping[str, Any], example_input: Inputs) -> int:
    """The batch that the budget was about, and that is timed; a file that says nonsense is not followed."""
    batch = summary.get("batch")
    return batch if isinstance(batch, int) and 1 <= batch <= _MAX_BATCH else batch_size_of(example_input)


@contextmanager
def _workshop(folder: Path) -> Iterator[Path]:
    """A folder beside the files to come, removed when this ends."""
    try:
        was_there = folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        shop = Path(mkdtemp(dir=folder, prefix=_SHOP))
    except OSError as error:
        raise BadFile(f"cannot write into {folder}: {error.strerror}. Give another folder with -o.") from None
    try:
        yield shop
    except OSError as error:
        raise BadFile(f"cannot write into {folder}: {error.strerror}.") from None
    finally:
        shutil.rmtree(shop, ignore_errors=True)
        if not was_there and not any(folder.iterdir()):
            folder.rmdir()


def _is_another(new: Path, old: Path) -> bool:
    return old.exists() and (not old.is_file() or not filecmp.cmp(new, old, shallow=False))


def _publish(files: Sequence[Path], folder: Path, *, force: bool) -> None:
    """Gives proved files their names; none of them if one of them may not have it."""
    others = [file.name for file in files if _is_another(file, folder / file.name)]
    if others and not force:
        raise BadFile(f"{folder / others[0]} is there and differs; give --force to overwrite it, or another folder.")
    for name in others:
        if not (folder / name).is_file():  # before any file has its name
            raise BadFile(f"{folder / name} is there and is no file; give another folder.")
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    for file in files:
        file.replace(folder / file.name)
    sync_folder(folder)
