"""Every verb, run as a user runs it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from cli.command import NET, PLATFORM, SHORT, ecc, from_json, run_ok, summary_of
from ecc.cli.options import TASK_FILE, RememberedTask, recall_task, remember_task, task_defaults
from ecc.energy import EnergyModel
from ecc.errors import NoMeter
from ecc.graph import ChannelGraph
from ecc.measure import MeasureSettings, Profile, registry
from ecc.measure.remote.client import InstalledSpec
from ecc.records import write_record
from ecc.report.serve import LiveServer
from ecc.training import load_state
from export.runs import finished_run, small_task
from methods.jobs import digits_model
from report.folders import write_run

METERS = """
import time
from ecc.measure import Estimated, MeterInfo, Reading

class Platform:
    def cost(self, graph, widths):
        return Reading(1e-3 + 1e-6 * float(graph.macs(widths)), 1e-4)

    def describe(self):
        return MeterInfo(name="mine", device="board", provenance=Estimated("made up"), scope="all")

class Slow(Platform):
    def cost(self, graph, widths):
        time.sleep(0.05)
        return super().cost(graph, widths)

class Expensive(Platform):
    def cost(self, graph, widths):
        return Reading(1.0 + 1e-6 * float(graph.macs(widths)), 1e-4)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task file, meters, and energy models of the digits."""
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "meters.py").write_text(METERS)
    digits_model().save(tmp_path / "energy.json")
    digits_model(resource="latency").save(tmp_path / "latency.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


# ---------------------------------------------------------------- inspect and doctor


def test_inspect_prints_a_table_or_json_and_saves_the_graph(folder: Path) -> None:
    text = " ".join(run_ok("inspect", "net.py:plain").stdout.split())
    assert "Channel groups of net.plain" in text
    assert "verified: " in text
    assert "not verified" in " ".join(run_ok("inspect", "net.py:plain", "--no-verify").stdout.split())
    facts = from_json(ecc("inspect", "net.py:plain", "--freeze", "0", "-o", "net.graph", "--json"))
    graph = ChannelGraph.load("net.graph")
    assert facts["fingerprint"] == graph.fingerprint
    assert [group.name for group in graph.prunable] == ["2"]


def test_doctor_lists_every_meter_and_the_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(argument: str) -> None:
        raise NoMeter("not on this machine", remedy="sudo repair")

    for name in registry.AUTO:
        monkeypatch.setitem(registry.OPENERS, name, missing)
    text = run_ok("doctor").stdout
    for word in (*registry.AUTO, "platform:jetson-tx2", "cputime:15W", "command:PROGRAM", "sudo repair"):
        assert word in text
    facts = from_json(ecc("doctor", "--json"))
    assert facts["can_measure"] is False
    assert "NVIDIA GeForce GTX 1080 Ti" in run_ok("doctor", "--meter", "platform:gtx-1080-ti").stdout


# ---------------------------------------------------------------- profile, merge and fit


def profiled(*words: str, meter: str = "meters.py:Platform", output: str = "a.profile") -> str:
    return run_ok("profile", "net.py:plain", "--meter", meter, "-o", output, *words).stderr


def test_a_profile_has_the_design_of_its_options_and_is_resumed(folder: Path) -> None:
    words = "--samples 9 --design uniform --seed 3 --width-multiple 4 --batch 5 --rounds 2 --shard 2/3"
    profiled(*words.split())
    header, design = Profile.load("a.profile").header, Profile.load("a.profile").header.design
    assert (header.batch, header.groups) == (5, ("0", "2"))
    assert (design.kind, design.seed, design.width_multiple, design.rounds, design.shard) == (
        "uniform", 3, 4, 2, (2, 3),
    )  # fmt: skip
    whole = (folder / "a.profile").read_bytes()
    (folder / "a.profile").write_bytes(whole[: len(whole) // 2])  # as after a power cut
    profiled(*words.split())
    assert (folder / "a.profile").read_bytes() == whole
    other = ("--meter", "meters.py:Platform", "--batch", "6", "--samples", "9", "-o", "a.profile")
    refused = ecc("profile", "net.py:plain", *other)
    assert refused.exit_code == 2
    assert "cannot be resumed" in refused.stderr


def test_a_profile_stops_at_the_target_error(folder: Path) -> None:
    assert "stopped early" in profiled("--samples", "80", "--target-error", "2%")
    assert len(Profile.load("a.profile").design_samples) == 50


def test_shards_are_merged_and_devices_that_differ_need_rescaling(folder: Path) -> None:
    for number, meter in (("1", "Platform"), ("2", "Platform"), ("3", "Expensive")):
        profiled("--samples", "20", "--shard", f"{number}/3", output=number, meter=f"meters.py:{meter}")
    text = run_ok("merge", "1", "2", "-o", "two.profile.gz").stdout
    assert "7 samples of the design are in none of the files" in text
    assert len(Profile.load("two.profile.gz").corrected()) == 13
    assert ecc("merge", "1", "2", "3", "-o", "all").exit_code == 2
    run_ok("merge", "1", "2", "3", "-o", "all", "--rescale")


@pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
def test_ctrl_c_leaves_a_profile_that_can_be_resumed(folder: Path) -> None:
    command = [sys.executable, "-m", "ecc", "profile", "net.py:plain", "--meter", "meters.py:Slow", "-o", "a.profile"]
    with subprocess.Popen([*command, "--samples", "100"], stderr=subprocess.PIPE, text=True) as run:
        for _ in range(600):
            time.sleep(0.1)
            if Path("a.profile").exists() and len(Path("a.profile").read_text().splitlines()) > 4:
                break
        os.kill(run.pid, signal.SIGINT)
        _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    done = len(Profile.load("a.profile").design_samples)
    assert f"stopped; {done} of 100" in errors
    assert "Traceback" not in errors


def test_fit_writes_the_model_and_reports_its_error_and_budgets(folder: Path) -> None:
    quiet = run_ok("profile", "digits", *PLATFORM, "--samples", "40", "--batch", "256", "-o", "digits.profile", "-q")
    assert quiet.output == ""
    text = run_ok("fit", "digits.profile", "-o", "fitted.json", "--budget", "5%").stdout
    assert "wrote fitted.json" in text
    assert EnergyModel.load("fitted.json").resource == "energy"
    facts = from_json(ecc("fit", "digits.profile", "--json", "--resource", "latency", "--family", "bilinear"))
    assert (facts["resource"], facts["kind"]) == ("latency", "bilinear")


# ---------------------------------------------------------------- compress


def test_compress_profiles_fits_prunes_and_reports_in_one_command(folder: Path) -> None:
    words = ("compress", "digits", "--budget", "50%", *PLATFORM, "--batch", "256", "--samples", "40", "-o", "run")
    first = run_ok(*words, *SHORT)
    assert "energy (estimated)" in first.stdout
    assert "report: run/report.html" in first.stdout
    run = folder / "run"
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert len(Profile.load(run / "network.profile").design_samples) == 40
    assert EnergyModel.load(run / "energy.json").origin.batch == 256
    summary = summary_of(run)
    assert (summary["label"], summary["met"], summary["batch"]) == ("estimated", True, 256)
    assert load_state(run / "slim.safetensors")["head.bias"].shape == (10,)

    assert run_ok(*words, *SHORT).stdout == first.stdout  # a finished run is shown again
    assert from_json(ecc(*words, *SHORT, "--json")) == summary
    refused = ecc(*words, *SHORT, "--seed", "5", "-q")
    assert refused.exit_code == 2
    assert "seed" in refused.stderr


def test_a_machine_without_a_meter_gets_a_short_list_of_choices(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(argument: str) -> None:
        raise NoMeter("a long reason. " * 40)

    for name in registry.AUTO:
        monkeypatch.setitem(registry.OPENERS, name, missing)
    result = ecc("compress", "digits", "--budget", "50%", "-o", "run", *SHORT)
    assert result.exit_code == 2
    assert len(result.stderr) < 700
    assert "--budget macs=50%" in result.stderr
    assert "--meter platform:jetson-tx2" in result.stderr
    assert not (folder / "run").exists()


def test_errors_name_options_as_they_are_typed(folder: Path) -> None:
    missing = ecc("compress", "digits", "--budget", "macs=50%")
    assert missing.exit_code == 2
    assert "'-o' / '--output'" in missing.stderr
    assert "compress --help has examples" in missing.stderr
    result = ecc(
        "compress", "digits", "--budget", "macs=5%", "-o", "run", "--min-width-ratio", "0.5", "--no-depth", *SHORT
    )
    assert result.exit_code == 2
    assert "--min-width-ratio 0.25 (reaches" in result.stderr
    assert "--depth (reaches" in result.stderr


def test_ctrl_c_before_training_says_how_to_continue(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: Any, **settings: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ecc.api.compress_task", interrupted)
    result = ecc("compress", "digits", "--budget", "macs=50%", "-o", "run", *SHORT)
    assert result.exit_code == 130
    assert "stopped; run the same command again to continue." in result.stderr


def test_depth_is_refused_for_methods_that_remove_no_branches(folder: Path) -> None:
    refused = ecc(
        "compress", "digits", "--budget", "macs=50%", "-o", "run", "--method", "uniform", "--no-depth", *SHORT
    )
    assert refused.exit_code == 2
    assert "--depth is a setting of methods that remove residual branches" in refused.stderr
    other = ecc("compress", "digits", "--budget", "macs=1%", "-o", "run", "--method", "one_shot", "--no-depth", *SHORT)
    assert other.exit_code == 2
    assert "--depth (reaches" in other.stderr  # accepted, and then the budget is refused


@pytest.mark.parametrize("verb", ["compress --budget 50% -o run", "compare --budgets 50% -o run --methods uniform"])
def test_a_task_without_training_data_is_refused_before_a_meter_is_opened(verb: str, folder: Path) -> None:
    name, *words = verb.split()
    result = ecc(name, "net.py:plain", *words)  # the search for a meter would fail in another way
    assert result.exit_code == 2
    assert "task 'net.plain' has no train_batches" in result.stderr
    assert not (folder / "run").exists()


def test_an_unmet_budget_is_exit_code_2_and_the_result_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ImportError("No module named 'altair'")

    monkeypatch.setattr("ecc.report.page.write_report", fail)
    text = (folder / "energy.json").read_text()
    lists = re.compile(r'("coefficients": \[)([^]]+)')
    wrong = lists.sub(lambda found: found[1] + ",".join(str(0.7 * float(x)) for x in found[2].split(",")), text)
    assert wrong != text
    (folder / "wrong.json").write_text(wrong)
    short = ("--prune-steps", "1", "--finetune-steps", "0", "--device", "cpu")
    result = ecc("compress", "digits", "--energy", "wrong.json", "--budget", "9 mJ", "-o", "run", *short)
    assert result.exit_code == 2
    assert "NOT MET" in result.stdout
    assert "note: no report was written: No module named 'altair'" in result.stdout
    assert "error: the budget is not met: " in result.stderr
    assert "note: digits starts from random weights; give --pretrain-steps N" in result.stderr
    assert (folder / "run" / "slim.safetensors").exists()


def test_the_preset_of_the_paper_sets_solver_model_and_design(folder: Path) -> None:
    words = ("--preset", "paper", *PLATFORM, "--batch", "256", "--samples", "60", "-o", "run", *SHORT, "-q")
    ecc("compress", "digits", "--budget", "60%", *words)  # it may not converge in so few steps
    run = folder / "run"
    assert Profile.load(run / "network.profile").header.design.kind == "uniform"
    assert EnergyModel.load(run / "energy.json").kind == "bilinear"
    config = json.loads((run / "config.json").read_text())["config"]["settings"]
    assert (config["solver"], config["importance"], config["clip_norm"]) == ("paper", "adam_norm", 1.0)
    assert config["min_width_ratio"] == 0


def test_defaults_of_hugging_face_models_do_not_change_the_preset_of_the_paper() -> None:
    assert task_defaults("hf:tiny", "default", {}) == {"kd_temperature": 1.0}
    assert task_defaults("hf:tiny", "default", {"kd_weight": 0}) == {"kd_temperature": None}
    assert task_defaults("hf:tiny", "paper", {}) == task_defaults("digits", "default", {}) == {}


def test_training_curves_for_tensorboard_are_those_of_the_history(folder: Path) -> None:
    loading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    words = ("compress", "digits", "--energy", "energy.json", "--budget", "50%", "-o", "run", *SHORT, "--quiet")
    for _ in range(2):  # the second time the run is finished
        run_ok(*words, "--tracker", "tensorboard:board")
        found = loading.EventAccumulator("board").Reload()
        lines = [json.loads(line) for line in (folder / "run" / "history.jsonl").read_text().splitlines()]
        for phase in ("pretrain", "prune", "finetune"):
            losses = [line["loss"] for line in lines if line["phase"] == phase]
            assert [point.value for point in found.Scalars(f"{phase}/loss")] == pytest.approx(losses)


# ---------------------------------------------------------------- compare

FEW = ("--pretrain-steps", "3", "--prune-steps", "4", "--finetune-steps", "2", "--device", "cpu", "--seeds", "1")


def test_compare_profiles_once_runs_the_grid_and_reports(folder: Path) -> None:
    words = ("compare", "digits", *PLATFORM, "--batch", "256", "--samples", "40", "-o", "runs", *FEW)
    first = run_ok(*words, "--methods", "uniform", "--budgets", "65%,1%")
    assert "report: runs/report.html" in first.stderr
    assert "1%" in first.stderr  # which failed: it is not reachable
    rows = from_json(ecc(*words, "--methods", "uniform", "--budgets", "65%", "--json"))
    assert {row["budget"]: row["met"] for row in rows} == {"65%": True, "1%": None}
    failed = ecc(*words, "--methods", "uniform", "--budgets", "1%")
    assert failed.exit_code == 2
    assert "every run failed" in failed.stderr


# ---------------------------------------------------------------- export and report


def test_export_uses_the_task_of_a_run(folder: Path) -> None:
    run_ok("compress", "net.py:build", "--budget", "macs=60%", "-o", "run", *SHORT, "-q")
    assert "slim.torchscript" in run_ok("export", "run", "-f", "torchscript", "--task", "net.py:build").stdout
    facts = from_json(ecc("export", "run", "--json", "-o", "files", "--license", "mit", "--task", "net.py:build"))
    assert [(file["format"], file["error"]) for file in facts["files"]] == [("safetensors", 0)]
    assert 'license: "mit"' in (folder / "files" / "model_card.md").read_text()


def test_a_run_folder_does_not_choose_code_to_execute(folder: Path) -> None:
    finished_run(folder / "run", small_task())
    assert "does not name its task; give it with --task" in ecc("export", "run").stderr
    (folder / "evil.py").write_text("import pathlib\ndef build():\n    pathlib.Path('ran').touch()\n")
    remember_task(folder / "run", "evil.py:build", {})
    result = ecc("export", "run")
    assert result.exit_code == 2
    assert f"--task {folder / 'evil.py'}:build" in " ".join(result.stderr.split())
    assert not (folder / "ran").exists()
    (folder / "timm:evil.py").write_text((folder / "evil.py").read_text())
    write_record(folder / "run" / TASK_FILE, RememberedTask(task="timm:evil.py:build"))
    assert ecc("export", "run").exit_code == 2
    assert not (folder / "ran").exists()
    remember_task(folder / "run", "digits", {"image_size": None})
    assert recall_task(folder / "run").task == "digits"


@pytest.mark.parametrize("verb", ["compress --budget 60%", "compare --budgets 60% --methods uniform"])
@pytest.mark.parametrize(
    ("meter", "runner", "message"),
    [
        ("command:touch ran", None, "names the meter 'command:touch ran', which would be executed"),
        ("evil.py:Meter", None, "--meter evil.py:Meter"),
        ("wall", "evil.py:Runner", "--runner evil.py:Runner"),
    ],
)
def test_an_energy_model_does_not_choose_code_to_execute(
    verb: str, meter: str, runner: str | None, message: str, folder: Path
) -> None:
    (folder / "evil.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    model = digits_model()
    info = replace(model.origin.meter, name=meter)
    settings = None if runner is None else MeasureSettings(runner=runner)
    replace(model, origin=replace(model.origin, meter=info, settings=settings)).save(folder / "energy.json")
    name, *words = verb.split()
    result = ecc(name, "digits", *words, "--energy", "energy.json", "-o", "run", *SHORT)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("words", ["", "--runner auto"])
def test_a_profile_does_not_choose_code_to_execute(words: str, folder: Path) -> None:
    (folder / "evil.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    short = "--samples 2 --window 0.001 --min-repeats 1 --max-repeats 1 --probe-seconds 0.01 --no-in-turns".split()
    profiled(*short, meter="wall")
    text = (folder / "a.profile").read_text()
    assert text.count('"runner":"eager"') == 1
    (folder / "a.profile").write_text(text.replace('"runner":"eager"', '"runner":"evil.py:Runner"'))
    result = ecc("profile", "net.py:plain", "--meter", "wall", "-o", "a.profile", *short, *words.split())
    assert result.exit_code == 2
    assert "give --runner evil.py:Runner" in result.stderr
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("verb", ["compress --budget 60%", "compare --budgets 60% --methods uniform"])
def test_a_task_on_a_board_has_the_batch_of_the_energy_model(
    verb: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(targets: object, meter: str, *, task: InstalledSpec, settings: MeasureSettings) -> None:
        raise NoMeter(f"batch {task.batch}")

    monkeypatch.setattr("ecc.profiling.open_targets", refuse)
    name, *words = verb.split()
    result = ecc(
        name, "digits", *words, "--energy", "energy.json", "--target", "ssh://board", "--meter", "platform:jetson-tx2",
        "-o", "run", *SHORT,
    )  # fmt: skip
    assert f"batch {digits_model().origin.batch}" in result.stderr


def test_a_comparison_refuses_a_runner_that_is_not_that_of_its_energy_model(folder: Path) -> None:
    model = digits_model()
    replace(model, origin=replace(model.origin, settings=MeasureSettings(runner="eager"))).save(folder / "energy.json")
    result = ecc("compare", "digits", "--energy", "energy.json", "--runner", "compile", "-o", "runs", *SHORT)
    assert result.exit_code == 2
    assert "runner is 'compile', but the energy model was measured with 'eager'" in result.stderr


def test_report_writes_into_the_run_or_where_it_is_told_to(folder: Path) -> None:
    write_run(folder / "run", method="uniform", model=False, scores={})  # has three figures
    assert run_ok("report", "run").stdout == "run/report.html\n"
    text = run_ok("report", "run", "-o", "page.html", "--figures", "figures").stdout
    assert (folder / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "figures/widths.svg" in text


def test_a_live_report_prints_its_address_and_ends_with_ctrl_c(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    def serve_one(server: LiveServer, **options: float) -> None:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with urlopen(server.url, timeout=30) as answer:
            seen.append(answer.read())
        thread.join()
        raise KeyboardInterrupt

    monkeypatch.setattr("ecc.report.page._library", lambda: "0")  # bundling it takes seconds
    monkeypatch.setattr(LiveServer, "serve_forever", serve_one)
    write_run(folder / "run", finished=False)
    assert run_ok("report", "--live", "run", "--port", "0").stdout.startswith("http://127.0.0.1:")
    assert b"<!doctype html>" in seen[0]
