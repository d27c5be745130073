"""Grids on a real Ray cluster of two nodes; see `two_nodes.py`."""

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

import ecc
from ecc.errors import EccError
from ecc.methods import CompressSettings
from ecc.methods import cluster as clusters
from ecc.methods.cluster import Cluster, Outcome, open_cluster, run_on_cluster
from ecc.methods.grid import Comparison, GridRun
from ecc.training import Interrupted, RunInUse
from methods.jobs import _graph, digits_model, history_of, true_model, wide_task

TESTS = Path(__file__).resolve().parent.parent


# ---------------------------------------------------------------- two nodes


class Grids(NamedTuple):
    """A grid made here, one on two nodes, and one on two nodes of which one was killed."""

    here: Path
    peace: Path
    war: Path
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
    return Grids(folder / "here", folder / "peace", folder / "war", json.loads((folder / "outcome.json").read_text()))


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
    """Compares all cells of two grids; how many there are."""
    cells = sorted(file.parent.relative_to(one) for file in one.glob("seed-*/*/summary.json"))
    assert cells == sorted(file.parent.relative_to(other) for file in other.glob("seed-*/*/summary.json"))
    for cell in cells:
        for name in ("summary.json", "config.json", "widths.json", "slim.safetensors", "dense.safetensors"):
            if cell.name == "dense" and name in ("widths.json", "slim.safetensors"):
                continue
            if cell.name != "dense" and name == "dense.safetensors":
                continue
            assert (one / cell / name).read_bytes() == (other / cell / name).read_bytes(), cell / name
        assert history_of(one / cell) == history_of(other / cell)
    return len(cells)


@pytest.mark.slow
def test_a_grid_on_two_nodes_is_the_grid_of_one_machine(grids: Grids) -> None:
    assert grids.outcome["nodes"] == [True, True]  # both worked
    told = grids.outcome["told"]
    assert sorted(told) == sorted(
        f"{method} 65% seed {seed}: done" for method in ("ecc", "scratch", "uniform") for seed in (0, 1)
    )
    assert all(told.index(f"ecc 65% seed {n}: done") < told.index(f"scratch 65% seed {n}: done") for n in (0, 1))
    assert same(grids.here, grids.peace) == 8  # the two dense networks among them


@pytest.mark.slow
def test_a_node_that_is_killed_at_its_cell_loses_nothing(grids: Grids) -> None:
    finished, victim = grids.outcome["finished"], grids.outcome["victim"]
    assert finished
    assert f"{victim}/summary.json" not in finished
    assert grids.outcome["tries"] == 2  # begun there, ended elsewhere
    for name, when in finished.items():
        assert (grids.war / name).stat().st_mtime_ns == when, "a finished cell was run again"
    assert same(grids.here, grids.war) == 8


# ---------------------------------------------------------------- parts, without a cluster


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EccError, match="pip install ray"), open_cluster():
        pass


def test_a_cluster_that_is_not_there_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False, init=pytest.fail))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and nobody listens
        address = f"127.0.0.1:{free.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(EccError, match=f"the Ray cluster at {address} does not answer"), open_cluster():
            pass


class Errors:
    """Ray's, as far as we look at them."""

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
    """A cluster that has what it is told to have, and whose tickets are what comes of them."""

    exceptions = Errors

    def __init__(self, **resources: float) -> None:
        self._resources = resources
        self.cancelled: list[Any] = []

    def cluster_resources(self) -> dict[str, float]:
        return self._resources

    def nodes(self) -> list[dict[str, bool]]:
        return [{"Alive": True}, {"Alive": True}, {"Alive": False}]

    def wait(self, tickets: list[Any], *, num_returns: int = 1, timeout: float) -> tuple[list[Any], list[Any]]:
        return tickets[:num_returns], tickets[num_returns:]

    def get(self, ticket: Any) -> Any:
        if isinstance(ticket, Exception):
            raise ticket
        return ticket

    def cancel(self, ticket: Any) -> None:
        self.cancelled.append(ticket)


@pytest.mark.parametrize(("device", "gpus", "needed"), [(None, 8, 1), (None, 0, 0), ("cpu", 8, 0), ("cuda", 8, 1)])
def test_a_task_asks_for_a_gpu_where_it_computes_on_one(device: str | None, gpus: int, needed: int) -> None:
    cluster = Cluster(FakeRay(CPU=16, GPU=gpus), device)
    assert cluster._needs == {"num_cpus": 1, "num_gpus": needed}
    assert cluster.device == ("cuda" if needed else "cpu")
    assert str(cluster) == f"2 machines, 16 CPUs and {gpus} GPUs"


def test_what_ray_can_never_give_is_refused() -> None:
    with pytest.raises(EccError, match="no machine of the Ray cluster has a GPU"):
        Cluster(FakeRay(CPU=16), "cuda")
    with pytest.raises(EccError, match="a GPU of its own; say cuda"):
        Cluster(FakeRay(CPU=16, GPU=2), "cuda:1")


def test_what_dies_again_and_again_is_told_and_the_others_go_on() -> None:
    crash = Errors.WorkerCrashedError("out of\nmemory")
    tickets = [
        crash,
        Errors.RayTaskError(crash),
        Outcome(),
        Outcome("infeasible"),
    ]  # the second had waited for the first
    found = [outcome for _, outcome in Cluster(FakeRay(CPU=1), "cpu").outcomes(tickets)]
    assert all("its process or machine died 4 times; Ray says: memory" in outcome.error for outcome in found[:2])
    assert found[2:] == [Outcome(), Outcome("infeasible")]
    assert not any(outcome.is_fatal for outcome in found)


def test_what_ends_the_whole_cancels_what_is_left() -> None:
    for last, error, match in (
        (Outcome("no meter", is_fatal=True), EccError, "no meter"),
        (Errors.RaySystemError("No module named 'ecc'"), EccError, "Every machine needs the same ecc as here"),
        (Errors.RayTaskError(RuntimeError("of the user's code")), Errors.RayTaskError, "of the user's code"),
    ):
        ray = FakeRay(CPU=1)
        left = Outcome("not looked at")
        with pytest.raises(error, match=match):
            list(Cluster(ray, "cpu").outcomes([Outcome(), last, left]))
        assert ray.cancelled == [left]


def test_asked_to_stop_it_cancels_and_says_how_to_go_on() -> None:
    ray = FakeRay(CPU=1)
    outcomes = Cluster(ray, "cpu").outcomes([Outcome("a"), Outcome("b"), Outcome("c")])
    assert next(outcomes) == (Outcome("a"), Outcome("a"))
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Interrupted, match=r"stopped with 1 of 3 tasks done\. The same command goes on") as stop:
        next(outcomes)
    assert stop.value.signum == signal.SIGTERM
    assert sorted(ray.cancelled) == [Outcome("b"), Outcome("c")]


class Ticket:
    pass


class Inline:
    """A cluster that does everything at once, here."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.results: dict[Ticket, Outcome] = {}

    def start(self, work: Callable[..., Outcome], *values: Any) -> Ticket:
        self.started.append(values[2])
        ticket = Ticket()
        self.results[ticket] = work(*(self.results[one] if isinstance(one, Ticket) else one for one in values))
        return ticket

    def outcomes(self, tickets: list[Ticket]) -> Iterator[tuple[Ticket, Outcome]]:
        yield from ((ticket, self.results[ticket]) for ticket in tickets)


def small_grid(**changes: Any) -> Comparison:
    graph = _graph("chain")
    values: dict[str, Any] = {"methods": ["scratch", "uniform", "ecc"], "budgets": ["65%"], "seeds": 1} | changes
    settings = CompressSettings(pretrain_steps=3, prune_steps=20, finetune_steps=2, lr=1e-3)
    return Comparison(wide_task("chain"), true_model(graph), settings=settings, **values)


def test_what_others_build_on_comes_first_and_what_is_finished_is_not_run_again(tmp_path: Path) -> None:
    grid, told = small_grid(methods=["uniform"]), list[str]()
    assert grid.run(tmp_path / "runs") == []
    grid, cluster = small_grid(seeds=2), Inline()
    assert run_on_cluster(grid, lambda: nullcontext(grid), tmp_path / "runs", cluster, told.append) == []
    first = [GridRun("ecc", "65%", 0), GridRun("scratch", "65%", 0)]
    second = [GridRun("uniform", "65%", 1), GridRun("ecc", "65%", 1), GridRun("scratch", "65%", 1)]
    assert cluster.started == [1, *first, *second]  # the dense network of seed 1 first
    assert len(told) == 5
    assert not grid.missing(tmp_path / "runs")


def test_a_cell_without_result_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grid = small_grid(budgets=["1%", "65%"], methods=["uniform"])
    failed = run_on_cluster(grid, lambda: nullcontext(grid), tmp_path / "some", Inline())
    assert failed == [GridRun("uniform", "1%", 0)]
    assert "is below" in json.loads((tmp_path / "some" / "seed-0" / "uniform-1.failed.json").read_text())["error"]

    monkeypatch.setattr(Comparison, "train_dense", lambda self, seed, root: raises(EccError("the loss is nan")))
    failed = run_on_cluster(grid, lambda: nullcontext(grid), tmp_path / "none", Inline())
    assert failed == grid.cells
    for cell in failed:
        file = cell.folder(tmp_path / "none").with_name(f"{cell.folder(tmp_path).name}.failed.json")
        assert json.loads(file.read_text())["error"] == "the loss is nan"


def busy(tries: list[int]) -> Outcome:
    tries.append(1)
    if len(tries) < 3:
        raise RunInUse("the folder is in use by process 7.")
    return Outcome()


def raises(error: BaseException) -> Outcome:
    raise error


def test_a_worker_waits_for_a_lock_that_outlived_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters.time, "sleep", lambda seconds: None)
    tries: list[int] = []
    assert clusters._at_home(str(Path.cwd()), busy, tries) == Outcome()
    assert len(tries) == 3
    monkeypatch.setattr(clusters, "LOCK_SECONDS", 0.0)
    assert clusters._at_home(str(Path.cwd()), busy, []) == Outcome("the folder is in use by process 7.", is_fatal=True)


def test_what_would_go_wrong_on_every_worker_stops_the_grid(tmp_path: Path) -> None:
    outcome = clusters._at_home(str(Path.cwd()), raises, EccError("no meter"))
    assert outcome == Outcome("no meter", is_fatal=True)
    outcome = clusters._at_home(str(tmp_path / "local"), raises, EccError("not reached"))
    assert outcome.is_fatal
    assert "must lie on a file system that all machines share" in outcome.error
    with pytest.raises(EccError, match="does not see"), clusters._joined(pytest.fail, tmp_path):
        pass


def test_a_cell_that_is_cancelled_ends_as_ray_expects() -> None:
    with pytest.raises(KeyboardInterrupt):
        clusters._at_home(str(Path.cwd()), raises, Interrupted("saved", signal.SIGINT))
