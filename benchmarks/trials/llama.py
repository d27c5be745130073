"""Trial: a small Llama with random weights: joules per token, and text from the saved result."""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ecc
from ecc.integrations.huggingface import load_pruned, save_pruned


def build():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, max_position_embeddings=64, **sizes))


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(16):
        ids = (torch.randint(0, 128, (8, 1), generator=generator) + 3 * torch.arange(32)) % 128
        yield {"input_ids": ids, "labels": ids}


def loss(model, batch):
    return model(**batch).loss


step = sys.argv[1]
if step == "generator":
    ecc.compress(build(), batches(), "macs=60%", loss=loss)
if step == "no_meter":
    ecc.compress(build(), list(batches()), "70%", loss=loss)
if step == "compress":
    result = ecc.compress(
        build(), list(batches()), "decode=70%", loss=loss, meter="platform:jetson-tx2", epochs=4, folder="run"
    )
    save_pruned(result.model, "pruned")
    print(result)
if step == "load":
    slim = load_pruned("pruned")
    print(slim.generate(torch.tensor([[1, 4, 7]]), max_new_tokens=4, do_sample=False).tolist())
