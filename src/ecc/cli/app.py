"""The command line itself: finds the verb, imports its file, and turns errors into one message and exit code 2."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import click

import ecc
from ecc.constants import BUNDLED_TASKS
from ecc.errors import EccError, closest, option_names


class Verb(NamedTuple):
    """A verb of the command line."""

    module: str
    """Its file in `ecc.cli`; the command has the name of the verb."""
    summary: str
    """One line of `ecc --help`."""


VERBS = {
    "compress": Verb("compress", "Prune a network during training until its measured cost meets a budget."),
    "report": Verb("report", "Write an HTML report of a run or of a comparison."),
    "export": Verb("export", "Write the slim network of a run as ONNX, safetensors, pt2 or TorchScript."),
    "inspect": Verb("inspect", "Show which channels can be pruned, and why others cannot."),
    "doctor": Verb("inspect", "Show which energy meters work on this machine, and why others do not."),
    "profile": Verb("profile", "Measure a network at many widths (a step of compress)."),
    "merge": Verb("profile", "Join profiles that several devices measured in shards."),
    "fit": Verb("fit", "Fit an energy model to a profile and report its error (a step of compress)."),
    "compare": Verb("compare", "Compress a network by several methods at equal budgets and steps."),
}

HIDDEN = {"agent": Verb("agent", "Measure for another machine; started by --target.")}
"""Verbs that users do not type."""

OVERVIEW = f"""\
Usage: ecc [OPTIONS] COMMAND [ARGS]...

  Prune a neural network to a measured energy budget.

      ecc compress TASK --budget 50% -o run    profile, fit, prune, measure,
                                               finetune, and write a report
      ecc export run -f onnx                   the slim network for deployment

  TASK is one of
      {", ".join(BUNDLED_TASKS)}
      torchvision:NAME or timm:NAME, if the package is installed
      hf:FOLDER or hf:NAME, a Hugging Face language model, encoder or image
          classifier
      file.py:function, a function of yours that returns a Task or a pair
          (model, example_input); the file is executed
      recipe.toml, a file with a task and its settings (compress, compare)
"""

OPTIONS = {"--version": "Print the version and exit.", "-h, --help": "Show this message and exit."}

EPILOG = """\
ecc COMMAND --help shows the options of a command, with examples.
Shell completion: eval "$(_ECC_COMPLETE=bash_source ecc)" (or zsh_source, fish_source).
"""


def overview() -> str:
    """The text of `ecc --help`."""
    lines = [OVERVIEW, "Options:"]
    lines += [f"  {name:<12}{text}" for name, text in OPTIONS.items()]
    lines += ["", "Commands:", *(f"  {name:<10}{verb.summary}" for name, verb in VERBS.items())]
    return "\n".join([*lines, "", EPILOG])


class Commands(click.Group):
    """The verbs. The module of a verb is imported when the verb is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of the help."""
        del ctx
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a verb."""
        del ctx
        verb = {**VERBS, **HIDDEN}.get(cmd_name)
        if verb is None:
            return None
        command: click.Command = getattr(import_module(f"ecc.cli.{verb.module}"), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Names the closest verb if there is no such one."""
        if args[0] not in {**VERBS, **HIDDEN} and not args[0].startswith("-"):
            raise click.UsageError(
                f"there is no command {args[0]!r}{did_you_mean(args[0], VERBS)} ecc --help lists them."
            )
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The overview."""
        del ctx
        formatter.write(overview())

    def main(self, *args: Any, **settings: Any) -> Any:
        """Run the command line; errors become one message on stderr and exit code 2."""
        try:
            with option_names():
                code = super().main(*args, **{**settings, "standalone_mode": False})
        except EccError as error:
            fail(str(error))
        except click.exceptions.NoArgsIsHelpError as error:
            sys.stderr.write(f"{error.format_message()}\n")
            sys.exit(2)
        except click.MissingParameter as error:
            command = error.ctx.command_path if error.ctx else "ecc"
            fail(f"{error.format_message()} {command} --help has examples.")
        except click.ClickException as error:
            fail(error.format_message())
        except click.Abort:
            sys.exit(128 + signal.SIGINT)
        sys.exit(code if isinstance(code, int) else 0)


def did_you_mean(word: str, known: Any) -> str:
    """The end of a sentence: a question that names the closest of the known words, if one is close."""
    close = closest(word, known)
    return f"; did you mean {close}?" if close else "."


def fail(message: str) -> NoReturn:
    """Print an error and exit with code 2."""
    sys.stderr.write(f"error: {message.rstrip()}\n")
    sys.exit(2)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(ecc.__version__, message="ecc %(version)s")
def app() -> None:
    """See `overview`."""


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    sys.exit(128 + number)


def run() -> None:
    """Run the command line of this process."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit_on_signal)  # temporary files are removed; training saves a checkpoint
    app(prog_name="ecc")
