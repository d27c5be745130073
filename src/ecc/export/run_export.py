"""`export_run` and `export_model`: files for deployment, each verified before it is kept.

Files are written and verified in a temporary folder and then moved to their names together: an export that fails leaves
nothing behind and overwrites nothing.
"""

from __future__ import annotations

import copy
import filecmp
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from torch import nn
from torch.utils._pytree import tree_map

from ecc.constants import EXPORT_FORMATS
from ecc.errors import BadFile, CannotExport, first_line, option_hint
from ecc.graph.forward_pass import as_call
from ecc.graph.hooks import without_observer_hooks
from ecc.graph.model_copy import whole_state
from ecc.graph.numerics import outputs_of
from ecc.io import is_locked, lock_folder, sync_file, sync_folder, write_bytes
from ecc.measure.runners.runtime import import_runtime
from ecc.records import read_record, write_record
from ecc.run_records import FRONT_FILE, RunSummary
from ecc.task import Inputs, Task, batch_size_of, check_input, with_batch_size
from ecc.training import load_state, save_state

from .formats import FORMATS, ExportVerification, open_file, verified_batches, verify_export, without_cache
from .model_card import model_card
from .onnx_tools import Latency, OnnxNetwork, check_int8, compare_latency, quantize, score_of
from .slim_file import load_slim, on_cpu, weights_file

SAFETENSORS = EXPORT_FORMATS[0]
CARD = "model_card.md"
_MAX_BATCH = 4096

Log = Callable[[str], None]


@dataclass(frozen=True)
class Exported:
    """One exported file and its verification."""

    format: str
    file: str
    bytes: int
    error: float
    """Largest difference from the slim network at any batch size, relative to the largest output."""
    batches: tuple[int, ...]
    """Batch sizes that were compared."""
    tolerance: float | None
    """Allowed error; None for int8, where no equality is required."""
    beside_bytes: int | None = None
    """Size of the dense network in the same format; for int8, of the float file."""
    latency: Latency | None = None
    """Latency next to the dense network; for int8, next to the float file."""
    score: float | None = None
    """Score on the test split, for int8."""


@dataclass(frozen=True)
class ExportedRun:
    """The result of `export_run`."""

    folder: Path
    files: tuple[Exported, ...]
    summary: RunSummary
    """Summary of the run."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _RunConfig:
    config: dict[str, Any]


def export_model(model: nn.Module, example_input: Inputs, path: str | Path, *, force: bool = False) -> Exported:
    """Write any network in one format and verify the file.

    Args:
        model: The network; it is in eval mode afterwards.
        example_input: One batch; the file accepts any batch size.
        path: The file; its suffix .pt2, .onnx or .torchscript is the format.
        force: Overwrite a file that differs.

    Raises:
        BadFile: If a different file exists.
        BadTask: If the example input contains something else than tensors.
        CannotExport: If the network cannot be written in the format, or the verification fails.
    """
    path, example_input = Path(path), check_input(example_input)
    name = path.suffix.removeprefix(".")
    if name not in FORMATS:
        other = " ecc.save_slim writes safetensors files." if name == SAFETENSORS else ""
        raise CannotExport(f"the suffix of {path} is no export format; use .{', .'.join(FORMATS)}.{other}")
    _check_formats([name], None)
    with _temporary_folder(path.parent) as folder, without_cache(model):
        made = _write_format(model, example_input, folder / path.name, name)
        with lock_folder(path.parent):
            _publish([folder / path.name], path.parent, force=force)
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
    log: Log = lambda _: None,
) -> ExportedRun:
    """Write the slim network of a finished run in other formats, with a model card.

    Args:
        run: Folder of the run.
        task: The task of the run; its model is the dense network.
        formats: Some of `EXPORT_FORMATS`.
        output: Folder of the files; `export` in the run folder by default.
        int8: `dynamic` or `static`: also write a quantized ONNX file.
        licence: Licence for the model card, such as `apache-2.0`.
        force: Overwrite files that differ.
        log: Called with a line for each step.

    Raises:
        BadFile: If the run is not finished, belongs to another network, or a different file exists.
        BadTask: If static int8 has no training batches.
        CannotExport: If the network cannot be written in a format, or the verification fails.
    """
    run = Path(run)
    _check_formats(formats, int8)
    check_int8(task, int8)
    if (run / FRONT_FILE).is_file():
        folders = ", ".join(str(path.parent) for path in sorted(run.glob("*/summary.json")))
        raise BadFile(f"{run} has a run for each of several budgets; give one of them: {folders}.")
    summary = _read(run / "summary.json", RunSummary)
    config = _read(run / "config.json", _RunConfig).config
    if summary.task != task.name:
        raise BadFile(f"{run} compressed the task {summary.task!r}, but the given task is {task.name!r}.")
    slim, dense = on_cpu(load_slim(task.model, run)), on_cpu(_dense_network(task.model, run))
    example: Inputs = tree_map(lambda tensor: tensor.cpu(), task.example_input)
    _check_runs(slim, example, run)
    timed = with_batch_size(example, summary.batch if summary.batch <= _MAX_BATCH else batch_size_of(example))
    folder, files = Path(output or run / "export"), []
    with _temporary_folder(folder) as temporary, without_cache(slim), without_cache(dense):
        for name in dict.fromkeys(formats):
            log(f"writing {name}")
            if name == SAFETENSORS:
                files.append(_write_safetensors(run, task, slim, dense, example, temporary))
                continue
            made = _write_format(slim, example, temporary / FORMATS[name].file, name)
            if name == "onnx":
                log("timing the dense and the slim network with onnxruntime")
                made = _time_onnx(made, dense, example, timed, temporary)
            files.append(made)
        if int8 is not None:
            log(f"quantizing to int8 ({int8})")
            files.append(_write_int8(task, slim, example, timed, temporary, int8))
        card = model_card(summary, config, licence=licence, batches=_batch_sizes(files, example))
        write_bytes(temporary / CARD, card.encode("utf-8", "replace"))
        with lock_folder(folder):  # from the comparison with existing files until all have their names
            is_kept = _differs(temporary / CARD, folder / CARD) and not force
            if is_kept:  # the user may have edited it
                (temporary / CARD).unlink()
            _publish(sorted(temporary.iterdir()), folder, force=force)
    notes = (
        (f"{CARD} exists and differs; it was kept. Use {option_hint('force', True)} to overwrite it.",)
        if is_kept
        else ()
    )
    return ExportedRun(folder, tuple(files), summary, notes)


def _batch_sizes(files: Sequence[Exported], example: Inputs) -> str:
    """A sentence about the batch sizes at which all files were compared with the network."""
    wanted = set(verified_batches(example))
    compared = wanted.intersection(*(one.batches for one in files))
    if compared == wanted:
        return "Each accepts any batch size."
    sizes, others = (" and ".join(map(str, sorted(some))) for some in (compared, wanted - compared))
    return f"They were compared at batch size {sizes}; the network does not run at {others}."


def _read(path: Path, kind: Any) -> Any:
    try:
        return read_record(path, kind)
    except BadFile as error:
        raise BadFile(f"{error} Give the folder of a finished run of `ecc compress`.") from None


def _dense_network(model: nn.Module, run: Path) -> nn.Module:
    """A copy of the dense network, with the weights of the run if it was pretrained there."""
    dense = copy.deepcopy(model)
    file = run / "dense.safetensors"
    if file.exists():
        try:
            dense.load_state_dict(load_state(file))
        except (RuntimeError, TypeError):
            raise BadFile(f"{file} belongs to another network.") from None
    return dense


# ---------------------------------------------------------------- one file


def _check_formats(formats: Sequence[str], int8: str | None) -> None:
    """Refuse unknown formats and missing packages before the export starts."""
    for name in formats:
        if name not in EXPORT_FORMATS:
            raise CannotExport(f"format {name!r} is unknown; choose one of {', '.join(EXPORT_FORMATS)}.")
        for module in FORMATS[name].needs if name in FORMATS else ():
            import_runtime(module)
    if int8 is not None and "onnx" not in formats:
        raise CannotExport("int8 files are made from the ONNX file; add the format onnx.")


def _check_runs(slim: nn.Module, example_input: Inputs, run: Path) -> None:
    try:
        outputs_of(slim, example_input)
    except Exception as error:
        reason = first_line(error)[:300]
        raise BadFile(f"the slim network of {run} cannot run on the task's example input: {reason}") from error


def _write_format(model: nn.Module, example_input: Inputs, path: Path, name: str) -> Exported:
    model.eval()
    with without_observer_hooks(model, *as_call(example_input)) as plain:
        FORMATS[name].write(plain, example_input, path)
        return _record(name, path, verify_export(plain, open_file(name, path), example_input, what=path.name))


def _record(name: str, path: Path, found: ExportVerification) -> Exported:
    return Exported(name, path.name, path.stat().st_size, found.error, found.batches, found.tolerance)


def _write_safetensors(
    run: Path, task: Task, slim: nn.Module, dense: nn.Module, example_input: Inputs, folder: Path
) -> Exported:
    """Weights by name, and the widths; verified by `load_slim` on the dense network."""
    source = weights_file(run)
    file = folder / source.name
    save_state(file, whole_state(slim))
    widths = run / ("widths.json" if source.name.startswith("slim") else "nonzeros.json")
    write_record(folder / widths.name, _read(widths, dict[str, int]))
    again = on_cpu(load_slim(task.model, folder))
    found = verify_export(slim, lambda inputs: outputs_of(again, inputs), example_input, what=file.name)
    save_state(folder / ".dense", dense.state_dict())
    size = (folder / ".dense").stat().st_size
    (folder / ".dense").unlink()
    return replace(_record(SAFETENSORS, file, found), beside_bytes=size)


def _time_onnx(made: Exported, dense: nn.Module, example_input: Inputs, timed: Inputs, folder: Path) -> Exported:
    """Size and latency next to the dense network in the same format, which is not kept."""
    other = folder / ".dense.onnx"
    with without_observer_hooks(dense, *as_call(example_input)) as plain:
        FORMATS["onnx"].write(plain, example_input, other)
    latency, size = compare_latency(other, folder / made.file, timed), other.stat().st_size
    other.unlink()
    return replace(made, beside_bytes=size, latency=latency)


def _write_int8(task: Task, slim: nn.Module, example_input: Inputs, timed: Inputs, folder: Path, mode: str) -> Exported:
    source, path = folder / FORMATS["onnx"].file, folder / f"slim.int8-{mode}.onnx"
    quantize(source, path, mode, task)
    found = verify_export(slim, open_file("onnx", path), example_input, is_exact=False, what=path.name)
    return replace(
        _record("onnx int8", path, found),
        beside_bytes=source.stat().st_size,
        latency=compare_latency(source, path, timed),
        score=score_of(task, OnnxNetwork(path, slim, example_input)),
    )


# ---------------------------------------------------------------- files


@contextmanager
def _temporary_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder inside `folder`, removed at the end; `folder` too if it is new and stays empty."""
    try:
        is_new = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(".export.*"):
            if not is_locked(stale):  # of an export that was killed
                shutil.rmtree(stale, ignore_errors=True)
        temporary = Path(mkdtemp(dir=folder, prefix=".export."))
    except OSError as error:
        raise BadFile(f"cannot write into {folder}: {error.strerror}. Give another folder.") from None
    try:
        with lock_folder(temporary):
            yield temporary
    except OSError as error:
        raise BadFile(f"cannot write into {folder}: {error.strerror}.") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if is_new and not any(folder.iterdir()):
            folder.rmdir()


def _differs(new: Path, old: Path) -> bool:
    return old.exists() and (not old.is_file() or not filecmp.cmp(new, old, shallow=False))


def _publish(files: Sequence[Path], folder: Path, *, force: bool) -> None:
    """Move verified files to their names; none of them if one is refused."""
    others = [folder / file.name for file in files if _differs(file, folder / file.name)]
    if others and not force:
        raise BadFile(
            f"{others[0]} exists and differs; use {option_hint('force', True)} to overwrite it, or give another folder."
        )
    for other in others:
        if not other.is_file():
            raise BadFile(f"{other} exists and is not a file; give another folder.")
    for file in files:
        file.chmod(0o666 & ~_umask())  # some writers make private files
        sync_file(file)
    for file in files:
        file.replace(folder / file.name)
    sync_folder(folder)


def _umask() -> int:
    mask = os.umask(0o022)  # it can only be read by setting it
    os.umask(mask)
    return mask
