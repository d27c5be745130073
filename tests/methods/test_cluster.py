"""Comparisons on a real Ray cluster of two nodes (`two_nodes.py`), and its parts with a fake one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import ecc
from ecc.errors import EccError
from ecc.methods import CompressSettings
from ecc.methods import cluster as clusters
from ecc.methods.cluster import Cluster, Outcome, open_cluster, run_on_cluster
from ecc.methods.grid import Comparison, GridRun
from ecc.records import read_record
from ecc.run_records import GridFailure
from ecc.training import Interrupted, RunInUse, load_state
from methods.jobs import _graph, digits_model, history_of, true_model, wide_task

TESTS = Path(__file__).resolve().parent.parent


# ---------------------------------------------------------------- two nodes


class Grids(NamedTuple):
    """A comparison made here, and one on two nodes of which one was killed."""

    here: Path
    killed: Path
    outcome: dict[str, Any]


@pytest.fixture(scope="module")
def grids(tmp_path_factory: pytest.TempPathFactory) -> Grids:
    pytest.importorskip("ray")
    from methods.two_nodes import spec_of

    folder = tmp_path_factory.mktemp("grids")
    energy = folder / "energy.json"
    digits_model().save(energy)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(Path(ecc.__file__).parent.parent)]),  # workers are elsewhere
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",  # or Ray writes a token into the home folder
    }
    command = [sys.executable, str(TESTS / "methods" / "two_nodes.py"), str(folder), str(energy)]
    # Sockets lie in Ray's folder, and the path of a socket has to be short.
    with (folder / "log").open("w") as log, TemporaryDirectory(prefix="ecc-ray-", dir="/tmp") as short:
        environment["RAY_TMPDIR"] = short
        ray = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            with spec_of(energy, "digits").opened() as grid:
                assert grid.run(folder / "here") == []
            code = ray.wait(timeout=240)
            survivors = left_after_a_while(ray.pid)
        finally:
            for process in session(ray.pid):
                os.kill(process, signal.SIGKILL)
            ray.wait()
    assert code == 0, (folder / "log").read_text()[-3000:]
    assert not survivors, "a process of Ray survived"
    return Grids(folder / "here", folder / "killed", json.loads((folder / "outcome.json").read_text()))


def left_after_a_while(leader: int) -> list[int]:
    """The processes of a session that do not end by themselves; those of an old Ray take a moment."""
    patience = time.monotonic() + 20
    while session(leader) and time.monotonic() < patience:
        time.sleep(0.1)
    return session(leader)


def session(leader: int) -> list[int]:
    """The processes of a session."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rsplit(")", 1)[1].split()
        except OSError:  # gone meanwhile
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(entry.parent.name))
    return found


def same(one: Path, other: Path) -> int:
    """Compare all runs of two comparisons; how many there are."""
    runs = sorted(file.parent.relative_to(one) for file in one.glob("seed-*/*/summary.json"))
    assert runs == sorted(file.parent.relative_to(other) for file in other.glob("seed-*/*/summary.json"))
    for run in runs:
        first, second = (load_state(next((root / run).glob("[sd][le]*.safetensors"))) for root in (one, other))
        assert all(torch.equal(first[name], second[name]) for name in first), run  # slim or dense
        for name in ("summary.json", "config.json", *(["widths.json"] if run.name != "dense" else [])):
            assert (one / run / name).read_bytes() == (other / run / name).read_bytes(), run / name
        assert history_of(one / run) == history_of(other / run)
    return len(runs)


@pytest.mark.thorough  # starts two nodes, half a minute
@pytest.mark.slow
def test_two_nodes_of_which_one_is_killed_give_the_result_of_one_machine(grids: Grids) -> None:
    messages, finished, victim = (grids.outcome[name] for name in ("messages", "finished", "victim"))
    done = [f"{method} 65% seed {seed}: done" for method in ("ecc", "scratch", "uniform") for seed in (0, 1)]
    assert sorted(messages) == sorted(done)
    assert all(
        messages.index(f"ecc 65% seed {n}: done") < messages.index(f"scratch 65% seed {n}: done") for n in (0, 1)
    )
    assert finished
    assert f"{victim}/summary.json" not in finished
    assert grids.outcome["tries"] == 2  # begun there, ended elsewhere
    for name, when in finished.items():
        assert (grids.killed / name).stat().st_mtime_ns == when, "a finished run was repeated"
    assert same(grids.here, grids.killed) == 8  # the two dense networks among them


# ---------------------------------------------------------------- parts, with a fake cluster


def test_a_missing_ray_or_cluster_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EccError, match="pip install ray"), open_cluster():
        pass
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=pytest.fail))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nothing listens
        address = f"127.0.0.1:{free.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(EccError, match=f"the Ray cluster at {address} does not answer"), open_cluster():
            pass


class Errors:
    """The exceptions of Ray that matter here."""

    class RayError(Exception):
        pass

    class RaySystemError(RayError):
        pass

    class WorkerCrashedError(RayError):
        pass

    class RayTaskError(RayError):
        def __init__(self, cause: Exception) -> None:
            super().__init__(f"in a task: {cause}")
            self.cause = cause


class FakeRay:
    """A cluster with given resources, whose references are their own outcomes."""

    exceptions = Errors

    def __init__(self, **resources: float) -> None:
        self._resources, self.cancelled = resources, list[Any]()

    def cluster_resources(self) -> dict[str, float]:
        return self._resources

    def nodes(self) -> list[dict[str, bool]]:
        return [{"Alive": True}, {"Alive": True}, {"Alive": False}]

    def wait(self, references: list[Any], *, num_returns: int = 1, timeout: float) -> tuple[list[Any], list[Any]]:
        return references[:num_returns], references[num_returns:]

    def get(self, reference: Any) -> Any:
        if isinstance(reference, Exception):
            raise reference
        return reference

    def cancel(self, reference: Any) -> None:
        self.cancelled.append(reference)


@pytest.mark.parametrize(("device", "gpus", "needed"), [(None, 8, 1), (None, 0, 0), ("cpu", 8, 0), ("cuda", 8, 1)])
def test_a_task_needs_a_gpu_if_it_computes_on_one(device: str | None, gpus: int, needed: int) -> None:
    cluster = Cluster(FakeRay(CPU=16, GPU=gpus), device)
    assert cluster._needs == {"num_cpus": 1, "num_gpus": needed}
    assert cluster.device == ("cuda" if needed else "cpu")
    assert str(cluster) == f"2 machines, 16 CPUs and {gpus} GPUs"


def test_a_task_that_dies_again_and_again_is_a_failure_and_the_others_continue() -> None:
    crash = Errors.WorkerCrashedError("out of\nmemory")
    references = [crash, Errors.RayTaskError(crash), Outcome(), Outcome("infeasible")]  # the second awaited the first
    found = [outcome for _, outcome in Cluster(FakeRay(CPU=1), "cpu").outcomes(references)]
    assert all("process or machine died 4 times. Ray reports: memory" in outcome.error for outcome in found[:2])
    assert found[2:] == [Outcome(), Outcome("infeasible")]


@pytest.mark.parametrize(
    ("last", "error", "message"),
    [
        (Outcome("no meter", is_fatal=True), EccError, "no meter"),
        (Errors.RaySystemError("No module named 'ecc'"), EccError, "Every machine needs the same ecc"),
        (Errors.RayTaskError(RuntimeError("of the user's code")), Errors.RayTaskError, "of the user's code"),
    ],
)
def test_a_fatal_outcome_cancels_the_other_tasks(last: Any, error: type[Exception], message: str) -> None:
    ray, left = FakeRay(CPU=1), Outcome("not looked at")
    with pytest.raises(error, match=message):
        list(Cluster(ray, "cpu").outcomes([Outcome(), last, left]))
    assert ray.cancelled == [left]


def test_a_signal_cancels_the_tasks() -> None:
    ray = FakeRay(CPU=1)
    outcomes = Cluster(ray, "cpu").outcomes([Outcome("a"), Outcome("b"), Outcome("c")])
    assert next(outcomes) == (Outcome("a"), Outcome("a"))
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Interrupted, match=r"stopped after 1 of 3 tasks\. Run the same command again") as stop:
        next(outcomes)
    assert stop.value.signum == signal.SIGTERM
    assert sorted(ray.cancelled) == [Outcome("b"), Outcome("c")]


class Reference:
    pass


class Inline:
    """A cluster that runs every task at once, in this process."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.results: dict[Reference, Outcome] = {}

    def start(self, function: Callable[..., Outcome], *values: Any) -> Reference:
        self.started.append(values[2])
        reference = Reference()
        values = tuple(self.results[one] if isinstance(one, Reference) else one for one in values)
        self.results[reference] = function(*values)
        return reference

    def outcomes(self, references: list[Reference]) -> Iterator[tuple[Reference, Outcome]]:
        yield from ((reference, self.results[reference]) for reference in references)


def small_grid(**changes: Any) -> Comparison:
    values: dict[str, Any] = {"methods": ["scratch", "uniform", "ecc"], "budgets": ["65%"], "seeds": 1} | changes
    settings = CompressSettings(pretrain_steps=3, prune_steps=20, finetune_steps=2, lr=1e-3)
    return Comparison(wide_task("chain"), true_model(_graph("chain")), settings=settings, **values)


def test_prerequisites_start_first_and_finished_runs_are_skipped(tmp_path: Path) -> None:
    assert small_grid(methods=["uniform"]).run(tmp_path / "runs") == []
    grid, cluster, messages = small_grid(seeds=2), Inline(), list[str]()
    assert run_on_cluster(grid, lambda: nullcontext(grid), tmp_path / "runs", cluster, messages.append) == []
    first = [GridRun("ecc", "65%", 0), GridRun("scratch", "65%", 0)]
    second = [GridRun("uniform", "65%", 1), GridRun("ecc", "65%", 1), GridRun("scratch", "65%", 1)]
    assert cluster.started == [1, *first, *second]  # the dense network of seed 1 first
    assert len(messages) == 5
    assert not grid.unfinished(tmp_path / "runs")


def raises(error: BaseException) -> Outcome:
    raise error


def test_a_failed_run_or_pretraining_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = small_grid(budgets=["1%", "65%"], methods=["uniform"])
    failed = run_on_cluster(grid, lambda: nullcontext(grid), tmp_path / "some", Inline())
    assert failed == [GridRun("uniform", "1%", 0)]
    assert "not reachable" in read_record(failed[0].failure_file(tmp_path / "some"), GridFailure).error
    monkeypatch.setattr(Comparison, "pretrain", lambda self, seed, root: raises(EccError("the loss is nan")))
    failed = run_on_cluster(grid, lambda: nullcontext(grid), tmp_path / "none", Inline())
    assert failed == grid.runs
    for one in failed:
        assert read_record(one.failure_file(tmp_path / "none"), GridFailure).error == "the loss is nan"


def test_a_worker_waits_for_a_locked_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(tries: list[int]) -> Outcome:
        tries.append(1)
        return Outcome() if len(tries) == 3 else raises(RunInUse("the folder is in use by process 7."))

    monkeypatch.setattr(clusters.time, "sleep", lambda seconds: None)
    tries: list[int] = []
    assert clusters._run_task(str(Path.cwd()), locked, tries) == Outcome()
    assert len(tries) == 3
    monkeypatch.setattr(clusters, "LOCK_SECONDS", 0.0)
    assert clusters._run_task(str(Path.cwd()), locked, []) == Outcome("the folder is in use by process 7.", True)


def test_errors_that_every_worker_would_have_are_fatal(tmp_path: Path) -> None:
    assert clusters._run_task(str(Path.cwd()), raises, EccError("no meter")) == Outcome("no meter", is_fatal=True)
    outcome = clusters._run_task(str(tmp_path / "local"), raises, EccError("not reached"))
    assert outcome.is_fatal
    assert "use a file system that all machines share" in outcome.error
    with pytest.raises(EccError, match="does not see"), clusters._open_grid(pytest.fail, tmp_path):
        pass
    with pytest.raises(KeyboardInterrupt):  # a cancelled task ends as Ray expects
        clusters._run_task(str(Path.cwd()), raises, Interrupted("saved", signal.SIGINT))
