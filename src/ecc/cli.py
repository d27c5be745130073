"""The command line: verbs to functions, nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

import ecc
from ecc.energy import fit as fit_profile
from ecc.energy import parse_budgets
from ecc.energy.study import study
from ecc.errors import EccError
from ecc.files import write_text
from ecc.graph import prove, trace_channels
from ecc.measure import Analytic, Profile, close_meter, find_meter
from ecc.measure import merge as merge_profiles
from ecc.measure import profile as measure_profile
from ecc.measure.bench import default_device
from ecc.measure.doctor import examine
from ecc.measure.learning import parse_share
from ecc.measure.merging import missing_rows
from ecc.measure.profiling import chosen_settings
from ecc.measure.sampling import parse_shard
from ecc.report.doctor import doctor_view
from ecc.report.fit import budget_warning, fit_facts, fit_view
from ecc.report.fit_figures import draw_fit
from ecc.report.inspect import graph_facts, graph_table
from ecc.report.live_profile import ProfileView, profile_facts, profile_summary
from ecc.task import with_batch
from ecc.zoo.find import BUNDLED_TASKS, find_task

PIPELINE = f"""
Make a neural network fit an energy budget.

\b
    model --> channel graph --> profile --> energy model --> small network
              ecc inspect       ecc profile ecc fit          (coming)

ecc doctor tells what can be measured on this machine.

\b
TASK names what to work on:
    {", ".join(BUNDLED_TASKS)}
    torchvision:NAME or timm:NAME, where those are installed
    file.py:function, a function of yours that returns a model and an
        example input; the file is run like any Python program
"""


class _Verbs(TyperGroup):
    """Turns our errors, and slips at the command line, into one line and exit code 2."""

    def main(self, *args: Any, **settings: Any) -> Any:
        """Run the command line."""
        if not settings.get("standalone_mode", True):
            return super().main(*args, **settings)
        try:
            code = super().main(*args, **{**settings, "standalone_mode": False})
        except EccError as error:
            _complain(str(error))
        except Exception as error:
            if not hasattr(error, "format_message"):  # typer's own errors have one
                raise
            _complain(error.format_message())
        sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str) -> NoReturn:
    line = " ".join(message.split()) if "Usage:" not in message else message  # without arguments, help is shown
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"error: {line}", markup=False)
    sys.exit(2)


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    help=PIPELINE,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ecc {ecc.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """See PIPELINE: typer shows that text, since the app was made with it."""


@app.command()
def doctor(
    meter: Annotated[
        str, typer.Option("--meter", metavar="METER", help="Examine this one alone, such as nvml:1 or file.py:MyMeter.")
    ] = "auto",
    seconds: Annotated[float, typer.Option(min=1, help="Length of the self-test of each meter, about.")] = 10.0,
    quick: Annotated[bool, typer.Option("--quick", help="Leave the self-test out.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print facts for programs.")] = False,
) -> None:
    """Show what can be measured on this machine, how well, and why the rest cannot.

    Every meter is tried. One that works is watched at rest and at work, and
    a small network is measured again and again to see how far its joules
    repeat. Where no meter works, the ways forward are named.

    \b
    Examples:
      ecc doctor
      ecc doctor --quick
      ecc doctor --meter 'command:read-joules --port 3' --seconds 30
      ecc doctor --json
    """
    with Console(stderr=True).status("looking for meters") as status:
        found = examine(meter, seconds=seconds, quick=quick, say=status.update)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=1))
    else:
        Console(highlight=False).print(doctor_view(found))


@app.command()
def inspect(
    task: Annotated[str, typer.Argument(metavar="TASK", help="What to look at.", show_default=False)],
    freeze: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Keep the outputs of these modules whole, e.g. 'layer1.*'. Repeatable."),
    ] = None,
    proof: Annotated[
        bool, typer.Option(help="Compare the masked with the cut network in numbers (four forward passes).")
    ] = True,
    save: Annotated[Path | None, typer.Option("-o", "--save", metavar="FILE", help="Write the graph as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print facts for programs.")] = False,
) -> None:
    """Show which channels of a network can be cut, who writes and who reads them, and what is frozen and why.

    \b
    Examples:
      ecc inspect digits
      ecc inspect mobilenet_v1 --freeze conv1
      ecc inspect net.py:build --json
    """
    job = find_task(task)
    graph = trace_channels(job.model, job.example_input, freeze=freeze or [], proven=proof)
    if save is not None:
        graph.save(save)
    if as_json:
        typer.echo(json.dumps(graph_facts(graph), indent=1))
    else:
        Console().print(graph_table(graph, f"Channel groups of {job.name}"))


@app.command()
def profile(
    task: Annotated[str, typer.Argument(metavar="TASK", help="Whose widths to measure.", show_default=False)],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Append to this file.", show_default=False)
    ],
    meter: Annotated[
        str,
        typer.Option("--meter", metavar="METER", help="Where joules come from: auto, nvml, platform:jetson-tx2, ..."),
    ] = "auto",
    rows: Annotated[int, typer.Option(help="Networks in the design; more than before extends a file.")] = 250,
    design: Annotated[str, typer.Option(help="mixed, or uniform as in the paper.")] = "mixed",
    seed: Annotated[int, typer.Option(help="Of the design and its order.")] = 0,
    multiple_of: Annotated[int | None, typer.Option(metavar="N", help="Widths in multiples of N.")] = None,
    rounds: Annotated[int, typer.Option(help="How often each network is measured, far apart in time.")] = 1,
    reference_every: Annotated[
        int, typer.Option(metavar="N", help="Networks between two measurements of the dense reference.")
    ] = 10,
    until: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Stop when a quick fit errs by less, e.g. 2%, or no longer learns."),
    ] = None,
    shard: Annotated[str | None, typer.Option(metavar="K/N", help="Rows for the K-th of N equal devices.")] = None,
    batch: Annotated[
        int | None, typer.Option(metavar="N", help="Items in one inference; the task's own if not given.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cuda, cuda:1, cpu, ...; one that the meter sees if not given.")
    ] = None,
    mode: Annotated[str | None, typer.Option(help="eager, graph (CUDA graph) or compile.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, tf32, fp16 or bf16.")] = None,
    memory_format: Annotated[str | None, typer.Option(help="contiguous or channels_last.")] = None,
    autotune: Annotated[bool | None, typer.Option(help="Let cuDNN choose its algorithms by trying them.")] = None,
    window: Annotated[float | None, typer.Option(metavar="SECONDS", help="Least length of a window.")] = None,
    min_ticks: Annotated[int | None, typer.Option(metavar="N", help="Least counter ticks in a window.")] = None,
    allow_shared: Annotated[
        bool | None, typer.Option("--allow-shared", help="Measure although others use the device.")
    ] = None,
    allow_throttling: Annotated[
        bool | None, typer.Option("--allow-throttling", help="Measure although the device is too hot.")
    ] = None,
    freeze: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Keep the outputs of these modules whole. Repeatable.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print facts for programs.")] = False,
) -> None:
    """Measure many widths of a network. The same command again goes on where the last one ended.

    \b
    Examples:
      ecc profile digits --meter platform:jetson-tx2 -o digits.profile
      ecc profile mobilenet_v1 --mode graph --precision tf32 -o mobile.profile
      ecc profile net.py:build --rounds 2 --until 2% -o net.profile
      ecc profile alexnet --shard 3/8 -o alexnet-3.profile

    \b
    The file is opened by pandas in one line:
      pandas.read_json("digits.profile", lines=True).dropna(subset="row")
    """
    job = find_task(task)
    source = find_meter(meter, runs_on=device and device.partition(":")[0])
    console = None if quiet or as_json else Console(stderr=True)
    view = ProfileView(console)
    try:
        settings = chosen_settings(
            source,
            device=device,
            mode=mode,
            precision=precision,
            memory_format=memory_format,
            cudnn_autotune=autotune,
            window_seconds=window,
            min_ticks=min_ticks,
            allow_shared=allow_shared,
            allow_throttling=allow_throttling,
        )
        device = None if isinstance(source, Analytic) else device or default_device(source)
        view.announce(source.describe(), device)
        example_input = job.example_input if batch is None else with_batch(job.example_input, batch)
        graph = trace_channels(job.model, example_input, freeze=freeze or [], proven=False)
        graph = prove(job.model, graph, job.example_input)
        with view:
            result = measure_profile(
                job.model,
                graph,
                example_input,
                source,
                output,
                rows=rows,
                design=design,
                seed=seed,
                multiple_of=multiple_of,
                settings=settings,
                device=device,
                rounds=rounds,
                reference_every=reference_every,
                until=None if until is None else parse_share(until),
                shard=None if shard is None else parse_shard(shard),
                progress=view,
            )
    except KeyboardInterrupt:
        typer.echo(f"\nstopped; {view.so_far(output)}", err=True)
        raise typer.Exit(130) from None
    finally:
        close_meter(source)
    if as_json:
        typer.echo(json.dumps({"file": str(output), **profile_facts(result, graph)}, indent=1))
    elif not quiet:
        typer.echo(profile_summary(result, output, graph))


@app.command()
def fit(
    file: Annotated[Path, typer.Argument(metavar="PROFILE", help="From `ecc profile`.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the model, as JSON.")
    ] = None,
    family: Annotated[
        str, typer.Option("--family", metavar="NAME", help="auto, physical, or bilinear as in the paper.")
    ] = "auto",
    resource: Annotated[str, typer.Option("--resource", metavar="NAME", help="energy or latency.")] = "energy",
    budget: Annotated[
        list[str] | None, typer.Option("--budget", metavar="BUDGET", help="Tell whether it can be met. Repeatable.")
    ] = None,
    figures: Annotated[
        Path | None, typer.Option("--figures", metavar="FOLDER", help="Draw errors, learning curves, and the data.")
    ] = None,
    iterations: Annotated[
        int, typer.Option("--paper", metavar="N", help="With figures: N iterations of the paper's Adam; it took 10000.")
    ] = 0,
    allow_unsteady: Annotated[
        bool, typer.Option("--allow-unsteady", help="Take a profile whose reference varied by more than 3 %.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print facts for programs.")] = False,
) -> None:
    """Learn from a profile what any widths of its network cost, and tell honestly how well.

    \b
    Examples:
      ecc fit digits.profile -o energy.json
      ecc fit mobile.profile -o energy.json --budget 60% --figures figures
      ecc fit mobile.profile -o latency.json --resource latency
      ecc fit mobile.profile --figures figures --paper 10000
    """
    profile = Profile.load(file)
    budgets = parse_budgets(budget) if budget else ()
    model = fit_profile(profile, family, resource=resource, allow_unsteady=allow_unsteady, curve=True)
    if output is not None:
        model.save(output)
    drawn: list[Path] = []
    if figures is not None:
        found = study(profile, resource=resource, allow_unsteady=allow_unsteady, iterations=iterations)
        drawn = draw_fit(found, file.name.partition(".")[0], figures, file.name.partition(".")[0])
        data = figures / f"{file.name.partition('.')[0]}-fit.json"
        write_text(data, json.dumps(found) + "\n")
        drawn.append(data)
    warnings = [line for one in budgets if one.resource == resource and (line := budget_warning(model, one))]
    if as_json:
        typer.echo(json.dumps({**fit_facts(model), "warnings": warnings}, indent=1))
        return
    console = Console()
    console.print(fit_view(model, f"{file.name}: {resource} of {model.origin.rows} networks ({model.label})"))
    for line in [*warnings, *(f"wrote {path}" for path in [*([output] if output else []), *drawn])]:
        typer.echo(line)


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Shards of one design.", show_default=False)],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The joined profile.", show_default=False)
    ],
    rescale: Annotated[
        bool, typer.Option("--rescale", help="Scale devices that differ to one another by their reference.")
    ] = False,
) -> None:
    """Join profiles that equal devices measured in shards, after checking that they agree.

    \b
    Examples:
      ecc merge alexnet-1.profile alexnet-2.profile -o alexnet.profile
      ecc merge alexnet-*.profile -o alexnet.profile.gz --rescale
    """
    result = merge_profiles(files, output, rescale=rescale)
    typer.echo(profile_summary(result, output))
    missing = missing_rows(result)
    if missing:
        typer.echo(f"{len(missing)} rows of the design are in none of the files, such as row {missing[0]}.")


def main() -> None:
    """Entry point of the `ecc` command."""
    app(prog_name="ecc")
