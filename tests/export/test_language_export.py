"""Export of a pruned language model of transformers."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch

from ecc.export import export_model
from ecc.export.formats import open_file
from ecc.graph import trace_channels, with_widths

pytest.importorskip("onnxscript", reason="ONNX export needs onnxscript")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its dependencies at import
    pytest.importorskip("transformers", minversion="5", reason="needs transformers 5")

sys.path.insert(0, str(Path(__file__).parents[1] / "zoo"))
try:
    import tiny_models as tiny
finally:
    sys.path.pop(0)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_pruned_language_model_is_written_as_onnx(tmp_path: Path) -> None:
    model = tiny.tiny_llama()
    example = {"input_ids": torch.randint(1, 32, (2, 8))}
    graph = trace_channels(model, example, verify=False)
    heads = next(group.name for group in graph.prunable if "attn" in group.name)
    hidden = [group.name for group in graph.prunable if "mlp" in group.name]
    small = with_widths(model, graph, {heads: 2, hidden[0]: 40, hidden[1]: 24})  # sizes differ between layers
    export_model(small, example, tmp_path / "small.onnx")
    assert small.config.use_cache  # as before
    run = open_file("onnx", tmp_path / "small.onnx")
    for shape in ((3, 8), (1, 13)):  # any number of sequences and of tokens
        tokens = torch.randint(1, 32, shape)
        with torch.no_grad():
            expected = small(input_ids=tokens).logits
        (found,) = run({"input_ids": tokens})
        assert torch.allclose(found, expected, atol=1e-5)
