"""`ecc fit`: fit an energy model to a profile."""

from __future__ import annotations

from pathlib import Path

import click

from ecc.errors import BadBudget, BadFile

from .options import PATH, Command, json_option, option, print_json, waiting


@click.command(cls=Command)
@click.argument("file", type=PATH, metavar="PROFILE")
@option("-o", "--output", type=PATH, metavar="FILE", help="Write the energy model as JSON.")
@option("--family", metavar="NAME", default="auto", help="auto, physical, or bilinear as in the paper.")
@option("--resource", metavar="NAME", default="energy", help="energy or latency.")
@option("--budget", "budgets", metavar="BUDGET", multiple=True, help="Check whether it can be met. Repeatable.")
@option("--figures", type=PATH, metavar="FOLDER", help="Draw errors and learning curves, and write their data.")
@option("--allow-drift", is_flag=True, help="Accept a profile whose dense network varied by more than 3 %.")
@json_option
def fit(
    file: Path,
    output: Path | None,
    family: str,
    resource: str,
    budgets: tuple[str, ...],
    figures: Path | None,
    allow_drift: bool,
    as_json: bool,
) -> None:
    """Fit an energy model to a profile and report its cross-validated error.

    \b
    Examples:
      ecc fit digits.profile -o energy.json
      ecc fit mobile.profile -o energy.json --budget 60% --figures figures
      ecc fit mobile.profile -o latency.json --resource latency
    """
    from rich.console import Console

    from ecc.energy import fit as fit_profile
    from ecc.energy import parse_budgets
    from ecc.energy.ablation import run_ablation
    from ecc.io import write_text
    from ecc.measure import Profile
    from ecc.records import to_json
    from ecc.report.terminal import check_budget, fit_summary, fit_table

    profile = Profile.load(file)
    parsed = parse_budgets(budgets) if budgets else ()
    stem = file.name.removesuffix(".gz").removesuffix(".profile") + ("" if resource == "energy" else f"-{resource}")
    _check_files(output, figures, stem)
    for one in parsed:
        if one.resource != resource:
            raise BadBudget(f"budget {one} is on {one.resource}, but this model predicts {resource}; leave it out.")
    with waiting(f"fitting {file.name} and cross-validating"):
        model = fit_profile(profile, family, resource=resource, allow_drift=allow_drift, curve=True)
    written = []
    if output is not None:
        model.save(output)
        written.append(output)
    if figures is not None:
        from ecc.report.figures import draw_fit

        with waiting("comparing families and numbers of samples"):
            found = run_ablation(profile, resource=resource, allow_drift=allow_drift)
        data = figures / f"{stem}-fit.json"
        written += [draw_fit(found, stem, figures, stem), data]
        write_text(data, to_json(found).decode() + "\n")
    checks = [check_budget(model, one) for one in parsed]
    if as_json:
        warnings = [line for is_reachable, line in checks if not is_reachable]
        print_json({**fit_summary(model), "warnings": warnings})
        return
    Console().print(fit_table(model, f"{file.name}: {resource} of {model.origin.samples} samples ({model.label})"))
    for _, line in checks:
        click.echo(line)
    for path in written:
        click.echo(f"wrote {path}")


def _check_files(output: Path | None, figures: Path | None, stem: str) -> None:
    """Refuse to overwrite other files, before anything is computed."""
    from ecc.energy.ablation import ABLATION_FORMAT
    from ecc.energy.model import FORMAT
    from ecc.io import refuse_other_file

    if output is not None:
        if not output.parent.is_dir():
            raise BadFile(f"cannot write {output}: there is no folder {output.parent}.")
        refuse_other_file(output, FORMAT, "energy model")
    if figures is not None:
        refuse_other_file(figures / f"{stem}-fit.json", ABLATION_FORMAT, "data of a fit")
        refuse_other_file(figures / f"{stem}-prediction.svg", "<svg", "figure")
