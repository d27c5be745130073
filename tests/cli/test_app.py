from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

import ecc
from ecc.cli import main
from ecc.cli.app import app
from ecc.constants import BUNDLED_TASKS
from ecc.graph import ChannelGraph, trace_channels
from ecc.zoo.registry import find_task

VERBS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]

NET = """
import torch
from torch import nn


def build():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), torch.randn(1, 3, 8, 8)


def raises():
    raise ValueError("the first line\\nand a second one")


def wrong():
    return 3


def misfit():
    return nn.Conv2d(3, 8, 3), torch.randn(1, 5, 8, 8)


def loud():
    class Loud(nn.Module):
        def forward(self, x):
            raise RuntimeError("[red]no[/red]\\nnot today")

    return Loud(), torch.randn(1, 3)


number = 3
"""


@dataclass
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The `ecc` command, in a folder with net.py, on a terminal of 100 columns."""
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "recipe.toml").write_text('task = "digits"\n')
    monkeypatch.chdir(tmp_path)

    def call(*args: str, columns: int = 100) -> Result:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["ecc", *args])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return Result(int(stop.value.code or 0), out, err)

    return call


def one_line(text: str) -> str:
    return " ".join(text.split())


# ---------------------------------------------------------------- help


def test_the_help_fits_one_screen_and_shows_the_pipeline(run: Run) -> None:
    result = run("--help")
    assert result.code == 0
    assert len(result.out.splitlines()) <= 40
    assert max(map(len, result.out.splitlines())) <= 100
    assert re.search(r"model --> channel graph --> profile --> energy model --> \w+ network", result.out)
    for name in (*VERBS, *BUNDLED_TASKS):
        assert name in result.out


def test_nothing_typed_shows_the_help(run: Run) -> None:
    result = run()
    assert "channel graph" in result.out + result.err
    assert "inspect" in result.out + result.err


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_both_flags_ask_for_help(run: Run, flag: str) -> None:
    assert run(flag).out == run("--help").out
    assert run("inspect", flag).code == 0


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_examples(run: Run, verb: str) -> None:
    assert examples(run, verb)


def examples(run: Run, verb: str) -> list[list[str]]:
    """The commands under "Examples:" in a verb's help, as lists of arguments."""
    _, _, below = run(verb, "--help", columns=200).out.partition("Examples:")
    lines = [line.strip() for line in below.splitlines()]
    commands = [line.split("   (")[0] for line in lines if line.startswith("ecc ")]
    return [re.findall(r"'[^']*'|\S+", command)[1:] for command in commands]


@pytest.mark.parametrize("verb", VERBS)
def test_every_example_uses_options_that_exist(run: Run, verb: str) -> None:
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    for name, *args in examples(run, verb):
        assert name == verb
        with command.make_context(verb, args) as context:  # parses, and runs nothing
            assert context.params


def test_the_examples_of_inspect_run(run: Run) -> None:
    commands = examples(run, "inspect")
    assert len(commands) == 3
    for args in commands:
        result = run(*args)
        assert (result.code, result.err) == (0, ""), args
        assert result.out


@pytest.mark.parametrize("args", [["--version"], ["--version", "inspect"]])
def test_the_version_is_that_of_the_package(run: Run, args: list[str]) -> None:
    assert run(*args) == Result(0, f"ecc {ecc.__version__}\n", "")


# ---------------------------------------------------------------- inspect


def test_inspect_shows_a_table(run: Run) -> None:
    result = run("inspect", "net.py:build")
    assert (result.code, result.err) == (0, "")
    assert "Channel groups of net.build" in result.out
    assert "no: it is an output of the network" in result.out
    assert "; verified: " in one_line(result.out)


def test_inspect_without_the_proof_says_so(run: Run) -> None:
    assert "not verified" in one_line(run("inspect", "net.py:build", "--no-verify").out)


def test_freezing_is_passed_on(run: Run) -> None:
    result = run("inspect", "net.py:build", "--freeze", "1", "--freeze", "0")
    assert "no: frozen by the argument `freeze`" in result.out


def test_facts_are_json_and_nothing_else(run: Run) -> None:
    result = run("inspect", "digits", "--json")
    assert (result.code, result.err) == (0, "")
    facts = json.loads(result.out)
    task = find_task("digits")
    graph = trace_channels(task.model, task.example_input)
    assert facts["fingerprint"] == graph.fingerprint
    assert facts["macs"] == int(graph.macs())
    assert [g["name"] for g in facts["groups"]] == [g.name for g in graph.groups]


@pytest.mark.parametrize("option", ["-o", "--save"])
def test_a_saved_graph_can_be_loaded(run: Run, tmp_path: Path, option: str) -> None:
    result = run("inspect", "net.py:build", option, "net.graph", "--json")
    graph = ChannelGraph.load(tmp_path / "net.graph")
    assert graph.fingerprint == json.loads(result.out)["fingerprint"]
    assert graph.full_widths == {"0": 8, "2": 4}


# ---------------------------------------------------------------- bad inputs

BAD: dict[str, tuple[list[str], str]] = {
    "unknown task": (["inspect", "mobilnet_v1"], "did you mean 'mobilenet_v1'?"),
    "missing file": (["inspect", "none.py:build"], "there is no file 'none.py'"),
    "no function named": (["inspect", "net.py"], "write net.py:FUNCTION"),
    "missing function": (["inspect", "net.py:bild"], "did you mean 'build'?"),
    "no function": (["inspect", "net.py:number"], "number is int"),
    "function that raises": (["inspect", "net.py:raises"], "ValueError at net.py, line 11: the first line"),
    "wrong return type": (["inspect", "net.py:wrong"], "returned int"),
    "input that does not fit": (["inspect", "net.py:misfit"], "expected input[1, 5, 8, 8] to have 3 channels"),
    "network that raises": (["inspect", "net.py:loud"], "RuntimeError: [red]no[/red]"),
    "missing folder": (["inspect", "net.py:build", "-o", "none/net.graph"], "none/net.graph"),
    "a folder as a file": (["inspect", "net.py:build", "-o", "."], "."),
    "unknown verb": (["inspekt"], "inspekt"),
    "unknown option": (["inspect", "digits", "--colour"], "--colour"),
    "missing argument": (["inspect"], "TASK"),
    "missing value": (["inspect", "digits", "--freeze"], "--freeze"),
    "one argument too many": (["inspect", "digits", "twice"], "twice"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_input_is_one_line_and_exit_code_2(run: Run, name: str) -> None:
    args, words = BAD[name]
    result = run(*args)
    assert (result.code, result.out) == (2, "")
    assert words in result.err
    assert "Traceback" not in result.err
    assert len(result.err.splitlines()) == 1, result.err


def test_the_module_runs_as_the_command_does() -> None:
    done = subprocess.run([sys.executable, "-m", "ecc", "inspect", "nope"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: unknown task 'nope'")
    assert done.stderr.count("\n") == 1


def imported(code: str, *names: str) -> list[str]:
    """Those of the names that a new interpreter has imported after the code, whose exit is caught."""
    program = (
        f"import atexit, sys\natexit.register(lambda: print([n for n in {names} if n in sys.modules], file=sys.stderr))"
    )
    done = subprocess.run([sys.executable, "-c", f"{program}\n{code}"], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return list(ast.literal_eval(done.stderr.splitlines()[-1]))


def test_a_command_starts_without_what_few_commands_need() -> None:
    """From a quarter of a second up each; whoever needs one imports it then."""
    dear = [
        "accelerate",
        "matplotlib",
        "onnx",
        "pandas",
        "ray",
        "scipy.optimize",
        "scipy.stats",
        "sklearn",
        "torch._dynamo",
        "vl_convert",
    ]
    rooms = "import ecc.energy, ecc.export, ecc.graph, ecc.measure, ecc.methods, ecc.training, ecc.zoo"
    assert imported(rooms, "torch", *dear) == ["torch"]


HEAVY = ("torch", "numpy", "scipy", "rich", "pydantic", "typer")


@pytest.mark.parametrize(
    "args", [["--version"], ["-h"], ["--help"], *([verb, "--help"] for verb in VERBS)], ids=" ".join
)
def test_help_and_version_need_no_library(args: list[str]) -> None:
    """Torch alone takes seconds to import, typer seven times as long as Python takes to start."""
    assert imported(f"sys.argv = ['ecc', *{args}]\nfrom ecc.cli import main\nmain()", *HEAVY) == []


@pytest.mark.parametrize("args", [["fit", "--nope"], ["nope"], ["compress", "digits"], ["report"], []], ids=" ".join)
def test_what_cannot_be_parsed_needs_no_torch(args: list[str]) -> None:
    code = f"sys.argv = ['ecc', *{args}]\nfrom ecc.cli import main\nmain()"
    assert imported(code, "torch", "numpy", "scipy", "rich") == []


def test_a_verb_that_runs_imports_torch() -> None:
    """Shows that the tests above look at the right place."""
    assert imported("sys.argv = ['ecc', 'inspect', 'nope']\nfrom ecc.cli import main\nmain()", "torch") == ["torch"]
