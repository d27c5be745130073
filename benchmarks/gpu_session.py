"""One call on a GPU machine: benchmarks in the order of their priority within a number of seconds, all records in one folder.

    PYTHONPATH=src python3 benchmarks/gpu_session.py --seconds 585 --folder out --names resnet56 --inputs inputs
    PYTHONPATH=src python3 benchmarks/gpu_session.py --collect DATA --names e1,e3   # copies what they read into inputs/data
    PYTHONPATH=src python3 benchmarks/gpu_session.py --list                 # cells of results/: done, missing, failed
    PYTHONPATH=src python3 benchmarks/gpu_session.py --check                # exit 1 if a cell lacks a field (make evidence)

Each experiment of `EXPERIMENTS` gets the seconds that are left minus those that later ones are promised, runs as a process
of its own, and writes its JSON into the folder after every cell, so that a call that is killed loses only the cells that
ran. A log of each is there as well. States of unfinished cells and other files that the next call needs are packed into
parts of at most 15 MiB (`state.tar.00` and so on), since machines may limit the size of a file; with `--unpack` they are
restored before the first benchmark. `--earlier` names a folder of records of earlier calls, `results` by default: cells in
them are not repeated.

`inputs` is a folder with what the experiments read: `data` (cifar10.npz, imagenette128.npz and weights), `smollm2`, `minilm`,
`wikitext2`. `--collect` copies those of `data` from another folder. An experiment whose inputs are missing is left out.
Packages that this Python lacks, such as torch_pruning, are taken from `--vendor` (see `make vendor`), as for `make gpu`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_acceptance import VENDOR, prepare_path

ROOT = Path(__file__).resolve().parent.parent
PART_BYTES = 15 << 20
GRACE = 25.0
"""Seconds after its own limit in which an experiment may save states, before it is stopped."""
STATES = ("*.state", "*.safetensors", "*.energy.json", "*.profile", "*/*.profile.gz")
"""Files beside a record that the next call needs, and profiles in the folder of a record."""


@dataclass(frozen=True)
class Experiment:
    """A benchmark with its arguments.

    Args:
        script: In this folder.
        arguments: `{inputs}` stands for the folder of inputs.
        needs: Files in the folder of inputs.
        least: Seconds below which it is not started.
        share: Seconds that it is promised: earlier ones leave it so much.
        what: For the list.
        earlier: Option that names the record of an earlier call.
    """

    script: str
    arguments: Sequence[str] = ()
    needs: Sequence[str] = ()
    least: float = 60.0
    share: float = 0.0
    what: str = ""
    earlier: str = "--earlier"


_RESNET = ("--data", "{inputs}/data", "--mps")
_CIFAR = ("data/cifar10.npz", "data/cifar10_resnet56.safetensors")
_GRID_METHODS = "ecc,uniform,greedy_taylor,tp_taylor,halp,tp_group_norm,netadapt,eap,lcp,amc"


def grid(recipe: str, steps: tuple[int, int], variants: str, needs: Sequence[str]) -> Experiment:
    """One of E1 to E4 with four times the steps of its recipe: pruning and fine-tuning.

    On 16 cores, runs of E1 took half of the time with 11 processes than with 14 (`cell_seconds` of its record).
    """
    longer = f'{{"prune_steps": {steps[0]}, "finetune_steps": {steps[1]}}}'
    return Experiment(
        "evidence.py",
        (recipe, "--data", "{inputs}/data", "--root", f"build/{recipe}", "--mps", "--loop", "--processes", "11", "--seeds", "3",
         "--methods", _GRID_METHODS, "--variants", variants, "--settings", longer),
        needs, 150.0, what=f"{recipe}, {sum(steps)} batches, three seeds", earlier="--record",
    )  # fmt: skip


_IMAGENETTE = ("data/imagenette128.npz",)
EXPERIMENTS: dict[str, Experiment] = {
    "resnet56": Experiment(
        "resnet56.py", _RESNET, _CIFAR, 150.0, what="ResNet-56, 60 epochs, 47 % of the MACs, seven methods, three seeds"
    ),
    "resnet56_choice": Experiment(
        "resnet56.py",
        (*_RESNET, "--held-out", "--epochs", "30", "--compile", "yes",
         "--methods", "ecc,ecc_early,ecc_early_inner,greedy_taylor"),
        _CIFAR, 200.0, what="schedules of ECC on held-out images, 30 epochs, three seeds",
    ),
    "resnet56_energy": Experiment(
        "resnet56.py",
        (*_RESNET, "--epochs", "30", "--compile", "yes", "--profile", "results/depth/resnet56-m4.profile.gz",
         "--multiple", "4", "--shares", "0.5",
         "--methods", "ecc,uniform,greedy_taylor,greedy_branches,dense_distilled"),
        _CIFAR, 200.0, what="ResNet-56, 30 epochs, half of the energy, three seeds",
    ),
    "resnet56_front": Experiment(
        "resnet56.py",
        (*_RESNET, "--epochs", "30", "--compile", "yes", "--profile", "results/depth/resnet56-m4.profile.gz",
         "--multiple", "4", "--shares", "0.35,0.8,0.25,0.65", "--methods", "ecc,greedy_branches,uniform"),
        _CIFAR, 100.0, what="ResNet-56, 30 epochs, other shares of the energy, three seeds",
    ),
    "e1": grid("mobilenet-imagenette", (1600, 960), "none", (*_IMAGENETTE, "data/mobilenet_v1_1.0_224.safetensors")),
    "e3": grid("alexnet-imagenette", (1600, 1040), "none", _IMAGENETTE),
    "e2": grid(
        "erfnet-camvid", (960, 480), "depth",
        ("data/camvid.npz", "data/erfnet_cityscapes20_from_int8.safetensors"),
    ),
    "e4": grid("resnet56-cifar10", (2000, 1200), "depth", _CIFAR),
    "vit": Experiment(
        "vit.py", ("--data", "{inputs}/data", "--mps", "--processes", "8"), _IMAGENETTE, 200.0,
        what="E5: ViT-Tiny on Imagenette",
    ),
    "llm": Experiment(
        "llm.py", ("--weights", "{inputs}/smollm2", "--text", "{inputs}/wikitext2"),
        ("smollm2/packed.json", "wikitext2/valid.txt"), 150.0, what="E6: SmolLM2 at decode and prefill budgets",
    ),
    "step_time": Experiment("step_time.py", (), (), 60.0, what="a step with EccSolver relative to fused Adam, four networks"),
    "runners": Experiment("runners.py", (), (), 60.0, what="runners: error of the energy model, --runner auto"),
    "unseen_networks": Experiment(
        "unseen_networks.py", (), (), 100.0, what="energy models of ten random classifiers of torchvision, 100 samples",
    ),
    "encoder": Experiment(
        "encoder.py", ("--weights", "{inputs}/minilm", "--text", "{inputs}/wikitext2"),
        ("minilm/config.json", "wikitext2/valid.txt"), 100.0, what="MiniLM at energy budgets",
    ),
    "resnet56_long": Experiment(
        "resnet56.py",
        (*_RESNET, "--epochs", "200", "--tune-epochs", "100", "--compile", "yes", "--shares", "0.469,0.389", "--seeds", "0",
         "--processes", "7", "--methods", "ecc,tp_group_norm,greedy_taylor,dense_distilled"),
        _CIFAR, 200.0, what="200 epochs at the MACs of published results, 2.13x and 2.57x fewer",
    ),
    "resnet56_published": Experiment(
        "resnet56.py", (*_RESNET, "--protocol", "published", "--seeds", "0", "--methods", "ecc,tp_group_norm"), _CIFAR, 200.0,
        what="ResNet-56 with the published search of each method and equal fine-tuning",
    ),
}  # fmt: skip
"""By name of their record, in the order of their priority."""


def command(
    name: str, one: Experiment, folder: Path, inputs: Path, earlier: Path | None, more: Sequence[str] = ()
) -> list[str]:
    """The command line of an experiment."""
    words = [word.replace("{inputs}", str(inputs)) for word in one.arguments]
    known = [] if earlier is None else [earlier / f"{name}.json"]
    before = [one.earlier, *map(str, known)] if known and known[0].is_file() else []
    return [
        sys.executable, str(ROOT / "benchmarks" / one.script), *words, "--out", str(folder / f"{name}.json"), *before, *more,
    ]  # fmt: skip


def missing_inputs(one: Experiment, inputs: Path) -> list[str]:
    """Inputs of an experiment that are not there."""
    return [name for name in one.needs if not (inputs / name).exists()]


def collect(experiments: Mapping[str, Experiment], data: Path, inputs: Path) -> float:
    """Copy what these experiments read into the folder `data` of the inputs; its size in MiB. No file is removed.

    Raises:
        SystemExit: If a file is missing.
    """
    needed = sorted(
        {name.removeprefix("data/") for one in experiments.values() for name in one.needs if "data/" in name}
    )
    if absent := [name for name in needed if not (data / name).is_file()]:
        raise SystemExit(f"{data} has no {', '.join(absent)}")
    folder = inputs / "data"
    folder.mkdir(parents=True, exist_ok=True)
    if not folder.samefile(data):
        for name in needed:
            shutil.copyfile(data / name, folder / name)
    if others := sorted(path.name for path in folder.iterdir() if path.name not in needed):
        print(f"not needed: {', '.join(others)}")
    return sum(path.stat().st_size for path in folder.iterdir()) / 2**20


def run_session(
    experiments: Mapping[str, Experiment],
    folder: Path,
    inputs: Path,
    earlier: Path | None,
    seconds: float,
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """Run experiments until the time is over; what became of each, which is also written to session.json."""
    begin, report = time.monotonic(), dict[str, Any]()
    folder.mkdir(parents=True, exist_ok=True)
    promised = sum(one.share for one in experiments.values())
    for name, one in experiments.items():
        promised -= one.share
        left = seconds - GRACE - (time.monotonic() - begin) - promised
        if absent := missing_inputs(one, inputs):
            report[name] = {"skipped": f"no {', '.join(absent)} in {inputs.name}"}
        elif left < one.least:
            report[name] = {"skipped": f"{left:.0f} s left, and it needs {one.least:.0f} s"}
        else:
            report[name] = run_one(name, one, folder, inputs, earlier, left, more)
        report[name]["cells"] = cell_count(folder / f"{name}.json")
        print(json.dumps({name: report[name]}), flush=True)
        write_whole(folder / "session.json", (json.dumps(report, indent=1) + "\n").encode())
    pack(folder)
    return report


def run_one(
    name: str,
    one: Experiment,
    folder: Path,
    inputs: Path,
    earlier: Path | None,
    seconds: float,
    more: Sequence[str] = (),
) -> dict[str, Any]:
    """Run one experiment in its own process group, and stop it if it exceeds its time by more than `GRACE`."""
    words = command(name, one, folder, inputs, earlier, ["--seconds", f"{seconds:.0f}", *more])
    begin = time.monotonic()
    with (folder / f"{name}.log").open("a", encoding="utf-8") as log:
        process = subprocess.Popen(
            words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            code: int | None = process.wait(seconds + GRACE)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    result = "stopped" if code is None else "done" if code == 0 else f"exit code {code}"
    return {"result": result, "seconds": round(time.monotonic() - begin, 1), "limit": round(seconds, 1)}


def cell_count(file: Path) -> dict[str, int]:
    """Cells of a record, or runs of a grid: done, and failed or missing."""
    record = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    cells = record.get("cells", record.get("rows", []))
    failed = sum("error" in cell or "missing" in cell for cell in cells)
    return {"done": len(cells) - failed, "failed": failed}


def pack(folder: Path) -> list[Path]:
    """Put states and other large files into parts that can be copied, and remove them; the parts."""
    files = sorted(path for pattern in STATES for path in folder.glob(pattern))
    for old in folder.glob("state.tar.*"):
        old.unlink()
    if not files:
        return []
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for path in files:
            archive.add(path, path.relative_to(folder).as_posix())
    data, parts = whole.getvalue(), []
    for number, start in enumerate(range(0, len(data), PART_BYTES)):
        parts.append(folder / f"state.tar.{number:02}")
        write_whole(parts[-1], data[start : start + PART_BYTES])
    for path in files:
        path.unlink()
    return parts


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, or leave it as it was."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)


def unpack(source: Path, folder: Path) -> None:
    """Restore what `pack` put into parts. Files that are there are newer: the last call was killed before it packed them."""
    parts = sorted(source.glob("state.tar.*"))
    folder.mkdir(parents=True, exist_ok=True)
    if parts:
        data = io.BytesIO(b"".join(part.read_bytes() for part in parts))
        with tarfile.open(fileobj=data) as archive:
            missing = [one for one in archive if not (folder / one.name).is_file()]
            archive.extractall(folder, missing, filter="data")


# ---------------------------------------------------------------- list and check


def show(name: str, one: Experiment, results: Path, inputs: Path) -> list[str]:
    """Print what is done of an experiment and how to go on; problems of its cells."""
    from cells import problems  # it needs packages that `main` may have to unpack first

    file = results / f"{name}.json"
    record = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"cells": []}
    cells = [cell for cell in record.get("cells", []) if "key" in cell]
    found = [f"{name} {cell['key']}: {text}" for cell in cells for text in problems(cell)]
    count, skipped = cell_count(file), len(record.get("skipped", []))
    print(
        f"{name}: {one.what}\n  {count['done']} cells done, {count['failed']} failed, {skipped} not run in the last call"
    )
    if absent := missing_inputs(one, inputs):
        print(f"  needs {', '.join(absent)} in {inputs}")
    words = [word for word in command(name, one, results, inputs, None) if word != sys.executable]
    relative = [str(Path(word).relative_to(ROOT)) if Path(word).is_relative_to(ROOT) else word for word in words]
    print(f"  python3 {shlex.join(relative)} --list")
    return found


def show_grids(folder: Path) -> None:
    """Print what is done of E1 to E4, whose records have rows of another form (`evidence.py`)."""
    for file in sorted(folder.glob("e?.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        rows = record["rows"]
        missing, unknown = sum("missing" in row for row in rows), sum("commit" not in row for row in rows)
        print(
            f"{file.stem}: {record['what']}\n  {len(rows) - missing} runs done, {missing} missing; {unknown} without a commit"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=585.0, help="of the whole call")
    parser.add_argument("--folder", type=Path, default=Path("out"), help="for all records, logs and states")
    parser.add_argument("--names", type=lambda text: text.split(","), default=list(EXPERIMENTS), help="in this order")
    parser.add_argument("--inputs", type=Path, default=ROOT / "inputs")
    parser.add_argument("--earlier", type=Path, default=ROOT / "results", help="folder of records of earlier calls")
    parser.add_argument("--vendor", type=Path, default=VENDOR, help="folder of wheels for a Python that lacks them")
    parser.add_argument("--unpack", type=Path, help="folder with state.tar.00 and so on of the last call")
    parser.add_argument(
        "--more", type=shlex.split, default=[], help="arguments of all benchmarks of the call, such as '--compile yes'"
    )
    parser.add_argument("--collect", type=Path, help="copy what the experiments read from this folder, and end")
    parser.add_argument("--list", action="store_true", help="print the state of all experiments, and end")
    parser.add_argument("--check", action="store_true", help="the same; exit code 1 if a cell lacks something")
    options = parser.parse_args()
    if unknown := set(options.names) - set(EXPERIMENTS):
        parser.error(f"unknown experiment {min(unknown)}; choose from {', '.join(EXPERIMENTS)}")
    prepare_path(options.vendor)
    chosen = {name: EXPERIMENTS[name] for name in options.names}
    if options.collect is not None:
        print(f"{options.inputs / 'data'}: {collect(chosen, options.collect, options.inputs):.1f} MiB")
        return
    if options.list or options.check:
        found = [text for name, one in chosen.items() for text in show(name, one, options.earlier, options.inputs)]
        show_grids(options.earlier / "evidence")
        print("\n".join(found) or "no cell lacks anything")
        sys.exit(1 if found and options.check else 0)
    if options.unpack is not None:
        unpack(options.unpack, options.folder)
    run_session(chosen, options.folder, options.inputs, options.earlier, options.seconds, options.more)


if __name__ == "__main__":
    main()
