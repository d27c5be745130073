"""Kill each command with -9 at random moments, run it again, and compare with an undisturbed run.

Everything is imported once; each attempt is a forked process. Half of the kills come after a random fraction of the
time of the undisturbed run, half just before a random change of a file, which are the dangerous moments. Forking is
safe only without threads, so this is a program of its own:

    python killing.py FOLDER '{"profile": 2, "fit": 2}' 0.3     prints the numbers of kills and failures as JSON
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ecc.cli.app import app

_METER = "--meter platform:jetson-tx2"
_STEPS = "--pretrain-steps 20 --prune-steps 20 --finetune-steps 10"


@dataclass(frozen=True)
class Recipe:
    """A command line without `ecc`, the files it reads and writes, and other packages it needs."""

    words: str
    reads: str
    writes: str
    needs: tuple[str, ...] = ()


RECIPES: dict[str, Recipe] = {
    "profile": Recipe(f"profile digits {_METER} --batch 256 --samples 40 -o a.profile", "", "a.profile"),
    "fit": Recipe("fit a.profile --json -o energy.json", "a.profile", "energy.json"),
    "compress": Recipe(
        f"compress digits --energy energy.json --budget 60% {_METER} {_STEPS} --checkpoint-steps 2 --json -o run",
        "energy.json",
        "run",
    ),
    "compare": Recipe(
        f"compare digits --energy energy.json --budgets 60% --methods ecc,uniform --seeds 1 {_METER} {_STEPS} "
        "--json -o runs",
        "energy.json",
        "runs",
    ),
    "export": Recipe("export run --format safetensors -o out", "run", "out"),
    "export to ONNX": Recipe("export run --format onnx -o onnx", "run", "onnx", ("onnx", "onnxruntime", "onnxscript")),
    "report": Recipe("report runs -o page.html", "runs", "page.html", ("vl_convert",)),
}
"""In an order in which each finds what it reads."""

_IMPORTS = ("onnx", "onnxscript", "sklearn.datasets", "torch._dynamo")
"""Slow imports that commands do late; not onnxruntime, which starts a thread."""

_VARIES = ("wall", "session", "sessions", "seconds", "peak_bytes")
"""Fields that differ from run to run: clocks, memory, numbers of sessions."""

_SKIPPED = (".ecc-lock", "environment.json", "checkpoint.safetensors", "report.html")
"""Files that depend on time and sessions."""
_TEMPORARY = re.compile(r"\..*\.[0-9a-f]{8}\.tmp")
"""Files that a killed process was writing; nothing reads them, and they stay."""


@dataclass(frozen=True)
class Undisturbed:
    """An undisturbed run: its seconds, its number of file changes, and its result."""

    seconds: float
    changes: int
    result: dict[str, Any]


@dataclass
class Tally:
    """Numbers of kills and runs, and the failures."""

    kills: int = 0
    while_writing: int = 0
    runs: int = 0
    failures: list[str] = field(default_factory=list)


def can_run(verb: str) -> bool:
    """Whether the packages that a command needs are installed."""
    return all(find_spec(name) for name in RECIPES[verb].needs)


def undisturbed(folder: Path, verbs: tuple[str, ...] = tuple(RECIPES)) -> dict[str, Undisturbed]:
    """Run the commands one after the other without kills."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True)
    for name in _IMPORTS:
        with suppress(ImportError):
            importlib.import_module(name)
    found = {}
    for verb in verbs:
        started = time.monotonic()
        process = _start(verb, folder, count_changes=True)
        status = os.waitpid(process, 0)[1]
        assert status == 0, _output(folder, verb)
        changes = int((folder.with_name(f"{folder.name}.changes")).read_text())
        found[verb] = Undisturbed(time.monotonic() - started, changes, result(folder, verb))
    return found


def kill(
    verb: str, count: int, whole: dict[str, Undisturbed], root: Path, rng: random.Random, *, again: float
) -> Tally:
    """Kill a command `count` times, in as many runs as that takes.

    Args:
        verb: A key of `RECIPES`.
        count: Number of kills.
        whole: Result of `undisturbed(root / "whole")`.
        root: A folder to work in.
        rng: Chooses the moments.
        again: Probability that a killed run is killed once more.
    """
    tally = Tally()
    while tally.kills < count:
        folder = root / f"{verb}-{tally.runs}"
        folder.mkdir()
        if RECIPES[verb].reads:
            _copy(root / "whole" / RECIPES[verb].reads, folder / RECIPES[verb].reads)
        moments: list[str] = []
        while tally.kills < count and (not moments or rng.random() < again):
            moment, was_killed = _killed(verb, folder, whole[verb], rng, while_writing=tally.kills % 2 == 1)
            if not was_killed:
                break
            moments.append(moment)
            tally.kills += 1
            tally.while_writing += moment.startswith("change")
        status = os.waitpid(_start(verb, folder), 0)[1]
        tally.runs += 1
        failure = _output(folder, verb) if status else difference(whole[verb].result, result(folder, verb))
        if failure:
            tally.failures.append(f"{verb}, killed at {', '.join(moments)}: {failure}"[:400])
        shutil.rmtree(folder)
    return tally


def _killed(
    verb: str, folder: Path, whole: Undisturbed, rng: random.Random, *, while_writing: bool
) -> tuple[str, bool]:
    """One attempt: the moment of the kill, and whether the run was still going on."""
    if while_writing:
        number = rng.randint(1, whole.changes)
        status = os.waitpid(_start(verb, folder, kill_at=number), 0)[1]
        return f"change {number} of {whole.changes}", os.WIFSIGNALED(status)
    fraction = rng.random()
    process = _start(verb, folder)
    time.sleep(fraction * whole.seconds)
    os.kill(process, signal.SIGKILL)  # it was not waited for, so its id is still its own
    status = os.waitpid(process, 0)[1]
    return f"{fraction:.0%} of the time", os.WIFSIGNALED(status)


def _start(verb: str, folder: Path, *, kill_at: int = 0, count_changes: bool = False) -> int:
    """Start a command in a forked process, in the folder; returns its process id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.chdir(folder)
        output = os.open(_output_file(folder, verb), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        changes = _count_changes(folder, kill_at)
        sys.argv = ["ecc", *RECIPES[verb].words.split()]
        try:
            app(sys.argv[1:], prog_name="ecc")
        except SystemExit as end:
            status = int(end.code or 0)
        sys.stdout.flush()
        if count_changes:
            folder.with_name(f"{folder.name}.changes").write_text(str(changes[0]))
    finally:
        os._exit(status)


def _count_changes(folder: Path, kill_at: int) -> list[int]:
    """Count the file changes of this process in a folder, and kill it just before the one with that number."""
    changes = [0]
    events = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "open")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event not in events:
            return
        if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        is_here = isinstance(args[0], int) or folder in (folder / os.fsdecode(args[0])).parents
        if is_here:
            changes[0] += 1
            if changes[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return changes


def _output_file(folder: Path, verb: str) -> Path:
    return folder.with_name(f"{folder.name}.{verb}.output")


def _output(folder: Path, verb: str) -> str:
    return _output_file(folder, verb).read_text(errors="replace").strip()[-300:] or "no output"


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)


# ---------------------------------------------------------------- results


def result(folder: Path, verb: str) -> dict[str, Any]:
    """Files that a command read and wrote, stray ones included, and its JSON output, without varying fields."""
    recipe = RECIPES[verb]
    others = {other.writes for other in RECIPES.values()} - {recipe.reads, recipe.writes}
    found = {
        str(path.relative_to(folder)): _content_of(path)
        for path in folder.rglob("*")
        if path.name not in _SKIPPED
        and not _TEMPORARY.fullmatch(path.name)
        and path.relative_to(folder).parts[0] not in others
    }
    if "--json" in recipe.words:
        found["output"] = _without_varying(json.loads(_json_part(_output_file(folder, verb).read_text())))
    return found


def _json_part(text: str) -> str:
    """The output from the first line that starts with a brace; the lines before went to stderr."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line[:1] in "{[")
    return "\n".join(lines[first:])


def _content_of(path: Path) -> Any:
    if path.is_dir():
        return "folder"
    if path.suffix == ".profile":  # each session starts and ends with reference samples
        return [_without_varying(line) for line in _lines(path) if not line.get("reference")]
    if path.name == "history.jsonl":
        return [_without_varying(line) for line in _lines(path)]
    if path.name == "cell.json":
        return _without_varying(json.loads(path.read_text()))
    return sha256(path.read_bytes()).hexdigest()


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in path.read_text().splitlines())


def _without_varying(tree: Any) -> Any:
    """Without the fields that vary."""
    if isinstance(tree, dict):
        return {key: _without_varying(value) for key, value in tree.items() if key not in _VARIES}
    return [_without_varying(value) for value in tree] if isinstance(tree, list) else tree


def difference(before: Any, after: Any, where: str = "") -> str:
    """The first difference of two results in words; empty if there is none."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            if (key in before) != (key in after):
                return f"{where}/{key} is {'missing' if key in before else 'left over'}"
            found = difference(before[key], after[key], f"{where}/{key}")
            if found:
                return found
        return ""
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return next((found for number, both in pairs if (found := difference(*both, f"{where}/{number}"))), "")
    return "" if before == after else f"{where} is {str(after)[:80]}, not {str(before)[:80]}"


def main(folder: Path, counts: dict[str, int], again: float) -> None:
    whole = undisturbed(folder / "whole", tuple(verb for verb in RECIPES if verb in counts and can_run(verb)))
    tallies = {}
    for verb in whole:
        tallies[verb] = asdict(kill(verb, counts[verb], whole, folder, random.Random(verb), again=again))
        print(verb, tallies[verb], file=sys.stderr, flush=True)  # noqa: T201 - progress
    print(json.dumps(tallies))  # noqa: T201 - read by the test


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), json.loads(sys.argv[2]), float(sys.argv[3]))
