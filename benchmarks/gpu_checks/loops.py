"""Training loops of a user on the GPU: the README's, mixed precision with GradScaler, and a CUDA graph on and off."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import torch
import torch.nn.functional as F

import ecc
from gpu_checks.common import ROOT, CommandFailed, Context, Outcome, percent, run_python
from gpu_checks.runs import compress_words, history, make_energy_model, summary_of
from gpu_checks.user_net import Net, digits

REPORT = """
import json as _json
import torch as _torch
with _torch.no_grad():
    _inputs, _labels = loader.dataset.tensors
    _right = (slim(_inputs).argmax(1) == _labels).double().mean()
print("REPORT " + _json.dumps({
    "device": next(model.parameters()).device.type,
    "share": float(solver.cost[0]) / energy.dense,
    "prunable": len(graph.prunable),
    "accuracy": float(_right),
    "one_call": {"met": result.met, "score": result.score, "device": next(result.model.parameters()).device.type},
}))
"""
LEAST_ACCURACY = 0.8  # of the slim network on digits; a constant answer has 0.1
README_ACCURACY = 0.5  # its small network is trained for six epochs in all, and has about 0.7
BUDGET = 0.5
STEPS = 150
OVERFLOWING_SCALE = 2.0**24  # of the loss: the first gradients overflow in fp16, and GradScaler skips these steps
SLIM_TOLERANCE = 1e-2  # masked and slim outputs, relative to the largest: TF32 convolutions differ by up to 1e-3


# ---------------------------------------------------------------- the README's own loop


def own_loop(context: Context) -> Outcome:
    """Passed when the README's Python, with model and data on the device, and examples/own_loop.py succeed."""
    net, script = readme_on(context.device)
    (context.folder / "net.py").write_text(net, encoding="utf-8")
    (context.folder / "readme.py").write_text(f"{script}\n{REPORT}", encoding="utf-8")
    output = run_python(["readme.py"], context.folder, 120).output
    found = json.loads(output.rpartition("REPORT ")[2].splitlines()[0])
    example = "" if context.small else run_python([ROOT / "examples" / "own_loop.py"], context.folder, 80).output
    call = found["one_call"]
    good = found["device"] == call["device"] == context.device and found["share"] <= BUDGET and found["prunable"] > 0
    good &= found["accuracy"] >= README_ACCURACY and call["met"] and call["score"] >= README_ACCURACY
    scores = re.search(r"accuracy ([\d.]+)% -> ([\d.]+)%", example)
    if not context.small:
        good &= scores is not None and float(scores[2]) >= 100 * LEAST_ACCURACY
    summary = f"README: one call {'meets' if call['met'] else 'misses'} its budget, score {percent(call['score'])}"
    summary += f"; own loop {percent(found['share'])} of the energy (budget {percent(BUDGET)})"
    summary += f", accuracy {percent(found['accuracy'])}"
    return Outcome(good, summary, {"readme": found, "example_prints": example.strip().splitlines()[-3:]})


def readme_on(device: str) -> tuple[str, str]:
    """The README's net.py and its other Python blocks, with the model and the data on the device."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    net, script = blocks[0], "\n".join(blocks[1:])
    data = re.search(r"^images, labels = .*\n", net, re.MULTILINE)
    if not net.startswith("# net.py") or data is None or "\nnet = Net()" not in net or "model = Net()" not in script:
        raise CommandFailed("README.md has no block `# net.py` with `images, labels = ` and `net = Net()`.")
    moved = f"{data[0]}images, labels = images.to({device!r}), labels.to({device!r})\n"
    net = net.replace(data[0], moved).replace("\nnet = Net()", f"\nnet = Net().to({device!r})")
    script = re.sub(r"(?<!load_slim\()\bNet\(\)", f"Net().to({device!r})", script)
    return net, script


# ---------------------------------------------------------------- mixed precision


def amp_with_grad_scaler(context: Context) -> Outcome:
    """Passed when a loop with autocast and GradScaler meets its budget, and skipped steps change nothing."""
    device, steps = context.device, 40 if context.small else STEPS
    torch.manual_seed(0)
    images, labels = (tensor.to(device) for tensor in digits(12))
    model = Net(16 if context.small else 32).to(device)
    graph = ecc.trace_channels(model, images[:64])
    adam = torch.optim.Adam(model.parameters(), lr=2e-3)
    solver = ecc.EccSolver(model, graph, ecc.counted_cost(graph, "macs"), f"{BUDGET:.0%}", steps, optimizer=adam)
    dense = float(graph.macs())
    scaler = torch.amp.GradScaler(device, init_scale=OVERFLOWING_SCALE)
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    losses: list[float] = []
    skipped = 0
    generator = torch.Generator().manual_seed(0)
    model.train()
    while len(losses) < steps and skipped < 100:
        chosen = torch.randint(len(images), (128,), generator=generator).to(device)
        with torch.autocast(device, dtype=dtype):
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
        scaler.scale(loss).backward()
        scaler.unscale_(solver)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = scaler.get_scale()
        scaler.step(solver)
        scaler.update()
        solver.zero_grad()
        if scaler.get_scale() < scale:
            skipped += 1
        else:
            losses.append(float(loss.detach()))
    small = ecc.slim(model.eval(), graph)
    with torch.no_grad():
        masked, slimmed = model(images[:256]), small(images[:256])
        accuracy = float((slimmed.argmax(1) == labels[:256]).double().mean())
    difference = float((masked - slimmed).abs().max() / masked.abs().max())
    numbers: dict[str, Any] = {
        "steps": len(losses),
        "skipped_steps": skipped,
        "scale": scaler.get_scale(),
        "share_of_macs": float(solver.cost[0]) / dense,
        "first_loss": losses[0] if losses else math.nan,
        "last_loss": losses[-1] if losses else math.nan,
        "accuracy": accuracy,
        "slim_difference": difference,
    }
    good = len(losses) == steps and all(map(math.isfinite, losses)) and numbers["share_of_macs"] <= BUDGET
    good &= difference <= SLIM_TOLERANCE and losses[-1] < losses[0]
    if not context.small:
        good &= skipped > 0 and accuracy >= LEAST_ACCURACY
    summary = f"{percent(numbers['share_of_macs'])} of the MACs (budget {percent(BUDGET)})"
    summary += f", {skipped} steps skipped by GradScaler, accuracy {percent(accuracy)}"
    return Outcome(good, summary, numbers)


# ---------------------------------------------------------------- CUDA graph on and off

COMPARED_STEPS = 20
LOSS_TOLERANCE = 0.02  # of the first loss; relative to later, smaller losses, rounding differences look larger
SCORE_TOLERANCE = 0.03


def cuda_graph_on_and_off(context: Context) -> Outcome:
    """Passed when both runs meet the budget with close losses and scores."""
    energy = make_energy_model(context.folder)
    found: dict[str, Any] = {}
    for name, flags in (("off", []), ("on", ["--cuda-graph"])):
        run = context.folder / name
        words = compress_words(context, energy, run)
        seconds = run_python([*words, *flags], context.folder, 100).seconds
        dense = [line["loss"] for line in history(run) if line["phase"] == "pretrain"][:COMPARED_STEPS]
        found[name] = {"losses": dense, "seconds": seconds, **summary_of(run)}
    pairs = list(zip(found["on"]["losses"], found["off"]["losses"], strict=True))
    apart = max(abs(on - off) for on, off in pairs) / found["off"]["losses"][0]
    scores = abs(found["on"]["score"] - found["off"]["score"])
    good = len(pairs) == COMPARED_STEPS and apart <= LOSS_TOLERANCE and scores <= SCORE_TOLERANCE
    good &= found["on"]["met"] and found["off"]["met"]
    summary = f"losses of the first {len(pairs)} steps differ by {percent(apart)} of the first one, scores by {100 * scores:.1f} points"
    return Outcome(good, summary, {"loss_difference": apart, "score_difference": scores, **found})
