"""Trial: a YOLO of ultralytics, built from its configuration, with the loss of ultralytics."""

import sys

import torch
from ultralytics import YOLO
from ultralytics.cfg import get_cfg

import ecc

torch.manual_seed(0)
yolo = YOLO("yolov8n.yaml")
yolo.model.args = get_cfg()
batches = [
    {
        "img": torch.rand(4, 3, 64, 64),
        "cls": torch.zeros(4, 1),
        "bboxes": torch.rand(4, 4) * 0.3 + 0.3,
        "batch_idx": torch.arange(4.0),
    }
    for _ in range(6)
]


def loss(model, batch):
    return model.loss(batch)[0].sum()


step = sys.argv[1]
if step == "wrapper":
    ecc.compress(yolo, batches, "macs=70%", loss=loss)
if step == "batches":
    ecc.compress(yolo.model, batches, "macs=70%", loss=loss)
if step == "compress":
    example = torch.zeros(1, 3, 64, 64)
    result = ecc.compress(
        yolo.model, batches, "macs=70%", loss=loss, example_input=example, epochs=2, distill=0, folder="run"
    )
    result.export("onnx")
    print(result)
if step == "load":
    slim = ecc.load_slim(YOLO("yolov8n.yaml").model, "run")
    print(sum(p.numel() for p in slim.parameters()), "parameters")
