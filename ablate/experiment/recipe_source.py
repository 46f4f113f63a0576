"""Recipes from wherever a user has them: a preset's name, a file, its content, an object.

A recipe file is YAML. It has either all that `ablate recipe show --yaml` prints, or only what differs from
another recipe, which `from` names:

    from: nvfp4
    wgrad: {g: {bits: 4}}
    layers: {skip_last: 2}
"""

import os
from collections.abc import Mapping
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ablate.errors import nearest
from ablate.experiment.arms import (
    RECIPE_FILES,
    KnobError,
    StartingPoint,
    elsewhere,
    reason,
    siblings,
)
from ablate.experiment.yaml_document import read
from ablate.files import Json
from ablate.numerics.own import FOLDER
from ablate.numerics.words import NEAR
from ablate.recipes import KNOBS, PRESETS, Recipe
from ablate.recipes.te_import import TERecipe, is_te_recipe, recipe_of

RecipeSource = str | Path | Mapping[str, Json] | Recipe | TERecipe
_EXPERIMENT = {"schema", "workload"}
"""Keys that every experiment has one of, and no recipe."""


def resolve(source: RecipeSource, knobs: Mapping[str, Json]) -> Recipe:
    """Return a recipe with knobs turned: short names, or full paths with or without `recipe.`. ValueError if
    there is no such preset or file, or a field or knob is wrong; with every reason."""
    recipe = load(source)
    if not knobs:
        return recipe
    for knob, value in knobs.items():
        for part in value.values() if isinstance(value, Mapping) else (value,):
            if callable(part):
                name = getattr(part, "__name__", "FUNCTION")
                raise ValueError(f"{knob}: name the function by its file: 'FILE.py:{name}', not by itself")
    turned = {
        knob if knob.partition(".")[0] not in Recipe.model_fields else f"recipe.{knob}": value
        for knob, value in knobs.items()
    }
    try:
        return StartingPoint("idle", {}, "its own", own=recipe).recipe(turned)
    except KnobError as error:
        raise ValueError("; ".join(f"{knob}: {why}" for knob, why in error.reasons)) from None


def load(source: RecipeSource) -> Recipe:
    """Return the recipe that a source names or holds; ValueError with every reason if it is none."""
    if isinstance(source, Recipe):
        return source
    if isinstance(source, Mapping):
        return parse(source, "the recipe")
    if is_te_recipe(source):
        return recipe_of(source)
    if not isinstance(source, str | Path):
        raise ValueError(
            f"{type(source).__name__}: a recipe is a preset's name, a recipe file, a dict of fields, a Recipe"
            " or a recipe object of Transformer Engine"
        )
    if isinstance(source, str) and source in PRESETS:
        return PRESETS[source]()
    path = Path(source)
    if path.suffix in RECIPE_FILES:
        if not os.path.isfile(path):
            raise ValueError(f"{path}: no such recipe file")
        content = read(path).value
        if _EXPERIMENT & content.keys():
            recipe = content.get("recipe")
            named = f" {recipe}" if isinstance(recipe, str) else ""
            raise ValueError(
                f"{path}: this is an experiment, not a recipe; give its `recipe:`{named},"
                " with the knobs of an arm turned (by --set)"
            )
        return parse(content, str(path), path.parent)
    raise ValueError(
        f"{source}: no such preset; {nearest(str(source), PRESETS)}. A recipe file ends in .yaml"
    )


def parse(content: Mapping[str, Json], where: str = "", folder: Path | None = None) -> Recipe:
    """Return the recipe of a file's content: all fields; with `from`, those that differ from the recipe that
    it names. ValueError, with every reason, if a field is wrong.

    `where`: file or source that the error's sentences name; empty if the caller names it. `folder`: folder to
    which files of functions are relative; None: the working directory.
    """
    own, before = dict(content), f"{where}: " * bool(where)
    start = own.pop("from", None)
    if start is not None and (not isinstance(start, str) or start not in PRESETS):
        raise ValueError(f"{before}from: no such preset; {nearest(str(start), PRESETS)}")
    base = PRESETS[start]().model_dump(mode="json") if start else {}
    try:
        return Recipe.model_validate(_merged(base, own), strict=False, context={FOLDER: folder})
    except ValidationError as error:
        reasons = (
            f"{before}{'.'.join(map(str, problem['loc'])) or 'the recipe'}: {_reason(problem, start)}"
            for problem in error.errors()
        )
        raise ValueError("; ".join(reasons)) from None


def _reason(problem: ErrorDetails, start: str | None) -> str:
    """Return one of pydantic's errors about a recipe as a reason, with what a strange key may stand for.
    `start`: preset that the recipe changes; None: it is written whole."""
    usual, parts = reason(problem, Recipe), [str(part) for part in problem["loc"]]
    key = parts[-1] if parts else ""
    if problem["type"] != "extra_forbidden":
        return usual
    if key in KNOBS:
        turned = f"`ablate recipe show {start or 'nvfp4'} --set {key}=... --yaml` prints its fields"
        return f"a knob of ablate: and arms:, not a field; {turned}"
    if get_close_matches(key, siblings(problem, Recipe), 1, NEAR):
        return usual
    if len(parts) == 1 and get_close_matches(key, ["from"], 1, NEAR):
        return "no such key; 'from' is the nearest, the recipe that this one changes"
    hint = elsewhere(parts)
    return f"no such key here; {hint}" if hint else usual


def recipe_name(content: Mapping[str, Json]) -> str:
    """Return the name of an arm without knobs, for a recipe that is written in an experiment."""
    return f"{content['from']} changed" if "from" in content else "own recipe"


def _merged(base: dict[str, Json], changes: Mapping[str, Json]) -> dict[str, Json]:
    """Return nested dictionaries with values changed; a list, null or a user's quantiser replaces all."""
    merged = deepcopy(base)
    for key, value in changes.items():
        inner = merged.get(key)
        whole = isinstance(value, Mapping) and value.get("own") is not None  # replaces scales and roundings
        if isinstance(inner, dict) and isinstance(value, Mapping) and not whole:
            merged[key] = _merged(inner, value)
        else:
            merged[key] = deepcopy(value)
    return merged
