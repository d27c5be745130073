from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from ecc.errors import EccError
from ecc.training.distributed import DistributedContext, _backend, _init_after_restart, find_distributed
from training.toys import Net


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
    """methods/test_resume.py tests a real restart."""
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
