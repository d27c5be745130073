"""Recipes on the command line: what a file asks for is the default, and options that are typed win over it.

Both work on the defaults of the options that follow, before those are read: first `--quick`, then the recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ecc.options import flat_values, settings_from

from .parameters import Context

if TYPE_CHECKING:
    from ecc.methods import CompressSettings
    from ecc.zoo.recipe import Recipe

QUICK = {
    "pretrain_steps": 60,
    "prune_steps": 40,
    "finetune_steps": 20,
    "lr": 1e-3,
    "pretrain_lr": 3e-3,
    "seeds": 1,
    "budgets": "65%,40%",
}
"""A few steps of everything."""


def with_recipe(context: Context, task: str) -> str:
    """A callback of TASK: if it names a recipe, its values become the defaults, and its task is the task."""
    from ecc.zoo.recipe import is_recipe, read_recipe

    if not is_recipe(task):
        return task
    recipe = read_recipe(task)
    context.obj = recipe
    context.default_map = {**_defaults(recipe), **(context.default_map or {})}
    return recipe.task


def with_quick(context: Context, wanted: bool) -> bool:
    """A callback of --quick: few steps become the defaults, whatever a recipe says."""
    if wanted:
        context.default_map = {**(context.default_map or {}), **QUICK}
    return wanted


def settings_of(context: Context, typed: Mapping[str, Any]) -> CompressSettings:
    """The settings of the recipe, or the usual ones, with those that have options of their own."""
    from ecc.methods import CompressSettings
    from ecc.zoo.recipe import Recipe

    recipe = context.obj if isinstance(context.obj, Recipe) else None
    given = {} if recipe is None else flat_values(recipe.settings)
    return settings_from(CompressSettings, {**given, **typed})


def _defaults(recipe: Recipe) -> dict[str, Any]:
    """A recipe as defaults of the options of `ecc compare`, by the names of its parameters."""
    settings = flat_values(recipe.settings)
    found: dict[str, Any] = {name: settings[name] for name in recipe.given}
    found |= {name: getattr(recipe, name) for name in ("data", "weights", "batch_size", "seeds", "meter", "freeze")}
    if recipe.size is not None:
        found["size"] = "x".join(map(str, recipe.size))
    for name in ("budgets", "methods"):
        if getattr(recipe, name) is not None:
            found[name] = ",".join(getattr(recipe, name))
    return {name: value for name, value in found.items() if value is not None}
