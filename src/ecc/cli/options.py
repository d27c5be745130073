"""Options that several verbs share, and options that are generated from the declarations of settings classes."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from ecc.constants import BUNDLED_TASKS, PRESETS, TRANSFORMERS_DEFAULTS
from ecc.errors import BadTask, EccError
from ecc.options import Setting, flat_values, options_of
from ecc.settings import CompressSettings

from .app import did_you_mean

if TYPE_CHECKING:
    from rich.console import Console

    from ecc.task import Task
    from ecc.zoo.recipe import Recipe

TASK_FILE = "task.json"
"""In a run folder: the task, as it was typed."""

F = TypeVar("F", bound=Callable[..., Any])


# ---------------------------------------------------------------- short and long help


class Option(click.Option):
    """An option that `--help` shows only if it is `common`; `--help-all` shows every option."""

    def __init__(self, *args: Any, common: bool = True, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.common = common

    def get_help_extra(self, ctx: click.Context) -> Any:
        """The default; ranges are in the messages."""
        extra = super().get_help_extra(ctx)
        extra.pop("range", None)
        return extra


class Command(click.Command):
    """A verb: `--help` lists the common options, `--help-all` every option, and a typing mistake gets a suggestion."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if any(not _is_common(param) for param in self.params):
            text = "Show every option and exit."
            flag: Any = {"is_flag": True, "is_eager": True, "expose_value": False}
            self.params.append(click.Option(["--help-all"], callback=_show_all, help=text, **flag))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table of options."""
        params = self.get_params(ctx)
        options = [param for param in params if isinstance(param, click.Option)]
        shown = [param for param in options if "help_all" in ctx.meta or _is_common(param)]
        rows = [row for param in shown if (row := param.get_help_record(ctx)) is not None]
        with formatter.section("Options"):
            formatter.write_dl(rows)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options; an unknown one is answered with the closest known one."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            known = [name for param in self.get_params(ctx) for name in param.opts]
            raise click.UsageError(
                f"there is no option {error.option_name}{did_you_mean(error.option_name, known)} "
                f"ecc {ctx.info_name} --help-all lists them."
            ) from None


def _is_common(param: click.Parameter) -> bool:
    return getattr(param, "common", True)


def _show_all(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    del param
    if wanted:
        ctx.meta["help_all"] = True
        click.echo(ctx.get_help())
        ctx.exit()


def option(*names: str, **settings: Any) -> Callable[[F], F]:
    """As `click.option`, with `common=False` for an option that only `--help-all` shows."""
    return click.option(*names, cls=Option, **{"show_default": True, **settings})


def options(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in the order of the help."""

    def decorate(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate


# ---------------------------------------------------------------- options from a settings class


def settings_options(source: Any, *, common: bool = True, argument: str = "settings") -> Callable[[F], F]:
    """Add an option for every setting of a settings class, or of an instance that has the defaults.

    The function gets one more argument: a dict of the settings that were typed, or that a file of `--config` gives, by
    name. `common` is whether `--help` shows the settings that are declared as common.
    """
    kind, defaults = (source, {}) if isinstance(source, type) else (type(source), flat_values(source))
    settings = [replace(one, default=defaults.get(one.name, one.default)) for one in options_of(kind)]
    names = {setting.name for setting in settings}

    def decorate(function: F) -> F:
        @wraps(function)
        def call(**values: Any) -> Any:
            context = click.get_current_context()
            typed = {
                name: value
                for name, value in values.items()
                if name in names and context.get_parameter_source(name) is not ParameterSource.DEFAULT
            }
            others = {name: value for name, value in values.items() if name not in names}
            return function(**{argument: typed}, **others)

        decorated: Any = call
        for setting in reversed(settings):
            decorated = _option_of(setting, common=common and setting.option.common)(decorated)
        return decorated  # type: ignore[no-any-return]  # the same function for click

    return decorate


def _option_of(setting: Setting, *, common: bool) -> Callable[[F], F]:
    about, flag = setting.option, f"--{setting.name.replace('_', '-')}"
    kind: Any = setting.kind
    least, most = about.range
    if about.choices:
        kind = click.Choice(about.choices)
    elif kind is int:
        kind = click.IntRange(_whole(least), _whole(most))
    elif kind is float:
        kind = click.FloatRange(least if about.above is None else about.above, most, min_open=about.above is not None)
    elif kind is bool:
        flag = f"{flag}/--no-{setting.name.replace('_', '-')}"
    metavar = about.metavar or {int: "N", float: "X"}.get(setting.kind)
    return option(
        flag, setting.name, type=kind, default=setting.default, metavar=metavar, help=about.help, common=common
    )


def _whole(limit: float | None) -> int | None:
    return None if limit is None else int(limit)


# ---------------------------------------------------------------- a TOML file as defaults


def _task_or_recipe(ctx: click.Context, param: click.Parameter, task: str) -> str:
    del param
    takes_config = any("--config" in param.opts for param in ctx.command.params)
    is_recipe = task.endswith(".toml") and takes_config
    return _use_config(ctx, Path(task), needs_task=True) if is_recipe else task


def _use_config(ctx: click.Context, path: Path, *, needs_task: bool) -> str:
    """Make the values of a file the defaults of a verb, and return its task."""
    from ecc.zoo.recipe import read_recipe

    recipe = read_recipe(path, needs_task=needs_task)
    lists = {param.name for param in ctx.command.params if param.multiple}
    ctx.default_map = {**recipe_options(recipe, lists), **(ctx.default_map or {})}
    return recipe.task


config_option = option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    is_eager=True,
    expose_value=False,
    callback=lambda ctx, _, path: None if path is None else _use_config(ctx, path, needs_task=False) and None,
    help="TOML file with options, and settings below [settings]; typed options win.",
)
"""Values of a recipe become the defaults of the options."""
task_argument = click.argument("task", metavar="TASK", callback=_task_or_recipe, is_eager=True)
"""TASK; a recipe may stand in its place."""


def recipe_options(recipe: Recipe, lists: Container[str | None] = ()) -> dict[str, Any]:
    """The values of a recipe as options. Lists of options that cannot be repeated become text with commas."""
    settings = flat_values(recipe.settings)
    values: dict[str, Any] = {name: settings[name] for name in recipe.given}
    values |= {name: getattr(recipe, name) for name in ("data", "weights", "batch_size", "seeds", "meter", "freeze")}
    values["image_size"] = None if recipe.image_size is None else "x".join(map(str, recipe.image_size))
    for name in ("budgets", "methods"):
        found = getattr(recipe, name)
        values[name] = found if found is None or name in lists else ",".join(found)
    return {name: value for name, value in values.items() if value is not None}


# ---------------------------------------------------------------- the task


PATH = click.Path(path_type=Path)

task_options = options(
    option(
        "--data", metavar="FOLDER", type=PATH,
        help="Data set of a bundled network or an image classifier hf:NAME: ImageNet, Cityscapes, CIFAR-10, CamVid.",
    ),
    option(
        "--weights", metavar="FILE", type=PATH, common=False,
        help="Published weights of a bundled network (safetensors).",
    ),
    option("--image-size", metavar="PIXELS", common=False, help="Image size of a bundled network: 128 or 360x480."),
)  # fmt: skip
"""Data, weights and image size of a bundled network."""

text_options = options(
    option(
        "--text", type=PATH, metavar="FILE", multiple=True, common=False,
        help="Text file to train a Hugging Face model (hf:NAME) on. Repeatable.",
    ),
    option(
        "--test-text", type=PATH, metavar="FILE", multiple=True, common=False,
        help="Text file for the score of a Hugging Face model; a tenth of --text if not given. Repeatable.",
    ),
    option(
        "--length", type=click.IntRange(2), metavar="N", common=False,
        help="Tokens per sequence of a Hugging Face model, and in the cache of a decode step; 128 if not given.",
    ),
    option(
        "--gradient-checkpointing", is_flag=True, common=False,
        help="Compute activations of a Hugging Face model again in the backward pass: less memory, more time.",
    ),
)  # fmt: skip
"""Text and length of a Hugging Face model."""

target_option = option(
    "--target", "targets", metavar="URL", multiple=True, common=False,
    help="Measure on another machine by ssh: ssh://user@host[:port]. Repeat it for equal machines.",
)  # fmt: skip
freeze_option = option(
    "--freeze", metavar="PATTERN", multiple=True, common=False,
    help="Do not prune the outputs of these modules, such as 'layer1.*'. Repeatable.",
)  # fmt: skip
json_option = option("--json", "as_json", is_flag=True, common=False, help="Print JSON for programs.")
quiet_option = option("-q", "--quiet", is_flag=True, common=False, help="Print errors only.")


def run_options(*, common: bool = True) -> Callable[[F], F]:
    """The options that `compress` and `compare` share; `common` as in `settings_options`."""
    return options(
        option("--meter", metavar="METER", default="auto", help="auto, nvml, rapl, platform:jetson-tx2, ..., none."),
        target_option,
        option(
            "--energy", type=PATH, metavar="FILE", multiple=True,
            help="Energy model from `ecc fit`; without it the network is profiled. Repeatable.",
        ),
        task_options,
        config_option,
        settings_options(CompressSettings, common=common),
        option(
            "--batch-size", type=click.IntRange(1), metavar="N", common=False,
            help="Training batch size of a bundled network; as in the paper if not given.",
        ),
        option(
            "--batch", type=click.IntRange(1), metavar="N", common=False,
            help="Items per inference; as the example input of the task if not given.",
        ),
        option(
            "--samples", type=click.IntRange(1), metavar="N", common=False,
            help="Width configurations to measure; up to 250 if not given, fewer if the fit is good earlier.",
        ),
        freeze_option,
        option(
            "--device", metavar="DEVICE", common=False, help="Training device; a GPU if there is one, else the CPU."
        ),
    )  # fmt: skip


def build_task(
    spec: str,
    data: str | Path | None = None,
    weights: str | Path | None = None,
    image_size: str | None = None,
    batch_size: int | None = None,
    device: Any = "cpu",
    **text: Any,
) -> Task:
    """The task that the options above name. Notes are printed on stderr."""
    from ecc.zoo.registry import find_task

    return find_task(
        spec,
        data,
        weights,
        image_size=None if image_size is None else parse_image_size(image_size),
        batch_size=batch_size,
        device=device,
        **text,
        log=lambda line: click.echo(line, err=True),
    )


def task_defaults(task: str, preset: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Default settings that depend on the task; another preset has its own."""
    if not task.startswith("hf:") or preset != PRESETS[0]:
        return {}
    return {**TRANSFORMERS_DEFAULTS, **({"kd_temperature": None} if settings.get("kd_weight") == 0 else {})}


def parse_image_size(text: str) -> tuple[int, int]:
    """(height, width) of "128" or "360x480"."""
    found = re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", text.strip())
    if found is None:
        raise EccError(f"image size {text!r} is not a size; write 128, or height x width as in 360x480.")
    return int(found[1]), int(found[2] or found[1])


# ---------------------------------------------------------------- the task of a run, for `ecc export`


@dataclass(frozen=True, kw_only=True)
class RememberedTask:
    """The task of a run, as it was typed, with absolute paths."""

    task: str
    data: str | None = None
    weights: str | None = None
    image_size: str | None = None
    text: tuple[str, ...] = ()
    test_text: tuple[str, ...] = ()
    length: int | None = None


def remember_task(folder: Path, task: str, data: Mapping[str, Any]) -> None:
    """Write the task of a run into its folder."""
    from ecc.records import write_record

    file, colon, function = task.rpartition(":")
    if file.endswith(".py"):
        task = f"{Path(file).resolve()}{colon}{function}"
    if task.startswith("hf:") and Path(task[3:]).is_dir():
        task = f"hf:{Path(task[3:]).resolve()}"
    values: dict[str, Any] = {name: data.get(name) for name in ("image_size", "length")}
    values |= {name: str(data[name].resolve()) for name in ("data", "weights") if data.get(name) is not None}
    values |= {name: tuple(str(file.resolve()) for file in data.get(name) or ()) for name in ("text", "test_text")}
    found = RememberedTask(task=task, **values)
    with suppress(EccError):  # a run that cannot be written to: `ecc export` needs --task
        write_record(folder / TASK_FILE, found)


def recall_task(folder: Path) -> RememberedTask:
    """The task of a run, if it is a bundled task or a network of a library."""
    from ecc.records import read_record

    if not (folder / "config.json").is_file():
        raise BadTask(f"{folder} is not a run folder. Give the folder of `ecc compress`.")
    if not (folder / TASK_FILE).is_file():
        raise BadTask(f"{folder} does not name its task; give it with --task, such as net.py:build.")
    found = read_record(folder / TASK_FILE, RememberedTask)
    if found.task not in BUNDLED_TASKS and not found.task.startswith(("torchvision:", "timm:", "hf:")):
        raise BadTask(
            f"the task of {folder} is the file {found.task!r}. A run folder must not choose code to execute, so pass "
            f"the task yourself if you trust it: --task {found.task}"
        )
    return found


# ---------------------------------------------------------------- small things


def console(*, is_shown: bool) -> Console | None:
    """stderr for progress; None if nothing is shown."""
    from rich.console import Console

    return Console(stderr=True) if is_shown else None


def waiting(text: str) -> AbstractContextManager[Any]:
    """Show what is being computed while it takes time, if stderr is a terminal."""
    from rich.console import Console

    return Console(stderr=True).status(text)


def describe_report(folder: Path) -> str:
    """Write the report of a run or a comparison, and say where it is; a note if its packages are missing."""
    try:
        from ecc.report.page import write_report

        return f"report: {write_report(folder)}"
    except (EccError, ImportError) as error:
        return f"note: no report was written: {error}"


def print_json(value: Any) -> None:
    """Print a record, or plain values, as JSON."""
    import msgspec

    from ecc.records import to_json

    click.echo(msgspec.json.format(to_json(value), indent=1))
