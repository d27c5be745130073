"""Hugging Face models from files: the whole path with a tiny Llama and a tiny BERT, and wrong input."""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ecc
from ecc.errors import BadBudget, BadTask, EccError
from ecc.export import export_model
from ecc.export.formats import open_file
from ecc.graph import trace_channels, with_widths
from ecc.zoo.language import LogLikelihood, TokenBatches, language_task

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its dependencies at import
    transformers = pytest.importorskip("transformers", minversion="5", reason="tasks hf: need transformers 5")

sys.path.insert(0, str(Path(__file__).parent))
try:
    import tiny_models as tiny
finally:
    sys.path.pop(0)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]

ESTIMATED = ("--meter", "platform:eyeriss", "--samples", "20", "--length", "16")
PLATFORM = (*ESTIMATED, "-q")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model `llama`, an encoder `bert`, text, and models and text that something is wrong with."""
    path = tmp_path_factory.mktemp("models")
    tiny.write_model(path / "llama", tiny.tiny_llama())
    tiny.write_model(path / "bert", tiny.tiny_bert())
    tiny.write_text(path / "train.txt", 4000)
    tiny.write_text(path / "test.txt", 800, seed=1)
    (path / "short.txt").write_text("the cat")
    tiny.write_text(path / "few.txt", 100)
    (path / "bytes.txt").write_bytes(b"\xff\xfe\xff")
    tiny.write_model(path / "other", tiny.tiny_llama(), tiny.make_tokenizer(special=40))
    tiny.tiny_llama().save_pretrained(path / "bare")
    tiny_vit().save_pretrained(path / "vit")
    tiny_vit().vit.save_pretrained(path / "encoder")
    tiny.write_model(path / "damaged", tiny.tiny_llama())
    (path / "damaged" / "model.safetensors").write_bytes(b"no tensors")
    for name, change in (("unnamed", {"architectures": None}), ("resized", {"intermediate_size": 48})):
        file = tiny.write_model(path / name, tiny.tiny_llama()) / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    tensors = load_file(path / "llama" / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tiny.write_model(path / "incomplete", tiny.tiny_llama())
    save_file(tensors, path / "incomplete" / "model.safetensors", {"format": "pt"})
    return path


def tiny_vit() -> Any:
    """A vision transformer of two layers."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4
    )
    return transformers.ViTForImageClassification(config)


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    from ecc.cli import main

    monkeypatch.setattr(sys, "argv", ["ecc", *map(str, arguments)])
    try:
        main()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return 0


def test_a_language_model_goes_through_the_whole_path(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    command = ["compress", f"hf:{folder / 'llama'}", "--text", folder / "train.txt", "--test-text", folder / "test.txt"]
    command += ["--budget", "decode=70%", "--budget", "prefill=90%", "-o", run, *PLATFORM]
    command += ["--prune-steps", 6, "--finetune-steps", 2]
    assert run_cli(monkeypatch, *command) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["metric"] == "perplexity"
    assert summary["tokens"] == {"decode": 1, "decode_latency": 1, "prefill": 16, "prefill_latency": 16}
    assert set(summary["budgets"]) == {"decode", "prefill"}
    assert summary["met"]
    assert summary["measured"]["decode"]["result"] <= 0.7 * summary["measured"]["decode"]["dense"]
    assert summary["label"] == "estimated"
    card = (run / "model" / "README.md").read_text(encoding="utf-8")
    assert "decode per token (estimated)" in card
    record = json.loads((run / "model" / "ecc.json").read_text())
    assert ("load_pruned" in card) != record["has_plain_config"]

    from ecc.integrations.huggingface import load_pruned

    model = load_pruned(run)
    assert sum(p.numel() for p in model.parameters()) == summary["parameters"]["result"]
    prompt = torch.randint(1, 32, (2, 5))
    made = model.generate(prompt, max_new_tokens=6, do_sample=False)
    assert made.shape == (2, 11)
    slim = ecc.load_slim(tiny.tiny_llama(), run)
    with torch.no_grad():
        assert torch.equal(model(prompt).logits, slim(prompt).logits)
    static = model.generate(prompt, max_new_tokens=6, do_sample=False, cache_implementation="static")
    assert torch.equal(static, made)
    # The score in the summary is that of the saved model on the test text.
    task = language_task(folder / "llama", [folder / "train.txt"], test_text=[folder / "test.txt"], length=16)
    assert task.evaluate is not None
    assert task.evaluate(model) == pytest.approx(summary["scores"]["finetuned"], rel=1e-5)


THOROUGH = pytest.mark.thorough  # methods/baselines/test_transformer_baselines.py runs them on a counted budget


@THOROUGH
@pytest.mark.parametrize("method", ["one_shot", "wanda_sp", "flap", "llm_pruner", "uniform"])
def test_methods_without_training_meet_the_budget(folder: Path, tmp_path: Path, method: str) -> None:
    from ecc.api import compress_task, make_settings
    from ecc.energy import parse_budgets

    task = language_task(folder / "llama", [folder / "train.txt"], length=16)
    result = compress_task(
        task,
        parse_budgets("decode=70%"),
        folder=tmp_path / "run",
        meter="platform:eyeriss",
        samples=20,
        settings=make_settings("default", {"prune_steps": 0, "finetune_steps": 0}),
        method=method,
    )
    assert result.met
    row = result.summary.budgets["decode"]
    assert 0.9 * row.limit <= row.result <= row.limit
    assert result.energy_per_token() == pytest.approx(row.result)
    assert result.summary.batches is not None
    assert result.summary.batches.lineage == 0  # nothing was trained


@pytest.mark.parametrize("method", ["shortgpt", *(pytest.param(name, marks=THOROUGH) for name in ("one_shot", "2ssp"))])
def test_blocks_are_removed_and_the_model_loads_again(folder: Path, tmp_path: Path, method: str) -> None:
    from ecc.api import compress_task, make_settings
    from ecc.energy import parse_budgets
    from ecc.integrations.huggingface import load_pruned, save_pruned

    tiny.write_model(tmp_path / "deep", tiny.tiny_llama(num_hidden_layers=3))
    task = language_task(tmp_path / "deep", [folder / "train.txt"], length=16)
    result = compress_task(
        task,
        parse_budgets("macs=45%"),
        folder=tmp_path / "run",
        settings=make_settings("default", {"prune_steps": 0, "finetune_steps": 0}),
        method=method,
    )
    assert result.met
    if method != "one_shot":  # which may find widths that are better
        assert 0 in result.widths.values()
    save_pruned(result.model, tmp_path / "small")
    model, prompt = load_pruned(tmp_path / "small"), torch.randint(1, 32, (2, 5))
    with torch.no_grad():
        assert torch.equal(model(prompt).logits, result.model(prompt).logits)
    made = model.generate(prompt, max_new_tokens=4, do_sample=False)
    without = model.generate(prompt, max_new_tokens=4, do_sample=False, use_cache=False)
    assert torch.equal(made, without)


def test_less_memory_gives_the_same_gradients(folder: Path) -> None:
    def gradients(*, less: bool) -> tuple[int, list[torch.Tensor]]:
        """The number of values that autograd keeps for the backward pass, and the gradients."""
        task = language_task(folder / "llama", [folder / "train.txt"], length=16, gradient_checkpointing=less)
        batch = next(iter(task.epoch_batches(0)))
        kept: list[int] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = task.model.train()(**batch).loss
        loss.backward()
        return sum(kept), [one.grad for one in task.model.parameters() if one.grad is not None]

    model: Any = language_task(folder / "llama", gradient_checkpointing=True).model
    assert model.config.use_cache  # which is saved with the pruned model, and traced
    (all_kept, expected), (some_kept, found) = gradients(less=False), gradients(less=True)
    assert some_kept < all_kept / 2
    assert all(torch.allclose(one, two, atol=1e-6) for one, two in zip(expected, found, strict=True))


def test_methods_are_compared_on_a_language_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also when it is begun again, with another budget, which has the energy of a decode step without a name."""
    from ecc.report.load import load_grid

    command = ["compare", f"hf:{folder / 'llama'}", "--text", folder / "train.txt", "-o", tmp_path / "runs", *ESTIMATED]
    command += ["--methods", "one_shot,uniform", "--seeds", 1, "--prune-steps", 2, "--finetune-steps", 0, "--budgets"]
    for budgets in ("decode=80%", "decode=80%,60%"):
        assert run_cli(monkeypatch, *command, budgets) == 0
        assert "Perplexity after and before finetuning" in capsys.readouterr().out
    rows = {(row.method, row.budget): row for row in load_grid(tmp_path / "runs")}
    assert set(rows) == {(method, budget) for method in ("one_shot", "uniform") for budget in ("decode=80%", "60%")}
    for (_, budget), row in rows.items():
        assert row.cost_ratio is not None
        assert row.cost_ratio.mean <= (0.8 if budget == "decode=80%" else 0.6)
        assert (row.metric, row.failures) == ("perplexity", [])


def test_an_encoder_keeps_its_embeddings(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    command = ["compress", f"hf:{folder / 'bert'}", "--text", folder / "train.txt", "--budget", "70%", "-o", run]
    assert run_cli(monkeypatch, *command, *PLATFORM, "--prune-steps", 6, "--finetune-steps", 2) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["met"]
    assert summary["scores"]["dense"] == pytest.approx(1, abs=1e-5)
    assert summary["scores"]["finetuned"] > 0.9

    from ecc.integrations.huggingface import load_pruned

    model = load_pruned(run / "model")
    assert model(torch.randint(1, 32, (2, 5))).last_hidden_state.shape == (2, 5, 32)


def test_compress_takes_a_vision_transformer(tmp_path: Path) -> None:
    model = tiny_vit()
    batches = [{"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 1, 0, 1])} for _ in range(4)]
    result = ecc.compress(
        model,
        batches,
        "macs=70%",
        loss=lambda model, batch: model(**batch).loss,
        folder=tmp_path / "run",
        prune_steps=4,
        finetune_steps=2,
        progress=False,
    )
    assert result.met
    assert not result.summary.tokens


def test_compress_takes_a_language_model(tmp_path: Path) -> None:
    sequences = torch.randint(1, 32, (24, 12), generator=torch.Generator().manual_seed(0))
    result = ecc.compress(
        tiny.tiny_llama(),
        TokenBatches(sequences, 4),
        ["70%", "macs=95%"],
        loss=lambda model, batch: model(**batch).loss,
        evaluate=LogLikelihood(sequences[:4]),
        meter="platform:eyeriss",
        folder=tmp_path / "run",
        epochs=1,
        samples=20,
        progress=False,
    )
    assert list(result.summary.budgets) == ["decode", "macs"]
    assert result.summary.tokens["decode"] == 4
    assert "per token" in str(result)
    assert f"-> {math.exp(-(result.score or 0)):.1f}" in str(result)


def test_the_score_is_the_log_likelihood() -> None:
    model, tokens = tiny.tiny_llama(), torch.randint(1, 32, (5, 9))
    with torch.no_grad():
        expected = -float(model(tokens, labels=tokens).loss)
    assert LogLikelihood(tokens, 2)(model) == pytest.approx(expected, rel=1e-5)


def test_batches_are_a_permutation_that_depends_on_the_epoch() -> None:
    batches = TokenBatches(torch.arange(20).view(10, 2), 3)
    assert len(batches) == len(batches(0)) == 3
    epochs = [torch.cat([batch["input_ids"][:, 0] for batch in batches(epoch)]).tolist() for epoch in (0, 0, 1)]
    assert epochs[0] == epochs[1] != epochs[2]
    assert len(set(epochs[0])) == 9


def test_equal_layers_load_with_from_pretrained(tmp_path: Path) -> None:
    from ecc.graph import trace_channels, with_widths
    from ecc.integrations.huggingface import load_pruned, save_pruned

    model = tiny.tiny_llama()
    graph = trace_channels(model, {"input_ids": torch.randint(1, 32, (2, 8))}, verify=False)
    half = {group.name: group.width // 2 for group in graph.prunable if not group.zeroed}
    small = with_widths(model, graph, half)
    save_pruned(small, tmp_path / "small", tokenizer=tiny.make_tokenizer())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert again.config.num_attention_heads == 4
    prompt = torch.randint(1, 32, (2, 5))
    with torch.no_grad():
        expected = small(prompt).logits
        assert torch.equal(again(prompt).logits, expected)
        assert torch.equal(load_pruned(tmp_path / "small")(prompt).logits, expected)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "small")("the cat")["input_ids"] == [5, 7]


def test_attention_that_is_not_understood_leaves_the_other_parts_prunable(tmp_path: Path) -> None:
    class Sorting(transformers.models.llama.modeling_llama.LlamaAttention):
        def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
            mixed, _ = super().forward(hidden_states, **kwargs)
            return mixed.sort(dim=-1).values, None

    model = tiny.tiny_llama()
    for layer in model.model.layers:
        layer.self_attn.__class__ = Sorting
    seen = ecc.inspect(model, {"input_ids": torch.randint(1, 32, (2, 8))})
    hidden = [group for group in seen.graph.groups if "mlp" in group.name]
    assert len(hidden) == 2
    assert all(group.frozen is None for group in hidden)


def test_compress_says_that_attention_is_not_pruned(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=32, hidden_size=32, n_layer=2, n_head=4)  # a bias enters its scores
    tiny.write_model(tmp_path / "bloom", transformers.BloomForCausalLM(config))
    command = ["compress", f"hf:{tmp_path / 'bloom'}", "--text", folder / "train.txt", "--length", 16, "--budget"]
    command += ["params=80%", "--prune-steps", 4, "--finetune-steps", 0, "-o", tmp_path / "run"]
    assert run_cli(monkeypatch, *command) == 0
    assert "note: 2 groups of attention channels are not pruned" in " ".join(capsys.readouterr().err.split())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["widths"]["transformer.h.0.mlp.dense_h_to_4h"] < 128


# ---------------------------------------------------------------- wrong input


WRONG = [
    (("hf:nowhere/at/all",), "there is no folder 'nowhere/at/all'"),
    (("hf:.",), "has no config.json"),
    (("hf:llama", "--text", "no.txt"), "there is no text file 'no.txt'"),
    (("hf:llama", "--text", "short.txt"), "the text is too short: short.txt has 2 tokens"),
    (("hf:llama", "--text", "few.txt"), "a batch takes 8"),
    (("hf:llama", "--text", "bytes.txt"), "is not UTF-8"),
    (("hf:llama", "--text", "train.txt", "--length", "100"), "length 100 is outside 2..64"),
    (("hf:other", "--text", "train.txt"), "the tokenizer of 'other' has 65 tokens and the model embeds 32"),
    (("hf:bare", "--text", "train.txt"), "folder 'bare' has no tokenizer"),
    (("hf:unnamed", "--text", "train.txt"), "config.json of 'unnamed' names no class under 'architectures'"),
    (("hf:resized", "--text", "train.txt"), "down_proj.weight has the shape (32, 64) instead of (32, 48)"),
    (("hf:incomplete", "--text", "train.txt"), "model.layers.0.mlp.up_proj.weight is missing"),
    (("hf:llama",), "gets them with --text FILE"),
    (("hf:llama", "--text", "train.txt", "--budget", "macs=1M/token"), "not per token; write for example macs=50%"),
    (("hf:bert", "--text", "train.txt", "--budget", "5 mJ/token"), "are per item of the batch; use /item or /image"),
    (("hf:damaged", "--text", "train.txt"), "the model 'damaged' cannot be loaded"),
    (("hf:llama", "--text", "train.txt", "--data", "."), "takes no data"),
    (("digits", "--text", "train.txt"), "takes no text"),
    (("digits", "--gradient-checkpointing"), "has no gradient checkpointing"),
    (("hf:vit", "--text", "train.txt"), "classifies images and takes no text; give a data set with --data"),
    (("hf:encoder", "--text", "train.txt"), "takes no tokens; hf: takes language models, encoders of text"),
    (("hf:llama", "--text", "train.txt", "--budget", "5 mJ/image"), "whose costs are per token; use /token"),
    (("hf:llama", "--text", "train.txt", "--budget", "5 mW/token"), "energy takes J"),
    (
        ("hf:llama", "--text", "train.txt", "--budget", "prefill=1nJ/token", "--samples", "20", "-q"),
        "prefill budget 1.00 nJ per token is not reachable",
    ),
    (("hf:bert", "--text", "train.txt", "--budget", "decode=70%"), "this network is no language model"),
    (("hf:llama", "--text", "train.txt", "--prune-steps", "0"), "prunes while it trains, and prune_steps is 0"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_wrong_input_gets_one_line(
    arguments: tuple[str, ...],
    message: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    budget = () if "--budget" in arguments else ("--budget", "70%")
    length = () if "--length" in arguments or arguments[0] == "digits" else ("--length", "16")
    options = (*budget, *length, "--meter", "platform:eyeriss", "-o", "run")
    assert run_cli(monkeypatch, "compress", *arguments, *options) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(("note:", "text:"))]
    assert len(lines) == 1  # no report of transformers either
    assert lines[0].startswith("error:")
    assert message in lines[0]


def test_the_head_of_an_encoder_is_left_out_with_a_note(tmp_path: Path) -> None:
    model = transformers.BertForSequenceClassification(tiny.tiny_bert().config)
    tiny.write_model(tmp_path / "classifier", model)
    notes: list[str] = []
    task = language_task(tmp_path / "classifier", log=notes.append)
    assert type(task.model).__name__ == "BertModel"
    expected = "note: the folder has a BertForSequenceClassification; its encoder BertModel is compressed, without the"
    assert [note[: len(expected)] for note in notes] == [expected]


def test_a_state_space_model_is_saved_and_loaded(tmp_path: Path) -> None:
    from ecc.integrations.huggingface import load_pruned, save_pruned

    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, state_size=4)  # has no heads
    model, tokens = transformers.MambaForCausalLM(config).eval(), torch.randint(1, 32, (2, 8))
    save_pruned(model, tmp_path / "mamba")
    with torch.no_grad():
        assert torch.equal(load_pruned(tmp_path / "mamba")(tokens).logits, model(tokens).logits)


def test_a_gated_model_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        assert options["trust_remote_code"] is False
        raise OSError("You are trying to access a gated repo. 401 Client Error.")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refuse)
    with pytest.raises(BadTask, match="access to it is restricted"):
        language_task("org/gated")


def test_code_of_a_repository_is_never_executed(folder: Path, tmp_path: Path) -> None:
    tiny.write_model(tmp_path / "remote", tiny.tiny_llama())
    path = tmp_path / "remote" / "config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config["model_type"] = "private"
    path.write_text(json.dumps(config))
    (tmp_path / "remote" / "code.py").write_text("raise SystemExit('executed')")
    with pytest.raises(BadTask, match="cannot be loaded"):
        language_task(tmp_path / "remote")


def test_a_budget_per_token_needs_tokens() -> None:
    from ecc.energy import budgets_of_workloads, parse_budgets

    with pytest.raises(BadBudget, match="use /item or /image"):
        budgets_of_workloads(parse_budgets("5 mJ/token"), ())
    (budget,) = budgets_of_workloads(parse_budgets("5 mJ/token"), ("decode", "prefill"))
    assert (budget.resource, budget.item) == ("decode", "token")
    (budget,) = budgets_of_workloads(parse_budgets("latency=2ms/token"), ("decode", "prefill"))
    assert budget.resource == "decode_latency"
    with pytest.raises(BadBudget, match="2 budgets for decode"):
        budgets_of_workloads(parse_budgets(["70%", "decode=60%"]), ("decode", "prefill"))


@pytest.mark.thorough
def test_a_pruned_language_model_is_written_as_onnx(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="ONNX export needs onnxscript")
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


def test_a_clock_gives_no_joules_per_token(tmp_path: Path) -> None:
    model, batch = tiny.tiny_llama(), {"input_ids": torch.ones(2, 6, dtype=torch.long)}
    batch["labels"] = batch["input_ids"]
    with pytest.raises(EccError, match="cputime is a clock and measures no energy; give a budget on latency"):
        ecc.compress(
            model, [batch] * 4, "decode=70%", loss=lambda model, batch: model(**batch).loss, meter="cputime",
            prune_steps=2, finetune_steps=1, folder=tmp_path / "run", progress=False,
        )  # fmt: skip
