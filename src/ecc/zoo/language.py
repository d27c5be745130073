"""Tasks of Hugging Face models on text: `hf:FOLDER` or `hf:NAME` on the command line.

A causal language model is trained and evaluated on text from files; its score is the perplexity, and its costs are
those of decode and prefill. An encoder learns to reproduce the embeddings of the dense encoder; its score is the mean
cosine similarity to them. Code from a model repository is never executed (`trust_remote_code=False`).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.errors import BadTask, first_line, import_optional
from ecc.io import read_text
from ecc.task import MAX_BATCH_SIZE, WORKLOADS, Task, TokenWorkload
from ecc.torch_utils import device_of, eval_mode
from ecc.zoo.data.batches import SeededBatches

LENGTH = 128
"""Tokens of a sequence by default: in training, of a prompt, and in the cache of a decode step."""
BATCH_SIZE = 8
"""Training batch size by default, in sequences."""
MAX_TEXT_BYTES = 1 << 30
_HELD_OUT = 0.1  # share of the text that no training step sees
_EXAMPLE = (2, 16)  # input of a causal model to trace; its cost is that of prefill and decode
_EVALUATED = 64  # sequences that a held-out score is computed on


class TokenBatches:
    """Batches `{"input_ids", "labels"}` of (sequences, length) tokens, in another order in each epoch.

    It is a function of the epoch, as `Task.train_batches` expects, and its length is the number of batches. The last
    batch of an epoch is left out if it is smaller.
    """

    def __init__(self, sequences: Tensor, batch_size: int = BATCH_SIZE) -> None:
        if len(sequences) < batch_size:
            count, length = sequences.shape
            raise BadTask(
                f"the text is too short: it has {count} sequences of {length} tokens, and a batch takes {batch_size}. "
                "Give more text, a smaller batch size or shorter sequences."
            )
        self.sequences, self.batch_size = sequences, batch_size

    def __len__(self) -> int:
        return len(self.sequences) // self.batch_size

    def __call__(self, epoch: int) -> SeededBatches[dict[str, Tensor]]:
        """Batches of an epoch; always the same for one epoch."""
        order = torch.randperm(len(self.sequences), generator=torch.Generator().manual_seed(epoch))

        def make(number: int) -> dict[str, Tensor]:
            tokens = self.sequences[order[number * self.batch_size : (number + 1) * self.batch_size]]
            return {"input_ids": tokens, "labels": tokens}

        return SeededBatches(len(self), make)


class LogLikelihood:
    """Score of a causal language model: the mean log-likelihood of a token. The perplexity is exp(-score).

    The first token of each sequence has no prediction and does not count.
    """

    is_perplexity = True

    def __init__(self, sequences: Tensor, batch_size: int = BATCH_SIZE) -> None:
        self.sequences, self.batch_size = sequences, batch_size

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> float:
        """The score of a model; higher is better."""
        device, total, count = device_of(model), 0.0, 0
        with eval_mode(model):
            for tokens in self.sequences.split(self.batch_size):
                tokens = tokens.to(device)
                logits = model(input_ids=tokens).logits[:, :-1].float()
                total += float(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"))
                count += tokens[:, 1:].numel()
        return -total / count


class EmbeddingSimilarity:
    """Score of an encoder: mean cosine similarity of its sentence embeddings to those of the dense encoder.

    A sentence embedding is the mean of the last hidden state over the tokens. A copy of the dense encoder is kept.
    """

    def __init__(self, dense: nn.Module, sequences: Tensor, batch_size: int = BATCH_SIZE) -> None:
        self.dense = copy.deepcopy(dense).eval().requires_grad_(False)
        self.sequences, self.batch_size = sequences, batch_size
        self._wanted: list[Tensor] = []  # embeddings of the dense encoder, batch by batch

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> float:
        """The score of a model; higher is better."""
        device, batches = device_of(model), self.sequences.split(self.batch_size)
        if not self._wanted:
            self._wanted = [self._embed_dense(tokens.to(device)) for tokens in batches]
        with eval_mode(model):
            found = [
                F.cosine_similarity(_embed(model, tokens.to(device)), wanted.to(device))
                for tokens, wanted in zip(batches, self._wanted, strict=True)
            ]
        return float(torch.cat(found).mean())

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """1 - the mean similarity on a batch."""
        tokens = batch["input_ids"]
        return 1 - F.cosine_similarity(_embed(model, tokens), self._embed_dense(tokens)).mean()

    @torch.no_grad()
    def _embed_dense(self, tokens: Tensor) -> Tensor:
        return _embed(self.dense.to(tokens.device), tokens)


def _embed(model: nn.Module, tokens: Tensor) -> Tensor:
    """Embeddings of sentences, one for each sequence."""
    embedding: Tensor = model(input_ids=tokens).last_hidden_state.mean(1).float()
    return embedding


# ---------------------------------------------------------------- the task


def language_task(
    source: str | Path,
    text: Sequence[str | Path] = (),
    *,
    test_text: Sequence[str | Path] = (),
    length: int | None = None,
    batch_size: int | None = None,
    batch: int = 1,
    gradient_checkpointing: bool = False,
    log: Callable[[str], None] = lambda _: None,
) -> Task:
    """A task of a Hugging Face model.

    Args:
        source: Folder with a saved model and tokenizer, or a name on the Hugging Face hub.
        text: Text files to train and calibrate on. Without text the task can be traced and measured only.
        test_text: Text files for the score in the report; by default the last tenth of `text`, which is then not
            trained on.
        length: Tokens per sequence in training, of a prompt (prefill), in the cache (decode) and in the input of an
            encoder; 128 by default.
        batch_size: Training batch size in sequences; 8 by default.
        batch: Sequences at once in prefill and decode, and in the input of an encoder.
        gradient_checkpointing: Compute activations again in the backward pass, which needs less memory.
        log: Called with one-line notes for the user.

    Raises:
        BadTask: If the model or tokenizer cannot be loaded or do not fit, or the text is too short.
    """
    model, name = load_model(source)
    config: Any = model.config
    saved = config.architectures[0]
    if saved != type(model).__name__:
        log(f"note: the folder has a {saved}; its encoder {type(model).__name__} is compressed, without the head.")
    length = _checked_length(config, length)
    if gradient_checkpointing:
        _enable_checkpointing(model)
    vocabulary = int(config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    is_causal = _is_causal(config)
    size = _EXAMPLE if is_causal else (batch, length)  # an encoder is measured on its example input
    example = {"input_ids": torch.randint(1, vocabulary, size, generator=generator)}
    workloads = tuple(TokenWorkload(name=one, batch=batch, length=length) for one in WORKLOADS) if is_causal else ()
    task = Task(name=name, model=model, example_input=example, workloads=workloads)
    if not text:
        return task
    tokenizer = load_tokenizer(source, vocabulary)
    sequences = token_sequences(tokenizer, text, length)
    many = batch_size or BATCH_SIZE
    kept = max(1, round(_HELD_OUT * len(sequences)))
    held_out, sequences = sequences[-kept:], sequences[:-kept]
    if test_text:
        test = token_sequences(tokenizer, test_text, length)
    else:
        test = held_out
        log(f"note: the score is computed on the last {kept} sequences of the text, which are not trained on.")
    batches = TokenBatches(sequences, many)
    log(f"text: {len(sequences):,} sequences of {length} tokens, {len(batches):,} batches of {many} per epoch.")
    task = replace(task, train_batches=batches)
    if is_causal:
        score, held_out_score = (LogLikelihood(tokens, many) for tokens in (test, held_out[:_EVALUATED]))
        return replace(task, evaluate=score, evaluate_held_out=held_out_score, metric="perplexity")
    similarity, own = (EmbeddingSimilarity(model, tokens, many) for tokens in (test, held_out[:_EVALUATED]))
    return replace(task, loss=similarity.loss, evaluate=similarity, evaluate_held_out=own)


# ---------------------------------------------------------------- model, tokenizer and text


def load_model(source: str | Path) -> tuple[nn.Module, str]:
    """A saved model of transformers, or one on the Hugging Face hub, in float32, and its short name."""
    hf, where, config = import_transformers(), str(source), load_config(source)
    if not getattr(config, "architectures", None):
        raise BadTask(
            f"config.json of {where!r} names no class under 'architectures', such as LlamaForCausalLM, so that its "
            "output is unknown; add it."
        )
    kind = hf.AutoModelForCausalLM if _is_causal(config) else hf.AutoModel
    options = {"dtype": torch.float32, "trust_remote_code": False, "ignore_mismatched_sizes": True}
    model: nn.Module
    model, found = load_part(where, "model", lambda: kind.from_pretrained(where, output_loading_info=True, **options))
    check_weights(where, found)
    if not _is_causal(config) and getattr(config, "is_encoder_decoder", False):
        raise BadTask(
            f"model {where!r} has an encoder and a decoder; hf: takes causal language models and encoders. Use "
            "ecc.compress with batches and a loss of your own."
        )
    if not hasattr(config.get_text_config(), "vocab_size"):
        raise BadTask(
            f"model {where!r} ({type(model).__name__}) takes no tokens; hf: takes language models, encoders of text "
            "and image classifiers. Use ecc.compress with batches and a loss of your own."
        )
    return model, Path(where).name


def check_weights(where: str, found: dict[str, Any]) -> None:
    """Refuse a model some of whose weights are missing or have another size: transformers makes them random.

    Args:
        where: Folder or name of the model.
        found: The loading info of `from_pretrained`.
    """
    for name, saved, wanted in sorted(found["mismatched_keys"]):
        raise BadTask(
            f"model {where!r} does not fit its configuration: {name} has the shape {tuple(saved)} instead of "
            f"{tuple(wanted)}. Save the model again."
        )
    missing = sorted(name for name in found["missing_keys"] if "pooler" not in name)  # many encoders come without it
    if missing:
        raise BadTask(f"model {where!r} is not complete: {missing[0]} is missing. Save the model again.")


def load_config(source: str | Path) -> Any:
    """The configuration of a model of transformers."""
    hf, where = import_transformers(), str(source)
    _check_folder(where)
    return load_part(where, "model", lambda: hf.AutoConfig.from_pretrained(where, trust_remote_code=False))


def load_tokenizer(source: str | Path, vocabulary: int) -> Any:
    """The tokenizer of a model that knows `vocabulary` tokens."""
    hf, where = import_transformers(), str(source)
    if Path(where).is_dir() and not any(Path(where).glob("*token*")) and not any(Path(where).glob("vocab*")):
        raise BadTask(f"folder {where!r} has no tokenizer; save it there with tokenizer.save_pretrained.")
    tokenizer = load_part(where, "tokenizer", lambda: hf.AutoTokenizer.from_pretrained(where, trust_remote_code=False))
    if len(tokenizer) > vocabulary:
        raise BadTask(
            f"the tokenizer of {where!r} has {len(tokenizer):,} tokens and the model embeds {vocabulary:,}; save the "
            "tokenizer that belongs to the model into its folder."
        )
    return tokenizer


def token_sequences(tokenizer: Any, files: Sequence[str | Path], length: int) -> Tensor:
    """Joined UTF-8 text files as (sequences, length) tokens; what is left at the end is dropped."""
    tokens: list[int] = []
    for file in files:
        for part in _parts(_read_text(Path(file))):
            tokens += tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
    count = len(tokens) // length
    if count < 2:
        raise BadTask(
            f"the text is too short: {' and '.join(str(file) for file in files)} has {len(tokens):,} tokens, and two "
            f"sequences of {length} tokens are the least. Give more text, or a smaller length."
        )
    return torch.tensor(tokens[: count * length]).view(count, length)


def _parts(text: str, size: int = 1 << 20) -> Iterator[str]:
    """Text in parts that end at a line break; tokenizers are slow on long texts."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + size)
        stop = len(text) if end < 0 else end + 1
        yield text[start:stop]
        start = stop


def _read_text(path: Path) -> str:
    if not path.is_file():
        raise BadTask(f"there is no text file {str(path)!r}.")
    try:
        return read_text(path, MAX_TEXT_BYTES)
    except UnicodeDecodeError as error:
        raise BadTask(f"text file {str(path)!r} is not UTF-8 (byte {error.start}); convert it first.") from None


def _checked_length(config: Any, length: int | None) -> int:
    most: int = getattr(config.get_text_config(), "max_position_embeddings", None) or MAX_BATCH_SIZE
    if length is None:
        return min(LENGTH, most)
    if not 2 <= length <= most:
        raise BadTask(f"length {length} is outside 2..{most}, the positions that the model knows.")
    return length


def _is_causal(config: Any) -> bool:
    """Whether a configuration belongs to a causal language model."""
    names = getattr(config, "architectures", None) or ()
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names)


def _enable_checkpointing(model: nn.Module) -> None:
    """Let a model of transformers compute activations again in the backward pass."""
    hf: Any = model
    enable = getattr(hf, "activation_checkpointing_enable", None) or hf.gradient_checkpointing_enable  # the older name
    enable()


def _check_folder(where: str) -> None:
    folder = Path(where)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise BadTask(f"folder {where!r} has no config.json; give a folder that save_pretrained wrote.")
    if not folder.exists() and (where.startswith((".", "/", "~")) or where.count("/") > 1):
        raise BadTask(
            f"there is no folder {where!r}; give a folder that save_pretrained wrote, or a name such as org/model."
        )


def load_part(where: str, what: str, load: Callable[[], Any]) -> Any:
    """Load a part of a model; whatever fails becomes one line."""
    try:
        with quiet_transformers():
            return load()
    except Exception as error:  # noqa: BLE001 - whatever a damaged folder makes transformers raise
        text = f"{type(error).__name__} {error}".lower()
        if "gated" in text or "401" in text or "403" in text:
            reason = "access to it is restricted (gated or private); log in with `hf auth login` and accept its terms"
        elif "remote code" in text or "trust_remote_code" in text:
            reason = "it needs code from its repository, which ECC never executes; use a model that transformers has"
        elif not Path(where).exists():
            reason = (
                "it is neither a folder nor available on the Hugging Face hub from here; check the name and the "
                "network, or give a folder that save_pretrained wrote"
            )
        else:
            reason = first_line(error).rstrip(".")
        raise BadTask(f"the {what} {where!r} cannot be loaded: {reason}.") from None


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without the progress bars of transformers, which load in seconds, and without log lines: errors say it all."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging as hf

    was_enabled = hf.is_progress_bar_enabled()
    levels = hf.get_verbosity(), hub.get_verbosity()
    hf.disable_progress_bar()
    hf.set_verbosity(logging.ERROR)
    hub.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        hf.set_verbosity(levels[0])
        hub.set_verbosity(levels[1])
        if was_enabled:
            hf.enable_progress_bar()


def import_transformers() -> Any:
    """The package transformers."""
    transformers = import_optional("transformers", "a task hf:...", install="'ecc-compress[transformers]'")
    if int(transformers.__version__.split(".")[0]) < 5:
        raise BadTask(
            f"tasks hf:... need transformers 5 or later, and {transformers.__version__} is installed; pip install -U "
            "transformers."
        )
    return transformers
