"""Prune a Hugging Face classifier that computes its own loss. Run: python examples/hugging_face.py."""

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import ecc

torch.manual_seed(0)
config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)
model = BertForSequenceClassification(config)  # or from_pretrained(...)


def example(seed):
    """The label says whether token 7 occurs in the text."""
    tokens = torch.randint(8, 64, (16,), generator=torch.Generator().manual_seed(seed))
    tokens[3] = 7 if seed % 2 else tokens[3]
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": torch.tensor(seed % 2)}


loader = DataLoader([example(seed) for seed in range(512)], batch_size=32, shuffle=True)
result = ecc.compress(
    model, loader, budget="macs=70%", loss=lambda model, batch: model(**batch).loss, epochs=4, lr=1e-3, folder="bert"
)
print(result)
