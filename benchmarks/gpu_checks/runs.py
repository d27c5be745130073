"""Whole runs on the GPU: the command line with the NVML meter, kill and resume, two processes on one GPU."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

from gpu_checks.common import (
    ROOT,
    CommandFailed,
    Context,
    Outcome,
    finish,
    kill_group,
    percent,
    run_python,
    start_python,
)

PLATFORM = "platform:jetson-tx2"  # an estimate: runs that check something else than energy take a moment to profile
NET = "user_net.py"
SAMPLES = 30
BUDGET = "70%"
SCORE_TOLERANCE = 0.03


# ---------------------------------------------------------------- pieces that checks share


def make_energy_model(folder: Path) -> Path:
    """An energy model of the small user network, from an analytic platform."""
    copy_net(folder)
    words = ["-m", "ecc", "profile", f"{NET}:build_small", "--meter", PLATFORM, "--samples", "60", "-q"]
    run_python([*words, "-o", "small.profile"], folder, 60)
    run_python(["-m", "ecc", "fit", "small.profile", "-o", "energy.json"], folder, 60)
    return folder / "energy.json"


def copy_net(folder: Path) -> None:
    """The user's file, in the folder of the check."""
    shutil.copy(Path(__file__).with_name(NET), folder / NET)


def compress_words(context: Context, energy: Path, run: Path, steps: int = 150) -> list[str]:
    """`ecc compress` of the small user network with an estimated budget."""
    phases = ["--pretrain-steps", str(steps), "--prune-steps", str(steps), "--finetune-steps", str(steps // 3)]
    rates = ["--pretrain-lr", "3e-3", "--lr", "1e-3", "--checkpoint-every", "0.5", "-q"]
    words = ["-m", "ecc", "compress", f"{NET}:build_small", "--energy", str(energy), "--budget", "50%"]
    return [*words, "-o", str(run), "--meter", PLATFORM, "--device", context.device, *phases, *rates]


def history(run: Path) -> list[dict[str, Any]]:
    """All complete lines of the history of a run."""
    file = run / "history.jsonl"
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def summary_of(run: Path) -> dict[str, Any]:
    """What matters of a finished run."""
    found = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    energy = found["budgets"]["energy"]
    return {
        "met": found["met"],
        "label": energy["label"],
        "share_of_budget": energy["result"] / energy["limit"],
        "share_of_dense": energy["result"] / energy["dense"],
        "score": found["scores"]["finetuned"],
        "dense_score": found["scores"]["dense"],
        "widths": found["widths"],
    }


def sessions(run: Path) -> list[dict[str, Any]]:
    """The processes that worked on a run, the first one first."""
    found: list[dict[str, Any]] = json.loads((run / "environment.json").read_text(encoding="utf-8"))["sessions"]
    return found


# ---------------------------------------------------------------- the command line


def command_line_with_meter(context: Context) -> Outcome:
    """Passed when `ecc profile`, `fit` and `compress` succeed with the meter, and the measured budget is met."""
    folder = context.folder
    copy_net(folder)
    meter, label = ("nvml", "measured") if context.device == "cuda" else (PLATFORM, "estimated")
    net = f"{NET}:build_small" if context.small else f"{NET}:build"
    words = ["-m", "ecc", "profile", net, "--meter", meter, "--samples", str(SAMPLES), "-o", "net.profile"]
    profile = run_python(words, folder, 120)
    kept = ROOT / "build" / "gpu"
    kept.mkdir(parents=True, exist_ok=True)
    shutil.copy(folder / "net.profile", kept / "command_line.profile")  # beside the logs
    fit = run_python(["-m", "ecc", "fit", "net.profile", "-o", "energy.json", "--json"], folder, 60)
    words = ["-m", "ecc", "compress", net, "--energy", "energy.json", "--budget", BUDGET, "-o", "run", "-q"]
    steps = [
        "--pretrain-steps",
        "100",
        "--prune-steps",
        "150",
        "--finetune-steps",
        "50",
        "--pretrain-lr",
        "2e-3",
        "--lr",
        "1e-3",
    ]
    compress = run_python([*words, "--meter", meter, "--device", context.device, *steps], folder, 120)
    quality = json.loads(fit.output[fit.output.index("{") : fit.output.rindex("}") + 1])["errors"]
    found = summary_of(folder / "run")
    numbers = {
        "profile_seconds": profile.seconds,
        "rows": SAMPLES,
        "fit_seconds": fit.seconds,
        "fit": {name: value for name, value in quality.items() if isinstance(value, str | float | int)},
        "compress_seconds": compress.seconds,
        "budget": BUDGET,
        **found,
    }
    good = found["met"] and found["label"] == label and found["score"] >= 0.8
    summary = (
        f"{percent(found['share_of_dense'])} of the {label} joules (budget {BUDGET}), score "
        f"{percent(found['dense_score'])} -> {percent(found['score'])}, "
        f"profile of {SAMPLES} samples in {profile.seconds:.0f} s"
    )
    return Outcome(good, summary, numbers)


# ---------------------------------------------------------------- kill and resume


def checkpoint_and_resume(context: Context) -> Outcome:
    """Passed when a run killed while it prunes is completed by the same command, about as well as one never killed."""
    steps = 60 if context.small else 600
    energy = make_energy_model(context.folder)
    killed, whole = context.folder / "killed", context.folder / "whole"
    faster = ["--channels-last", "--precision", "bf16"]  # files keep no strides, and fused optimizers need them
    words = [*compress_words(context, energy, killed, steps), *faster]
    other = start_python([*compress_words(context, energy, whole, steps), *faster], context.folder)
    try:
        killed_at = _killed_while_pruning(words, killed, context.folder, steps // 3)
        again = run_python(words, context.folder, 100)
        finish(other, 60)
    finally:
        kill_group(other)
    worked = sessions(killed)
    later = [line for line in history(killed) if line["wall"]["time"] >= worked[-1]["started"]]
    resumed_at = later[0]["total"] if later else 0
    found, expected = summary_of(killed), summary_of(whole)
    apart = abs(found["score"] - expected["score"])
    good = found["met"] and expected["met"] and apart <= SCORE_TOLERANCE and len(worked) == 2 and resumed_at > 1
    good &= all(session["device"].startswith(context.device) for session in worked)
    summary = (
        f"killed at step {killed_at}, resumed at {resumed_at}, score {100 * apart:.1f} points from a run never killed"
    )
    return Outcome(
        good,
        summary,
        {
            "killed_at": killed_at,
            "resumed_at": resumed_at,
            "sessions": len(worked),
            "resumed": found,
            "never_killed": expected,
            "same_widths": found["widths"] == expected["widths"],
            "seconds_after_resume": again.seconds,
        },
    )


def _killed_while_pruning(words: list[str], run: Path, folder: Path, least_steps: int) -> int:
    """Start a run, kill it with SIGKILL once it has pruned for `least_steps`; the number of batches it had taken."""
    process = start_python(words, folder)
    deadline = time.monotonic() + 100
    try:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                output, _ = process.communicate()
                raise CommandFailed(f"the run ended before it was killed, exit code {process.returncode}.\n{output}")
            lines = [line for line in history(run) if line["phase"] == "prune" and line["step"] >= least_steps]
            if lines and (run / "checkpoint.safetensors").exists():
                return int(lines[-1]["total"])
            time.sleep(0.05)
        raise CommandFailed("the run did not reach the pruning phase within 100 s.")
    finally:
        kill_group(process)
        process.communicate()


# ---------------------------------------------------------------- two processes


def two_processes_on_one_gpu(context: Context) -> Outcome:
    """Passed when torchrun with two processes on one device prunes the same channels in both, within the budget."""
    run = context.folder / "run"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = run_python([*torchrun, ROOT / "examples" / "multi_gpu.py", run], context.folder, 110)
    share = re.search(r"energy ([\d.]+)% of the budget", found.output)
    same = "the same in all processes: True" in found.output
    devices = [session["device"] for session in sessions(run)]
    good = "2 processes" in found.output and same and share is not None and float(share[1]) <= 100
    good &= bool(devices) and all(device.startswith(context.device) for device in devices)
    shown = percent(float(share[1]) / 100) if share else "unknown"
    summary = f"the same channels in both processes: {same}, {shown} of the budget"
    numbers = {"same_channels": same, "share_of_budget": shown, "devices": devices, "seconds": found.seconds}
    return Outcome(good, summary, numbers | {"prints": found.output.strip().splitlines()[-3:]})
