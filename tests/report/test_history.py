from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecc.errors import BadFile
from ecc.report.history import MOST_POINTS, Follower, History, Thinning, thinned
from ecc.report.reading import read_json


@pytest.mark.parametrize("count", [0, 1, 239, 240, 241, 5000])
def test_thinning_keeps_both_ends(count: int) -> None:
    rows = list(range(count))
    assert len(thinned(rows)) == min(count, MOST_POINTS)
    assert thinned(rows)[:1] + thinned(rows)[-1:] == rows[:1] + rows[-1:]
    assert thinned(rows) == sorted(set(thinned(rows)))


@given(st.integers(0, 400), st.integers(2, 9))
def test_a_stream_is_thinned_evenly_and_keeps_both_ends(count: int, most: int) -> None:
    found = Thinning(most)
    for row in range(count):
        found.add(row)
    rows = found.rows
    assert rows[:1] + rows[-1:] == list(range(count))[:1] + list(range(count))[-1:]
    assert len(rows) <= 2 * most + 1
    if count <= 2 * most:
        assert rows == list(range(count))
    else:
        assert len(rows) > most
        gaps = {b - a for a, b in pairwise(rows[:-1])}
        assert len(gaps) == 1
        assert 0 < rows[-1] - rows[-2] <= gaps.pop()


def lines(steps: int) -> Iterator[dict[str, Any]]:
    """A solve of so many steps on two processes, with a weighing, and its tuning."""
    for step in range(1, steps + 1):
        facts = {"spent": {"energy": 10.0 / step}, "target": 10.0, "energy_dual": 1.0 * step}
        yield {"phase": "solver", "step": step, **facts, "widths": {"a": step}, "width_duals": {"a": 2.0 * step}}
        yield {"phase": "prune", "step": step, "loss": 1.0 / step, "total": 2 * step, "lineage": 2 * step}
        if step == steps // 2:
            scales = {"predicted": {"energy": 1.1}, "weighed": {"energy": 1.0}}
            yield {"phase": "cost_check", "step": step, **scales, "label": "estimated", "widths": {"a": step}}
    for step in range(1, steps + 1):
        batches = 2 * steps + step
        yield {"phase": "finetune", "step": step, "loss": 0.1, "total": batches, "lineage": batches}


def written(file: Path, steps: int) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines(steps)))
    return file


@pytest.mark.parametrize("steps", [10, 3000])
def test_curves_are_those_of_the_lines(steps: int) -> None:
    history = History()
    for line in lines(steps):
        history.add(line)
    facts = history.facts(dense=20.0)
    assert facts["phases"] == [
        {"phase": "prune", "start": 0.0, "end": 2.0 * steps},
        {"phase": "finetune", "start": 2.0 * steps, "end": 3.0 * steps},
    ]
    for point in facts["loss"]:
        is_tuned = point["phase"] == "tune"
        assert point["batches"] == (2 * steps + point["step"] if is_tuned else 2 * point["step"])
        assert point["loss"] == (0.1 if is_tuned else 1.0 / point["step"])
    assert facts["descent"][0] == {"batches": 0.0, "spent": 20.0, "target": 20.0}
    for row in facts["descent"][1:]:
        assert row["spent"] in (10.0 / (row["batches"] / 2), 1.1)
    assert all(row["dual"] == row["batches"] / 2 for row in facts["duals"])
    assert all((row["dual"], row["group"]) == (row["batches"], "a") for row in facts["width_duals"])
    (weighing,) = facts["weighings"]
    assert (weighing["batches"], weighing["error"]) == (2 * (steps // 2), pytest.approx(0.1))
    assert (history.now, history.widths) == ({"phase": "finetune", "step": steps}, {"a": steps})
    sizes = {name: len(facts[name]) for name in ("loss", "descent", "duals", "width_duals")}
    assert max(sizes.values()) <= MOST_POINTS
    assert facts == history.facts(dense=20.0)  # asked again, it says the same


def test_memory_does_not_grow_with_the_lines(tmp_path: Path) -> None:
    """A week of one line a second has 600,000: at the three kilobytes that a line takes in memory, two gigabytes."""
    file = written(tmp_path / "h", 4000)
    peaks = []
    for share in (2, 1):
        file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[: 12_000 // share]))
        tracemalloc.start()
        Follower().read(file)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        written(file, 4000)
    assert peaks[1] < 1.5 * peaks[0]
    assert peaks[1] < 2_000_000


def test_what_was_read_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, follower = written(tmp_path / "h", 20), Follower()
    first = follower.read(file)
    added: list[Any] = []
    monkeypatch.setattr(History, "add", lambda self, line: added.append((self, line)))
    assert follower.read(file) is first
    assert added == []
    with file.open("a") as more:
        more.write('{"phase": "finetune", "step": 21}\n{"phase": "tu')
    assert follower.read(file) is first
    assert added == [(first, {"phase": "finetune", "step": 21})]  # a torn line waits for its end


def test_a_history_that_was_cut_back_is_read_anew(tmp_path: Path) -> None:
    file, follower = written(tmp_path / "h", 20), Follower()
    follower.read(file)
    whole = file.read_bytes().splitlines(keepends=True)
    for kept, other in ((50, 0), (10, 200), (0, 0)):
        again = [
            json.dumps({"phase": "finetune", "step": 7, "loss": 1.0, "lineage": n}).encode() + b"\n" for n in range(other)
        ]
        file.write_bytes(b"".join([*whole[:kept], *again]))
        assert follower.read(file).facts(1.0) == Follower().read(file).facts(1.0)
    file.unlink()
    assert follower.read(file).facts(None)["loss"] == []


def test_a_damaged_line_is_named_and_read_again_once_it_is_mended(tmp_path: Path) -> None:
    file, follower = written(tmp_path / "h", 3), Follower()
    follower.read(file)
    good = file.read_bytes()
    for bad, said in (
        (b"nonsense\n", r"h:11: the line is damaged"),
        (b'{"loss": 1, "phase": "finetune"}\n', "h is damaged"),
    ):
        file.write_bytes(good + bad)
        with pytest.raises(BadFile, match=said):
            follower.read(file)
    file.write_bytes(good)
    assert follower.read(file).now == {"phase": "finetune", "step": 3}


def test_only_so_many_histories_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecc.report.history.MOST_FOLLOWED", 2)
    follower, files = Follower(), [written(tmp_path / name, 3) for name in "abc"]
    first = [follower.read(file) for file in files]
    again = [follower.read(file) for file in files]
    assert [one is other for one, other in zip(first, again, strict=True)] == [True, True, False]
    assert first[2].facts(1.0) == again[2].facts(1.0)


@pytest.mark.parametrize(("groups", "points"), [(1, MOST_POINTS), (50, MOST_POINTS), (100, 120), (1000, 12), (9000, 2)])
def test_the_duals_of_many_groups_have_fewer_points_each(groups: int, points: int) -> None:
    """A thousand groups at 240 points would be most of a page of tens of megabytes."""
    history, duals = History(), {f"g{number}": 1.0 for number in range(groups)}
    for step in range(1, 301):
        facts = {"spent": {"energy": 1.0}, "target": 1.0}
        history.add({"phase": "solver", "step": step, **facts, "width_duals": duals})
        history.add({"phase": "prune", "step": step, "loss": 1.0, "lineage": step})
    rows = history.facts(1.0)["width_duals"]
    assert len(rows) == groups * points
    assert (rows[0]["batches"], rows[-1]["batches"]) == (1.0, 300.0)


def test_a_line_that_is_too_long_is_not_taken_apart(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").write_bytes(b'{"a": "' + b"x" * (1 << 20) + b'"}\n')
    with pytest.raises(BadFile, match=r"history\.jsonl:1: the line is damaged"):
        Follower().read(tmp_path / "history.jsonl")


@pytest.mark.skipif(os.name != "posix", reason="needs pipes")
def test_a_pipe_in_a_run_folder_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "history.jsonl")
    for read in (read_json, Follower().read):
        with pytest.raises(BadFile, match="is not a plain file"):
            read(tmp_path / "history.jsonl")
