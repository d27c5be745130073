"""Ten trials of ECC as a new user has it: ten programs that were not written for it, and what goes wrong for them.

    python3 -m venv fresh && fresh/bin/pip install torch '.[digits,transformers,export,tensorboard,wandb,mlflow]' ultralytics
    fresh/bin/python benchmarks/new_user_trials.py --out results/new_user_trials.json [--only lstm gan]

Each program of `benchmarks/trials` contains an ordinary network, its data and its training, and calls ECC as the README shows.
Every command runs in a process of its own. A command that is meant to fail has to end with a message that says what to do.
Data are random, and trainings are short: the trials show whether ECC works and is understood, not accuracy. Seconds are
processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from machine import machine, write_record

PROGRAMS = Path(__file__).resolve().parent / "trials"


@dataclass(frozen=True)
class Command:
    """A command of a trial, the part of its output that shows that it went as it should, and whether it fails."""

    words: str
    expected: str
    fails: bool = False


@dataclass(frozen=True)
class Trial:
    """A network, the packages that it needs, its commands, and what was confusing before it was changed."""

    network: str
    commands: tuple[Command, ...]
    confusing: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


def run(words: str, expected: str) -> Command:
    return Command(words, expected)


def fail(words: str, expected: str) -> Command:
    return Command(words, expected, fails=True)


SHORT = "--pretrain-steps 20 --prune-steps 20 --finetune-steps 10"
TRIALS = {
    "yolo": Trial(
        "YOLOv8n of ultralytics, from its configuration",
        (
            fail("yolo.py wrapper", "pass `yolo.model`"),
            fail("yolo.py batches", "keys img, cls, bboxes, batch_idx.*give example_input="),
            run("yolo.py compress", "macs .*: met"),
            run("yolo.py load", "parameters"),
        ),
        (
            "A dict batch that is not the input of the network ended in `missing 1 required positional argument: 'x'`; the "
            "message now says that it was taken from train_loader, with its keys, and names `example_input=`.",
            "The table of `ecc.inspect` divided long module names at any letter; it now has one name per line.",
        ),
        ("ultralytics",),
    ),
    "detector": Trial(
        "own anchor-free detector with a feature pyramid",
        (
            fail("detector.py net", "name the first parameter `model`"),
            run("detector.py compress", "macs .*: met"),
            run("detector.py load", "boxes"),
        ),
        (
            "A loss `loss(net, batch)` was called as `loss(outputs, targets)` and failed with `too many values to unpack`; the "
            "message now says that the first parameter has to be named `model`.",
            "The warning that distillation is off did not say how to turn it off without a warning.",
        ),
    ),
    "bert": Trial(
        "DistilBERT classifier of transformers, random weights",
        (
            fail("bert.py cross_entropy", "loss=lambda model, batch: model"),
            run("bert.py compress", "macs .*: met"),
            run("bert.py load", "accuracy"),
            run("bert.py trainer", "of the MACs"),
        ),
        (
            "The callback of the Trainer logged MACs under the name `ecc/energy`; it now logs `ecc/macs`.",
            "`save_pretrained` writes the dense sizes, so `from_pretrained` fails; the README now names `save_pruned`.",
        ),
        ("transformers",),
    ),
    "llama": Trial(
        "small Llama of transformers, random weights",
        (
            fail("llama.py generator", "ends after one epoch; give a DataLoader, a list"),
            fail("llama.py no_meter", "meter='platform:jetson-tx2'"),
            run("llama.py compress", "decode .* per token .*: met"),
            run("llama.py load", r"\[\[1, 4, 7"),
        ),
        (),
        ("transformers",),
    ),
    "lstm": Trial(
        "bidirectional LSTM over sequences of different lengths",
        (
            run("lstm.py compress", "macs .*: met"),
            fail("lstm.py three", "give example_input="),
            run("lstm.py packed", "macs .*: met"),
            run("lstm.py load", "accuracy"),
        ),
        (
            "The ONNX export printed two long warnings of torch about `_flat_weights`; they are hidden, and the file is "
            "compared with the network as before.",
        ),
        ("onnxscript",),
    ),
    "unet": Trial(
        "U-Net with a frozen encoder, interrupted and resumed",
        (
            run("unet.py freeze", r"'down1.0': 16, 'down1.3': 16"),
            fail("unet.py freeze_typo", "freeze pattern 'encoder.*' matches no module"),
            fail("unet.py interrupt", "Run the same command again to resume"),
            run("unet.py resume", "energy .*: met"),
            fail("unet.py other_budget", "Use the same settings to resume, or another folder"),
            fail("unet.py other_weights", "call torch.manual_seed before you build the network"),
            run("unet.py load", "IoU"),
            fail("unet.py load_wrong", "Build the network as for the run"),
            fail("unet.py one_percent", r"a budget of at least \d+ %"),
            fail("unet.py no_unit", "has no unit; write 50%"),
        ),
        (
            "The batch axis of the ONNX file had a name such as `s77`; it is now `batch`.",
            "The guide did not say what happens to layers with `requires_grad=False`; it does now.",
        ),
        ("onnxscript",),
    ),
    "gan": Trial(
        "DCGAN, whose generator is pruned in the adversarial loop",
        (
            run("gan.py train", "of the energy"),
            fail("gan.py wrong_optimizer", "holds none of the model's"),
            run("gan.py stop_early", "the budget is not met: energy .*Call step"),
            run("gan.py load", "parameters"),
        ),
        (
            "The warning about an unmet budget had numbers such as 2.553e+07; they now have prefixes and units.",
            "The cost divided by `energy.dense` was above the budget, because percentages refer to the dense network as it was "
            "profiled; README and guide now use `energy.dense_profiled` and `solver.limits`.",
        ),
    ),
    "mobilenet": Trial(
        "network like MobileNetV2 with squeeze-and-excitation",
        (
            fail("mobilenet.py dataset", "give a DataLoader"),
            fail("mobilenet.py prints_only", "return one number"),
            fail("mobilenet.py test_loader", "give a function or None"),
            run("mobilenet.py cpu_time", r"energy .*declared 15 W"),
            run("mobilenet.py several", "macs .*: met"),
            run("mobilenet.py load", "accuracy"),
        ),
        (
            "The report of several budgets that `result.report()` wrote was that of the last budget; it now shows all of them.",
            "Reports of counted budgets said `device: not known yet`, and the card of the dense network had a number without a name.",
        ),
        ("onnxscript",),
    ),
    "own_loop": Trial(
        "own loop with bf16 autocast, accumulation, clipping, OneCycle",
        (run("own_loop.py stop", "stopped at"), run("own_loop.py resume", "of the energy .estimated., accuracy")),
    ),
    "command_line": Trial(
        "the command line alone, with the bundled task",
        (
            run("ecc doctor --quick", "platform:jetson-tx2"),
            run("ecc inspect digits", "5 of 6 groups are prunable"),
            fail("ecc compress digits --budget macs=50%", "'-o' / '--output'.*--help has examples"),
            fail("ecc compress digit --budget macs=50% -o run", "digit"),
            fail("ecc compress digits --budget 2% --meter platform:jetson-tx2 --samples 60 -o little", "at least"),
            run(
                "ecc compress digits --budget 50% --meter platform:jetson-tx2 --samples 60 -o run --pretrain-steps 100 "
                "--pretrain-lr 3e-3 --lr 1e-3 --prune-steps 100 --finetune-steps 50",
                "energy .estimated.*met",
            ),
            run("ecc export run --format onnx", "max relative error"),
            run("ecc report run -o report.html", "report.html"),
            fail(f"ecc compress digits --budget macs=50% --tracker wand:x -o wrong {SHORT}", "wandb"),
            run(f"ecc compress digits --budget macs=50% --tracker tensorboard:tb -o tb-run {SHORT}", "met"),
            run(f"ecc compress digits --budget macs=50% --tracker wandb:trial -o wandb-run {SHORT}", "met"),
            run(f"ecc compress digits --budget macs=50% --tracker mlflow:sqlite:///ml.db -o ml-run {SHORT}", "met"),
            run(f"ecc compare digits --budgets macs=50% --methods ecc,uniform --seeds 2 -o both {SHORT}", "uniform"),
            run("ecc report both -o both.html", "both.html"),
        ),
        (
            "The note below the table of `ecc export` began with `Error:`, as if something had failed.",
            "Errors proposed `min_width_ratio=0.05` on the command line; they now say `--min-width-ratio 0.05`.",
            "A missing `-o` was reported without a hint; the message now points to the examples of `--help`.",
        ),
        ("sklearn", "onnxscript", "tensorboard", "wandb", "mlflow"),
    ),
}


def run_trial(trial: Trial, folder: Path) -> dict[str, Any]:
    """Run the commands of a trial one after another in a folder."""
    missing = [name for name in trial.packages if find_spec(name) is None]
    row: dict[str, Any] = {"network": trial.network, "confusing": list(trial.confusing)}
    if missing:
        return {**row, "skipped": f"not installed: {', '.join(missing)}"}
    commands = [run_command(command, folder) for command in trial.commands]
    return {**row, "cpu_minutes": round(sum(one["cpu_seconds"] for one in commands) / 60, 2), "commands": commands}


def run_command(command: Command, folder: Path) -> dict[str, Any]:
    """Run a command in a process of its own, and compare its output with what is expected."""
    first, *rest = command.words.split()
    words = [sys.executable, *(("-m", "ecc") if first == "ecc" else (str(PROGRAMS / first),)), *rest]
    settings = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WANDB_MODE": "offline",
        "COLUMNS": "200",
        "YOLO_VERBOSE": "false",
    }
    with tempfile.TemporaryFile() as stderr, tempfile.TemporaryFile() as stdout:
        process = subprocess.Popen(words, cwd=folder, env=settings, stdout=stdout, stderr=stderr)
        _, status, usage = os.wait4(process.pid, 0)  # the usage of this process and of those that it waited for
        process.returncode = code = os.waitstatus_to_exitcode(status)
        for file in (stderr, stdout):
            file.seek(0)
        output = "\n".join(file.read().decode(errors="replace") for file in (stderr, stdout))
    for place in (folder, PROGRAMS):
        output = output.replace(f"{place}/", "")
    found = re.search(command.expected, output, re.DOTALL)
    as_expected = found is not None and (code != 0) == command.fails
    lines = [line for line in output.splitlines() if line.strip()]
    shown = [line for line in lines if re.search(command.expected, line)] or lines
    row: dict[str, Any] = {
        "command": f"{'' if first == 'ecc' else 'python '}{command.words}",
        "exit_code": code,
        "as_expected": as_expected,
        "output": " ".join(shown[-1].split())[:400],
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
    }
    print("ok  " if as_expected else "FAIL", row["command"], f"{row['cpu_seconds']} s", row["output"][:120], flush=True)
    return row if as_expected else {**row, "all_output": lines[-30:]}


def main() -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=TRIALS, help="run these; others stay as they are in the file")
    parser.add_argument("--jobs", type=int, default=1, help="trials at the same time")
    args = parser.parse_args()
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a program in the background ignores it, and passes that on
    earlier = json.loads(args.out.read_text(encoding="utf-8"))["trials"] if args.only and args.out.exists() else {}
    rows: dict[str, Any] = {
        name: {**earlier[name], "confusing": list(trial.confusing)} for name, trial in TRIALS.items() if name in earlier
    }
    packages = sorted({"torch", *(name for trial in TRIALS.values() for name in trial.packages)} - {"sklearn"})
    versions = {package: version(package) for package in packages if find_spec(package)}
    chosen = args.only or list(TRIALS)
    with tempfile.TemporaryDirectory() as root, ThreadPoolExecutor(args.jobs) as pool:
        for name in chosen:
            Path(root, name).mkdir()
        done = {pool.submit(run_trial, TRIALS[name], Path(root, name)): name for name in chosen}
        for future in as_completed(done):
            rows[done[future]] = future.result()
            ordered = {name: rows[name] for name in TRIALS if name in rows}
            write_record({"machine": machine(packages=versions), "trials": ordered}, args.out)


if __name__ == "__main__":
    main()
