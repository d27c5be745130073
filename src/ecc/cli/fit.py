"""`ecc fit`: from a profile to an energy model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from ecc.errors import BadBudget, BadFile, EccError

from .parameters import Argument, Option


def fit(
    file: Annotated[Path, Argument(metavar="PROFILE", help="From `ecc profile`.", show_default=False)],
    output: Annotated[Path | None, Option("-o", "--output", metavar="FILE", help="Write the model, as JSON.")] = None,
    family: Annotated[
        str, Option("--family", metavar="NAME", help="auto, physical, or bilinear as in the paper.")
    ] = "auto",
    resource: Annotated[str, Option("--resource", metavar="NAME", help="energy or latency.")] = "energy",
    budget: Annotated[
        list[str] | None, Option("--budget", metavar="BUDGET", help="Tell whether it can be met. Repeatable.")
    ] = None,
    figures: Annotated[
        Path | None, Option("--figures", metavar="FOLDER", help="Draw errors, learning curves, and the data.")
    ] = None,
    iterations: Annotated[
        int, Option("--paper", metavar="N", help="With figures: N iterations of the paper's Adam; it took 10000.")
    ] = 0,
    allow_drift: Annotated[
        bool, Option("--allow-drift", help="Take a profile whose reference varied by more than 3 %.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print facts for programs.")] = False,
) -> None:
    """Learn from a profile what any widths of its network cost, and tell honestly how well.

    \b
    Examples:
      ecc fit digits.profile -o energy.json
      ecc fit mobile.profile -o energy.json --budget 60% --figures figures
      ecc fit mobile.profile -o latency.json --resource latency
      ecc fit mobile.profile --figures figures --paper 10000
    """
    import typer
    from rich.console import Console

    from ecc.energy import fit as fit_profile
    from ecc.energy import parse_budgets
    from ecc.energy.ablation import ABLATION_FORMAT, run_ablation
    from ecc.energy.model import FORMAT
    from ecc.io import refuse_other_file, write_text
    from ecc.measure import Profile
    from ecc.report.fit import budget_warning, budget_within, fit_facts, fit_view
    from ecc.report.fit_figures import draw_fit

    profile = Profile.load(file)
    budgets = parse_budgets(budget) if budget else ()
    if output is not None and not output.parent.is_dir():
        raise BadFile(f"cannot write {output}: there is no folder {output.parent}.")
    if output is not None:
        refuse_other_file(output, FORMAT, "energy model")
    if iterations < 0 or (iterations and figures is None):
        raise EccError(
            f"--paper {iterations} is a number of iterations to draw; give at least 1, and --figures FOLDER."
        )
    stem = file.name.removesuffix(".gz").removesuffix(".profile") + ("" if resource == "energy" else f"-{resource}")
    if figures is not None:
        refuse_other_file(figures / f"{stem}-fit.json", ABLATION_FORMAT, "data of a fit")
        for name in ("prediction", "paper"):
            refuse_other_file(figures / f"{stem}-{name}.svg", "<svg", "figure")
    for one in budgets:
        if one.resource != resource:
            raise BadBudget(
                f"budget {one} is about {one.resource}, and this model about {resource}; leave it out here."
            )
    model = fit_profile(profile, family, resource=resource, allow_drift=allow_drift, curve=True)
    if output is not None:
        model.save(output)
    drawn: list[Path] = []
    if figures is not None:
        found = run_ablation(profile, resource=resource, allow_drift=allow_drift, iterations=iterations)
        drawn = draw_fit(found, stem, figures, stem)
        data = figures / f"{stem}-fit.json"
        write_text(data, json.dumps(found) + "\n")
        drawn.append(data)
    warnings = [line for one in budgets if (line := budget_warning(model, one))]
    if as_json:
        typer.echo(json.dumps({**fit_facts(model), "warnings": warnings}, indent=1))
        return
    console = Console()
    console.print(fit_view(model, f"{file.name}: {resource} of {model.origin.rows} networks ({model.label})"))
    told = [budget_warning(model, one) or budget_within(model, one) for one in budgets]
    for line in [*told, *(f"wrote {path}" for path in [*([output] if output else []), *drawn])]:
        typer.echo(line)
