"""Runs and grids from their folders."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel

from ecc.errors import BadFile
from ecc.records import read_record, to_json, write_record
from ecc.report.history import MAX_HEATMAP_CELLS, MAX_POINTS, Follower, History, PhaseSpan, Thinning, thinned
from ecc.report.load import load_grid, load_report, p_value
from ecc.report.records import MeanStd, Run
from ecc.run_records import CostCheck, GridRunInfo, RunSummary, SolverLine, TrainLine
from report.folders import GRID_SCORES, energy_model, write_grid, write_run


def one_run(folder: Path) -> Run:
    (run,) = load_report(folder).runs
    return run


# ---------------------------------------------------------------- one run


def test_a_finished_run_has_the_numbers_of_its_files(tmp_path: Path) -> None:
    report = load_report(write_run(tmp_path / "run"))
    run, summary = report.runs[0], read_record(tmp_path / "run" / "summary.json", RunSummary)
    assert (report.kind, report.task, report.running, report.budgets) == ("run", "digits", 0, ["50%"])
    assert (run.method, run.seed, run.summary, run.is_unstructured) == ("ecc", 0, summary, False)
    rows = {row.resource: row for row in run.resources}
    assert list(rows) == ["energy", "latency", "throughput", "macs", "params"]
    energy, budget = rows["energy"], summary.budgets["energy"]
    assert (energy.dense, energy.result, energy.limit) == (budget.dense, budget.result, budget.limit)
    assert energy.change == pytest.approx(budget.result / budget.dense - 1)
    assert (rows["macs"].label, rows["latency"].unit, rows["latency"].limit) == ("counted", "s", None)
    assert {row.group: row.kept for row in run.widths} == summary.widths
    assert report.commands == ["ecc compress digits --budget 50% -o run"]


def test_energies_of_layers_sum_to_the_prediction(tmp_path: Path) -> None:
    run, model = one_run(write_run(tmp_path / "run")), energy_model()
    assert sum(row.dense for row in run.layers) == pytest.approx(model.dense)
    assert sum(row.result for row in run.layers) == pytest.approx(model.at({row.group: row.kept for row in run.widths}))
    assert run.layers[-1].layer == "(outside any layer)"


def test_a_run_that_is_not_finished_shows_its_last_line(tmp_path: Path) -> None:
    run = one_run(write_run(tmp_path / "run", finished=False))
    assert (run.summary, run.now, run.label) == (None, ("prune", 40), "predicted")
    (row,) = run.resources
    assert (row.dense, row.met, row.limit) == (energy_model().dense, None, 0.5 * energy_model().dense)
    assert run.widths[0].full == energy_model().full_widths[0]
    (tmp_path / "run" / "history.jsonl").write_text("")
    assert one_run(tmp_path / "run").now is None


def test_unstructured_pruning_has_weights_in_place_of_channels(tmp_path: Path) -> None:
    run = one_run(write_run(tmp_path / "run", model=False, unstructured=True))
    assert (run.is_unstructured, run.counted_things) == (True, "weights")
    assert [(row.group, row.kept) for row in run.widths] == [("conv.weight", 300), ("fc.weight", 64)]
    assert [row.layer for row in run.layers] == ["conv", "fc", "(independent of the weights)"]
    assert run.layers[1].result == pytest.approx(64 * 2e-6)


# ---------------------------------------------------------------- grids


def test_a_grid_has_runs_rows_and_failures(tmp_path: Path) -> None:
    report = load_report(write_grid(tmp_path / "runs"))
    assert (report.kind, len(report.runs), report.seeds) == ("grid", 12, [0, 1])
    assert (report.methods, report.budgets) == (["ecc", "netadapt", "uniform"], ["65%", "40%"])
    assert [failure.method for failure in report.failures] == ["amc"]
    assert report.first_budget == "40%"
    assert all(bool(run.curves.loss) == (run.seed == 0) for run in report.runs)  # curves of one seed only
    assert all(not run.curves.width_duals for run in report.runs)


def test_rows_are_means_over_seeds_with_a_paired_test(tmp_path: Path) -> None:
    root = write_grid(tmp_path / "runs")
    info = root / "seed-1" / "ecc-65" / "cell.json"
    write_record(info, replace(read_record(info, GridRunInfo), sessions=2, seconds=50.0))
    rows = {(row.method, row.budget): row for row in load_grid(root)}
    ecc, uniform = rows["ecc", "65%"], rows["uniform", "65%"]
    assert ecc.finetuned == MeanStd(pytest.approx(0.96), pytest.approx(0.0141421356))
    assert ecc.pruned == MeanStd(pytest.approx(0.86), pytest.approx(0.0141421356))
    assert (ecc.p_value, ecc.met, ecc.seeds, ecc.batches_total) == (None, True, 2, 70)
    assert uniform.p_value == pytest.approx(ttest_rel(GRID_SCORES["ecc"], GRID_SCORES["uniform"]).pvalue)
    assert (ecc.seconds, uniform.seconds) == (2.0, 2.0)  # the duration of an interrupted run is not known
    assert ecc.cost_ratio is not None
    assert ecc.cost_ratio.mean == pytest.approx(0.99 * 0.65)
    failed = rows["amc", "65%"]
    assert (failed.failures, failed.finetuned, failed.met) == (["seed 1: no <luck>"], None, None)


def test_a_test_of_one_seed_or_without_differences_has_no_p_value() -> None:
    assert p_value({0: 0.9}, {0: 0.8}) is None
    assert p_value({0: 0.9, 1: 0.8}, {0: 0.9, 1: 0.8}) is None
    assert p_value({0: 0.9, 1: 0.8}, {2: 0.9}) is None


# ---------------------------------------------------------------- histories


@pytest.mark.parametrize("count", [0, 1, 239, 240, 241, 5000])
def test_thinned_rows_keep_both_ends(count: int) -> None:
    rows = list(range(count))
    assert len(thinned(rows)) == min(count, MAX_POINTS)
    assert thinned(rows)[:1] + thinned(rows)[-1:] == rows[:1] + rows[-1:]
    assert thinned(rows) == sorted(set(thinned(rows)))


@given(st.integers(0, 400), st.integers(2, 9))
def test_a_stream_is_thinned_evenly_and_keeps_both_ends(count: int, most: int) -> None:
    found: Thinning[int] = Thinning(most)
    for row in range(count):
        found.add(row)
    rows = found.rows
    assert rows[:1] + rows[-1:] == list(range(count))[:1] + list(range(count))[-1:]
    if count <= 2 * most:
        assert rows == list(range(count))
    else:
        assert most < len(rows) <= 2 * most + 1
        gaps = {b - a for a, b in pairwise(rows[:-1])}
        assert len(gaps) == 1
        assert 0 < rows[-1] - rows[-2] <= gaps.pop()


def lines(steps: int, groups: int = 1) -> Iterator[Any]:
    """Pruning on two processes with one cost check, then finetuning."""
    duals = {f"g{number}": 1.0 for number in range(groups)}
    for step in range(1, steps + 1):
        cost, widths, batches = {"energy": 10.0 / step}, {"a": step}, 2 * step
        yield SolverLine(step=step, cost=cost, target=10.0, energy_dual=step, width_duals=duals, widths=widths)
        yield TrainLine(phase="prune", step=step, loss=1.0 / step, lr=1e-3, total=batches, lineage=batches)
        if step == steps // 2:
            yield CostCheck(
                step=step,
                progress=0.5,
                widths={"a": step},
                predicted={"energy": 1.1},
                measured={"energy": 1.0},
                label="estimated",
                relative_ci=None,
                targets={},
            )
    for step in range(1, steps + 1):
        batches = 2 * steps + step
        yield TrainLine(phase="finetune", step=step, loss=0.1, lr=1e-3, total=batches, lineage=batches)


def write_history(file: Path, steps: int, groups: int = 1) -> Path:
    file.write_bytes(b"".join(to_json(line) + b"\n" for line in lines(steps, groups)))
    return file


@pytest.mark.parametrize("steps", [10, 3000])
def test_curves_have_the_values_of_the_lines(tmp_path: Path, steps: int) -> None:
    history = Follower().read(write_history(tmp_path / "h", steps))
    curves = history.curves("energy", 20.0)
    assert curves.phases == [PhaseSpan("prune", 0.0, 2.0 * steps), PhaseSpan("finetune", 2.0 * steps, 3.0 * steps)]
    for point in curves.loss:
        finetunes = point.phase == "finetune"
        assert point.batches == (2 * steps + point.step if finetunes else 2 * point.step)
        assert point.loss == (0.1 if finetunes else 1.0 / point.step)
    assert asdict(curves.cost[0]) == {"batches": 0.0, "cost": 20.0, "target": 20.0}
    for row in curves.cost[1:]:
        assert (row.cost, row.target) in ((10.0 / (row.batches / 2), 10.0), (1.1, None))
    assert all(point.dual == point.batches / 2 for point in curves.dual)
    (check,) = curves.checks
    assert (check.batches, check.error) == (2 * (steps // 2), pytest.approx(0.1))
    assert (history.now, history.widths) == (("finetune", steps), {"a": steps})
    assert max(len(curves.loss), len(curves.cost), len(curves.dual), len(curves.width_duals)) <= MAX_POINTS
    assert curves == history.curves("energy", 20.0)


def test_memory_does_not_grow_with_the_length_of_a_history(tmp_path: Path) -> None:
    peaks = []
    for steps in (2000, 4000):
        file = write_history(tmp_path / "h", steps)
        tracemalloc.start()
        Follower().read(file)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]
    assert peaks[1] < 3_000_000


def test_only_new_lines_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, follower = write_history(tmp_path / "h", 20), Follower()
    first = follower.read(file)
    added: list[bytes] = []
    monkeypatch.setattr(History, "add", lambda self, line, where: added.append(line))
    assert follower.read(file) is first
    with file.open("ab") as more:
        more.write(b'{"phase": "new"}\n{"phase": "incompl')
    assert follower.read(file) is first
    assert added == [b'{"phase": "new"}\n']  # the incomplete line is being written


def test_a_truncated_history_is_read_again(tmp_path: Path) -> None:
    file, follower = write_history(tmp_path / "h", 20), Follower()
    follower.read(file)
    whole = file.read_bytes().splitlines(keepends=True)
    other = TrainLine(phase="finetune", step=7, loss=1.0, lr=None, total=9)
    for kept, count in ((50, 0), (10, 200), (0, 0)):
        file.write_bytes(b"".join([*whole[:kept], *[to_json(other) + b"\n"] * count]))
        assert follower.read(file).curves("energy", 1.0) == Follower().read(file).curves("energy", 1.0)
    file.unlink()
    assert follower.read(file).curves("energy", None).loss == []


def test_a_damaged_line_is_named_and_read_again_after_repair(tmp_path: Path) -> None:
    file, follower = write_history(tmp_path / "h", 3), Follower()
    follower.read(file)
    good = file.read_bytes()
    for bad in (b"nonsense\n", b'{"loss": 1, "phase": "finetune"}\n'):
        file.write_bytes(good + bad)
        with pytest.raises(BadFile, match="h:11 is not"):
            follower.read(file)
    file.write_bytes(good)
    assert follower.read(file).now == ("finetune", 3)


@pytest.mark.parametrize(("groups", "points"), [(1, 240), (50, 240), (100, 120), (9000, 2)])
def test_width_duals_of_many_groups_have_fewer_points(groups: int, points: int) -> None:
    history = History()
    for line in lines(300 if groups < 1000 else 4, groups):
        if isinstance(line, SolverLine | TrainLine):
            history.add(to_json(line), "h")
    found = history.curves("energy", 1.0).width_duals
    assert len(found) == groups * points
    assert len(found) <= max(MAX_HEATMAP_CELLS, 2 * groups)
