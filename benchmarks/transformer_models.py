"""Tiny Hugging Face models with random weights, built from configurations without a download."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
IMAGE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "image_size": 16,
    "patch_size": 4,
}


def tokens() -> dict[str, Any]:
    """Ids of ten tokens for two sentences."""
    return {"input_ids": torch.randint(1, 64, (2, 10))}


def sentence_pairs() -> dict[str, Any]:
    """Ids for an encoder and a decoder."""
    return {"input_ids": torch.randint(1, 64, (2, 10)), "decoder_input_ids": torch.randint(1, 64, (2, 6))}


def pixels(size: int = 16) -> dict[str, Any]:
    """Two images."""
    return {"pixel_values": torch.randn(2, 3, size, size)}


def _whisper() -> hf.WhisperConfig:
    return hf.WhisperConfig(
        vocab_size=64,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=160,
        decoder_ffn_dim=160,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )


def _sound(*, decoder: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"input_features": torch.randn(2, 8, 40)}
    return {**found, "decoder_input_ids": torch.randint(1, 64, (2, 6))} if decoder else found


def _clip() -> nn.Module:
    text = {**TEXT, "bos_token_id": 1, "eos_token_id": 2}
    model: nn.Module = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=IMAGE, projection_dim=16))
    return model


def _detr() -> nn.Module:
    backbone = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    config = hf.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=160,
        decoder_ffn_dim=160,
        num_queries=5,
        num_labels=4,
    )
    model: nn.Module = hf.DetrForObjectDetection(config)
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "Llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, num_key_value_heads=4)), tokens),
    "Llama, eager": (
        lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT, num_key_value_heads=4, attn_implementation="eager")),
        tokens,
    ),
    "Qwen2": (lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**TEXT, num_key_value_heads=4)), tokens),
    "Qwen3": (lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**TEXT, num_key_value_heads=4, head_dim=8)), tokens),
    "Mistral": (lambda: hf.MistralForCausalLM(hf.MistralConfig(**TEXT, num_key_value_heads=4)), tokens),
    "Gemma": (lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**TEXT, num_key_value_heads=4, head_dim=8)), tokens),
    "Phi": (lambda: hf.PhiForCausalLM(hf.PhiConfig(**TEXT)), tokens),
    "GPT-2": (
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=8, n_positions=64)),
        tokens,
    ),
    "GPT-NeoX": (lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**TEXT)), tokens),
    "Mixtral": (
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**TEXT, num_key_value_heads=4, num_local_experts=2)),
        tokens,
    ),
    "Mixtral, eager": (
        lambda: hf.MixtralForCausalLM(
            hf.MixtralConfig(**TEXT, num_key_value_heads=4, num_local_experts=2, experts_implementation="eager")
        ),
        tokens,
    ),
    "BERT": (lambda: hf.BertForSequenceClassification(hf.BertConfig(**TEXT)), tokens),
    "BERT, eager": (
        lambda: hf.BertForSequenceClassification(hf.BertConfig(**TEXT, attn_implementation="eager")),
        tokens,
    ),
    "RoBERTa": (lambda: hf.RobertaForSequenceClassification(hf.RobertaConfig(**TEXT)), tokens),
    "T5": (
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=64, d_model=64, d_kv=8, num_heads=8, d_ff=160, num_layers=2)
        ),
        sentence_pairs,
    ),
    "Whisper": (lambda: hf.WhisperForConditionalGeneration(_whisper()), lambda: _sound(decoder=True)),
    "Whisper encoder": (
        lambda: hf.models.whisper.modeling_whisper.WhisperEncoder(_whisper()),
        lambda: _sound(decoder=False),
    ),
    "CLIP": (_clip, lambda: {**tokens(), **pixels()}),
    "ViT": (lambda: hf.ViTForImageClassification(hf.ViTConfig(**IMAGE)), pixels),
    "DeiT": (lambda: hf.DeiTForImageClassification(hf.DeiTConfig(**IMAGE)), pixels),
    "Swin": (
        lambda: hf.SwinForImageClassification(
            hf.SwinConfig(image_size=32, patch_size=4, embed_dim=32, depths=[2, 2], num_heads=[4, 8], window_size=4)
        ),
        lambda: pixels(32),
    ),
    "Segformer": (
        lambda: hf.SegformerForSemanticSegmentation(
            hf.SegformerConfig(
                depths=[1, 1, 1, 1],
                hidden_sizes=[16, 32, 48, 64],
                num_attention_heads=[2, 4, 6, 8],
                decoder_hidden_size=32,
            )
        ),
        lambda: pixels(64),
    ),
    "DETR": (_detr, lambda: pixels(64)),
}
"""Name -> (makes the model, makes an example input)."""
