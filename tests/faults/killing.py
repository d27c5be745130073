"""Kills each verb with -9 at random moments, gives the same command again, and compares with an undisturbed run.

    peace = undisturbed(folder / "peace")
    tally = kill("fit", 3, peace, folder, random.Random(0), again=0.3)

Everything is imported once; each attempt is a forked process. Half of the kills come after a random share of the time
that the undisturbed run took, half just before a random one of the process's own changes to files: few moments of a
run are those in which it writes, and they are the dangerous ones. Run it in a process of its own, as `test_killing.py`
does: forking is safe only as long as there are no threads.

    python killing.py FOLDER '{"profile": 2, "fit": 2}' 0.3     prints the tallies of so many kills, as JSON
"""

from __future__ import annotations

import importlib
import json
import os
import random
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

_WEIGH = "--meter platform:jetson-tx2"
_STEPS = "--pretrain-steps 20 --prune-steps 20 --finetune-steps 10"


@dataclass(frozen=True)
class Recipe:
    """The words after `ecc`, what they read, what they write, and the packages they need beyond those of ECC."""

    words: str
    reads: str
    writes: str
    needs: tuple[str, ...] = ()


RECIPES: dict[str, Recipe] = {
    "profile": Recipe(f"profile digits {_WEIGH} --batch 256 --samples 40 -o a.profile", "", "a.profile"),
    "fit": Recipe("fit a.profile --json -o energy.json", "a.profile", "energy.json"),
    "compress": Recipe(
        f"compress digits --energy energy.json --budget 60% {_WEIGH} {_STEPS} --checkpoint-seconds 0.05 --json -o run",
        "energy.json",
        "run",
    ),
    "compare": Recipe(
        f"compare digits --energy energy.json --budgets 60% --methods ecc,uniform --seeds 1 {_WEIGH} {_STEPS} "
        "--json -o runs",
        "energy.json",
        "runs",
    ),
    "export": Recipe("export run --format safetensors -o out", "run", "out"),
    "export to ONNX": Recipe("export run --format onnx -o onnx", "run", "onnx", ("onnx", "onnxruntime", "onnxscript")),
    "report": Recipe("report runs -o page.html", "runs", "page.html", ("vl_convert",)),
}
"""In an order in which each finds what it reads. Fine-tuning is the last phase of `compress`, and of each cell."""

_IMPORTS = ("onnx", "onnxscript", "sklearn.datasets", "torch._dynamo")
"""What takes long to import and is imported late; not onnxruntime, which starts a thread."""

_VARIES = ("wall", "session", "sessions", "seconds", "peak_bytes")
"""Fields that differ from run to run: clocks, memory, and how many processes it took."""

_SKIPPED = (".ecc-lock", "environment.json", "checkpoint.safetensors")
"""When the last checkpoint was made is a matter of time; environment.json lists all sessions."""


@dataclass(frozen=True)
class Undisturbed:
    """What a verb did in peace: its time, its changes to files, and what came out."""

    seconds: float
    changes: int
    result: dict[str, Any]


@dataclass
class Tally:
    """How many kills a verb had, of which kind, and which of them did harm."""

    kills: int = 0
    while_writing: int = 0
    runs: int = 0
    lost: list[str] = field(default_factory=list)


def can_run(verb: str) -> bool:
    """Whether what the verb needs is installed."""
    return all(find_spec(name) for name in RECIPES[verb].needs)


def undisturbed(folder: Path, verbs: tuple[str, ...] = tuple(RECIPES)) -> dict[str, Undisturbed]:
    """Runs the verbs one after the other, each in a process that nobody disturbs."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True)
    for name in _IMPORTS:
        with suppress(ImportError):
            importlib.import_module(name)
    found = {}
    for verb in verbs:
        started = time.monotonic()
        process = _started(verb, folder, count_changes=True)
        status = os.waitpid(process, 0)[1]
        assert status == 0, _said(folder, verb)
        changes = int((folder.with_name(f"{folder.name}.changes")).read_text())
        found[verb] = Undisturbed(time.monotonic() - started, changes, result(folder, verb))
    return found


def kill(
    verb: str, count: int, peace: dict[str, Undisturbed], root: Path, rng: random.Random, *, again: float
) -> Tally:
    """Kills a verb `count` times, in as many runs as that takes.

    Args:
        verb: Of `RECIPES`.
        count: Kills.
        peace: From `undisturbed(root / "peace")`.
        root: A folder to work in.
        rng: Decides the moments.
        again: The chance that a run that was killed is killed once more.
    """
    tally = Tally()
    while tally.kills < count:
        folder = root / f"{verb}-{tally.runs}"
        folder.mkdir()
        if RECIPES[verb].reads:
            _copy(root / "peace" / RECIPES[verb].reads, folder / RECIPES[verb].reads)
        moments: list[str] = []
        while tally.kills < count and (not moments or rng.random() < again):
            moment, was_killed = _killed(verb, folder, peace[verb], rng, while_writing=tally.kills % 2 == 1)
            if not was_killed:  # it was through before
                break
            moments.append(moment)
            tally.kills += 1
            tally.while_writing += moment.startswith("change")
        status = os.waitpid(_started(verb, folder), 0)[1]
        tally.runs += 1
        harm = _said(folder, verb) if status else difference(peace[verb].result, result(folder, verb))
        if harm:
            tally.lost.append(f"{verb}, killed at {', '.join(moments)}: {harm}"[:400])
        shutil.rmtree(folder)
    return tally


def _killed(
    verb: str, folder: Path, peace: Undisturbed, rng: random.Random, *, while_writing: bool
) -> tuple[str, bool]:
    """One attempt: when it was to be killed, and whether it was."""
    if while_writing:
        number = rng.randint(1, peace.changes)
        status = os.waitpid(_started(verb, folder, kill_at=number), 0)[1]
        return f"change {number} of {peace.changes}", os.WIFSIGNALED(status)
    share = rng.random()
    process = _started(verb, folder)
    time.sleep(share * peace.seconds)
    os.kill(process, signal.SIGKILL)  # it is not waited for yet, so that no other can have its number
    status = os.waitpid(process, 0)[1]
    return f"{share:.0%} of the time", os.WIFSIGNALED(status)


def _started(verb: str, folder: Path, *, kill_at: int = 0, count_changes: bool = False) -> int:
    """The verb in a process of its own, in the folder; its number."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.chdir(folder)
        said = os.open(_said_file(folder, verb), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        changes = _watched(folder, kill_at)
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


def _watched(folder: Path, kill_at: int) -> list[int]:
    """Counts the changes that this process makes in a folder, and kills it just before the one with that number."""
    changes = [0]
    events = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod", "open")

    def look(event: str, args: tuple[Any, ...]) -> None:
        if event not in events:
            return
        if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        is_here = isinstance(args[0], int) or folder in (folder / os.fsdecode(args[0])).parents
        if is_here:
            changes[0] += 1
            if changes[0] == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)
    return changes


def _said_file(folder: Path, verb: str) -> Path:
    return folder.with_name(f"{folder.name}.{verb}.said")


def _said(folder: Path, verb: str) -> str:
    return _said_file(folder, verb).read_text(errors="replace").strip()[-300:] or "it said nothing"


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)


# ---------------------------------------------------------------- what came out


def result(folder: Path, verb: str) -> dict[str, Any]:
    """What a verb wrote and read and the facts it printed, without what differs from run to run; strays included."""
    recipe = RECIPES[verb]
    others = {other.writes for other in RECIPES.values()} - {recipe.reads, recipe.writes}  # in peace they are there
    found = {
        str(path.relative_to(folder)): _content(path)
        for path in folder.rglob("*")
        if path.name not in _SKIPPED and path.relative_to(folder).parts[0] not in others
    }
    if "--json" in recipe.words:
        found["said"] = _steady(json.loads(_json_part(_said_file(folder, verb).read_text())))
    return found


def _json_part(text: str) -> str:
    """The lines from the first brace at the begin of one; the lines before went to stderr."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line[:1] in "{[")
    return "\n".join(lines[first:])


def _content(path: Path) -> Any:
    if path.is_dir():
        return "folder"
    if path.suffix == ".profile":  # each session begins and ends with the reference, so that its rows vary
        return [_steady(line) for line in _lines(path) if not line.get("reference")]
    if path.name == "history.jsonl":
        return [_steady(line) for line in _lines(path)]
    if path.name == "cell.json":
        return _steady(json.loads(path.read_text()))
    return sha256(path.read_bytes()).hexdigest()


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in path.read_text().splitlines())


def _steady(tree: Any) -> Any:
    """Without the fields that vary."""
    if isinstance(tree, dict):
        return {key: _steady(value) for key, value in tree.items() if key not in _VARIES}
    return [_steady(value) for value in tree] if isinstance(tree, list) else tree


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
    peace = undisturbed(folder / "peace", tuple(verb for verb in RECIPES if verb in counts and can_run(verb)))
    tallies = {}
    for verb in peace:
        tallies[verb] = asdict(kill(verb, counts[verb], peace, folder, random.Random(verb), again=again))
        print(verb, tallies[verb], file=sys.stderr, flush=True)  # noqa: T201 - for who waits
    print(json.dumps(tallies))  # noqa: T201 - read by the test


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), json.loads(sys.argv[2]), float(sys.argv[3]))
