"""Help, version and examples."""

from __future__ import annotations

import ast
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

import ecc as package
from cli.command import NET, ecc, run_ok
from ecc.cli.app import VERBS, app
from ecc.cli.options import options_of
from ecc.constants import BUNDLED_TASKS
from ecc.methods import CompressSettings

CONTEXT = click.Context(app)
COMMANDS = {name: app.get_command(CONTEXT, name) for name in VERBS}


def test_the_overview_names_every_verb_and_fits_one_screen() -> None:
    text = run_ok("--help").stdout
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 100
    assert all(name in text for name in (*VERBS, *BUNDLED_TASKS))
    assert run_ok("-h").stdout == text
    assert text in ecc().stderr
    assert run_ok("--version").stdout == f"ecc {package.__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_at_most_twelve_options_and_help_all_shows_every_option(verb: str) -> None:
    short = run_ok(verb, "--help").stdout.partition("\nOptions:\n")[2]
    every = "--help-all" if "--help-all" in short else "--help"
    long = run_ok(verb, every).stdout.partition("\nOptions:\n")[2]
    assert len(re.findall(r"^  -", short, re.MULTILINE)) <= 12
    options = [param for param in COMMANDS[verb].params if isinstance(param, click.Option)]
    assert all(param.help for param in options)
    assert len(re.findall(r"^  -", long, re.MULTILINE)) >= len(options)


def test_every_setting_is_an_option_of_compress_and_compare_with_its_default() -> None:
    for verb in ("compress", "compare"):
        params = {param.name: param for param in COMMANDS[verb].params}
        for setting in options_of(CompressSettings):
            assert params[setting.name].default == setting.default, setting.name
            assert f"--{setting.name.replace('_', '-')}" in params[setting.name].opts


def imported(*words: str) -> list[str]:
    """Those of some large libraries that a command imports."""
    code = (
        "import atexit, sys\n"
        "names = ('torch', 'numpy', 'scipy', 'rich', 'ray', 'altair')\n"
        "atexit.register(lambda: print([n for n in names if n in sys.modules], file=sys.stderr))\n"
        f"sys.argv = ['ecc', *{words}]\nfrom ecc.cli import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return list(ast.literal_eval(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("words", [["--version"], ["fit", "--nope"], ["compress", "--help"], ["compare", "digits"]])
def test_help_and_typing_mistakes_are_answered_without_torch(words: list[str]) -> None:
    assert imported(*words) == []


# ---------------------------------------------------------------- every example of the help is parsed, and executed

PARSED = {
    "torchrun --nproc-per-node 4 -m ecc compress net.py:build --budget 60% -o run": "several processes",
    "ecc compress mobilenet_v1 --data imagenet --budget 60% -o run": "a data set; see test_data.py",
    "ecc compare recipe.toml --data imagenet --energy e.json -o runs": "a data set; see test_data.py",
    "ecc compress hf:./model --text train.txt --budget decode=70% --budget prefill=80% -o run": (
        "a saved model; see zoo/test_language.py"
    ),
    "ecc compress hf:./vit --data imagenet --budget 60% -o run": "a saved model; see zoo/test_vision.py",
    "ecc doctor --target ssh://me@jetson": "a board; see measure/remote",
    "ecc profile net.py:build --target ssh://me@jetson --meter jetson -o net.profile": "a board; see measure/remote",
    "ecc compress net.py:build --target ssh://me@jetson --meter jetson --budget 60% -o run": "a board",
    "ecc profile digits --runner auto -o digits.profile": "a meter; see measure/test_runners.py",
    "ecc report --live run": "it serves until Ctrl-C; see test_verbs.py",
    "ecc profile alexnet --shard 3/8 -o alexnet-3.profile": "verifying AlexNet is slow; see measure/test_profiler.py",
    "ecc compare net.py:build --energy e.json -o /shared/runs --backend ray": "a cluster; see methods/test_cluster.py",
    "ecc export run --format onnx --format pt2 --license apache-2.0": "ONNX is slow; see export/test_run_export.py",
    "ecc export run --format onnx --int8 static --task net.py:build": "ONNX is slow; see export/test_run_export.py",
}
"""Examples that are only parsed, and why."""

PLATFORM = "--meter platform:jetson-tx2"
SHORT = "--prune-steps 12 --pretrain-steps 5 --finetune-steps 2 --lr 1e-3"
SMALLER = {
    "ecc doctor --meter 'command:read-joules --port 3' --seconds 30": "--quick",
    "ecc profile mobilenet_v1 --runner cuda-graph --precision tf32 -o mobile.profile": None,
    "ecc profile net.py:build --rounds 2 --target-error 2% -o net.profile": f"{PLATFORM},noise=0.01 --samples 20",
    "ecc compress digits --budget 50% --meter platform:jetson-tx2 -o run --pretrain-steps 300": f"{SHORT} --batch 256",
    "ecc compress digits --budget macs=40% -o run --pretrain-steps 300": SHORT,
    "ecc compress digits --budgets macs=80%,macs=50%,macs=35% -o run --pretrain-steps 300": f"{SHORT} -o front",
    "ecc compress net.py:build --energy energy.json --budget 24mJ --budget params=2M -o run": SHORT,
    "ecc compress digits --unstructured --meter platform:eyeriss --budget 60% -o sparse": SHORT,
    "ecc compare digits --quick --meter platform:jetson-tx2 -o runs": (
        f"{SHORT} --methods uniform --budgets 65% --batch 256"
    ),
    "ecc compare net.py:build --energy e.json --budgets 65%,35% --methods ecc,netadapt -o runs": (
        f"{SHORT} --seeds 1 --budgets 65% --methods ecc,uniform"
    ),
}
"""What is added to an example, so that it is short and runs on every machine; None if it needs a GPU."""

OF_NET = "ecc compress net.py:build"
"""The example whose energy.json belongs to net.py; that of the others belongs to the digits."""

READ_JOULES = "#!/usr/bin/env python3\nimport time\nprint(5 * time.monotonic(), 'J')\n"


def examples() -> list[str]:
    texts = [inspect.getdoc(command.callback) or "" for command in COMMANDS.values()]
    blocks = [text.partition("Examples:\n")[2].partition("\n\n")[0] for text in texts]
    return [line.strip() for block in blocks for line in block.splitlines()]


LINES = examples()


def test_every_verb_has_examples_and_the_tables_above_name_real_ones() -> None:
    assert all(any(f"ecc {verb}" in line for line in LINES) for verb in VERBS)
    assert {*PARSED, *SMALLER} <= set(LINES)


@pytest.mark.parametrize("line", LINES)
def test_an_example_is_parsed(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.toml").write_text('task = "alexnet"\n')
    monkeypatch.chdir(tmp_path)
    verb, *arguments = shlex.split(line.partition("ecc ")[2])
    assert COMMANDS[verb].make_context(verb, arguments, parent=CONTEXT).params


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every file that an example names."""
    folder = tmp_path_factory.mktemp("files")
    before = Path.cwd()
    os.chdir(folder)
    try:
        Path("net.py").write_text(NET)
        Path("bin").mkdir()
        Path("bin/read-joules").write_text(READ_JOULES)
        Path("bin/read-joules").chmod(0o755)
        for line in (
            f"profile digits {PLATFORM} --batch 256 --samples 40 -o digits.profile",
            f"profile net.py:build {PLATFORM} --samples 40 -o mobile.profile",
            f"profile net.py:build {PLATFORM} --samples 20 --shard 1/2 -o alexnet-1.profile",
            f"profile net.py:build {PLATFORM} --samples 20 --shard 2/2 -o alexnet-2.profile",
            "fit digits.profile -o energy.json",
            "fit mobile.profile -o e.json",
            f"compress digits --energy energy.json --budget 60% -o digits-run {SHORT}",
            "compare digits --energy energy.json --quick --budgets 65% --methods uniform -o runs",
        ):
            run_ok(*shlex.split(line))
    finally:
        os.chdir(before)
    return folder


@pytest.mark.thorough  # test_verbs.py and the pages of docs/ run every verb
@pytest.mark.parametrize("line", [line for line in LINES if line not in PARSED and SMALLER.get(line, "") is not None])
def test_an_example_runs(line: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "here"
    shutil.copytree(files, folder)
    of_net = line.startswith(OF_NET)
    if of_net:
        shutil.copy(folder / "e.json", folder / "energy.json")
    if line.startswith("ecc profile"):
        for profile in folder.glob("*.profile"):
            profile.unlink()
    if line.startswith("ecc compare"):
        shutil.rmtree(folder / "runs")
    if not line.startswith("ecc compress"):
        (folder / "digits-run").rename(folder / "run")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(folder / "bin"), prepend=os.pathsep)
    words = shlex.split(f"{line} {SMALLER.get(line, '')}")[1:]
    typed = [found for word in words for found in (sorted(map(str, Path().glob(word))) if "*" in word else [word])]
    run_ok(*typed)
