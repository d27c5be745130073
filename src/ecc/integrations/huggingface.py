"""Hugging Face: pruned models as folders (`save_pruned`, `load_pruned`), and ECC in the Trainer (`EccCallback`).

In the Trainer the solver is the optimizer; a callback logs, checks the budget and slims.

model.to(args.device)  # before the solver is created
solver = EccSolver(model, graph, energy, "60%", args.max_steps)
callback = EccCallback(model, graph)
Trainer(model, args, train_dataset=data, optimizers=(solver, None), callbacks=[callback]).train()
callback.slim  # the small network
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel, TrainerCallback

from ecc.errors import BadFile, BadTask, one_line
from ecc.export.model_card import model_card
from ecc.export.slim_file import slim_from_state
from ecc.graph import ChannelGraph
from ecc.graph.masked_norm import MASKED_NORMS
from ecc.graph.model_copy import unsaved_tensors, whole_state
from ecc.graph.removal import REMOVED, SIZES
from ecc.io import write_text
from ecc.measure.tokens import number_caches_
from ecc.records import read_record, write_record
from ecc.run_records import RunSummary
from ecc.training import Logger
from ecc.zoo.language import quiet_transformers

from .monitor import SolverMonitor


class EccCallback(TrainerCallback):  # type: ignore[misc] # untyped where transformers is not installed
    """Adds cost and widths to the logs of the Trainer, and slims the network when the training ends.

    The Trainer calls its own reporters first, so they do not see these metrics; `log_history` and `loggers` have them.

    Args:
        network: The module that was traced: the Trainer's model or a part of it.
        graph: Its channel graph.
        loggers: Also receive the metrics, such as `ecc.integrations.wandb.WandbLogger`.

    Raises:
        EccError: When training starts, if the Trainer has no `EccSolver`, or one for more steps than it makes.
    """

    def __init__(self, network: nn.Module, graph: ChannelGraph, *, loggers: Sequence[Logger] = ()) -> None:
        self._monitor, self._loggers = SolverMonitor(network, graph), tuple(loggers)
        self._last = -1

    @property
    def slim(self) -> nn.Module | None:
        """The small network, once training has ended."""
        return self._monitor.slim

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the solver."""
        del args, control
        self._monitor.begin([kwargs.get("optimizer")], state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add the metrics of the solver."""
        del args, control
        metrics = self._monitor.metrics() if self._monitor.slim is None else {}
        for entry in (kwargs.get("logs"), state.log_history[-1] if state.log_history else None):
            if entry is not None:
                entry.update(metrics)
        if metrics and state.global_step > self._last:  # the Trainer logs once more at the end
            self._last = state.global_step
            for logger in self._loggers:
                logger.log(metrics, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Slim the network."""
        del args, state, control, kwargs
        self._monitor.end()
        for logger in self._loggers:
            logger.close()


# ---------------------------------------------------------------- pruned models as folders

SIZES_FILE = "ecc.json"
"""In the folder of a pruned model: what its configuration cannot say."""
WEIGHTS_FILE = "model.safetensors"
_PREPROCESSOR_FILE = "preprocessor_config.json"
_FORMAT = "ecc pruned model, version 1"


@dataclass(frozen=True, kw_only=True)
class PrunedRecord:
    """The file `ecc.json` of a pruned model."""

    format: str
    architecture: str
    """Class of transformers, such as LlamaForCausalLM."""
    has_plain_config: bool
    """Whether `from_pretrained` of transformers loads the folder as well."""
    sizes: dict[str, dict[str, int | float]] = field(default_factory=dict)
    """Attributes such as `num_heads` or the epsilon of a norm that changed, by module."""
    removed: dict[str, Any] = field(default_factory=dict)
    """Modules of removed branches, and what stands for them."""
    masked_norms: list[str] = field(default_factory=list)
    """Modules with a layer norm in which some channels are masked."""


def save_pruned(
    model: nn.Module,
    folder: str | Path,
    *,
    tokenizer: Any = None,
    source: str | Path | None = None,
    summary: RunSummary | None = None,
) -> Path:
    """Write a pruned model of transformers as a folder, with safetensors, tokenizer and model card.

    If all layers have equal sizes, the configuration says them, and `from_pretrained` of transformers loads the folder.
    The configuration of other models keeps the sizes of the dense network, since the networks of transformers read one
    size for all layers; `load_pruned` loads them.

        save_pruned(result.model, "small", tokenizer=tokenizer, summary=result.summary)
        model = load_pruned("small")

    Args:
        model: The slim network, such as `CompressResult.model`.
        folder: Folder to write to.
        tokenizer: The tokenizer, or the folder or name that it is loaded from; None leaves it out.
        source: Folder or name of the dense model, from which the tokenizer, or the preprocessor of images, is taken.
        summary: Summary of the run, for the model card.

    Raises:
        BadTask: If the model is no model of transformers.
        BadFile: If a file cannot be written.
    """
    folder = Path(folder)
    if not isinstance(model, PreTrainedModel):
        raise BadTask(f"model is {type(model).__name__}; give a model of transformers.")
    state = whole_state(model)
    sizes, removed, norms = state.pop(SIZES, {}), state.pop(REMOVED, {}), state.pop(MASKED_NORMS, [])
    plain = _plain_config(model, sizes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        dense = model.config
        try:
            model.config = dense if plain is None else plain
            # With the names of the modules. transformers would write the names of an older version for some models.
            options = {"max_shard_size": "1TB", "save_original_format": False}
            with quiet_transformers():
                tensors = _tensors_to_save(model, with_buffers=plain is None)
                model.save_pretrained(folder, state_dict=tensors, **options)
        finally:
            model.config = dense
        if source is not None and model.main_input_name == "pixel_values":
            file = Path(source) / _PREPROCESSOR_FILE
            if file.is_file():
                shutil.copy(file, folder / _PREPROCESSOR_FILE)
        elif source is not None and tokenizer is None:
            tokenizer = source
        if isinstance(tokenizer, str | Path):
            tokenizer = AutoTokenizer.from_pretrained(str(tokenizer), trust_remote_code=False)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    except OSError as error:
        raise BadFile(f"the model cannot be written to {folder}: {error.strerror or error}.") from None
    record = PrunedRecord(
        format=_FORMAT,
        architecture=type(model).__name__,
        has_plain_config=plain is not None,
        sizes=sizes,
        removed=removed,
        masked_norms=norms,
    )
    write_record(folder / SIZES_FILE, record)
    if summary is not None:
        write_text(folder / "README.md", pruned_card(summary, type(model).__name__, has_plain_config=plain is not None))
    return folder


def load_pruned(folder: str | Path) -> nn.Module:
    """Load a model that `save_pruned` or `ecc compress hf:...` wrote; `generate` works as before.

    Only classes of transformers are built, and no code of the folder is executed.

    Args:
        folder: The folder, or the run folder of `ecc compress hf:...`.

    Raises:
        BadFile: If a file is missing or damaged, or the parts do not fit together.
    """
    folder = Path(folder)
    if not (folder / SIZES_FILE).is_file() and (folder / "model" / SIZES_FILE).is_file():
        folder = folder / "model"
    if not (folder / SIZES_FILE).is_file():
        raise BadFile(
            f"{folder} has no {SIZES_FILE}; give a folder of save_pruned, or a finished run of ecc compress hf:."
        )
    record = read_record(folder / SIZES_FILE, PrunedRecord)
    kind = getattr(transformers, record.architecture, None)
    if record.format != _FORMAT or not isinstance(kind, type) or not issubclass(kind, PreTrainedModel):
        raise BadFile(
            f"{folder / SIZES_FILE} has format {record.format!r} and model {record.architecture!r}, which this version "
            "cannot load."
        )
    file = folder / WEIGHTS_FILE
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        tensors = safetensors.torch.load_file(file)
        dtype = next((one.dtype for one in tensors.values() if one.is_floating_point()), torch.float32)
        dense = kind(config).to(dtype)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise BadFile(f"the model in {folder} cannot be loaded: {one_line(error)}") from None
    for name, buffer in unsaved_tensors(dense).items():
        if name in tensors:  # transformers keeps some buffers in float32
            path, _, last = name.rpartition(".")
            dense.get_submodule(path)._buffers[last] = buffer.to(tensors[name].dtype)
    plain = {SIZES: record.sizes, REMOVED: record.removed, MASKED_NORMS: record.masked_norms}
    state: dict[str, Any] = {**_tied(dense, tensors), **plain}
    small = slim_from_state(dense, state, file)
    number_caches_(small)
    if (folder / "generation_config.json").is_file():
        small.generation_config = GenerationConfig.from_pretrained(folder)
    small.eval()
    return small  # type: ignore[no-any-return]  # a model of transformers, which has no types


def pruned_card(summary: RunSummary, architecture: str, *, has_plain_config: bool) -> str:
    """The model card of a pruned model of transformers, of a class such as LlamaForCausalLM."""
    is_causal = architecture.endswith(("ForCausalLM", "LMHeadModel"))
    card = model_card(summary, {}).replace('library_name: "pytorch"', 'library_name: "transformers"')
    if is_causal:
        card = card.replace(f"for one inference of a batch of {summary.batch}", "per token")
    start = card.index("## How to load")
    plain = (
        f"from transformers import {architecture}\n    model = {architecture}.from_pretrained(FOLDER)"
        if has_plain_config
        else (
            "from ecc.integrations.huggingface import load_pruned\n"
            "    model = load_pruned(FOLDER)  # its layers have different sizes"
        )
    )
    use = "\n    model.generate(...)" if is_causal else ""
    return f"{card[:start]}## How to load\n\n    {plain}{use}\n"


def _tensors_to_save(model: nn.Module, *, with_buffers: bool) -> dict[str, Tensor]:
    """The state without the second name of shared tensors; `with_buffers` with those that may have been pruned too.

    transformers would take a buffer with `persistent=False`, such as the frequencies of rotary embeddings, for unknown.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    others = unsaved_tensors(model) if with_buffers else {}
    for name, tensor in {**model.state_dict(), **others}.items():
        found.setdefault(tensor.data_ptr() if tensor.numel() else id(tensor), (name, tensor.contiguous()))
    return dict(found.values())


def _tied(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a file with the names of shared tensors that the file leaves out."""
    found = dict(tensors)
    names: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in found:
            names[id(tensor)] = name
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in found and id(tensor) in names:
            found[name] = found[names[id(tensor)]]
    return found


def _plain_config(model: Any, attributes: Mapping[str, Mapping[str, int | float]]) -> Any:
    """A configuration with which transformers builds a network of exactly these shapes; None if there is none.

    The attributes of its modules, by path and name, must be those that `slim` has set.
    """
    config = copy.deepcopy(model.config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}

    def sizes(*endings: str) -> set[int]:
        return {shape[0] for name, shape in shapes.items() if name.endswith(endings) and len(shape) == 2}

    wide = sizes("gate_proj.weight", "up_proj.weight", "intermediate.dense.weight", "fc1.weight")
    query = sizes("q_proj.weight", "query.weight")
    key = sizes("k_proj.weight", "key.weight")
    if any(len(found) > 1 for found in (wide, query, key)):
        return None
    try:
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if wide:
            config.intermediate_size = wide.pop()
        if query and hasattr(config, "head_dim"):
            config.head_dim = head
            config.num_attention_heads = query.pop() // head
        if key and getattr(config, "num_key_value_heads", None):
            config.num_key_value_heads = key.pop() // head
        with torch.device("meta"):
            plain = type(model)(config)
    except (ValueError, RuntimeError, TypeError, AttributeError, ZeroDivisionError):
        return None
    same = {name: tuple(tensor.shape) for name, tensor in plain.named_parameters()} == shapes
    built = dict(plain.named_modules())
    same &= all(
        path in built and getattr(built[path], name, None) == value
        for path, values in attributes.items()
        for name, value in values.items()
    )
    return config if same else None
