"""Which layers of an int8 network should stay in fp32, by measured loss and measured cost, with onnxruntime on the CPU.

    OMP_NUM_THREADS=1 python3 benchmarks/precision_layers.py --out results/precision_layers.json

The dense digits network is trained once and quantized to int8. Then each layer alone is left in fp32. Its cost is the latency of that
file relative to the int8 file, measured in turns; its gain is the change of the output error, relative to fp32 outputs on test images.
The layers that gain most per cost are left in fp32 together until their costs add up to a budget, and that file is measured anew.
Latency is CPU time of one thread.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from pathlib import Path
from typing import Any

import onnx
import torch
from machine import machine, write_record
from precision import RUNNER, train

from ecc.graph.numerics import relative_error
from ecc.measure import measure
from ecc.measure.meters.cputime import CpuTimeMeter
from ecc.measure.runners import PreparedRunner, RunnerModule
from ecc.measure.runners.onnx_network import OnnxNetwork, quantize
from ecc.measure.runners.runtime import Session, open_session
from ecc.measure.window import probe_under_load
from ecc.profiling import calibration_inputs
from ecc.settings import CLOCK_SETTINGS
from ecc.task import Inputs, Task, with_batch_size
from ecc.zoo.registry import find_task

LAYERS = ("Conv", "Gemm", "MatMul")


class Files:
    """Quantises one network with some layers in fp32, and measures what comes out."""

    def __init__(self, task: Task, batch: int, turns: int) -> None:
        self.task, self.turns = task, turns
        self.example = with_batch_size(task.example_input, batch)
        self.network = OnnxNetwork.of(task.model, self.example)
        (self.name,) = self.network.names
        batches = calibration_inputs(task, batch, 8)
        self.feeds = [{self.name: one.numpy()} for one in batches if isinstance(one, torch.Tensor)]
        self.meter = CpuTimeMeter()
        self.counter: Any = None
        self.wanted = [torch.from_numpy(array) for array in self.open(self.network.data).infer(self.feeds[0])]
        self.layers = [
            node.name for node in onnx.load_model_from_string(self.network.data).graph.node if node.op_type in LAYERS
        ]

    def open(self, data: bytes) -> Session:
        """Load a file."""
        return open_session(RUNNER, data, self.network.inputs, threads=1)

    def int8(self, excluded: list[str]) -> Session:
        """The network in int8, except for some layers."""
        return self.open(quantize(self.network.data, self.feeds, excluded=excluded))

    def error(self, session: Session) -> float:
        """Largest difference of an output from fp32, relative to the largest output."""
        return relative_error(self.wanted, [torch.from_numpy(array) for array in session.infer(self.feeds[0])])

    def infer(self, session: Session, inputs: Inputs) -> list[torch.Tensor]:
        """Outputs for images."""
        assert isinstance(inputs, torch.Tensor)
        return [torch.from_numpy(array) for array in session.infer({self.name: inputs.numpy()})]

    def score(self, session: Session) -> float:
        """Accuracy on the test images."""
        assert self.task.evaluate is not None
        ready = PreparedRunner(
            run=session.run, device=torch.device("cpu"), batch=len(self.network.inputs[self.name]), runner=RUNNER,
            reason="", is_asynchronous=False, versions={},
            infer=lambda inputs: self.infer(session, inputs),
        )  # fmt: skip
        return float(self.task.evaluate(RunnerModule(ready, self.task.model, self.example)))

    def ratio(self, session: Session, base: Session) -> tuple[float, float]:
        """Latency relative to another file, measured in turns, and its spread."""
        settings = CLOCK_SETTINGS
        if self.counter is None:
            self.counter = probe_under_load(base.run, self.meter, settings, device="cpu", is_asynchronous=False)

        def seconds(one: Session) -> float:
            return measure(one.run, self.meter, settings, is_asynchronous=False, counter=self.counter).seconds

        ratios = [seconds(session) / seconds(base) for _ in range(self.turns)]
        return statistics.median(ratios), statistics.stdev(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--train-steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--budgets", type=float, nargs="+", default=[1.0, 1.1], help="latency, relative to int8")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    task = find_task("digits")
    train(task, options.train_steps)
    files = Files(task, options.batch, options.turns)
    full, dense = files.int8([]), files.open(files.network.data)
    base_error = files.error(full)
    layers: list[dict[str, Any]] = []
    for name in files.layers:
        file = files.int8([name])
        ratio, spread = files.ratio(file, full)
        layers.append({"layer": name, "latency": ratio, "spread": spread, "error": files.error(file)})
        print(layers[-1], flush=True)
    ratio, spread = files.ratio(dense, full)
    rows: list[dict[str, Any]] = [
        {"way": "fp32", "latency": ratio, "spread": spread, "error": 0.0, "score": files.score(dense)},
        {"way": "int8", "latency": 1.0, "spread": 0.0, "error": base_error, "score": files.score(full)},
    ]
    helping = [one for one in layers if one["error"] < base_error]
    helping.sort(key=lambda one: (base_error - one["error"]) / max(1e-3, one["latency"] - 1), reverse=True)
    for budget in options.budgets:
        kept, spent = list[str](), 1.0
        for one in helping:
            if spent + max(0.0, one["latency"] - 1) <= budget:
                kept, spent = [*kept, one["layer"]], spent + max(0.0, one["latency"] - 1)
        mixed = files.int8(kept)
        ratio, spread = files.ratio(mixed, full)
        row = {"way": f"int8, {len(kept)} layers fp32", "budget": budget, "layers": kept, "latency": ratio}
        rows.append({**row, "spread": spread, "error": files.error(mixed), "score": files.score(mixed)})
    record = {
        "what": "int8 with some layers in fp32, onnxruntime on the CPU, digits",
        "environment": machine(),
        "batch": options.batch,
        "layers": layers,
        "rows": rows,
    }
    write_record(record, options.out)
    for row in rows:
        print(row, flush=True)


if __name__ == "__main__":
    main()
