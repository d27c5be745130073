"""Tiny Hugging Face models with random weights, tokenizers and text, written to folders without a download."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

WORDS = "the a cat dog bird sees hears likes finds big small red old and in on under house tree sun".split()


def write_text(path: Path, words: int = 6000, seed: int = 0) -> Path:
    """Random sentences."""
    chosen = random.Random(seed).choices(WORDS, k=words)
    path.write_text(" ".join(word + (" .\n" if n % 9 == 8 else "") for n, word in enumerate(chosen)), encoding="utf-8")
    return path


def make_tokenizer(special: int = 0) -> Any:
    """A tokenizer with one token per word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", "<unk>", ".", *WORDS, *(f"<extra{n}>" for n in range(special))]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>")


def tiny_llama(**changes: Any) -> Any:
    """A Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "tie_word_embeddings": True,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()


def tiny_bert() -> Any:
    """A BERT encoder of two layers."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    return BertModel(
        BertConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            pad_token_id=0,
        )
    ).eval()


def write_model(folder: Path, model: Any, tokenizer: Any = None) -> Path:
    """A folder as `save_pretrained` writes it, with a tokenizer."""
    model.save_pretrained(folder)
    (tokenizer or make_tokenizer()).save_pretrained(folder)
    return folder
