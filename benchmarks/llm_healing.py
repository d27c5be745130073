"""Healing of pruned language models: several networks at the same time, each in a process of its own, for `llm.py`.

A pruned network travels as a file with the tensors in which it differs from the dense one (`save_pruned`). Processes
share the GPU, so nothing is measured while they run.
"""

from __future__ import annotations

import copy
import json
import math
import time
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cells import Key, Pause, Supply, name_of
from llm_cost import kind_of
from safetensors.torch import load_file, save_file
from smollm2 import load_model
from torch import Tensor, nn

from ecc.errors import BadFile
from ecc.graph import ChannelGraph, trace_channels
from ecc.graph.slimming import build_slim
from ecc.settings import Cosine, DistillSettings, TrainSettings
from ecc.task import Task
from ecc.training import BatchStream, Teacher, train
from ecc.zoo.language import LogLikelihood, TokenBatches
from ecc.zoo.language import load_model as load_folder

TOKENS = "tokens.safetensors"
"""File with the text as tokens, in the folder that processes share."""


def load_network(options: Namespace) -> tuple[nn.Module, ChannelGraph]:
    """The dense network on its device, and its channel graph."""
    folder: Path = options.weights
    model: Any = load_model(folder) if (folder / "packed.json").is_file() else load_folder(folder)[0]
    graph_file = options.graph or folder / "graph.json"
    try:
        graph = ChannelGraph.load(graph_file)
    except BadFile:  # missing, or of an earlier version
        graph = trace_channels(model, {"input_ids": torch.randint(1, model.config.vocab_size, (2, 8))}, verify=False)
        graph.save(graph_file)
    # Only what the costs depend on is pruned, so that no method prunes what saves nothing here.
    groups = tuple(
        one if kind_of(one.name) or one.frozen is not None else replace(one, frozen="not compared here")
        for one in graph.groups
    )
    return model.to(torch.device(options.device)), replace(graph, groups=groups)


def token_stream(model: nn.Module, sequences: Tensor, batch: int, seed: int, device: torch.device) -> BatchStream:
    """Batches of the text in an order that the seed draws."""
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(seed))
    batches = TokenBatches(sequences[order], batch)
    task = Task(name="smollm2", model=model, example_input={"input_ids": sequences[:1]}, train_batches=batches)
    return BatchStream(task, device=device, seed=seed)


def perplexity(model: nn.Module, evaluate: LogLikelihood, device: torch.device) -> float:
    """Perplexity with the weights and activations in half precision on a GPU, as deployed."""
    used = copy.deepcopy(model).to(torch.bfloat16) if device.type == "cuda" else model
    return math.exp(min(50.0, -evaluate(used)))


def save_pruned(
    folder: Path, key: Key, model: nn.Module, dense: Mapping[str, Tensor], found: Mapping[str, Any]
) -> None:
    """Write a pruned network, and what its cell has so far.

    Args:
        folder: That the processes share.
        key: Of the cell.
        model: The network with masked channels.
        dense: The weights of the dense network.
        found: The result without healing.
    """
    changed = {
        name: tensor.detach().clone().contiguous()
        for name, tensor in model.state_dict().items()
        if not torch.equal(tensor, dense[name])
    }
    save_file(changed, folder / f"{name_of(key)}.safetensors")
    (folder / f"{name_of(key)}.json").write_text(json.dumps(found), encoding="utf-8")


def heal_cells(supply: Supply, options: Namespace, folder: Path) -> None:
    """Heal networks until there are none: the work of a process."""
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    model, graph = load_network(options)
    text = load_file(folder / TOKENS)
    teacher = Teacher(model, DistillSettings(weight=options.kd_weight, temperature=1.0))
    test = LogLikelihood(text["test"], options.evaluation_batch)

    def run(key: Key, pause: Pause) -> dict[str, Any]:
        del pause
        started = time.monotonic()
        name = name_of(key)
        masked = copy.deepcopy(model)
        masked.load_state_dict(load_file(folder / f"{name}.safetensors"), strict=False)
        small = build_slim(masked, graph)
        del masked
        found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        heal(small, teacher, text["learn"], options, key["seed"])
        found["healed_perplexity"] = perplexity(small, test, device)
        found["heal_steps"], found["batches"] = options.heal_steps, found["batches"] + options.heal_steps
        found["seconds_healing"] = round(time.monotonic() - started, 2)
        del found["is_partial"]
        return found

    supply.run(run)


def heal(model: nn.Module, teacher: Teacher, sequences: Tensor, options: Namespace, seed: int) -> None:
    """Distillation against the dense model; the same batches for every method."""
    device = torch.device(options.device)
    half = device.type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.heal_lr, betas=(0.9, 0.95), weight_decay=0.01, fused=half
    )
    train(
        model,
        optimizer,
        token_stream(model, sequences, options.batch, seed, device),
        steps=options.heal_steps,
        loss=None,
        settings=TrainSettings(precision="bf16" if half else "fp32", clip_norm=1.0, log_every=1000, seed=seed),
        schedule=Cosine(start_lr=options.heal_lr),
        teacher=teacher,
    )
