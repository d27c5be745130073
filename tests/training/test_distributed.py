from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from ecc.errors import EccError
from ecc.training.batches import BatchStream
from ecc.training.checkpoint import load_state
from ecc.training.distributed import DistributedContext, _backend, _init_after_restart, find_distributed
from training.launching import in_two_processes
from training.toys import Net, toy_task


def test_a_single_process() -> None:
    distributed = DistributedContext("cpu")
    model = torch.nn.Linear(1, 1)
    assert (distributed.rank, distributed.size, distributed.is_main) == (0, 1, True)
    assert distributed.wrap_model(model) is model
    assert distributed.max([3, -1]) == [3, -1]
    assert torch.equal(distributed.gather(torch.tensor(2.0)), torch.tensor([2.0]))
    assert distributed.gather_object({"a": 1}) == [{"a": 1}]
    with distributed.no_sync(model):
        distributed.broadcast_buffers_(model)
    distributed.close()
    assert DistributedContext(torch.device("cpu", 1)).device == torch.device("cpu")


ALONE = """
import os, sys, torch
import ecc.training.loop
from ecc.training.distributed import find_distributed
assert find_distributed("cpu").size == 1
os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
assert find_distributed("cpu").size == 1
assert "accelerate" not in sys.modules, "accelerate was imported"
"""


def test_without_other_processes_accelerate_is_not_imported() -> None:
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run([sys.executable, "-c", ALONE], env=clean, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_missing_accelerate_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(EccError, match=r"in 2 processes needs Accelerate.*pip install accelerate"):
        find_distributed("cpu")


@pytest.mark.parametrize(
    "changes", [{"TORCHELASTIC_RESTART_COUNT": "0"}, {"LOCAL_WORLD_SIZE": "1"}, {"TORCHELASTIC_USE_AGENT_STORE": "no"}]
)
def test_only_a_restart_on_one_machine_creates_its_own_group(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str]
) -> None:
    """methods/test_restarting.py tests a real restart."""
    alike = {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **alike, **changes}.items():
        monkeypatch.setenv(name, value)
    _init_after_restart(torch.device("cpu"))
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(("processes", "gpus", "expected"), [(2, 2, "nccl"), (2, 1, "gloo"), (1, 1, "nccl")])
def test_processes_that_share_a_gpu_use_gloo(
    monkeypatch: pytest.MonkeyPatch, processes: int, gpus: int, expected: str
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert _backend(torch.device("cuda")) == expected
    assert _backend(torch.device("cpu")) == "gloo"
    assert _backend(torch.device("meta")) is None


def test_processes_that_share_a_gpu_wrap_the_network_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    net, asked = Net(), SimpleNamespace(process_index=1, num_processes=2, prepare_model=lambda model: "by Accelerate")
    monkeypatch.setattr(torch.nn.parallel, "DistributedDataParallel", lambda model: ("shared", model))
    for backend, expected in (("gloo", ("shared", net)), ("nccl", "by Accelerate")):
        monkeypatch.setattr(torch.distributed, "get_backend", lambda backend=backend: backend)
        assert DistributedContext("cuda:0", asked).wrap_model(net) == expected
    assert DistributedContext("cpu", asked).wrap_model(net) == "by Accelerate"


# ---------------------------------------------------------------- two processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of two processes; see `ranks.py`."""
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("ranks")
    in_two_processes("training/ranks.py", folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["joint", "micro", "whole", "resumed"])
def test_both_processes_end_with_the_same_network(folder: Path, name: str) -> None:
    first, second = (load_state(folder / f"{name}-{rank}.safetensors") for rank in (0, 1))
    assert first
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["joint", "micro"])
def test_two_processes_equal_one_with_the_joint_batch(folder: Path, name: str) -> None:
    torch.manual_seed(0)
    model = Net(norm=False, dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    stream = BatchStream(toy_task(), seed=3)
    for _ in range(6):
        (images, labels), (more_images, more_labels) = next(stream), next(stream)
        optimizer.zero_grad()
        F.cross_entropy(model(torch.cat([images, more_images])), torch.cat([labels, more_labels])).backward()
        optimizer.step()
    found = load_state(folder / f"{name}-0.safetensors")
    for key, weight in model.state_dict().items():
        torch.testing.assert_close(found[key], weight, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_two_processes_resume_bit_for_bit(folder: Path) -> None:
    whole, resumed = (load_state(folder / f"{name}-0.safetensors") for name in ("whole", "resumed"))
    assert all(torch.equal(whole[key], resumed[key]) for key in whole)


@pytest.mark.slow
def test_only_one_process_writes_and_batches_of_both_count(folder: Path) -> None:
    history = [json.loads(line) for line in (folder / "run" / "history.jsonl").read_text().splitlines()]
    assert [(line["step"], line["total"]) for line in history] == [(3, 6), (6, 12)]
    contexts = [load_state(folder / f"context-{rank}.safetensors") for rank in (0, 1)]
    assert contexts == [{"rank": 0, "size": 2}, {"rank": 1, "size": 2}]
