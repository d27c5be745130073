from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ecc.training import load_state
from methods.jobs import history_of
from training.launching import in_two_processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes left behind; see `processes.py`."""
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("processes")
    in_two_processes("methods/processes.py", folder)
    return folder


@pytest.mark.slow
def test_both_processes_decide_alike_at_every_step(folder: Path) -> None:
    first, second = (load_state(folder / f"{rank}.safetensors") for rank in (0, 1))
    assert list(first["steps"]) == list(second["steps"]) == [str(step + 1) for step in range(16)]
    for step, facts in first["steps"].items():
        for name, tensor in facts.items():
            assert torch.equal(tensor, second["steps"][step][name]), (step, name)
    assert len({tuple(facts["widths"].tolist()) for facts in first["steps"].values()}) > 4
    assert len({tuple(facts["limits"].tolist()) for facts in first["steps"].values()}) > 2  # it was corrected
    assert torch.equal(first["widths"], second["widths"])
    assert (first["label"], second["label"]) == ("estimated", "estimated")
    assert all(torch.equal(first["slim"][name], second["slim"][name]) for name in first["slim"])


@pytest.mark.slow
def test_only_the_first_process_writes(folder: Path) -> None:
    assert not (folder / "whole-1").exists()
    names = {path.name for path in (folder / "whole-0").iterdir()}
    assert {"slim.safetensors", "widths.json", "summary.json", "history.jsonl", "config.json"} <= names
    sessions = json.loads((folder / "parted" / "environment.json").read_text())["sessions"]
    assert len({session["pid"] for session in sessions}) == 1
    assert len(sessions) == 2
    summary = json.loads((folder / "whole-0" / "summary.json").read_text())
    assert summary["batches"]["total"] == 2 * (2 + 16 + 3)
    assert summary["relative_ci"] == 0.012
    assert summary["met"]


@pytest.mark.slow
def test_two_processes_go_on_bit_for_bit(folder: Path) -> None:
    whole, *parted = (load_state(folder / f"{name}.safetensors")["slim"] for name in ("0", "parted-0", "parted-1"))
    for found in parted:
        assert all(torch.equal(whole[name], found[name]) for name in whole)
    assert history_of(folder / "parted") == history_of(folder / "whole-0")
