"""Trial: a bidirectional LSTM that tags sequences of different lengths, padded or packed."""

import sys

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import DataLoader

import ecc


class Tagger(nn.Module):
    def __init__(self, packed=False):
        super().__init__()
        self.packed = packed
        self.embed = nn.Embedding(60, 48, padding_idx=0)
        self.lstm = nn.LSTM(48, 64, num_layers=2, batch_first=True, bidirectional=True, dropout=0.1)
        self.head = nn.Linear(128, 6)

    def forward(self, tokens, lengths=None):
        x = self.embed(tokens)
        if not self.packed:
            return self.head(self.lstm(x)[0])
        x = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.lstm(x)[0], batch_first=True)[0])


def sentence(i):
    generator = torch.Generator().manual_seed(i)
    words = torch.randint(1, 60, (int(torch.randint(5, 20, (1,), generator=generator)),), generator=generator)
    return words, words % 6


def collate(items):
    return pad_sequence([x for x, _ in items], True), pad_sequence([y for _, y in items], True, -100)


def collate_packed(items):
    words, tags = collate(items)
    return words, torch.tensor([len(x) for x, _ in items]), tags


def loss(outputs, tags):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), tags.flatten(), ignore_index=-100)


def accuracy(model):
    words, tags = collate(data)
    with torch.no_grad():
        return float((model.eval()(words).argmax(-1) == tags)[tags >= 0].float().mean())


torch.manual_seed(0)
data, step = [sentence(i) for i in range(160)], sys.argv[1]
packed = DataLoader(data, 16, shuffle=True, collate_fn=collate_packed)
if step == "compress":
    net, loader = Tagger(), DataLoader(data, 16, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(4):
        for words, tags in loader:
            optimizer.zero_grad()
            loss(net(words), tags).backward()
            optimizer.step()
    result = ecc.compress(net, loader, "macs=50%", loss=loss, evaluate=accuracy, epochs=6, lr=3e-3, folder="run")
    result.export("onnx")
    print(result)
if step == "three":  # batches of three tensors, and a network with two inputs
    ecc.compress(Tagger(packed=True), packed, "macs=50%", loss=loss, epochs=2, folder="packed")
if step == "packed":

    def packed_loss(model, batch):
        words, lengths, tags = batch
        return loss(model(words, lengths), tags)

    example = next(iter(packed))[:2]
    print(
        ecc.compress(
            Tagger(packed=True), packed, "macs=50%", loss=packed_loss, example_input=example, epochs=2, folder="packed"
        )
    )
if step == "load":
    print("accuracy", accuracy(ecc.load_slim(Tagger(), "run")))
