"""Trial: an encoder classifier of transformers with random weights: the call, saving, loading, and the Trainer."""

import sys

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import DistilBertConfig, DistilBertForSequenceClassification, Trainer, TrainingArguments

import ecc
from ecc.integrations.huggingface import EccCallback, load_pruned, save_pruned


class Texts(Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, i):
        ids = torch.randint(2, 100, (24,), generator=torch.Generator().manual_seed(i))
        ids[3] = 100 + i % 2
        return {"input_ids": ids, "attention_mask": torch.ones(24, dtype=torch.long), "labels": torch.tensor(i % 2)}


def build():
    torch.manual_seed(0)
    config = DistilBertConfig(vocab_size=120, dim=64, n_heads=4, n_layers=2, hidden_dim=128, max_position_embeddings=32)
    return DistilBertForSequenceClassification(config)


def accuracy(model):
    model.eval()
    batch = next(iter(DataLoader(Texts(), batch_size=128)))
    labels = batch.pop("labels")
    with torch.no_grad():
        return float((model(**batch).logits.argmax(1) == labels).float().mean())


model, loader, step = build(), DataLoader(Texts(), batch_size=16, shuffle=True), sys.argv[1]
if step == "cross_entropy":
    ecc.compress(model, loader, "macs=50%", loss=torch.nn.functional.cross_entropy, folder="wrong")
if step == "compress":
    result = ecc.compress(
        model,
        loader,
        "macs=50%",
        loss=lambda model, batch: model(**batch).loss,
        evaluate=accuracy,
        epochs=6,
        folder="run",
    )
    save_pruned(result.model, "pruned")
    print(result)
if step == "load":
    print(load_pruned("pruned").num_parameters(), "parameters; accuracy", accuracy(load_pruned("pruned")))
if step == "trainer":
    batch = next(iter(loader))
    del batch["labels"]
    graph = ecc.trace_channels(model, batch)
    arguments = TrainingArguments(
        "hf", max_steps=30, per_device_train_batch_size=16, save_strategy="no", report_to=[], use_cpu=True
    )
    solver = ecc.EccSolver(model, graph, ecc.counted_cost(graph, "macs"), "50%", arguments.max_steps, lr=1e-3)
    callback = EccCallback(model, graph)
    Trainer(model, arguments, train_dataset=Texts(), optimizers=(solver, None), callbacks=[callback]).train()
    print(f"{float(solver.cost[0]) / float(graph.macs()):.1%} of the MACs; accuracy {accuracy(callback.slim)}")
