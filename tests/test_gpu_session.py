"""The driver of a session on a GPU machine, with small programs in place of the benchmarks."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import evidence
import gpu_session
import pytest
import resnet56
import unseen_networks
import vit

from ecc.methods.registry import METHODS
from ecc.zoo.recipe import read_recipe

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import argparse, json, sys, time
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path); parser.add_argument("--seconds", type=float)
parser.add_argument("--earlier", type=Path, nargs="*", default=[])
parser.add_argument("--sleep", type=float, default=0)
o = parser.parse_args()
done = [c for f in o.earlier for c in json.loads(f.read_text())["cells"]]
state = o.out.with_suffix(".state")
step = int(state.read_text()) + 1 if state.exists() else 1
done.append({"step": step, "limit": o.seconds})
o.out.write_text(json.dumps({"cells": done}))
state.write_text(str(step).zfill(100))
time.sleep(o.sleep)
"""


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "program.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.setattr(gpu_session, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_session, "GRACE", 1.0)
    monkeypatch.setattr(gpu_session, "PART_BYTES", 4096)
    return gpu_session


def test_a_session_runs_in_order_within_its_time_and_goes_on_later(session: Any, tmp_path: Path) -> None:
    one = session.Experiment
    experiments = {
        "first": one("program.py", least=1, needs=["data"]),
        "endless": one("program.py", ["--sleep", "600"], least=1),
        "absent": one("program.py", least=1, needs=["nowhere"]),
        "late": one("program.py", least=5000, share=4.0),
        "broken": one("nothing.py", least=0.1, share=4.0),
    }
    (tmp_path / "inputs" / "data").mkdir(parents=True)
    folder = tmp_path / "out"
    begin = time.monotonic()
    report = session.run_session(experiments, folder, tmp_path / "inputs", None, 20.0)
    assert time.monotonic() - begin < 30
    assert report["first"]["result"] == "done"
    assert report["endless"]["result"] == "stopped"
    assert report["endless"]["limit"] <= 20 - 1 - 8
    assert report["endless"]["cells"] == {"done": 1, "failed": 0}  # what it wrote before it was stopped
    assert report["absent"] == {"skipped": "no nowhere in inputs", "cells": {"done": 0, "failed": 0}}
    assert "it needs 5000 s" in report["late"]["skipped"]
    assert report["broken"]["result"] == "exit code 2"
    assert json.loads((folder / "session.json").read_text(encoding="utf-8")) == report
    parts = sorted(folder.glob("state.tar.*"))
    assert len(parts) > 1
    assert all(part.stat().st_size <= 4096 for part in parts)
    assert not list(folder.glob("*.state"))

    again = tmp_path / "again"
    session.unpack(folder, again)
    session.run_session({"first": experiments["first"]}, again, tmp_path / "inputs", folder, 20.0)
    record = json.loads((again / "first.json").read_text(encoding="utf-8"))
    assert [cell["step"] for cell in record["cells"]] == [1, 2]


def test_profiles_in_the_folder_of_a_record_are_packed_with_their_folder(session: Any, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    (folder / "nets").mkdir(parents=True)
    (folder / "nets" / "a.profile.gz").write_bytes(b"profile")
    (folder / "nets.json").write_text("{}", encoding="utf-8")
    assert session.pack(folder)
    assert not list(folder.rglob("*.gz"))
    session.unpack(folder, tmp_path / "again")
    assert (tmp_path / "again" / "nets" / "a.profile.gz").read_bytes() == b"profile"


def test_states_of_a_call_that_was_killed_are_not_replaced_by_older_ones(session: Any, tmp_path: Path) -> None:
    for name in ("a.state", "b.state"):
        (tmp_path / name).write_text("old", encoding="utf-8")
    session.pack(tmp_path)
    (tmp_path / "a.state").write_text("new", encoding="utf-8")
    session.unpack(tmp_path, tmp_path)
    assert [(tmp_path / name).read_text(encoding="utf-8") for name in ("a.state", "b.state")] == ["new", "old"]


def test_cells_are_listed_and_checked(session: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = {"commit": "a", "device": "b", "date": "c", "command": "d", "seconds": 1, "batches": 0}
    cells = [
        {"key": {"seed": 0}, **good},
        {"key": {"seed": 1}, **good, "joules": 1.0},
        {"key": {"seed": 2}, "error": "x"},
    ]
    (tmp_path / "one.json").write_text(json.dumps({"cells": cells, "skipped": ["a"]}), encoding="utf-8")
    found = session.show("one", session.Experiment("program.py", what="a test"), tmp_path, tmp_path)
    assert found == ["one {'seed': 1}: joules without their interval", "one {'seed': 2}: failed: x"]
    assert "2 cells done, 1 failed, 1 not run" in capsys.readouterr().out
    assert session.show("two", session.Experiment("program.py", needs=["far"]), tmp_path, tmp_path) == []
    assert "needs far" in capsys.readouterr().out


def test_every_experiment_names_a_script_and_its_options() -> None:
    for name, one in gpu_session.EXPERIMENTS.items():
        assert (ROOT / "benchmarks" / one.script).is_file(), name
        words = gpu_session.command(name, one, Path("out"), Path("inputs"), None)
        if one.script == "resnet56.py":
            options = resnet56.parse(words[2:])
            assert options.mps
            assert resnet56.keys_of(options)
        if name == "resnet56_long":
            assert {"ecc", "tp_group_norm", "greedy_taylor", "dense_distilled"} <= set(options.methods)
            assert options.processes == len(resnet56.keys_of(options))
        if one.script == "unseen_networks.py":
            options = unseen_networks.parse(words[2:])
            assert (options.networks, options.count, options.samples) == ("torchvision", 10, 100)
        if one.script == "vit.py":
            options = vit.parse(words[2:])
            assert (options.processes, options.mps) == (8, True)
        if one.script == "evidence.py":
            options = evidence.parse(words[2:])
            recipe, longer = read_recipe(evidence.RECIPES / f"{options.name}.toml"), json.loads(options.settings)
            steps = sum(getattr(recipe.settings, part) for part in ("prune_steps", "finetune_steps"))
            assert sum(longer.values()) >= 4 * steps
            assert set(options.methods) <= set(METHODS)
    assert sys.executable == words[0]


def test_inputs_are_those_of_the_experiments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, inputs = tmp_path / "data", tmp_path / "inputs"
    data.mkdir()
    chosen = {name: gpu_session.EXPERIMENTS[name] for name in ("e1", "e3")}
    with pytest.raises(SystemExit, match=r"has no imagenette128.npz, mobilenet_v1_1.0_224.safetensors"):
        gpu_session.collect(chosen, data, inputs)
    for name in ("imagenette128.npz", "mobilenet_v1_1.0_224.safetensors", "cifar10.npz"):
        (data / name).write_bytes(bytes(2**20))
    (inputs / "data").mkdir(parents=True)
    (inputs / "data" / "old.npz").touch()
    assert gpu_session.collect(chosen, data, inputs) == 2.0
    assert capsys.readouterr().out == "not needed: old.npz\n"
    found = {path.name for path in (inputs / "data").iterdir()}
    assert found == {"imagenette128.npz", "mobilenet_v1_1.0_224.safetensors", "old.npz"}
    assert gpu_session.collect(chosen, inputs / "data", inputs) == 2.0  # its own source
    assert not any(gpu_session.missing_inputs(one, inputs) for one in chosen.values())
